"""Personal head: a second head beside the network's own, trained on the network's features without changing them."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from polysite.errors import ConfigError
from polysite.models.names import canonical, head_of
from polysite.training.losses import BatchLoss
from polysite.tree import Tree

if TYPE_CHECKING:
    from polysite.training.network import Network


class Personal:
    """The personal head of one fit, with its own optimiser."""

    def __init__(
        self,
        network: "Network",
        values: Tree,
        optimiser: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        loss: BatchLoss,
    ):
        name = head_of(name for name, _ in network.module.named_modules())
        self.network, self.loss = network, loss
        self.head = copy.deepcopy(network.module.get_submodule(name)).requires_grad_(True)
        self.leaves = {canonical(f"{name}.{n}"): p for n, p in self.head.named_parameters()}
        if values.keys() != self.leaves.keys():
            odd = sorted(values.keys() ^ self.leaves.keys())
            raise ConfigError(f"a personal head is of the form of the network's own; they differ in {odd[:3]}")
        with torch.no_grad():
            for k, p in self.leaves.items():
                p.copy_(values[k])
        self.optimiser = optimiser(list(self.leaves.values()))

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Take one step on a batch; return the loss of both heads together before the step."""
        with torch.no_grad(), frozen_statistics(self.network.module):
            logits, features = self.network.before_head(x)
        self.optimiser.zero_grad(set_to_none=True)
        with torch.autocast(self.network.device.type, dtype=torch.bfloat16, enabled=self.network.half):
            added = self.head(features)
        loss = self.loss(logits + added.float(), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        return loss.detach()

    def read(self) -> Tree:
        """Return a copy of the head's parameters."""
        return {k: p.detach().clone(memory_format=torch.contiguous_format) for k, p in self.leaves.items()}


@contextmanager
def frozen_statistics(module: torch.nn.Module) -> Iterator[None]:
    """Normalise by the batch, as in training, but do not update running statistics."""
    norms = [m for m in module.modules() if getattr(m, "running_mean", None) is not None]
    before = [m.momentum for m in norms]
    for m in norms:
        m.momentum = 0.0  # type: ignore[assignment]
    try:
        yield
    finally:
        for m, momentum in zip(norms, before, strict=True):
            m.momentum = momentum
