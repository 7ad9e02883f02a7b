"""The network that all sites of a process share, on its device."""

import copy
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from polysite import tree
from polysite.errors import ConfigError
from polysite.models.names import canonical, deepest_of, head_of
from polysite.training.gpu_passes import GpuPasses
from polysite.training.gpu_steps import GpuSteps, Heads, PerCase, can_accelerate, channels_last
from polysite.training.losses import Replaced
from polysite.training.patches import Patches
from polysite.training.personal import SharedHead
from polysite.training.settings import Train
from polysite.training.supervision import supervised
from polysite.tree import Tree

SMALL = 40**3  # voxels of a volume that is too small for the fast convolution path of a CPU


def device_of(name: str) -> torch.device:
    """Return the device of this name; ``auto`` is the GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise ConfigError(f"train.device = {name!r} is no device; use 'auto', 'cpu' or 'cuda'") from problem
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"train.device = {name!r} is not supported; use 'auto', 'cpu' or 'cuda'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"train.device = {name!r}, but torch sees {torch.cuda.device_count()} GPUs here; use 'auto'")
    return device


class Network:
    """One network that all sites of a process share; each use writes the parameters first.

    Args:
        module: The network in torch.
        train: Settings of local training.
        expected: Number of training steps of the run, as far as it is known: long runs compile.
        later: The same of the runs after it that will use this network.
    """

    def __init__(self, module: torch.nn.Module, train: Train, expected: int = 0, later: int = 0):
        self.device = device_of(train.device)
        self.module = module.to(self.device)
        self.layout = channels_last(module) if self.device.type == "cpu" else torch.contiguous_format
        self.module.to(memory_format=self.layout)  # type: ignore[call-overload]
        self.half = train.autocast and self.device.type == "cuda"
        self.gpu_steps = (
            GpuSteps(self.module, self.half, train.compile, expected, later)
            if self.device.type == "cuda" and can_accelerate(module)
            else None
        )
        self.passes = GpuPasses(self.gpu_steps, train.batch) if self.gpu_steps else None
        self._shared_head: SharedHead | None = None
        # where a step cannot be shared, the network alone is compiled, and only on demand
        self.forward = torch.compile(self.module) if train.compile is True and not self.gpu_steps else self.module
        # a single small volume takes a slow convolution path on a CPU; together with a copy it does not
        self.doubles = self.device.type == "cpu" and not any(isinstance(m, _BatchNorm) for m in module.modules())
        self.parameters, self.leaves = leaves_of(module)
        self._tracking = _tracking(module)
        self.start = self.read()
        self.patches = Patches(self.device)

    def read(self) -> Tree:
        """Return a copy of the current parameters and running statistics, on the device."""
        return {k: v.detach().clone(memory_format=torch.contiguous_format) for k, v in self.leaves.items()}

    def write(self, params: Tree) -> None:
        """Copy these parameters into the network."""
        if params.keys() != self.leaves.keys():
            odd = sorted(params.keys() ^ self.leaves.keys())
            raise ConfigError(f"these parameters do not belong to this model; they differ in {odd[:3]}")
        odd = [k for k, v in self.leaves.items() if params[k].shape != v.shape]
        if odd:
            raise ConfigError(f"these parameters do not belong to this model; {odd[0]!r} has another shape")
        with torch.no_grad():
            torch._foreach_copy_(list(self.leaves.values()), [params[k] for k in self.leaves])

    def restart(self, module: torch.nn.Module, expected: int = 0, later: int = 0) -> None:
        """Take over the initial parameters of another network with the same layers, and keep what was compiled.

        Args:
            module: The other network.
            expected: Number of training steps of the run that begins.
            later: The same of the runs after it.
        """
        self.write(leaves_of(module)[1])
        self.start = self.read()
        if self.gpu_steps and self.passes:
            self.gpu_steps.begin(expected, later)
            self.passes.begin()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch, in float32."""
        return self.heads(x)[0]

    def heads(self, x: torch.Tensor) -> Heads:
        """Return the logits of all heads for a batch, in float32: several in training with deep supervision."""
        return self._heads(self.forward, x)

    def backward(self, x: torch.Tensor, y: torch.Tensor, loss: PerCase | Replaced, batch: int) -> torch.Tensor:
        """Compute the mean loss of a batch and its gradients; return the loss. ``GpuSteps.backward`` explains more."""
        if self.gpu_steps:
            return self.gpu_steps.backward(x, y, loss, batch)
        assert not isinstance(loss, Replaced)  # these are for shared steps
        mean = supervised(loss, self.heads(x), y).mean()
        mean.backward()  # type: ignore[no-untyped-call]
        return mean

    def complete(self) -> None:
        """Give every trained parameter a gradient after a backward pass; a compiled pass leaves out biases without
        effect."""
        if self.gpu_steps:
            self.gpu_steps.complete()

    def infer(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch in evaluation mode, in float32."""
        return self.gpu_steps.infer(x) if self.gpu_steps else self(x)

    @property
    def setup(self) -> tuple[float, str]:
        """Seconds spent on compiling so far, and what went wrong."""
        return (self.gpu_steps.setup_seconds, self.gpu_steps.problem) if self.gpu_steps else (0.0, "")

    def twin(self, params: Tree) -> "Network":
        """Return a second network with these parameters. (functional_call fails where DynUNet lists modules twice.)"""
        twin = copy.copy(self)
        twin.module = twin.forward = copy.deepcopy(self.module)
        twin.gpu_steps = twin.passes = None
        twin.parameters, twin.leaves = leaves_of(twin.module)
        twin._tracking = _tracking(twin.module)
        twin.write(params)
        return twin

    def look(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of a batch, and the deepest features of every patch, pooled over space."""
        deepest = deepest_of(name for name, _ in self.module.named_modules())
        heads, seen = self.trace(x, [deepest])
        return heads[0], seen[deepest][0].flatten(2).mean(2)

    def trace(self, x: torch.Tensor, modules: Collection[str]) -> tuple[Heads, dict[str, list[torch.Tensor]]]:
        """Return the logits of all heads for a batch, and the outputs of these modules."""
        if self.passes and self.module.training:
            heads, _, found = self.passes(x, modules)
            return heads, {name: [y.float() for y in out] for name, out in found.items()}
        seen: dict[str, Any] = {}
        hooks = [self.module.get_submodule(name).register_forward_hook(partial(_note, seen, name)) for name in modules]
        try:
            heads = self._heads(self.module, x)
        finally:
            for hook in hooks:
                hook.remove()
        return heads, {k: [y[: len(x)].float() for y in out] for k, out in seen.items()}

    def before_head(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of a batch, and the input of the head."""
        seen: list[torch.Tensor] = []
        head = self.module.get_submodule(head_of(name for name, _ in self.module.named_modules()))
        hook = head.register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
        try:
            logits = self._heads(self.module, x)[0]
        finally:
            hook.remove()
        return logits, seen[0][: len(x)]

    def shared_head(self) -> SharedHead:
        """Return the personal head of all fits on a GPU."""
        assert self.gpu_steps and self.passes
        self._shared_head = self._shared_head or SharedHead(self.gpu_steps, self.passes)
        return self._shared_head

    def train(self, only: Collection[str]) -> None:
        """Set the network to training mode, except normalisation layers with running statistics whose names match no
        pattern in ``only``: these stay in evaluation mode."""
        if not self.module.training:  # visiting all modules takes longer than starting a short step on a GPU
            self.module.train()
        for name, layer in self._tracking.items():
            layer.train(tree.matches(canonical(f"{name}.running_mean"), only))

    def _heads(self, forward: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Heads:
        twice = len(x) == 1 and self.doubles and math.prod(x.shape[2:]) <= SMALL
        x = (torch.cat([x, x]) if twice else x).contiguous(memory_format=self.layout)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.half):
            made = forward(x)
        return tuple(
            logits[: 1 if twice else None].float() for logits in (made if isinstance(made, tuple) else (made,))
        )


def _note(seen: dict[str, Any], name: str, _module: Any, _given: Any, out: Any) -> None:
    seen[name] = out if isinstance(out, tuple) else (out,)


def _tracking(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the layers with running statistics."""
    return {n: layer for n, layer in module.named_modules() if getattr(layer, "running_mean", None) is not None}


def leaves_of(module: torch.nn.Module) -> tuple[dict[str, torch.nn.Parameter], dict[str, torch.Tensor]]:
    """Return the parameters, and the parameters with running statistics. (DynUNet's state_dict lists them twice.)"""
    parameters = {canonical(n): p for n, p in module.named_parameters()}
    statistics = {canonical(n): b for n, b in module.named_buffers() if b.is_floating_point()}
    return parameters, {**parameters, **statistics}
