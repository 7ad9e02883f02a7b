"""Losses of a local objective in torch: replacements of the local loss, and losses added to it.

``polysite.site`` defines each of them.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import adaptive_avg_pool2d, adaptive_avg_pool3d, cosine_similarity, log_softmax, softplus

from polysite.models.names import deepest_of, sub_encoders_of
from polysite.site import Balanced, Contrast, Divergence, ExtraLoss, OneVsAll, ReplacementLoss
from polysite.training.tasks import Outline, Task

if TYPE_CHECKING:
    from polysite.training.torch_site import Network

Judge = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits, truth) of a batch -> one number


def replacement(loss: ReplacementLoss, task: Task, name: str, seen: Callable[[], tuple[torch.Tensor, float]]) -> Judge:
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


CLASSIFYING, SEGMENTING = 0.2, 0.4  # weight of the divergence where none is given: the paper's best of each


class ExtraLosses:
    """The sum of some terms, ready for one local training."""

    def __init__(self, network: "Network", terms: Sequence[ExtraLoss]):
        self.network = network
        self.contrasts = [(t, network.twin(t.near), network.twin(t.far)) for t in terms if isinstance(t, Contrast)]
        self.divergences = [t for t in terms if isinstance(t, Divergence)]
        names = [name for name, _ in network.module.named_modules()]
        self.encoders = sub_encoders_of(names) if self.divergences else []
        self.deepest = [deepest_of(names)] if self.contrasts else []

    def __call__(self, x: torch.Tensor, truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The network's answer to a batch, and the sum of the terms; the truth is that of every channel."""
        logits, seen = self.network.trace(x, [*self.encoders, *self.deepest])
        total = torch.zeros((), device=logits.device)
        for term, near, far in self.contrasts:
            with torch.no_grad():
                (_, near_z), (_, far_z) = near.look(x), far.look(x)
            z = seen[self.deepest[0]][0].flatten(2).mean(2)
            total = total + term.weight * contrast(z, near_z, far_z, term).mean()
        for each in self.divergences:
            found = divergence([seen[name] for name in self.encoders], truth, each.focus)
            total = total + weight_of(each, truth) * found
        return logits, total


def contrast(z: torch.Tensor, near: torch.Tensor, far: torch.Tensor, term: Contrast) -> torch.Tensor:
    """The contrast of every patch, without its weight."""
    alike = torch.stack([cosine_similarity(z, near), cosine_similarity(z, far)]) / term.temperature
    return -log_softmax(alike, 0)[0]


def divergence(features: Sequence[Sequence[torch.Tensor]], truth: torch.Tensor, focus: float) -> torch.Tensor:
    """How much the features of every class vary over a batch, without the weight.

    ``features`` are those of every class, each (case, feature, *space) at some size; ``truth`` is (case, class) or
    (case, class, *space).
    """
    total = truth.new_zeros(())
    for mine, maps in zip(truth.unbind(1), features, strict=True):
        spread = [(_focus(mine, f, focus) * f).std(0, correction=0).flatten(1).mean(1) for f in maps]
        total = total + torch.cat(spread).mean()
    return total


def weight_of(term: Divergence, truth: torch.Tensor) -> float:
    if term.weight is not None:
        return term.weight
    return CLASSIFYING if truth.ndim == 2 else SEGMENTING


def _focus(mine: torch.Tensor, features: torch.Tensor, focus: float) -> torch.Tensor:
    """What the features are multiplied by: a number for every case, or for every position."""
    if mine.ndim == 1:
        return torch.exp(focus * (2 * mine - 1)).view(-1, *(1 for _ in features.shape[1:]))
    pool: Any = adaptive_avg_pool2d if mine.ndim == 3 else adaptive_avg_pool3d
    return focus * torch.exp(-pool(mine[:, None], features.shape[2:]))
