"""The network of an ensemble: the weighted mean of the logits of its members."""

from collections.abc import Iterable

import torch
from torch import nn


class EnsembleNetwork(nn.Module):
    """Several networks, and a buffer of their weights."""

    weights: torch.Tensor

    def __init__(self, members: Iterable[nn.Module]):
        super().__init__()
        self.members = nn.ModuleList(members)
        self.register_buffer("weights", torch.full((len(self.members),), 1 / len(self.members)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted mean of the members' logits, in float32."""
        parts = [weight * _logits(member(x)) for weight, member in zip(self.weights, self.members, strict=True)]
        return torch.stack(parts).sum(0)


def _logits(made: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the logits of the main head: a network with deep supervision has several heads in training."""
    return (made[0] if isinstance(made, tuple) else made).float()
