"""Losses in place of the site's own, in torch. What they mean is said in ``polysite.site``."""

import math
from collections.abc import Callable

import torch
from torch.nn.functional import softplus

from polysite.site import Balanced, Loss, OneVsAll
from polysite.train.tasks import Outline, Task

Judge = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits, truth) of a batch -> one number


def judge(loss: Loss, task: Task, name: str, seen: Callable[[], tuple[torch.Tensor, float]]) -> Judge:
    """The loss, ready for one local training; ``seen`` tells the shares of the labels, and of how many voxels."""
    if isinstance(loss, Balanced):
        shift = task.shift(*seen(), loss.clip)
        return lambda logits, truth: task.loss(name, logits + _along(shift, logits), truth).mean()

    def apart(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        found = one_vs_all(logits, task.channels(truth), loss)
        if truth.ndim == 2:  # a class for every case: there is nothing to overlap
            return found
        return found + Outline().loss("dice", logits[:, -truth.shape[1] :], truth).mean()  # a background comes first

    return apart


def one_vs_all(logits: torch.Tensor, truth: torch.Tensor, loss: OneVsAll) -> torch.Tensor:
    """The sum over the channels of what they lose on their positives and on their hard negatives."""
    total = 0 * logits.sum()  # where nothing counts, a gradient of zero
    for z, y in zip(logits.transpose(0, 1).flatten(1), truth.transpose(0, 1).flatten(1), strict=True):
        yes, no = z[y > 0.5], z[y <= 0.5]
        most = len(no) if loss.ratio is None or not len(yes) else min(len(no), math.ceil(loss.ratio * len(yes)))
        no = no[no.detach().topk(most, sorted=False).indices]
        yes, no = yes[yes.detach().sigmoid() < loss.below], no[no.detach().sigmoid() > loss.above]
        if len(yes):
            total = total + loss.weight * _focal(yes, loss.gamma)
        if len(no):
            total = total + (1 - loss.weight) * _focal(-no, loss.gamma)
    return total


def _focal(z: torch.Tensor, gamma: float) -> torch.Tensor:
    """The mean of (1 - p)^gamma (-log p); the power as an exponential, whose slope is finite where 1 - p is 0."""
    return (torch.exp(-gamma * softplus(z)) * softplus(-z)).mean()


def _along(shift: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """One number for every channel, beside logits of any number of axes."""
    return shift.to(logits.device).view(1, -1, *(1 for _ in logits.shape[2:]))
