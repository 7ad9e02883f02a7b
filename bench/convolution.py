"""3x3x3 convolutions of the two finest resolutions of a U-Net on a GPU: kernels of polysite against cuDNN.

For every layer: largest error against float32, relative to the largest value, then the time of the forward pass and of
both gradients, by cuDNN and by the fastest of several blockings. ``--profile`` starts with the kernels of a compiled
training step; ``--step`` ends with the time of that step without and with the kernels that were faster; ``--batches``
times the compiled step at other batch sizes. Networks as in ``bench/gpu.py``.
"""

import argparse
import multiprocessing
import os
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "triton"))  # of all processes
CACHE = os.environ["TRITON_CACHE_DIR"]

import torch  # noqa: E402
from gpu import build, median  # noqa: E402

from polysite.site import Budget  # noqa: E402
from polysite.training import convolution  # noqa: E402
from polysite.training.convolution import LAYOUT, Blocking, padded, taps_first, transposed, widened  # noqa: E402

Layer = tuple[int, int, tuple[int, int, int]]  # channels in and out, size of a patch
FULL, HALF = (96, 96, 16), (48, 48, 8)
LAYERS: dict[str, list[Layer]] = {
    "small": [(3, 16, FULL), (16, 16, FULL), (32, 16, FULL), (32, 32, HALF), (64, 32, HALF)],
    "fets": [
        (4, 32, (128,) * 3),
        (32, 32, (128,) * 3),
        (64, 32, (128,) * 3),
        (64, 64, (64,) * 3),
        (128, 64, (64,) * 3),
    ],
}
BATCH = 4
BEGAN = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:5.0f} s] {text}", flush=True)


def blockings(part: str, ins: int, size: tuple[int, ...]) -> list[Blocking]:
    """Blockings to try for a kernel that reads ``ins`` channels, a power of two."""
    large = size[0] >= 96  # the full resolution
    deep = {96: 12, 48: 6, 128: 32, 64: 16}[size[0]]
    if part == "weight":
        run = {96: 24, 48: 12, 128: 128, 64: 64}[size[0]]
        return [Blocking(1, 128, 64, run), Blocking(3, 128, 64, run), Blocking(1, 128, 128, run, 8)]
    if ins < 16:
        return [Blocking(1, 128, 128, 1, 4, 2), Blocking(1, 128, 64, 1, 4, 1, 1), Blocking(1, 256, 64, 2, 8, 3)]
    some = [Blocking(1, 128, 64, 1), Blocking(1, 128, 64, 1, 4, 1, 1)]
    if ins <= 32:
        some.append(Blocking(3, 64, ins, deep, 4, 2))
    if ins == 16:
        some.append(Blocking(3, 128, 16, deep, 4, 2))
    return [*some, Blocking(1, 256, 64, 2, 8) if large else Blocking(1, 64, 64, 1, 4, 4)]


def parts(layer: Layer) -> Iterator[tuple[str, int, int]]:
    """Parts of a layer, with the channels that its kernel reads and writes; the first layer has no input gradient."""
    ins, outs, _ = layer
    yield "forward", padded(ins), outs
    if ins >= 16:
        yield "input", outs, ins
    yield "weight", padded(ins), outs


def variants(network: str) -> list[tuple[bool, Blocking, tuple[int, ...], int]]:
    found = {
        (part == "weight", blocking, (BATCH, reads, *layer[2]), writes): None
        for layer in LAYERS[network]
        for part, reads, writes in parts(layer)
        for blocking in blockings(part, reads, layer[2])
    }
    return list(found)


class NoDevice:
    """Stands for the GPU while a process without one compiles for it."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)  # of an H100 or H200


def compile_one(variant: tuple[bool, Blocking, tuple[int, ...], int]) -> str:
    """Compile a kernel into Triton's cache on disk."""
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    of_weight, blocking, shape, outs = variant
    try:
        driver.set_active(NoDevice())
        plan = convolution.weight_plan if of_weight else convolution.forward_plan
        kernel, grid, constants = plan(blocking, torch.Size(shape), outs)
        types = (torch.bfloat16, torch.bfloat16, torch.float32 if of_weight else torch.bfloat16)
        kernel.warmup(*(MockTensor(t) for t in types), grid=grid, **constants)
    except Exception as problem:
        return f"{variant}: {type(problem).__name__}: {str(problem)[:200]}"
    return ""


def timed(works: list[Callable[[], object]], calls: int) -> float:
    """Seconds of a call, of CUDA graphs that go through several copies of the data."""
    for work in works:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k in range(calls):
            works[k % len(works)]()
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000 / calls)
    return statistics.median(times[1:])


def cudnn(part: str, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    if part == "forward":
        return torch.nn.functional.conv3d(x, weight, padding=1)
    one, mask = [1, 1, 1], [part == "input", part == "weight", False]
    got = torch.ops.aten.convolution_backward(dy, x, weight, None, one, one, one, False, [0, 0, 0], 1, mask)
    return got[0 if part == "input" else 1]


def kernel_of(part: str, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, b: Blocking) -> Callable[[], object]:
    """One launch on data that are laid out beforehand; the gradient of the weights includes adding up."""
    if part == "weight":
        x = widened(x)
        return lambda: convolution.launch_weight(x, dy, b)
    source = widened(x if part == "forward" else dy)
    matrix = taps_first(weight if part == "forward" else transposed(weight), torch.bfloat16)
    y = torch.empty((len(x), matrix.shape[1], *x.shape[2:]), dtype=x.dtype, device=x.device, memory_format=LAYOUT)
    kernel, grid, constants = convolution.forward_plan(b, source.shape, matrix.shape[1])
    return lambda: kernel[grid](source, matrix, y, **constants)


def result(part: str, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, b: Blocking) -> torch.Tensor:
    if part == "weight":
        return convolution.launch_weight(x, dy, b)
    return convolution.launch(*((x, weight) if part == "forward" else (dy, transposed(weight))), b)


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got.float() - truth).abs().max() / truth.abs().max())


def drawn(layer: Layer, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ins, outs, size = layer
    x = torch.randn(batch, ins, *size, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=LAYOUT)
    dy = torch.randn(batch, outs, *size, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=LAYOUT)
    weight = torch.randn(outs, ins, 3, 3, 3, device="cuda") / (27 * ins) ** 0.5
    return x, weight.bfloat16().contiguous(memory_format=LAYOUT), dy


def measure(layer: Layer) -> dict[tuple[str, int, int, bool], tuple[Blocking, float]]:
    """Print errors and times of a layer; return the fastest blocking of every part and its time relative to cuDNN."""
    ins, outs, size = layer
    voxels = BATCH * size[0] * size[1] * size[2]
    small = voxels < 1e6
    copies = [drawn(layer, BATCH) for _ in range(3 if small else 1)]
    check = drawn(layer, BATCH if small else 1)
    work, best = 2 * 27 * voxels * ins * outs, {}
    for part, reads, _ in parts(layer):
        name = f"{ins:3d} -> {outs:3d} {'x'.join(map(str, size)):11s} {part:7s}"
        with torch.backends.cudnn.flags(benchmark=False, allow_tf32=False):
            truth = cudnn(part, *(t.float() for t in check))
        torch.backends.cudnn.benchmark = True
        wrong = error(cudnn(part, *check), truth)
        calls = 21 if small else 4
        theirs = timed([lambda c=c, part=part: cudnn(part, *c) for c in copies], calls)
        say(f"{name} cuDNN {1e6 * theirs:8.1f} us {work / theirs / 1e12:6.1f} TFLOP/s   error {wrong:.1e}")
        for blocking in blockings(part, reads, size):
            try:
                off = error(result(part, *check, blocking), truth)
                ours = timed([kernel_of(part, *c, blocking) for c in copies], calls)
            except Exception as problem:
                say(f"{name}   {tuple(blocking)}: {type(problem).__name__}: {str(problem)[:300]}")
                continue
            rate, ratio = work / ours / 1e12, ours / theirs
            say(f"{name}   {1e6 * ours:8.1f} us {rate:6.1f} TFLOP/s x {ratio:4.2f} error {off:.1e} {tuple(blocking)}")
            key = (part, ins, outs, voxels >= convolution.LARGE)
            if off < 4 * wrong + 1e-4 and (key not in best or ratio < best[key][1]):
                best[key] = (blocking, ratio)
    return best


def step_times(network: str, title: str) -> None:
    """Print the time of a compiled training step, and the mean loss of the first 40."""
    torch._dynamo.reset()
    site = build(network, True, "full")
    loss = site.fit(site.start, budget=Budget(steps=40)).loss
    steps = 40 if network == "small" else 8
    for augment in ("none", "full"):
        other = site.under(replace(site.train, augment=augment))
        took = median(lambda other=other: other.fit(other.start, budget=Budget(steps=steps)), 5) / steps
        say(f"{network} step, {title}, augmentation {augment}: {1000 * took:.3f} ms; mean loss of 40 steps {loss:.5f}")


def profile(network: str) -> None:
    """Print the kernels of a compiled training step that take longest."""
    from torch.profiler import ProfilerActivity

    site = build(network, True, "full")
    site.fit(site.start, budget=Budget(steps=12))
    steps = 10
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as watched:
        site.fit(site.start, budget=Budget(steps=steps))
        torch.cuda.synchronize()
    total, calls = defaultdict(float), defaultdict(int)
    for event in watched.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name] += event.device_time_total
            calls[event.name] += 1
    say(
        f"{network}: kernels of a step, {sum(total.values()) / steps:.0f} us in {sum(calls.values()) / steps:.0f} calls"
    )
    for name in sorted(total, key=lambda n: -total[n])[:25]:
        print(f"  {total[name] / steps:8.1f} us {calls[name] / steps:6.1f} calls  {name[:150]}", flush=True)


def batches(network: str, sizes: list[int]) -> None:
    for size in sizes:
        torch._dynamo.reset()
        site = build(network, True, "none")
        site = site.under(replace(site.train, batch=size))
        site.fit(site.start, budget=Budget(steps=12))
        took = median(lambda site=site: site.fit(site.start, budget=Budget(steps=20)), 5) / 20
        say(f"{network} step of {size} patches: {1000 * took:.3f} ms, {4000 * took / size:.3f} ms per 4 patches")


def guarded(work: Callable[..., object], *args: object) -> None:
    try:
        work(*args)
    except Exception:
        say(f"{work.__name__}{args} failed: {traceback.format_exc()[-1500:]}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--network", choices=LAYERS, default="small")
    options.add_argument("--profile", action="store_true", help="kernels of a compiled training step")
    options.add_argument("--step", action="store_true", help="time the training step without and with the kernels")
    options.add_argument("--batches", type=int, nargs="*", default=[], help="time the step at these batch sizes")
    options.add_argument("--processes", type=int, default=8, help="processes that compile kernels")
    given = options.parse_args()
    if convolution.triton is None:
        raise SystemExit("bench/convolution.py measures Triton kernels, and there is no triton here")
    before = multiprocessing.get_context("fork").Pool(given.processes)  # before CUDA is in use
    compiled = [before.apply_async(compile_one, (v,)) for v in variants(given.network)]
    before.close()
    if not torch.cuda.is_available():
        print([c.get() for c in compiled])
        raise SystemExit("bench/convolution.py measures a GPU, and torch sees none here")
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    say(f"triton {convolution.triton.__version__}; {len(compiled)} variants to compile")
    convolution.BLOCKINGS.clear()
    if given.profile:
        guarded(profile, given.network)
    if given.step:
        guarded(step_times, given.network, "cuDNN")
    for job in compiled:
        if problem := job.get():
            say(problem)
    say("all variants compiled")
    os.environ["TRITON_CACHE_DIR"] = CACHE
    best: dict[tuple[str, int, int, bool], tuple[Blocking, float]] = {}
    for layer in LAYERS[given.network]:
        torch.cuda.empty_cache()
        guarded(lambda layer=layer: best.update(measure(layer)))
    convolution.BLOCKINGS.update({key: blocking for key, (blocking, ratio) in best.items() if ratio < 0.97})
    say("faster than cuDNN:")
    for key, blocking in convolution.BLOCKINGS.items():
        print(f"    {key}: Blocking{tuple(blocking)},  # {best[key][1]:.2f} of cuDNN's time", flush=True)
    if given.step and convolution.BLOCKINGS:
        guarded(step_times, given.network, "polysite's kernels")
    guarded(batches, given.network, given.batches)


if __name__ == "__main__":
    main()
