"""Classification networks, built from MONAI's DenseNet, for any number of modalities and classes, in 2D and 3D.

``densenet`` is DenseNet-121; ``densenet_small`` has two blocks of four layers, for small patches and laptops.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from polysite.errors import ConfigError


@dataclass(frozen=True)
class DenseNet:
    """A DenseNet for classification.

    Args:
        blocks: Layers of every block.
        growth: Channels that a layer adds.
        features: Channels of the first convolution.
    """

    blocks: tuple[int, ...] = (6, 12, 24, 16)
    growth: int = 32
    features: int = 64

    task: ClassVar[str] = "classification"

    def __post_init__(self) -> None:
        if not self.blocks or min(*self.blocks, self.growth, self.features) < 1:
            raise ConfigError(f"a DenseNet needs blocks, growth and features of at least one, got {self}")

    @property
    def divisor(self) -> int:
        """Factor that the sides of a patch must be multiples of.

        The network halves a patch twice at first, and once after every block but the last. Two voxels remain along each
        axis, since batch statistics need more than one value.
        """
        return int(2 ** (len(self.blocks) + 2))

    def build(self, *, dims: int, modalities: int, outputs: int, seed: int) -> Any:
        """Return the network with initial weights drawn from the seed."""
        import torch
        from monai.networks.nets.densenet import DenseNet as Network

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Network(
                spatial_dims=dims,
                in_channels=modalities,
                out_channels=outputs,
                init_features=self.features,
                growth_rate=self.growth,
                block_config=self.blocks,
            )
