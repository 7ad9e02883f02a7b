"""The 3D-ResNet-18 of MedicalNet, up to its last features; parameter names are those of the published checkpoint.

Paper: Chen et al., Med3D: Transfer Learning for 3D Medical Image Analysis, 2019

The last two of four stages use dilation 2 and 4 instead of halving the volume, so that one position of the 512 channels
covers 8 × 8 × 8 voxels. A block that changes the number of channels adds its input padded with zero channels.
"""

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, before: int, channels: int, stride: int, dilation: int):
        super().__init__()
        self.conv1 = nn.Conv3d(before, channels, 3, stride, padding=dilation, dilation=dilation, bias=False)
        self.bn1 = nn.BatchNorm3d(channels)
        self.conv2 = nn.Conv3d(channels, channels, 3, padding=dilation, dilation=dilation, bias=False)
        self.bn2 = nn.BatchNorm3d(channels)
        self.stride, self.added = stride, channels - before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of a batch."""
        inner = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        x = x[..., :: self.stride, :: self.stride, :: self.stride]  # an average over windows of one voxel
        return functional.relu(inner + functional.pad(x, (0, 0, 0, 0, 0, 0, 0, self.added)))


class ResNet18(nn.Module):
    """Encoder from (batch, 1, *space) to (batch, 512, *space / 8); to space / 32 if not ``dilated``, as in MONAI."""

    def __init__(self, dilated: bool = True):
        super().__init__()
        self.conv1 = nn.Conv3d(1, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm3d(64)
        self.maxpool = nn.MaxPool3d(3, stride=2, padding=1)
        last = [(1, 2), (1, 4)] if dilated else [(2, 1), (2, 1)]
        before = 64
        for stage, (stride, dilation) in enumerate([(1, 1), (2, 1), *last]):
            channels = 64 << stage
            first = Block(before, channels, stride, dilation)
            self.add_module(f"layer{stage + 1}", nn.Sequential(first, Block(channels, channels, 1, dilation)))
            before = channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the deepest features of a batch."""
        x = self.maxpool(functional.relu(self.bn1(self.conv1(x))))
        for stage in (1, 2, 3, 4):
            x = self.get_submodule(f"layer{stage}")(x)
        return x
