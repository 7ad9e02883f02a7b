"""Losses of the tasks against MONAI's."""

import pytest
import torch
from monai.losses.dice import DiceLoss

from polysite.training.tasks import Exclusive, Outline

SMOOTH = {"smooth_nr": 1.0, "smooth_dr": 1.0, "reduction": "none"}


@pytest.mark.parametrize("shape", [(3, 2, 9, 8, 7), (1, 3, 16, 5)], ids=str)
@pytest.mark.parametrize("exclusive", [False, True])
def test_soft_dice_and_its_gradient_are_monais_to_the_last_bit(shape, exclusive):
    torch.manual_seed(0)
    task, outputs = (Exclusive(), shape[1] + 1) if exclusive else (Outline(), shape[1])
    logits = torch.randn(shape[0], outputs, *shape[2:])
    labels = torch.randint(0, shape[1] + 1, (shape[0], *shape[2:]))
    truth = torch.stack([labels == k for k in range(1, shape[1] + 1)], 1).float()
    oracle = (
        DiceLoss(softmax=True, include_background=False, **SMOOTH) if exclusive else DiceLoss(sigmoid=True, **SMOOTH)
    )
    results = []
    for loss in (lambda z: task.loss("dice", z, truth), lambda z: oracle(z, task.channels(truth)).flatten(1).mean(1)):
        z = logits.clone().requires_grad_()
        value = loss(z)
        value.mean().backward()
        results.append((value.detach(), z.grad))
    (mine, slope), (theirs, their_slope) = results
    assert torch.equal(mine, theirs) and torch.equal(slope, their_slope)
