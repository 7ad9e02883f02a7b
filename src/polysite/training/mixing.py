"""Joint training of two models in torch; ``polysite.site.Mix`` defines it.

A point between two models is linear in both, so no graph through the interpolation is needed: the network holds the
parameters of the point, and its gradient, times 1 - lam and lam, is the gradient of either model.
"""

from collections.abc import Mapping

import numpy as np
import torch

from polysite.site import Mix
from polysite.tree import Tree

Weights = Mapping[str, torch.nn.Parameter]
_TINY = 1e-30  # a model of zeros has no direction


class Mixing:
    """The shared model and its twin, for one fit."""

    def __init__(self, network: Weights, mix: Mix, rng: np.random.Generator):
        self.network, self.mix, self.rng = network, mix, rng
        self.shared = {k: _parameter(p, p) for k, p in network.items()}
        self.twin = {k: _parameter(mix.twin[k], p) for k, p in network.items() if k in mix.twin}
        self.at: dict[str, float] = {}  # lam of every parameter

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        """Parameters of both models, for the optimiser."""
        return [*self.shared.values(), *self.twin.values()]

    @torch.no_grad()
    def place(self) -> None:
        """Move the network to a new random point between the two models."""
        drawn: dict[str, float] = {}
        for name in self.twin:
            layer = name.rpartition(".")[0] if self.mix.by == "layer" else ""
            if layer not in drawn:
                drawn[layer] = float(self.rng.random())
            self.at[name] = drawn[layer]
        for name, p in self.network.items():
            p.grad = None  # an earlier fit may have left one
            p.copy_(self.shared[name].lerp(self.twin[name], self.at[name]) if name in self.twin else self.shared[name])

    @torch.no_grad()
    def divide(self) -> None:
        """Give each model its share of the network's gradient, and add the gradient of the orthogonality term."""
        for name, p in self.network.items():
            gradient, lam = torch.zeros_like(p) if p.grad is None else p.grad, self.at.get(name, 0.0)
            self.shared[name].grad = gradient * (1 - lam)
            if name in self.twin:
                self.twin[name].grad = gradient * lam
        if self.mix.orthogonality and self.twin:
            self._orthogonalise()

    def _orthogonalise(self) -> None:
        """Add the gradient of cos^2: 2 <u,v>/(|u|^2 |v|^2) v - 2 <u,v>^2/(|u|^4 |v|^2) u, and the same for v."""
        pairs = [(self.shared[k], self.twin[k]) for k in self.twin]
        uv, uu, vv = (
            torch.stack([(pair[i] * pair[j]).sum() for pair in pairs]).sum() for i, j in ((0, 1), (0, 0), (1, 1))
        )
        uu, vv = uu.clamp_min(_TINY), vv.clamp_min(_TINY)
        across = 2 * self.mix.orthogonality * uv / (uu * vv)
        for u, v in pairs:
            change = across * (v - uv / uu * u), across * (u - uv / vv * v)
            for p, c in zip((u, v), change, strict=True):
                p.grad = c if p.grad is None else p.grad + c

    def models(self) -> tuple[Tree, Tree]:
        """Return the trained parameters of the shared model, and the twin."""
        shared, twin = ({k: p.detach().contiguous() for k, p in half.items()} for half in (self.shared, self.twin))
        return shared, {**self.mix.twin, **twin}


def _parameter(value: torch.Tensor, like: torch.Tensor) -> torch.nn.Parameter:
    """Copy a value, with the memory layout of the network's own parameter."""
    return torch.nn.Parameter(torch.empty_like(like).copy_(value.detach()))
