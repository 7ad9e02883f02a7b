"""Networks with an encoder for every class and one decoder, in torch. ``sub_encoders`` computes their widths.

An encoder returns all features that the decoder uses: those of a U-Net at every resolution, or the pooled features of a
DenseNet. The decoder concatenates the features of all classes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from monai.networks.blocks.dynunet_block import UnetBasicBlock, UnetOutBlock, get_conv_layer
from monai.networks.layers.factories import Conv, Pool
from monai.networks.layers.utils import get_norm_layer
from monai.networks.nets.densenet import _DenseBlock, _Transition
from monai.networks.nets.dynunet import DynUNet
from torch import nn

from polysite.models.sub_encoders import INSIDE

INSTANCE = ("INSTANCE", {"affine": False})
LEAKY = ("leakyrelu", {"inplace": True, "negative_slope": 0.01})

Features = tuple[torch.Tensor, ...]


class Join(nn.Module):
    """Concatenates the features of all classes; a module, so that a hook can see its output."""

    def forward(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the features of all classes along the channel axis."""
        return torch.cat(list(features), 1)


class UNetEncoder(nn.Module):
    """The contracting half of a U-Net: from (batch, modalities, *space) to features at every resolution."""

    def __init__(self, dims: int, modalities: int, widths: Sequence[int]):
        super().__init__()
        down = [_block(dims, before, after, stride=2) for before, after in pairwise(widths)]
        self.input_block = _block(dims, modalities, widths[0], stride=1)
        self.downsamples = nn.ModuleList(down[:-1])
        self.bottleneck = down[-1]

    def forward(self, x: torch.Tensor) -> Features:
        """Return the features of a batch at every resolution."""
        features = [self.input_block(x)]
        for step in (*self.downsamples, self.bottleneck):
            features.append(step(features[-1]))
        return tuple(features)


class Up(nn.Module):
    """One step of the expanding half. (MONAI's own block requires as many channels from the encoder as it has.)"""

    def __init__(self, dims: int, below: int, beside: int, width: int, bias: bool):
        super().__init__()
        self.transp_conv = get_conv_layer(
            dims, below, width, 2, 2, act=None, norm=None, bias=bias, conv_only=False, is_transposed=True
        )
        self.conv_block = _block(dims, width + beside, width, stride=1)

    def forward(self, x: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        """Upsample the features and merge them with those of the encoders."""
        out: torch.Tensor = self.conv_block(torch.cat([self.transp_conv(x), beside], 1))
        return out


class SubUNet(nn.Module):
    """A U-Net with an encoder for every class: ``widths`` are the channels of an encoder, ``filters`` the decoder's."""

    def __init__(
        self, dims: int, modalities: int, outputs: int, widths: Sequence[int], filters: Sequence[int], bias: bool
    ):
        super().__init__()
        self.encoders = nn.ModuleList(UNetEncoder(dims, modalities, widths) for _ in range(outputs))
        self.bottleneck = Join()
        self.upsamples = nn.ModuleList(
            Up(dims, outputs * widths[-1] if level == len(filters) - 2 else filters[level + 1], outputs * w, f, bias)
            for level, (w, f) in reversed(list(enumerate(zip(widths[:-1], filters[:-1], strict=True))))
        )
        self.output_block = UnetOutBlock(dims, filters[0], outputs)
        self.apply(DynUNet.initialize_weights)
        for module in self.modules() if bias else ():  # MONAI adds biases to transposed convolutions only
            if isinstance(module, nn.Conv2d | nn.Conv3d) and module.bias is None:
                module.bias = nn.Parameter(torch.zeros(module.out_channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch."""
        *beside, deepest = zip(*(encoder(x) for encoder in self.encoders), strict=True)
        out = self.bottleneck(deepest)
        for up, features in zip(self.upsamples, reversed(beside), strict=True):
            out = up(out, torch.cat(features, 1))
        logits: torch.Tensor = self.output_block(out)
        return logits


class DenseEncoder(nn.Module):
    """A DenseNet without its classifier; the growth may differ from block to block."""

    def __init__(self, dims: int, modalities: int, first: int, growth: Sequence[int], blocks: Sequence[int]):
        super().__init__()
        self.features = nn.Sequential(
            OrderedDict(
                conv0=Conv[Conv.CONV, dims](modalities, first, kernel_size=7, stride=2, padding=3, bias=False),
                norm0=get_norm_layer("batch", dims, first),
                relu0=nn.ReLU(inplace=True),
                pool0=Pool[Pool.MAX, dims](kernel_size=3, stride=2, padding=1),
            )
        )
        channels = first
        for number, (layers, rate) in enumerate(zip(blocks, growth, strict=True), start=1):
            block = _DenseBlock(dims, layers, channels, INSIDE, rate, dropout_prob=0.0)
            self.features.add_module(f"denseblock{number}", block)
            channels += layers * rate
            if number < len(blocks):
                self.features.add_module(f"transition{number}", _Transition(dims, channels, channels // 2))
                channels //= 2
        self.features.add_module("norm5", get_norm_layer("batch", dims, channels))
        self.pool = nn.Sequential(nn.ReLU(inplace=True), Pool[Pool.ADAPTIVEAVG, dims](1))
        self.channels = channels

    def forward(self, x: torch.Tensor) -> Features:
        """Return the pooled features of a batch."""
        return (self.pool(self.features(x)),)


class SubDenseNet(nn.Module):
    """A DenseNet with an encoder for every class."""

    def __init__(
        self, dims: int, modalities: int, outputs: int, first: int, growth: Sequence[int], blocks: Sequence[int]
    ):
        super().__init__()
        self.encoders = nn.ModuleList(DenseEncoder(dims, modalities, first, growth, blocks) for _ in range(outputs))
        channels = sum(encoder.channels for encoder in self.encoders)  # type: ignore[misc]
        self.features = Join()
        self.class_layers = nn.Sequential(OrderedDict(flatten=nn.Flatten(1), out=nn.Linear(channels, outputs)))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch."""
        logits: torch.Tensor = self.class_layers(self.features([encoder(x)[0] for encoder in self.encoders]))
        return logits


def _block(dims: int, before: int, after: int, stride: int) -> nn.Module:
    block: nn.Module = UnetBasicBlock(dims, before, after, 3, stride, INSTANCE, LEAKY)
    return block
