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
from polysite.training.tasks import CaseLoss, Outline, Task

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


class Replaced:
    """A replacement of the local loss inside a step that fits share on a GPU: nothing in it depends on the fit but the
    memory of the shift, and its shapes do not depend on values.

    Args:
        loss: The replacement of the local loss.
        local: The local loss of every case.
    """

    def __init__(self, loss: ReplacementLoss, local: CaseLoss):
        self.loss, self.task, self.local = loss, local.task, local
        self.shift: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"Replaced({self.loss}, {self.local})"

    def prepare(self, label_shares: Callable[[], tuple[torch.Tensor, float]], device: torch.device) -> None:
        """Take over the label frequencies of the site that is fitted next."""
        if isinstance(self.loss, Balanced):
            shift = self.task.shift(*label_shares(), self.loss.clip).to(device)
            self.shift = shift if self.shift is None else self.shift.copy_(shift)

    def __call__(self, logits: torch.Tensor, truth: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Return the loss to minimise and the local loss, means over cases with these weights (None: equal ones)."""
        local = weighted(self.local(logits, truth), weights)
        if isinstance(self.loss, Balanced):
            assert self.shift is not None
            moved = logits + _along(self.shift, logits)
            return torch.stack([weighted(self.task.loss(self.local.name, moved, truth), weights), local])
        real = torch.ones(len(logits), device=logits.device) if weights is None else weights
        goal = one_vs_all_masked(logits, self.task.channels(truth), self.loss, real > 0)
        if truth.ndim > 2:
            goal = goal + weighted(Outline().loss("dice", logits[:, -truth.shape[1] :], truth), weights)
        return torch.stack([goal, local])


def weighted(losses: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of the losses of cases, times their weights; their mean without weights."""
    return losses.mean() if weights is None else (losses * weights).sum()


def one_vs_all_masked(logits: torch.Tensor, truth: torch.Tensor, loss: OneVsAll, real: torch.Tensor) -> torch.Tensor:
    """Return ``one_vs_all`` of the real cases of a batch, by operations of fixed shapes: a GPU waits for no count."""
    total = 0 * logits.sum()
    for z, y in zip(logits.transpose(0, 1).flatten(1), truth.transpose(0, 1).flatten(1), strict=True):
        counts = real.repeat_interleave(len(z) // len(real))
        yes, no = counts & (y > 0.5), counts & (y <= 0.5)
        positives, negatives = yes.sum(), no.sum()
        hardest = negatives
        if loss.ratio is not None:
            few = torch.ceil(loss.ratio * positives.double()).long()
            hardest = torch.where(positives > 0, torch.minimum(negatives, few), negatives)
        found = z.masked_fill(~no, -torch.inf).sort(descending=True).values
        found = found.masked_fill(~found.isfinite(), 0.0)
        hard = (torch.arange(len(z), device=z.device) < hardest) & (found.detach().sigmoid() > loss.above)
        unsure = yes & (z.detach().sigmoid() < loss.below)
        total = total + loss.weight * _masked_mean(_focal_each(z, loss.gamma), unsure)
        total = total + (1 - loss.weight) * _masked_mean(_focal_each(-found, loss.gamma), hard)
    return total


def _masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of the values inside a mask; 0 if it is empty."""
    return values.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def _focal(z: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return the mean of (1 - p)^gamma (-log p)."""
    return _focal_each(z, gamma).mean()


def _focal_each(z: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return (1 - p)^gamma (-log p). The power is an exponential: its slope is finite at 1 - p = 0."""
    return torch.exp(-gamma * softplus(z)) * softplus(-z)


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
