"""The encoder of deepbet's first network, which locates the brain in a head.

Paper: Fisch et al., deepbet: Fast brain extraction of T1-weighted MRI using Convolutional Neural Networks, 2024

The authors publish a TorchScript program. This module defines its layers and loads only the weights, so that no code
of the file runs. Volumes are prepared as the authors do: resized to 128 voxels a side, clipped at the 0.5 % and 99.5 %
quantiles, with mean 0.449 and standard deviation 0.226.
"""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional

SIDE = 128
BACKGROUND = 0.1  # zeros that make up more than this share of the voxels are background


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, before: int, channels: int, stride: int):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv3d(before, channels, 3, stride, padding=1, bias=False),
            nn.InstanceNorm3d(channels),
            nn.ReLU(),
            nn.Conv3d(channels, channels, 3, padding=1, bias=False),
            nn.InstanceNorm3d(channels),
        )
        self.downsample = nn.Sequential()  # the shortcut; empty for the identity
        if before != channels:
            convolution = nn.Conv3d(before, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.InstanceNorm3d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of a batch."""
        return functional.relu(self.double_conv(x) + self.downsample(x))


class HeadEncoder(nn.Module):
    """Encoder from (batch, 1, *space) to (batch, 128, 4, 4, 4)."""

    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Conv3d(1, 16, 7, stride=2, padding=3, bias=False)
        self.init = nn.Sequential(convolution, nn.InstanceNorm3d(16), nn.ReLU(), nn.MaxPool3d(3, stride=2, padding=1))
        self.down0 = _level(16, 16, 1)
        self.down1 = _level(16, 32, 2)
        self.down2 = _level(32, 64, 2)
        self.down3 = _level(64, 128, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the deepest features of a batch."""
        x = functional.interpolate(x, (SIDE,) * 3, mode="nearest-exact")
        x = self.init(torch.stack([as_trained(volume) for volume in x]))
        for level in (self.down0, self.down1, self.down2, self.down3):
            x = level(x)
        return x


def _level(before: int, channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(block1=Block(before, channels, stride), block2=Block(channels, channels, stride=1))
    )


def as_trained(volume: torch.Tensor) -> torch.Tensor:
    """Convert intensities to those that the network was trained on.

    The z-score over non-zero voxels leaves the background at zero, a medium grey, but the network was trained with a
    black background. So the background gets the darkest value. Zeros of only a few voxels are signal and stay.
    """
    empty = volume == 0
    if empty.float().mean() > BACKGROUND:
        volume = torch.where(empty, volume.min(), volume)
    low, high = torch.quantile(volume, torch.tensor([0.005, 0.995], device=volume.device))
    volume = ((volume - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
    return 0.226 * (volume - volume.mean()) / volume.std().clamp_min(1e-12) + 0.449
