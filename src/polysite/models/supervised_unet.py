"""A U-Net with further heads at coarser resolutions of its decoder, for deep supervision.

In training it returns the logits of all heads, the finest first; in evaluation those of the main head, like MONAI's
DynUNet, whose layers it has. (DynUNet's own heads are enlarged to the finest resolution, so that a loss would compare
copies of one voxel; nnU-Net compares every head with the ground truth at its own resolution.)
"""

from typing import Any

import torch
from monai.networks.blocks.dynunet_block import UnetOutBlock
from monai.networks.nets.dynunet import DynUNet
from torch import nn


class SupervisedUNet(DynUNet):  # type: ignore[misc]
    """DynUNet with ``heads`` more heads; head k has 1/2^(k + 1) of the resolution."""

    def __init__(self, heads: int, **settings: Any):
        super().__init__(**settings)
        dims, filters, outputs = settings["spatial_dims"], settings["filters"], settings["out_channels"]
        self.supervision = nn.ModuleList(UnetOutBlock(dims, filters[k + 1], outputs) for k in range(heads))
        self.supervision.apply(self.initialize_weights)  # after all others, which keep their initial values

    def forward(self, x: torch.Tensor) -> Any:
        """Return the logits of a batch; in training a tuple of those of all heads."""
        if not self.training:
            return super().forward(x)
        skips = [self.input_block(x)]
        for step in self.downsamples:
            skips.append(step(skips[-1]))
        stages = [self.bottleneck(skips[-1])]
        for step, skip in zip(self.upsamples, reversed(skips), strict=True):
            stages.append(step(stages[-1], skip))
        coarser = zip(self.supervision, reversed(stages[:-1]), strict=False)
        return (self.output_block(stages[-1]), *(head(stage) for head, stage in coarser))
