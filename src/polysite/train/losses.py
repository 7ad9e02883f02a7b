"""Losses of one batch, one number per case: (logits, truth) -> shape (batch,).

Every output channel is a label of its own behind a sigmoid, so labels may overlap (whole tumour, core, enhancing).
"""

from collections.abc import Callable

import torch
from monai.losses import DiceLoss

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_soft = DiceLoss(sigmoid=True, smooth_nr=1.0, smooth_dr=1.0, reduction="none")


def dice(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Soft Dice with smoothing 1: 1 - (2 sum p g + 1) / (sum p + sum g + 1), mean over the labels."""
    per_label: torch.Tensor = _soft(logits, truth)
    return per_label.flatten(1).mean(1)


def dice_ce(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Soft Dice plus voxel-wise cross-entropy."""
    ce = torch.nn.functional.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    return dice(logits, truth) + ce.flatten(1).mean(1)


LOSSES: dict[str, Loss] = {"dice": dice, "dice_ce": dice_ce}
