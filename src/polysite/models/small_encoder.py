"""The bundled encoder: the contracting half of a small 3D U-Net, 0.88 M weights.

Four levels of two 3 × 3 × 3 convolutions, each with batch normalisation and LeakyReLU 0.01; every level but the first
begins by halving the volume. Normalisation uses the statistics of training: instance statistics would remove much of
the difference between scanners. ``scripts/train_encoder.py`` trained the weights on phantoms.
"""

from itertools import pairwise

from torch import nn

CHANNELS = (16, 32, 64, 128)


class SmallEncoder(nn.Sequential):
    """Encoder from (batch, 1, *space) to (batch, 128, *space / 8)."""

    def __init__(self) -> None:
        super().__init__()
        for level, (before, channels) in enumerate(pairwise((1, *CHANNELS))):
            first = _convolution(before, channels, stride=2 if level else 1)
            self.add_module(f"level{level}", nn.Sequential(*first, *_convolution(channels, channels)))


def _convolution(before: int, channels: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv3d(before, channels, 3, stride, padding=1, bias=False)  # normalisation would cancel a bias
    return [convolution, nn.BatchNorm3d(channels), nn.LeakyReLU(0.01, inplace=True)]
