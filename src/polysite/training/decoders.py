"""Decoders of an attack: networks from the numbers of a case to its volume.

Paper: Manthe et al., Whole-brain radiomics for clustered federated personalization, MIDL 2023, appendix F

    small    a linear layer, then three transposed convolutions, 64 to 16 channels; any side that 8 divides
    paper    a linear layer to [512, 2, 2, 2]; residual blocks that double every side and halve the channels, six of
             them for 128 voxels a side; two convolutions; batch normalisation and LeakyReLU of slope 0.2 between them

The paper gives neither the inside of a block nor the channels at the end. Here a block enlarges by nearest neighbours;
then a 3x3x3 convolution keeps the channels, a second one halves them, and a third one is the shortcut. With 93 numbers
and one modality of 128 voxels a side that makes 19,262,817 weights; the paper says about 20 million.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

CHANNELS = (64, 32, 16)  # of the small decoder, from an eighth of the side to half of it
WIDEST, SMALLEST = 512, 2  # channels and side with which the paper's decoder begins
SLOPE = 0.2


def small(numbers: int, shape: Sequence[int], dropout: float) -> nn.Sequential:
    """Return a network from a vector to a volume (modality, *space); its initial output is zero."""
    modalities, space = shape[0], shape[1:]
    grow = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[len(space)]
    eighth = [side // 8 for side in space]
    layers: list[nn.Module] = [
        nn.Linear(numbers, CHANNELS[0] * int(np.prod(eighth))),
        nn.Dropout(dropout),
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
    blocks = (side // SMALLEST).bit_length() - 1
    last = WIDEST >> blocks
    return nn.Sequential(
        nn.Linear(numbers, WIDEST * SMALLEST**dims),
        nn.Unflatten(1, (WIDEST, *[SMALLEST] * dims)),
        _norm(WIDEST, dims),
        nn.LeakyReLU(SLOPE),
        *(Block(WIDEST >> k, dims) for k in range(blocks)),
        _conv(last, last, dims),
        _norm(last, dims),
        nn.LeakyReLU(SLOPE),
        _conv(last, modalities, dims),
    )


class Block(nn.Module):
    """A residual block that doubles every side and halves the channels."""

    def __init__(self, channels: int, dims: int):
        super().__init__()
        half = channels // 2
        self.grow = nn.Upsample(scale_factor=2)
        self.body = nn.Sequential(
            _conv(channels, channels, dims),
            _norm(channels, dims),
            nn.LeakyReLU(SLOPE),
            _conv(channels, half, dims),
            _norm(half, dims),
        )
        self.shortcut = _conv(channels, half, dims)
        self.end = nn.LeakyReLU(SLOPE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the enlarged features."""
        large = self.grow(x)
        out: torch.Tensor = self.end(self.body(large) + self.shortcut(large))
        return out


def _conv(before: int, after: int, dims: int) -> Any:
    return {2: nn.Conv2d, 3: nn.Conv3d}[dims](before, after, kernel_size=3, padding=1)


def _norm(channels: int, dims: int) -> Any:
    return {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](channels)
