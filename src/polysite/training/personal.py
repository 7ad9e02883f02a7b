"""A second head beside that of the network, trained on its features without changing them."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from polysite.errors import ConfigError
from polysite.models.names import canonical, head_of
from polysite.training.losses import Judge
from polysite.tree import Tree

if TYPE_CHECKING:
    from polysite.training.torch_site import Network


class Personal:
    """The head of one local training; it has an optimiser of its own."""

    def __init__(
        self,
        network: "Network",
        values: Tree,
        optimiser: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        loss: Judge,
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
        """One step on a batch; the loss before it, of the logits of both heads together."""
        with torch.no_grad(), still(self.network.module):
            logits, features = self.network.before_head(x)
        self.optimiser.zero_grad(set_to_none=True)
        with torch.autocast(self.network.device.type, dtype=torch.bfloat16, enabled=self.network.half):
            added = self.head(features)
        loss = self.loss(logits + added.float(), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        return loss.detach()

    def read(self) -> Tree:
        return {k: p.detach().clone(memory_format=torch.contiguous_format) for k, p in self.leaves.items()}


@contextmanager
def still(module: torch.nn.Module) -> Iterator[None]:
    """Normalise by the batch, as in training, and leave the running statistics alone."""
    norms = [m for m in module.modules() if getattr(m, "running_mean", None) is not None]
    before = [m.momentum for m in norms]
    for m in norms:
        m.momentum = 0.0  # type: ignore[assignment]
    try:
        yield
    finally:
        for m, momentum in zip(norms, before, strict=True):
            m.momentum = momentum
