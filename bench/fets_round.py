"""One FedAvg round of 23 hospitals with the sizes of FeTS 2022 on a GPU, against the sum of its bare steps.

The network has 22.6 M parameters, a step 4 patches of 4 x 128^3 with the full augmentation, and every hospital has as
many training cases as in the published federation: 64 %, the rest is for tests and validation. Images are noise
in the size of a cropped brain; all of them are in the memory of the GPU, as by default. The bare step is a compiled
PyTorch loop on a ready-made batch. ``--precision float32`` computes as the paper did.

    python bench/fets_round.py                      target: at most 1.10 times the bare steps
    polysite bench paper_b --plan                   the hours of all methods of the table, from measured speeds
    polysite bench paper_b --plan --set train.autocast=false
"""

import argparse
import statistics
import time

import numpy as np
import torch
from gpu import SHAPES, bare, drawn

from polysite.algorithms.fedavg import FedAvg
from polysite.data.case import Case
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.simulator import Simulator
from polysite.models.unet import UNet
from polysite.report.published import sizes
from polysite.training.network import Network
from polysite.training.settings import Train
from polysite.training.torch_site import TorchSite

DRAWN = 4  # different images; hospitals hold copies of them


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/fets_round.py measures a GPU, and torch sees none here")
    half = given.precision == "bfloat16"
    reference = bare("fets", True, 6, 5, half)
    print(f"bare compiled step {1000 * reference:.1f} ms", flush=True)
    torch.cuda.empty_cache()
    sites = build(half)
    start = next(iter(sites.values())).start
    engine = Simulator(FedAvg(), sites)

    def round_(number: int) -> int:
        torch.cuda.synchronize()
        began = time.perf_counter()
        done = next(run_rounds(FedAvg(), engine, start, Plan(), seed=number))
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
        print(f"round {number}: {took[-1]:.2f} s", flush=True)
        return sum(fit.steps for reply in done.replies.values() for fit in reply.fits)

    took: list[float] = []
    first = sites[next(iter(sites))]
    first.fit(start)  # compiles
    print(f"{len(sites)} hospitals are ready, setup {first.setup[0]:.0f} s", flush=True)
    for number in range(given.repeats + 1):
        steps = round_(number)
    cases = sum(site.size for site in sites.values())
    mine = statistics.median(took[1:])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {given.precision}")
    print(
        f"{len(sites)} hospitals, {cases} training cases, {steps} steps: round {mine:.2f} s "
        f"({1000 * mine / steps:.1f} ms a step); bare compiled step {1000 * reference:.1f} ms"
    )
    print(f"ratio to {steps} bare steps {mine / (steps * reference):.3f}; to the bare time of {cases} patches ", end="")
    print(f"{mine / (cases / 4 * reference):.3f}; memory {torch.cuda.max_memory_allocated() / 1e9:.0f} GB")


def build(half: bool) -> dict[str, TorchSite]:
    filters, modalities, labels, patch, whole = SHAPES["fets"]
    train = Train(lr=0.05, batch=4, patch=patch, device="cuda", compile=True, autocast=half)
    network = Network(UNet(filters=filters).build(dims=3, modalities=modalities, outputs=labels, seed=0), train)
    rng, titles = np.random.default_rng(0), [f"L{k}" for k in range(labels)]
    images = [drawn(rng, k, modalities, labels, whole) for k in range(DRAWN)]
    sites = {}
    for name, count in sizes("B_sizes").items():
        cases = [
            Case(name, str(k), images[k % DRAWN].image, images[k % DRAWN].label, images[0].spacing)
            for k in range(max(1, round(0.64 * count)))
        ]
        sites[name] = TorchSite(name, network, {"train": cases}, titles, train, 0)
    return sites


if __name__ == "__main__":
    main()
