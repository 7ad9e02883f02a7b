"""Losses of a local objective in torch: replacements of the local loss, and losses added to it.

``polysite.site`` defines each of them by its formula.
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
    from polysite.training.network import Network

BatchLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits, truth) of a batch -> one number


def replacement(
    loss: ReplacementLoss, task: Task, name: str, label_shares: Callable[[], tuple[torch.Tensor, float]]
) -> BatchLoss:
    """Return the loss function of one fit.

    Args:
        loss: The replacement of the local loss.
        task: The task.
        name: Name of the local loss.
        label_shares: Returns the shares of the labels, and the number of voxels or cases that they refer to.
    """
    if isinstance(loss, Balanced):
        shift = task.shift(*label_shares(), loss.clip)
        return lambda logits, truth: task.loss(name, logits + _along(shift, logits), truth).mean()

    def binary(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        total = one_vs_all(logits, task.channels(truth), loss)
        if truth.ndim == 2:  # a classification has no overlap
            return total
        return total + Outline().loss("dice", logits[:, -truth.shape[1] :], truth).mean()  # a background comes first

    return binary


def one_vs_all(logits: torch.Tensor, truth: torch.Tensor, loss: OneVsAll) -> torch.Tensor:
    """Return the sum over the channels of the losses of their positives and their hard negatives."""
    total = 0 * logits.sum()  # keeps a gradient of zero if nothing is added
    for z, y in zip(logits.transpose(0, 1).flatten(1), truth.transpose(0, 1).flatten(1), strict=True):
        yes, no = z[y > 0.5], z[y <= 0.5]
        hardest = len(no) if loss.ratio is None or not len(yes) else min(len(no), math.ceil(loss.ratio * len(yes)))
        no = no[no.detach().topk(hardest, sorted=False).indices]
        yes, no = yes[yes.detach().sigmoid() < loss.below], no[no.detach().sigmoid() > loss.above]
        if len(yes):
            total = total + loss.weight * _focal(yes, loss.gamma)
        if len(no):
            total = total + (1 - loss.weight) * _focal(-no, loss.gamma)
    return total


def _focal(z: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return the mean of (1 - p)^gamma (-log p). The power is an exponential: its slope is finite at 1 - p = 0."""
    return (torch.exp(-gamma * softplus(z)) * softplus(-z)).mean()


def _along(shift: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Reshape one number per channel to broadcast over logits of any number of axes."""
    return shift.to(logits.device).view(1, -1, *(1 for _ in logits.shape[2:]))


CLASSIFYING, SEGMENTING = 0.2, 0.4  # default weights of the divergence: the paper's best


class ExtraLosses:
    """The sum of added losses, for one fit."""

    def __init__(self, network: "Network", terms: Sequence[ExtraLoss]):
        self.network = network
        self.contrasts = [(t, network.twin(t.near), network.twin(t.far)) for t in terms if isinstance(t, Contrast)]
        self.divergences = [t for t in terms if isinstance(t, Divergence)]
        names = [name for name, _ in network.module.named_modules()]
        self.encoders = sub_encoders_of(names) if self.divergences else []
        self.deepest = [deepest_of(names)] if self.contrasts else []

    def __call__(self, x: torch.Tensor, truth: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return the logits of all heads and the sum of the losses; the truth has one channel per output."""
        heads, seen = self.network.trace(x, [*self.encoders, *self.deepest])
        total = torch.zeros((), device=x.device)
        for term, near, far in self.contrasts:
            with torch.no_grad():
                (_, near_z), (_, far_z) = near.look(x), far.look(x)
            z = seen[self.deepest[0]][0].flatten(2).mean(2)
            total = total + term.weight * contrast(z, near_z, far_z, term).mean()
        for each in self.divergences:
            total = total + weight_of(each, truth) * divergence([seen[n] for n in self.encoders], truth, each)
        return heads, total


def contrast(z: torch.Tensor, near: torch.Tensor, far: torch.Tensor, term: Contrast) -> torch.Tensor:
    """Return the contrastive loss of every patch, without its weight."""
    alike = torch.stack([cosine_similarity(z, near), cosine_similarity(z, far)]) / term.temperature
    return -log_softmax(alike, 0)[0]


def divergence(features: Sequence[Sequence[torch.Tensor]], truth: torch.Tensor, term: Divergence) -> torch.Tensor:
    """Return the variation of every class encoder's features over a batch, without the weight.

    Args:
        features: Feature maps of every class, each (case, feature, *space) at some size.
        truth: (case, class) or (case, class, *space).
        term: The loss; see ``polysite.site.Divergence``.
    """
    total = truth.new_zeros(())
    for mask, maps in zip(truth.unbind(1), features, strict=True):
        spread = [(_focus(mask, f, term) * f).std(0, correction=0).flatten(1).mean(1) for f in maps]
        total = total + torch.cat(spread).mean()
    return total


def weight_of(term: Divergence, truth: torch.Tensor) -> float:
    """Return the weight of a divergence, or the default of the task."""
    if term.weight is not None:
        return term.weight
    return CLASSIFYING if truth.ndim == 2 else SEGMENTING


def _focus(mask: torch.Tensor, features: torch.Tensor, term: Divergence) -> torch.Tensor:
    """Return the factors of the features: one per case in a classification, one per position in a segmentation."""
    if mask.ndim == 1:
        return torch.exp(term.focus * (2 * mask - 1)).view(-1, *(1 for _ in features.shape[1:]))
    pool: Any = adaptive_avg_pool2d if mask.ndim == 3 else adaptive_avg_pool3d
    covered = pool(mask[:, None], features.shape[2:])
    return term.focus * torch.exp(-(covered if term.edges == 1 else covered**term.edges))
