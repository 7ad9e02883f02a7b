"""The U-Net and the DenseNet with an encoder for every class; all encoders feed one decoder or classifier.

Paper: FedDiv, section IV

A class is an output channel of the network: one for every label of a segmentation with overlapping labels; one for
every label and one for the background if labels exclude one another (``train.exclusive``; the paper counts background
too); one for every class of a classification.

All encoders see the whole image and are equally wide. Their width makes the network as large as the plain one of the
same configuration, as nearly as whole channels allow. The decoder of the U-Net is as wide as the plain one's and takes
the features of all encoders at every resolution. In a DenseNet the decoder is the classifier alone. The parameters of
class i are called ``stem.class{i}.*``, ``encoder.class{i}.*`` and ``bottleneck.class{i}.*``, with i counted from 0 in
the order of the channels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, ClassVar

from polysite.models.densenet import DenseNet
from polysite.models.unet import UNet

Widths = tuple[int, ...]
INSIDE = 4  # channels inside a layer of a DenseNet per channel that the layer adds


@dataclass(frozen=True)
class UNetSub:
    """A U-Net with an encoder for every class.

    Args:
        filters: Channels at every resolution of the plain U-Net of the same size.
        bias: Use convolution biases, as in the published networks.
    """

    filters: tuple[int, ...] = (32, 64, 128, 256, 512)
    bias: bool = True

    task: ClassVar[str] = "segmentation"

    def __post_init__(self) -> None:
        UNet(self.filters, self.bias)  # checks the values

    @property
    def divisor(self) -> int:
        """Factor that the sides of a patch must be multiples of."""
        return UNet(self.filters).divisor

    def widths(self, dims: int, modalities: int, outputs: int) -> Widths:
        """Return the channels of every encoder at every resolution."""

        def size(encoders: int, widths: Widths) -> int:
            return _unet_size(self.filters, self.bias, dims, modalities, outputs, encoders, widths)

        return narrowed(self.filters, lambda widths: size(outputs, widths), size(1, self.filters))

    def build(self, *, dims: int, modalities: int, outputs: int, seed: int) -> Any:
        """Return the network with initial weights drawn from the seed."""
        import torch

        from polysite.models.sub_networks import SubUNet

        widths = self.widths(dims, modalities, outputs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return SubUNet(dims, modalities, outputs, widths, self.filters, self.bias)


@dataclass(frozen=True)
class DenseNetSub(DenseNet):
    """A DenseNet with an encoder for every class.

    Args:
        blocks: Layers of every block.
        growth: Channels that a layer adds in the plain DenseNet of the same size.
        features: Channels of its first convolution.
    """

    def widths(self, dims: int, modalities: int, outputs: int) -> Widths:
        """Return the channels of every encoder's first convolution, and those that a layer of each block adds."""
        whole = (self.features, *[self.growth] * len(self.blocks))

        def size(encoders: int, widths: Widths) -> int:
            return _densenet_size(self.blocks, dims, modalities, outputs, encoders, widths)

        return narrowed(whole, lambda widths: size(outputs, widths), size(1, whole))

    def build(self, *, dims: int, modalities: int, outputs: int, seed: int) -> Any:
        """Return the network with initial weights drawn from the seed."""
        import torch

        from polysite.models.sub_networks import SubDenseNet

        first, *growth = self.widths(dims, modalities, outputs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return SubDenseNet(dims, modalities, outputs, first, growth, self.blocks)


def narrowed(whole: Widths, size: Callable[[Widths], int], target: int) -> Widths:
    """Return widths that give a network the size nearest to a target.

    All widths shrink by one factor. Then each may change by one, and the first, which changes the size least, by three.

    >>> narrowed((10, 20), lambda widths: 3 * sum(widths), 30)
    (3, 7)
    """
    if size(whole) <= target:
        return whole

    def at(factor: float) -> Widths:
        return tuple(max(1, int(factor * w)) for w in whole)

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if size(at(middle)) <= target else (low, middle)
    base, reach = at(low), (3, *[1] * (len(whole) - 1))
    near = product(*(range(max(b - r, 1), min(b + r, w) + 1) for b, r, w in zip(base, reach, whole, strict=True)))
    return min(near, key=lambda widths: (abs(size(widths) - target), math.dist(widths, base)))


def _unet_size(
    filters: Widths, bias: bool, dims: int, modalities: int, outputs: int, encoders: int, widths: Widths
) -> int:
    """Return the number of parameters of a U-Net with several encoders."""
    kernel, up = int(3**dims), int(2**dims)

    def block(before: int, after: int) -> int:
        return kernel * (before + after) * after + 2 * bias * after

    encoder = block(modalities, widths[0]) + sum(block(a, b) for a, b in pairwise(widths))
    below = (*filters[1:-1], encoders * widths[-1])
    ups = zip(below, filters, widths, strict=False)  # one fewer than the resolutions
    decoder = sum(up * b * f + bias * f + block(f + encoders * w, f) for b, f, w in ups)
    return encoders * encoder + decoder + (filters[0] + 1) * outputs


def _densenet_size(
    blocks: Sequence[int], dims: int, modalities: int, outputs: int, encoders: int, widths: Widths
) -> int:
    """Return the number of parameters of a DenseNet with several encoders."""
    channels, *growth = widths
    size, kernel = int(7**dims) * modalities * channels + 2 * channels, int(3**dims)
    for number, (layers, rate) in enumerate(zip(blocks, growth, strict=True), start=1):
        inside = INSIDE * rate
        for _ in range(layers):
            size += 2 * channels + channels * inside + 2 * inside + kernel * inside * rate
            channels += rate
        if number < len(blocks):
            size += 2 * channels + channels * (channels // 2)
            channels //= 2
    size += 2 * channels
    return encoders * size + (encoders * channels + 1) * outputs
