"""Personal head: a second head beside the network's own, trained on the network's features without changing them."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from polysite.errors import ConfigError
from polysite.models.names import canonical, head_of
from polysite.training.clipping import clip
from polysite.training.gpu_passes import GpuPasses
from polysite.training.gpu_steps import GpuSteps
from polysite.training.losses import weighted
from polysite.training.tasks import CaseLoss
from polysite.tree import Tree

if TYPE_CHECKING:
    from polysite.training.network import Network


class Personal:
    """The personal head of one fit, with its own optimiser.

    Args:
        network: The network.
        values: Parameters of the head.
        optimiser: Makes an optimiser of parameters.
        loss: The local loss of every case.
        batch: Cases of a complete batch.
        most: Largest norm of the head's gradient; 0: any.
    """

    def __init__(
        self,
        network: "Network",
        values: Tree,
        optimiser: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        loss: CaseLoss,
        batch: int,
        most: float = 0.0,
    ):
        name = head_of(name for name, _ in network.module.named_modules())
        self.network, self.loss, self.batch, self.most = network, loss, batch, most
        self.head = network.shared_head().head if network.gpu_steps else own_head(network.module)
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
        self.optimiser.zero_grad(set_to_none=True)
        if self.network.gpu_steps:
            loss = self.network.shared_head().backward(x, y, self.loss, self.batch)
        else:
            with torch.no_grad(), frozen_statistics(self.network.module):
                logits, features = self.network.before_head(x)
            with torch.autocast(self.network.device.type, dtype=torch.bfloat16, enabled=self.network.half):
                added = self.head(features)
            loss = self.loss(logits + added.float(), y).mean()
            loss.backward()  # type: ignore[no-untyped-call]
        clip(list(self.leaves.values()), self.most)
        self.optimiser.step()
        return loss.detach()

    def read(self) -> Tree:
        """Return a copy of the head's parameters."""
        return {k: p.detach().clone(memory_format=torch.contiguous_format) for k, p in self.leaves.items()}


class SharedHead:
    """A personal head in fixed memory on a GPU; all fits of a network share its steps.

    Args:
        steps: The shared steps of the network.
        passes: Its forward passes.
    """

    def __init__(self, steps: GpuSteps, passes: GpuPasses):
        self.head = own_head(steps.module)
        self.steps, self.passes, self.weights = steps, passes, list(self.head.parameters())
        self.name = head_of(name for name, _ in steps.module.named_modules())
        passes.tap(self.name)

    def backward(self, x: torch.Tensor, y: torch.Tensor, loss: CaseLoss, batch: int) -> torch.Tensor:
        """Compute the mean loss of both heads together, and the gradients of the personal one; return the loss."""
        return self.steps.step((self.name, loss), partial(self._goal, loss), self.weights, x, y, batch)

    def _goal(self, loss: CaseLoss, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad():
            heads, inputs, _ = self.passes.run(x, (self.name,))
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.steps.half):
            added = self.head(inputs[self.name][0])
        return weighted(loss(heads[0] + added.float(), y), weights)


def own_head(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of the network's head."""
    name = head_of(name for name, _ in module.named_modules())
    return copy.deepcopy(module.get_submodule(name)).requires_grad_(True)


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
