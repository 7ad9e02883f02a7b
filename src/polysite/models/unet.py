"""The U-Nets of the federated brain-tumour literature, built from MONAI's DynUNet.

``unet`` is the network of the FeTS 2022 benchmark (32 to 512 channels, four downsamplings, 22.58 M parameters);
``unet_small`` that of the radiomics-clustering study (16 to 128, three downsamplings, 1.40 M). Both use instance
normalisation without scale and shift and LeakyReLU 0.01; any number of modalities and labels, in 2D and 3D.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from polysite.errors import ConfigError


@dataclass(frozen=True)
class UNet:
    """A U-Net for segmentation.

    Args:
        filters: Channels at every resolution.
        bias: Use convolution biases, as in the published networks.
        deep_supervision: Number of further heads at coarser resolutions of the decoder, trained with weights 1/2,
            1/4, ... beside the main head, which alone predicts; at most two less than the number of resolutions.
    """

    filters: tuple[int, ...] = (32, 64, 128, 256, 512)
    bias: bool = True
    deep_supervision: int = 0

    task: ClassVar[str] = "segmentation"

    def __post_init__(self) -> None:
        if len(self.filters) < 3 or min(self.filters) < 1:
            raise ConfigError(f"a U-Net needs channels for at least three resolutions, got filters = {self.filters}")
        most = len(self.filters) - 2
        if not 0 <= self.deep_supervision <= most:
            raise ConfigError(
                f"model.deep_supervision = {self.deep_supervision}: a U-Net of {len(self.filters)} resolutions has "
                f"room for 0 to {most} further heads"
            )

    @property
    def divisor(self) -> int:
        """Factor that the sides of a patch must be multiples of."""
        return int(2 ** (len(self.filters) - 1))

    def build(self, *, dims: int, modalities: int, outputs: int, seed: int) -> Any:
        """Return the network with initial weights drawn from the seed."""
        import torch

        depth = len(self.filters)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = self._network(
                spatial_dims=dims,
                in_channels=modalities,
                out_channels=outputs,
                kernel_size=[3] * depth,
                strides=[1] + [2] * (depth - 1),
                upsample_kernel_size=[2] * (depth - 1),
                filters=list(self.filters),
                norm_name=("INSTANCE", {"affine": False}),
                act_name=("leakyrelu", {"inplace": True, "negative_slope": 0.01}),
                trans_bias=self.bias,
            )
        if self.bias:  # DynUNet adds biases to its transposed convolutions only
            for module in net.modules():
                if hasattr(module, "out_channels") and getattr(module, "bias", 0) is None:
                    module.bias = torch.nn.Parameter(torch.zeros(module.out_channels))
        return net

    def _network(self, **settings: Any) -> Any:
        """Return MONAI's network, or the same with further heads."""
        if self.deep_supervision:
            from polysite.models.supervised_unet import SupervisedUNet

            return SupervisedUNet(self.deep_supervision, **settings)
        from monai.networks.nets import DynUNet

        return DynUNet(**settings)
