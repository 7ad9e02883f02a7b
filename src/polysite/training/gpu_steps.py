"""Gradients of training steps on a GPU: compiled once, captured in a CUDA graph where steps are small.

All sites, rounds and phases of a process share one compiled step, because it reads the batch, the weights of its cases
and the parameters of the network from fixed memory. An incomplete batch is filled up with cases of weight 0; without
batch statistics these change nothing. One that is at most half full has a step of half the size. The first steps run
as they are and are timed; then a run compiles its network if the steps that are left will save more time than compiling
takes. Of several processes on a machine one compiles; the others go on uncompiled until its kernels are on disk.
Small steps on a Hopper GPU use kernels of our own (``normalisation``, ``convolution``) and hardly need a compiler.
Memory, not time, shows whether a step is small: other processes on the GPU make it slow, but not large.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import MethodType
from typing import Any, Literal, TypeVar

import torch
from filelock import FileLock, Timeout
from torch.nn.functional import instance_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from polysite.site import ReplacementLoss
from polysite.training import convolution, normalisation
from polysite.training.losses import Replaced, weighted
from polysite.training.supervision import supervised
from polysite.training.tasks import CaseLoss

T = TypeVar("T")
PerCase = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits, truth) of a batch -> loss of every case
Goal = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]  # (images, truth, weights of cases)
Heads = tuple[torch.Tensor, ...]  # logits of all heads of a network, the main one first

PROBE = 8  # uncompiled steps before the choice; the second half of them is timed
GAIN = 0.4  # share of an uncompiled step that compiling saves; more on an H200 (docs/speed.md)
FUSED_GAIN = 0.04  # the same beside a captured step with the kernels of ``normalisation`` and ``convolution``
COMPILING, AGAIN = (
    30.0,
    6.0,
)  # seconds of compiling, and of compiling what torch keeps on disk (18 to 30 and 3 measured)
SMALL = 1 << 30  # bytes of a step's layers below which launching its kernels takes longer than running them
WARM = 3  # steps before a capture
LATER = 100  # steps until a process looks again whether another one has compiled the same step
KINDS = 64  # compiled functions in a process; beyond torch's own limit of 8 it would silently stop compiling


def can_accelerate(module: torch.nn.Module) -> bool:
    """Return whether cases of a batch do not influence each other, and a step draws no random numbers."""
    return not any(
        (isinstance(m, _BatchNorm) and m.track_running_stats) or (isinstance(m, _DropoutNd) and m.p > 0)
        for m in module.modules()
    )


class GpuSteps:
    """Computes the mean loss of a batch and its gradients, for all sites that share a network.

    Args:
        module: The network, on a GPU.
        half: Use bfloat16 in convolutions.
        setting: ``train.compile``.
        expected: Number of steps of the run.
        later: Number of steps of the runs after it in this process.
    """

    def __init__(
        self, module: torch.nn.Module, half: bool, setting: bool | Literal["auto"], expected: int, later: int = 0
    ):
        self.module, self.half, self.setting = module, half, setting
        self.expected, self.later = expected, later
        self.weights = list(module.parameters())
        self.device = self.weights[0].device
        self.taken, self.earlier = 0, 0  # steps of all kinds, in all runs and before this run
        self.counts, self.counts_earlier = Counter[str](), Counter[str]()  # the same for every kind
        self.compiled = False
        self.setup_seconds = 0.0  # spent on compiling and capturing
        self.problem = ""  # why the network could not be compiled
        self.layout = channels_last(module)
        self.fuses = half and normalisation.suits(self.device) and self.layout is convolution.LAYOUT
        self._steps: dict[Any, _Step] = {}
        self._replacements: dict[tuple[ReplacementLoss, CaseLoss], Replaced] = {}
        self._infer: Callable[[torch.Tensor], torch.Tensor] | None = None
        for norm in module.modules():
            if isinstance(norm, torch.nn.InstanceNorm2d | torch.nn.InstanceNorm3d) and not norm.affine:
                norm.forward = MethodType(_normalise, norm)  # type: ignore[method-assign]
        self.idle = dict[torch.nn.Parameter, torch.Tensor]()  # biases without effect, and their gradients, which are 0
        convolve = _convolve_fast if convolution.suits(self.device) else _convolve
        for layer in _normalised(module):
            layer.forward = MethodType(convolve, layer)  # type: ignore[method-assign]
            if isinstance(layer.bias, torch.nn.Parameter):
                self.idle[layer.bias] = torch.zeros_like(layer.bias)

    def begin(self, expected: int, later: int) -> None:
        """Begin another run, of these steps; what was not compiled in the run before is reconsidered."""
        self.expected, self.later = expected, later
        self.earlier, self.counts_earlier = self.taken, self.counts.copy()
        for step in self._steps.values():
            step.reconsider()

    def backward(self, x: torch.Tensor, y: torch.Tensor, loss: PerCase | Replaced, batch: int) -> torch.Tensor:
        """Compute the mean loss of a batch and the gradients of all parameters; return the local loss.

        Args:
            x: Images.
            y: Ground truth.
            loss: The loss of every case, or a replacement; equal ones share a step.
            batch: Cases of a complete batch.
        """
        self.taken += 1
        return self.step(loss, partial(self._goal, loss), self.weights, x, y, batch)

    def step(
        self, kind: Any, goal: Goal, weights: list[torch.nn.Parameter], x: torch.Tensor, y: torch.Tensor, batch: int
    ) -> torch.Tensor:
        """Compute a goal and the gradients of these parameters by a step that all goals of a kind share.

        Returns:
            The goal, or the second of its numbers if it has two; only the first is minimised.
        """
        room = batch if 2 * len(x) > batch else batch // 2  # two sizes of a step are compiled at most
        key = (kind, room, x.shape[1:], y.shape[1:])
        if key not in self._steps:
            self._steps[key] = _Step(self, goal, weights, f" step {key}")
        return self._steps[key](x, y, room)

    def _goal(
        self, loss: PerCase | Replaced, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        if isinstance(loss, Replaced):
            return supervised(lambda logits, truth: loss(logits, truth, weights), self.heads(x), y)
        return weighted(supervised(loss, self.heads(x), y), weights)

    def replaced(self, loss: ReplacementLoss, local: CaseLoss) -> Replaced:
        """Return the replacement of a local loss, the same for all fits, so that they share a step."""
        return self._replacements.setdefault((loss, local), Replaced(loss, local))

    def infer(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch in evaluation mode, by the compiled network if the run compiles."""
        if self.compiled:
            try:
                return self._infer_compiled(x)
            except Exception as problem:  # of the compiler
                self.fail(problem)
                self.compiled = False
        return self.fast_heads(x)[0]

    def _infer_compiled(self, x: torch.Tensor) -> torch.Tensor:
        self._infer = self._infer or torch.compile(self.logits)
        count = len(x)
        more = max(2, 1 << (count - 1).bit_length()) - count  # few sizes, since cuDNN times its algorithms for each
        x = torch.cat([x, x.new_zeros((more, *x.shape[1:]))]).contiguous(memory_format=self.layout)
        torch._dynamo.mark_dynamic(x, 0)
        return self._infer(x)[:count]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch, in float32."""
        return self.heads(x)[0]

    def heads(self, x: torch.Tensor) -> Heads:
        """Return the logits of all heads for a batch, in float32: several in training with deep supervision."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.half):
            made = self.module(x)
        return tuple(logits.float() for logits in (made if isinstance(made, tuple) else (made,)))

    def fast_heads(self, x: torch.Tensor) -> Heads:
        """Return the logits of all heads; in channels-last by the fast kernels, unless a compiler writes its own."""
        if (
            self.fuses
            and not torch.compiler.is_compiling()
            and self.weights[0].is_contiguous(memory_format=self.layout)
        ):
            with normalisation.fused():
                return self.heads(x.contiguous(memory_format=self.layout))
        return self.heads(x)

    def complete(self) -> None:
        """Give biases without effect their gradient of 0 after a backward pass through a compiled network."""
        left = {bias: zero for bias, zero in self.idle.items() if bias.requires_grad and bias.grad is None}
        if left:
            torch._foreach_zero_(list(left.values()))
            for bias, zero in left.items():
                bias.grad = zero

    def wait(self) -> None:
        """Wait until the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def fail(self, problem: Exception) -> None:
        """Go on without what does not work, unless the user has asked for compiling."""
        if self.setting is True:
            raise problem
        self.problem = f"{type(problem).__name__}: {problem}".splitlines()[0]

    def pays(self, seconds: float, kind: str, gain: float = GAIN) -> bool:
        """Return whether compiling a kind of step pays, given the seconds that it takes as it is and the share saved.

        The rest of this run is expected to have as many such steps as it has had so far, later runs as many as all.
        """
        if self.setting != "auto":
            return self.setting
        taken = self.taken - self.earlier
        now = (self.counts[kind] - self.counts_earlier[kind]) / max(taken, 1)
        left = (self.expected - taken) * now + self.later * self.counts[kind] / max(self.taken, 1)
        return gain * seconds * left > (AGAIN if self.mark(kind).exists() else COMPILING)

    def lay_out(self, layout: torch.memory_format) -> None:
        """Give the parameters a memory format.

        They move to other memory by this, so captured steps, which hold addresses, are captured again.
        """
        places = [p.data_ptr() for p in self.weights]
        self.module.to(memory_format=layout)  # type: ignore[call-overload]
        if places != [p.data_ptr() for p in self.weights]:
            for step in self._steps.values():
                step.forget()

    @contextmanager
    def turn(self, kind: str) -> Iterator[bool]:
        """Tell whether this process may compile a kind of step now; False while another one does it for the first time.

        Leaving it without an error marks the kind as compiled.
        """
        mark = self.mark(kind)
        lock = FileLock(f"{mark}.lock", blocking=False)
        try:
            mark.parent.mkdir(parents=True, exist_ok=True)
            if self.setting == "auto" and not mark.exists():
                lock.acquire()
        except Timeout:
            yield False
            return
        except OSError:  # no place for marks
            yield True
            return
        try:
            yield True
            mark.touch()
        finally:
            lock.release()

    def mark(self, kind: str) -> Path:
        """Return a file beside the kernels that torch keeps on disk; it exists if such steps were compiled before."""
        from torch._inductor.runtime.cache_dir_utils import cache_dir  # importing it takes a second

        what = f"{torch.__version__} {self.module} {self.half}{kind}"
        return Path(cache_dir()) / f"polysite-{sha256(what.encode()).hexdigest()[:16]}"


class _Step:
    """One kind of step: a goal, the parameters whose gradients it needs, and the shapes of a complete batch."""

    def __init__(self, steps: GpuSteps, goal: Goal, trained: list[torch.nn.Parameter], kind: str):
        self.steps, self.goal, self.trained, self.kind = steps, goal, trained, kind
        self.due = 0 if steps.setting is True else PROBE  # steps before the choice
        self.taken, self.timed, self.count = 0, 0.0, 0  # steps, seconds of the timed ones, cases of the last batch
        self.run: Callable[[], torch.Tensor] | None = None
        self.compiled = False

    def reconsider(self) -> None:
        """Choose again after a few steps of the run that begins, unless the step is compiled."""
        if not self.compiled and self.taken >= self.due:
            self.due = self.taken + PROBE

    def forget(self) -> None:
        """Choose again before the next step; what was compiled or captured is not used any more."""
        if self.run is not None:
            self.run, self.compiled, self.due = None, False, self.taken

    def __call__(self, x: torch.Tensor, y: torch.Tensor, batch: int) -> torch.Tensor:
        if self.taken == self.due:
            _, took = self._time(lambda: self._choose(x, y, batch, self.timed / (PROBE - PROBE // 2)))
            self.steps.setup_seconds += took
        self.taken += 1
        self.steps.counts[self.kind] += 1
        if self.run is not None:
            self._fill(x, y)
            return self.run()
        if not PROBE // 2 < self.taken <= PROBE:
            return self._plain(x, y)
        loss, took = self._time(lambda: self._plain(x, y))  # alone, without what happens between two fits
        self.timed += took
        return loss

    def _plain(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _gradients(self.trained, lambda: self.goal(x, y, None))

    def _time(self, work: Callable[[], T]) -> tuple[T, float]:
        """Return the result of some work, and the seconds that the device took for it."""
        self.steps.wait()
        began = time.perf_counter()
        result = work()
        self.steps.wait()
        return result, time.perf_counter() - began

    def _choose(self, x: torch.Tensor, y: torch.Tensor, batch: int, seconds: float) -> None:
        small = self.steps.device.type == "cuda" and self._bytes(x, y) < SMALL
        gain = FUSED_GAIN if small and self.steps.fuses else GAIN
        if self.steps.pays(seconds, self.kind, gain) and not self.steps.problem:
            try:
                with self.steps.turn(self.kind) as mine:
                    if not mine:
                        self.due = self.taken + LATER
                        return
                    self.steps.lay_out(self.steps.layout)
                    self._hold(x, y, batch, self.steps.layout)
                    torch.backends.cudnn.benchmark = True  # cuDNN times its algorithms once per shape
                    self.run, self.compiled = self._compile(), True
                    self.steps.compiled = True
            except Exception as problem:  # of the compiler, or because there is none
                self.steps.lay_out(torch.contiguous_format)
                self.steps.fail(problem)
                return
        if self.run is not None and not self.compiled:
            return  # captured before
        if small:
            if self.run is None:
                if self.steps.fuses:
                    self.steps.lay_out(self.steps.layout)
                self._hold(x, y, batch, self.steps.layout if self.steps.fuses else torch.contiguous_format)
            try:
                with torch.cuda.device(self.steps.device):
                    self.run = _captured(self.trained, self.run or self._eager)
            except RuntimeError as problem:  # of an operation that cannot be captured
                self.steps.fail(problem)

    def _bytes(self, x: torch.Tensor, y: torch.Tensor) -> int:
        """Return the memory of what a forward pass keeps for the backward pass.

        The hook keeps sizes only. If it kept tensors, some would hold the pass that made them for good, and with it the
        stream of that pass, which no capture allows.
        """
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value.nbytes), lambda _: x):
            self.goal(x, y, None)
        return sum(kept)

    def _hold(self, x: torch.Tensor, y: torch.Tensor, batch: int, layout: torch.memory_format) -> None:
        """Allocate the memory that the step reads, and copy a batch into it."""
        self.x = torch.zeros((batch, *x.shape[1:]), device=x.device).contiguous(memory_format=layout)
        self.y = torch.zeros((batch, *y.shape[1:]), device=y.device)
        self.weights, self.count = torch.zeros(batch, device=x.device), 0  # filling sets the weights of its cases
        self._fill(x, y)

    def _compile(self) -> Callable[[], torch.Tensor]:
        """Return the compiled step."""
        torch._dynamo.config.recompile_limit = KINDS
        function = torch.compile(self._goal, dynamic=False)

        def run() -> torch.Tensor:
            loss = _gradients(self.trained, lambda: function(self.x, self.y, self.weights))
            self.steps.complete()
            return loss

        for _ in range(WARM):
            run()
        return run

    def _eager(self) -> torch.Tensor:
        with normalisation.fused() if self.steps.fuses else nullcontext():
            loss = _gradients(self.trained, lambda: self._goal(self.x, self.y, self.weights))
        self.steps.complete()
        return loss

    def _goal(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.goal(x, y, weights)

    def _fill(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Copy a batch into the memory of the step. Cases beyond it keep former values and have no weight."""
        count = len(x)
        self.x[:count].copy_(x)
        self.y[:count].copy_(y)
        if count != self.count:
            self.weights[:count], self.weights[count:], self.count = 1 / count, 0.0, count


def _gradients(weights: Iterable[torch.nn.Parameter], loss: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Compute a loss and its gradients; return the loss. Of two numbers the first is minimised, the second returned."""
    for p in weights:
        p.grad = None
    value = loss()
    (value[0] if value.ndim else value).backward()  # type: ignore[no-untyped-call]
    return value.detach()[1] if value.ndim else value.detach()


def _captured(weights: list[torch.nn.Parameter], run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return a function that replays all kernels of ``run`` with one launch."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run()
    gradients = [p.grad for p in weights]

    def replay() -> torch.Tensor:
        graph.replay()
        for p, gradient in zip(weights, gradients, strict=True):
            p.grad = gradient
        return loss

    return replay


def channels_last(module: torch.nn.Module) -> torch.memory_format:
    """Return channels-last if all kernels are 2D or all are 3D, so that convolutions convert nothing.

    On a CPU it is up to 1.7 times faster; on an H200 it is slower unless the network is compiled.
    """
    axes = {p.ndim for p in module.parameters() if p.ndim > 3}
    if len(axes) != 1:
        return torch.contiguous_format
    return torch.channels_last if axes == {4} else torch.channels_last_3d


def _normalised(module: torch.nn.Module) -> list[torch.nn.Conv2d | torch.nn.Conv3d]:
    """Return the convolutions whose output is normalised next, which cancels their bias."""
    from monai.networks.blocks.dynunet_block import UnetBasicBlock

    blocks = [block for block in module.modules() if isinstance(block, UnetBasicBlock)]
    pairs = [(conv, norm) for b in blocks for conv, norm in ((b.conv1, b.norm1), (b.conv2, b.norm2))]
    return [
        conv.conv
        for conv, norm in pairs
        if isinstance(norm, torch.nn.InstanceNorm2d | torch.nn.InstanceNorm3d) and not norm.affine
    ]


def _fast() -> bool:
    """Return whether a pass is compiled or uses the kernels of ``normalisation`` and ``convolution``."""
    return torch.compiler.is_compiling() or normalisation.in_use()


def _convolve(self: torch.nn.Conv3d, x: torch.Tensor) -> torch.Tensor:
    """Convolution; a fast one leaves out the bias, which would be two more passes over all values."""
    out: torch.Tensor = self._conv_forward(x, self.weight, None if _fast() else self.bias)
    return out


def _convolve_fast(self: torch.nn.Conv3d, x: torch.Tensor) -> torch.Tensor:
    """Convolution, in a fast pass with kernels that are faster than cuDNN's for this shape."""
    if _fast() and convolution.applies(self, x):
        return convolution.convolve(x, self.weight)
    return _convolve(self, x)


def _normalise(self: torch.nn.InstanceNorm3d, x: torch.Tensor) -> torch.Tensor:
    """Instance normalisation that a compiler can fuse with its neighbours, in any memory format.

    Torch's own becomes a batch normalisation of a reshaped tensor, which is a copy of all values in channels-last.
    """
    if not torch.compiler.is_compiling():
        if normalisation.in_use() and normalisation.applies(x):
            return normalisation.normalise(x, self.eps)
        return instance_norm(x, eps=self.eps)
    wide = x.float()
    variance, mean = torch.var_mean(wide, tuple(range(2, x.ndim)), correction=0, keepdim=True)
    return ((wide - mean) * torch.rsqrt(variance + self.eps)).to(x.dtype)
