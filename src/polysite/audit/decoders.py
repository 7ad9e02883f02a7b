"""Decoders of an attack: networks from the numbers of a case to its volume.

Paper: Manthe et al., Whole-brain radiomics for clustered federated personalization, MIDL 2023, appendix F

    small    a linear layer, then three transposed convolutions, 64 to 16 channels; any side that 8 divides
    paper    a linear layer to [512, 2, 2, 2]; residual blocks that double every side and halve the channels, down to
             16, six of them for 128 voxels a side; two convolutions; batch normalisation and LeakyReLU of slope 0.2

The inside of a block, which the paper does not print, is that of its authors' program. With 93 numbers and one modality
of 128 voxels a side that makes 19,275,185 weights.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

CHANNELS = (64, 32, 16)  # of the small decoder, from an eighth of the side to half of it
DROPOUT = 0.1  # of the small decoder
WIDEST, NARROWEST, SMALLEST = 512, 16, 2  # most and least channels of the paper's decoder, and its first side
SLOPE = 0.2


def small(numbers: int, shape: Sequence[int]) -> nn.Sequential:
    """Return a network from a vector to a volume (modality, *space); its initial output is zero."""
    modalities, space = shape[0], shape[1:]
    grow = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[len(space)]
    eighth = [side // 8 for side in space]
    layers: list[nn.Module] = [
        nn.Linear(numbers, CHANNELS[0] * int(np.prod(eighth))),
        nn.Dropout(DROPOUT),
        nn.Unflatten(1, (CHANNELS[0], *eighth)),
    ]
    for before, after in pairwise((*CHANNELS, modalities)):
        layers += [nn.LeakyReLU(SLOPE), grow(before, after, kernel_size=4, stride=2, padding=1)]
    for weights in layers[-1].parameters():
        nn.init.zeros_(weights)
    return nn.Sequential(*layers)


def residual(numbers: int, shape: Sequence[int]) -> nn.Sequential:
    """Return the paper's network from a vector to a volume (modality, *space); a side is a power of two."""
    modalities, side, dims = shape[0], shape[1], len(shape) - 1
    doublings = (side // SMALLEST).bit_length() - 1
    widths = [max(WIDEST >> k, NARROWEST) for k in range(doublings + 1)]
    return nn.Sequential(
        nn.Linear(numbers, WIDEST * SMALLEST**dims),
        nn.LeakyReLU(SLOPE),
        nn.Unflatten(1, (WIDEST, *[SMALLEST] * dims)),
        *(Block(before, after, dims) for before, after in pairwise(widths)),
        _conv(widths[-1], widths[-1], dims),
        _norm(widths[-1], dims),
        nn.LeakyReLU(SLOPE),
        _conv(widths[-1], modalities, dims),
    )


DECODERS: Mapping[str, Callable[[int, Sequence[int]], nn.Sequential]] = {"small": small, "paper": residual}


class Block(nn.Module):
    """A residual block that doubles every side."""

    def __init__(self, before: int, after: int, dims: int):
        super().__init__()
        self.body = nn.Sequential(
            _conv(before, before, dims),
            nn.Upsample(scale_factor=2),
            _norm(before, dims),
            nn.LeakyReLU(SLOPE),
            _conv(before, after, dims),
            _norm(after, dims),
            nn.LeakyReLU(SLOPE),
        )
        self.shortcut = nn.Sequential(
            _conv(before, after, dims),
            nn.Upsample(scale_factor=2),
            _norm(after, dims),
            nn.LeakyReLU(SLOPE**2),  # the authors apply the one of slope 0.2 twice
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the enlarged features."""
        out: torch.Tensor = self.body(x) + self.shortcut(x)
        return out


def _conv(before: int, after: int, dims: int) -> Any:
    return {2: nn.Conv2d, 3: nn.Conv3d}[dims](before, after, kernel_size=3, padding=1)


def _norm(channels: int, dims: int) -> Any:
    return {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](channels)
