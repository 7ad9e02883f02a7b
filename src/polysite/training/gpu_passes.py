"""Forward passes of training on a GPU whose loss is computed outside: compiled if that pays.

A loss that mixes the cases of a batch, or that needs features of inner layers, cannot be a part of the shared step in
``gpu_steps``. Here the network alone is compiled. An incomplete batch is filled up with zeros, whose results are
dropped, so that every kind of pass has one size.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch

from polysite.training.gpu_steps import KINDS, LATER, PROBE, GpuSteps, Heads

Seen = dict[str, tuple[torch.Tensor, ...]]  # by module
Function = Callable[[torch.Tensor, tuple[str, ...]], tuple[Heads, Seen, Seen]]
BACKWARD = 2  # a backward pass takes about twice the time of a forward pass


@dataclass
class Taps:
    """What flows through some modules of a network while ``wanted`` names them."""

    wanted: tuple[str, ...] = ()
    inputs: Seen = field(default_factory=dict)
    outputs: Seen = field(default_factory=dict)


class GpuPasses:
    """Forward passes in training mode, for all sites that share a network.

    Args:
        steps: The shared steps of the network; they decide whether compiling pays.
        batch: Cases of a complete batch.
    """

    def __init__(self, steps: GpuSteps, batch: int):
        self.steps, self.batch = steps, batch
        self.taps = Taps()
        self._tapped = set[str]()
        self._kinds: dict[Any, _Kind] = {}

    def __call__(self, x: torch.Tensor, modules: Collection[str] = ()) -> tuple[Heads, Seen, Seen]:
        """Return the logits of all heads in float32, and the inputs and outputs of these modules."""
        for name in modules:
            self.tap(name)
        trained = tuple(p.requires_grad for p in self.steps.weights) if torch.is_grad_enabled() else ()
        key = (tuple(modules), trained, x.shape[1:])
        if key not in self._kinds:
            self._kinds[key] = _Kind(self, tuple(modules))
        if trained:
            self.steps.taken += 1
        return self._kinds[key](x)

    def begin(self) -> None:
        """Begin another run: what was not compiled in the run before is reconsidered."""
        for kind in self._kinds.values():
            kind.reconsider()

    def run(self, x: torch.Tensor, modules: tuple[str, ...]) -> tuple[Heads, Seen, Seen]:
        """Run the network on a batch of any size."""
        self.taps.wanted, self.taps.inputs, self.taps.outputs = modules, {}, {}
        heads = self.steps.fast_heads(x)
        inputs, outputs = self.taps.inputs, self.taps.outputs
        self.taps.wanted, self.taps.inputs, self.taps.outputs = (), {}, {}
        return heads, inputs, outputs

    def tap(self, name: str) -> None:
        """Let a module note what flows through it. (A compiler handles this, but not hooks that come and go.)"""
        if name not in self._tapped:
            module: Any = self.steps.module.get_submodule(name)
            module.taps, module.tap = self.taps, name
            module.forward = MethodType(_forward, module)
            self._tapped.add(name)


class _Kind:
    """One kind of pass: what is noted, and which parameters have gradients."""

    def __init__(self, passes: GpuPasses, modules: tuple[str, ...]):
        self.passes, self.modules = passes, modules
        self.name = f" pass {modules} {torch.is_grad_enabled()}"
        self.taken, self.timed = 0, 0.0
        self.due = 0 if passes.steps.setting is True else PROBE  # passes before the choice
        self.function: Function | None = None

    def reconsider(self) -> None:
        """Choose again after a few passes of the run that begins, unless the pass is compiled."""
        if self.function is None and self.taken >= self.due:
            self.due = self.taken + PROBE

    def __call__(self, x: torch.Tensor) -> tuple[Heads, Seen, Seen]:
        steps = self.passes.steps
        if self.taken == self.due:
            work = (1 + BACKWARD) if torch.is_grad_enabled() else 1
            seconds = work * self.timed / (PROBE - PROBE // 2)
            if steps.pays(seconds, self.name) and not steps.problem:
                self._choose(x)
        self.taken += 1
        steps.counts[self.name] += 1
        if self.function is not None:
            return self._filled(x, self.function)
        if not PROBE // 2 < self.taken <= PROBE:
            return self.passes.run(x, self.modules)
        steps.wait()
        began = time.perf_counter()
        made = self.passes.run(x, self.modules)
        steps.wait()
        self.timed += time.perf_counter() - began
        return made

    def _choose(self, x: torch.Tensor) -> None:
        """Compile the pass, unless another process is doing it for the first time."""
        steps = self.passes.steps
        try:
            with steps.turn(self.name) as mine:
                if mine:
                    self._compile(x)
                else:
                    self.due = self.taken + LATER
        except Exception as problem:  # of the compiler, or because there is none
            steps.lay_out(torch.contiguous_format)
            steps.fail(problem)

    def _compile(self, x: torch.Tensor) -> None:
        torch._dynamo.config.recompile_limit = KINDS
        torch.backends.cudnn.benchmark = True  # cuDNN times its algorithms once per shape; shapes are fixed here
        steps, began = self.passes.steps, time.perf_counter()
        steps.lay_out(steps.layout)
        function = torch.compile(self.passes.run, dynamic=False)
        self._filled(x, function)
        steps.setup_seconds += time.perf_counter() - began
        self.function, steps.compiled = function, True

    def _filled(self, x: torch.Tensor, function: Function) -> tuple[Heads, Seen, Seen]:
        """Run the compiled network on a complete batch; return the results of the given cases."""
        count, room = len(x), max(len(x), self.passes.batch)
        if count < room:
            x = torch.cat([x, x.new_zeros((room - count, *x.shape[1:]))])
        heads, *seen = function(x.contiguous(memory_format=self.passes.steps.layout), self.modules)
        inputs, outputs = ({name: tuple(y[:count] for y in some) for name, some in each.items()} for each in seen)
        return tuple(y[:count] for y in heads), inputs, outputs


def _forward(self: Any, *given: torch.Tensor) -> Any:
    """Forward pass of a module that notes its first input and its outputs if they are wanted."""
    made = type(self).forward(self, *given)
    if self.tap in self.taps.wanted:
        self.taps.inputs[self.tap] = (given[0],)
        self.taps.outputs[self.tap] = made if isinstance(made, tuple) else (made,)
    return made
