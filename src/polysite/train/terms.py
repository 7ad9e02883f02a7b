"""Losses that an algorithm adds to the local one, in torch. What they mean is said in ``polysite.site``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import adaptive_avg_pool2d, adaptive_avg_pool3d, cosine_similarity, log_softmax

from polysite.models.names import deepest_of, sub_encoders_of
from polysite.site import Contrast, Divergence, Term

if TYPE_CHECKING:
    from polysite.train.torch_site import Network

CLASSIFYING, SEGMENTING = 0.2, 0.4  # weight of the divergence where none is given: the paper's best of each


class Extra:
    """The sum of some terms, ready for one local training."""

    def __init__(self, network: "Network", terms: Sequence[Term]):
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
