"""The weighted mean of 23 models of 22.58 M parameters, against reading them once.

Prints the ratio of the two medians and the peak memory above the replies, in models. Targets: at most 1.5, and 1.
"""

import statistics
import time
from pathlib import Path

import torch

from polysite import tree
from polysite.models import MODELS

SITES, REPEATS = 23, 15


def main() -> None:
    net = MODELS["unet"].build(dims=3, modalities=4, outputs=3, seed=0)
    shapes = {k: p.shape for k, p in net.named_parameters()}
    tensors = [{k: torch.randn(s) for k, s in shapes.items()} for _ in range(SITES)]
    weights = [1.0 + i for i in range(SITES)]
    model = sum(x.nbytes for x in tensors[0].values())
    print(f"{SITES} models of {model / 4e6:.2f} M parameters, {SITES * model / 1e9:.2f} GB")

    arrays = [{k: x.numpy() for k, x in t.items()} for t in tensors]
    for kind, trees in (("tensors (the simulator, a server with torch)", tensors), ("plain arrays (no torch)", arrays)):
        tree.mean([{"w": t["input_block.conv1.conv.weight"]} for t in trees])  # load what the first call loads
        above = peak(lambda trees=trees: tree.mean(trees, weights)) / model  # first, while no freed memory is at hand
        read, mean = [], []
        for _ in range(REPEATS):  # by turns, so that a slow moment of the machine meets both
            read.append(seconds(lambda: [x.sum() for t in tensors for x in t.values()]))
            mean.append(seconds(lambda trees=trees: tree.mean(trees, weights)))
        once, all_of_it = statistics.median(read), statistics.median(mean)
        print(f"\n{kind}")
        print(f"  read once      {once:.4f} s   {SITES * model / once / 1e9:.1f} GB/s")
        print(f"  weighted mean  {all_of_it:.4f} s   ratio {all_of_it / once:.2f}   (medians of {REPEATS})")
        print(f"  peak memory above the replies: {above:.2f} models")


def seconds(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def peak(work) -> int:
    """Bytes by which the resident set grew at its highest while the work was done (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest mark so far
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before


def memory(what: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
