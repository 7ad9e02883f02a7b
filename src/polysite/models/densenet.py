"""Networks that name what an image shows, built from MONAI's DenseNet: any number of modalities and classes, 2D and 3D.

``densenet`` is DenseNet-121; ``densenet_small`` has two blocks of four layers and suits patches and laptops.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from polysite.errors import ConfigError


@dataclass(frozen=True)
class DenseNet:
    blocks: tuple[int, ...] = (6, 12, 24, 16)  # layers of every block
    growth: int = 32  # channels that a layer adds
    features: int = 64  # channels of the first convolution

    task: ClassVar[str] = "classification"

    def __post_init__(self) -> None:
        if not self.blocks or min(*self.blocks, self.growth, self.features) < 1:
            raise ConfigError(f"a DenseNet needs blocks, growth and features of at least one, got {self}")

    @property
    def divisor(self) -> int:
        """The sides of a patch must be multiples of this: two halvings first, one after every block but the last.

        Two voxels remain along each axis, since statistics of a batch cannot come from a single one.
        """
        return int(2 ** (len(self.blocks) + 2))

    def build(self, *, dims: int, modalities: int, outputs: int, seed: int) -> Any:
        """The network with its initial weights, the same for the same seed."""
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
