"""Losses that an algorithm adds to the local one, in torch. What they mean is said in ``polysite.site``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cosine_similarity, log_softmax

from polysite.site import Contrast, Term

if TYPE_CHECKING:
    from polysite.train.torch_site import Network


class Extra:
    """The sum of some terms, ready for one local training."""

    def __init__(self, network: "Network", terms: Sequence[Term]):
        self.network = network
        self.terms = [(t, network.twin(t.near), network.twin(t.far)) for t in terms]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The network's answer to a batch, and the sum of the terms."""
        logits, z = self.network.look(x)
        total = torch.zeros((), device=logits.device)
        for term, near, far in self.terms:
            with torch.no_grad():
                (_, near_z), (_, far_z) = near.look(x), far.look(x)
            total = total + term.weight * contrast(z, near_z, far_z, term).mean()
        return logits, total


def contrast(z: torch.Tensor, near: torch.Tensor, far: torch.Tensor, term: Contrast) -> torch.Tensor:
    """The contrast of every patch, without its weight."""
    alike = torch.stack([cosine_similarity(z, near), cosine_similarity(z, far)]) / term.temperature
    return -log_softmax(alike, 0)[0]
