"""Joint training of two models in torch; ``polysite.site.Mix`` defines it.

A point between two models is linear in both, so no graph through the interpolation is needed: the network holds the
parameters of the point, and its gradient, times 1 - lam and lam, is the gradient of either model.
"""

from collections.abc import Mapping, Sequence

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
        for p in self.network.values():
            p.grad = None  # an earlier fit may have left one
        torch._foreach_copy_(list(self.network.values()), list(self.shared.values()))
        if self.twin:
            at: list[torch.Tensor] = [self.network[k] for k in self.twin]
            mine: list[torch.Tensor] = [self.shared[k] for k in self.twin]
            torch._foreach_copy_(at, torch._foreach_lerp(mine, list(self.twin.values()), list(self.at.values())))

    @torch.no_grad()
    def divide(self) -> None:
        """Give each model its share of the network's gradient, and add the gradient of the orthogonality term."""
        gradients = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in self.network.items()}
        mine = torch._foreach_mul(list(gradients.values()), [1 - self.at.get(k, 0.0) for k in gradients])
        for shared, gradient in zip(self.shared.values(), mine, strict=True):
            shared.grad = gradient
        if not self.twin:
            return
        theirs = torch._foreach_mul([gradients[k] for k in self.twin], list(self.at.values()))
        for twin, gradient in zip(self.twin.values(), theirs, strict=True):
            twin.grad = gradient
        if self.mix.orthogonality:
            self._orthogonalise()

    def _orthogonalise(self) -> None:
        """Add the gradient of cos^2: 2 <u,v>/(|u|^2 |v|^2) v - 2 <u,v>^2/(|u|^4 |v|^2) u, and the same for v."""
        us, vs = [self.shared[k].detach() for k in self.twin], [p.detach() for p in self.twin.values()]
        uv, uu, vv = (_inner(a, b) for a, b in ((us, vs), (us, us), (vs, vs)))
        uu, vv = uu.clamp_min(_TINY), vv.clamp_min(_TINY)
        across = 2 * self.mix.orthogonality * uv / (uu * vv)
        for a, b, share, p in ((us, vs, uv / uu, self.shared), (vs, us, uv / vv, self.twin)):
            changes = torch._foreach_mul(torch._foreach_sub(b, torch._foreach_mul(a, share)), across)
            torch._foreach_add_([g for k in self.twin if (g := p[k].grad) is not None], changes)

    def models(self) -> tuple[Tree, Tree]:
        """Return the trained parameters of the shared model, and the twin."""
        shared, twin = ({k: p.detach().contiguous() for k, p in half.items()} for half in (self.shared, self.twin))
        return shared, {**self.mix.twin, **twin}


def _inner(a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
    """Return the inner product; on a GPU as (|a + b|^2 - |a - b|^2) / 4, which takes few kernels for all tensors."""
    if not a[0].is_cuda:
        return torch.stack([x.sum() for x in torch._foreach_mul(a, b)]).sum()
    return (_square(torch._foreach_add(a, b)) - (_square(torch._foreach_sub(a, b)) if a is not b else 0.0)) / 4


def _square(a: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(torch._foreach_norm(list(a))).square().sum()


def _parameter(value: torch.Tensor, like: torch.Tensor) -> torch.nn.Parameter:
    """Copy a value, with the memory layout of the network's own parameter."""
    return torch.nn.Parameter(torch.empty_like(like).copy_(value.detach()))
