"""Training steps and predictions on a GPU, against bare PyTorch loops that do the same in the same run.

``--network fets`` is the U-Net of FeTS 2022 (22.6 M parameters, batch 4 x 4 x 128^3), ``small`` that of TCGA-LGG (1.4 M
batch 4 x 3 x 96 x 96 x 16). Timed: one fit of many steps through ``TorchSite``, with the full augmentation and without,
uncompiled and compiled; bare loops on a ready-made batch, eager and compiled; one patient. ``--losses``
compares the losses of 200 steps, compiled and uncompiled, on the same patches.
"""

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from polysite.data.case import Case
from polysite.models.unet import UNet
from polysite.site import Budget
from polysite.training.network import Network
from polysite.training.settings import Train
from polysite.training.torch_site import TorchSite

SHAPES = {  # filters, modalities, labels, patch, size of a patient
    "fets": ((32, 64, 128, 256, 512), 4, 3, (128, 128, 128), (140, 172, 140)),
    "small": ((16, 32, 64, 128), 3, 1, (96, 96, 16), (160, 192, 20)),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--network", choices=SHAPES, nargs="+", default=list(SHAPES))
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--losses", action="store_true", help="compare the losses of 200 steps")
    given = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/gpu.py measures a GPU, and torch sees none here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    for name in given.network:
        steps = max(4, given.steps // 8) if name == "fets" else given.steps
        (losses if given.losses else speeds)(name, steps, given.repeats)


def speeds(name: str, steps: int, repeats: int) -> None:
    reference = bare(name, True, steps, repeats)

    def row(title: str, took: float, step: bool = True) -> None:
        ratio = f"   {took / reference:5.2f} x bare compiled" if step else ""
        print(f"{name:6s} {title:48s} {1000 * took:8.2f} ms{ratio}", flush=True)

    row("bare loop, compiled", reference)
    row("bare loop, eager", bare(name, False, steps, repeats))
    for compiled in (False, True):
        how = "compiled" if compiled else "uncompiled"
        site = build(name, compiled, "full")
        began = time.perf_counter()
        site.fit(site.start, budget=Budget(steps=12))
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        print(f"    {name}, {how}: first 12 steps {first:.1f} s, of which setup {site.setup[0]:.1f} s", flush=True)
        for augment in ("full", "none"):
            other = site.under(replace(site.train, augment=augment))
            took = median(lambda other=other: other.fit(other.start, budget=Budget(steps=steps)), repeats)
            row(f"polysite, {how}, augmentation {augment}", took / steps)
        case = site.cases("validation")[:1]
        site.score(site.start, case)
        row(f"patient, {how}", median(lambda site=site, case=case: site.score(site.start, case), repeats), False)
        del site, other
        torch.cuda.empty_cache()


def losses(name: str, _steps: int, _repeats: int) -> None:
    curves = []
    for compiled in (False, True):
        site, curve = build(name, compiled, "full"), []
        params = site.start
        for block in range(20):
            fit = site.at(block).fit(params, budget=Budget(steps=10))
            params, curve = fit.params, [*curve, fit.loss]
        curves.append(np.array(curve))
    apart = np.abs(curves[0] - curves[1])
    first, last = ((curves[0][k], curves[1][k]) for k in (0, -1))
    print(
        f"{name}: losses of 200 steps, means of ten; uncompiled and compiled: first {first[0]:.4f} and {first[1]:.4f}, "
    )
    print(f"    last {last[0]:.4f} and {last[1]:.4f}; largest difference {apart.max():.1e}, mean {apart.mean():.1e}")


def build(name: str, compiled: bool, augment: str) -> TorchSite:
    filters, modalities, labels, patch, whole = SHAPES[name]
    train = Train(lr=0.05, batch=4, patch=patch, augment=augment, device="cuda", compile=compiled)
    module = UNet(filters=filters).build(dims=3, modalities=modalities, outputs=labels, seed=0)
    rng = np.random.default_rng(0)
    cases = [drawn(rng, k, modalities, labels, whole) for k in range(8)]
    titles = [f"L{k}" for k in range(labels)]
    return TorchSite("s", Network(module, train), {"train": cases, "validation": cases[:2]}, titles, train, 0)


def drawn(rng: np.random.Generator, k: int, modalities: int, labels: int, whole: tuple[int, ...]) -> Case:
    """Noise with brighter balls, which are the labels."""
    image = rng.standard_normal((modalities, *whole), np.float32)
    centre = [rng.uniform(0.3, 0.7) * s for s in whole]
    distance = sum(((g - c) / s) ** 2 for g, c, s in zip(np.indices(whole), centre, whole, strict=True)) ** 0.5
    label = np.stack([distance < 0.2 / (1 + n) for n in range(labels)]).astype(np.uint8)
    return Case("s", str(k), image + label.sum(0, dtype=np.float32), label, (1.0,) * len(whole))


def bare(name: str, compiled: bool, steps: int, repeats: int, half: bool = True) -> float:
    """A hand-written loop on one ready-made batch, with torch's own layers."""
    filters, modalities, labels, patch, _ = SHAPES[name]
    torch._dynamo.reset()
    net = UNet(filters=filters).build(dims=3, modalities=modalities, outputs=labels, seed=0).cuda()
    x = torch.randn(4, modalities, *patch, device="cuda")
    y = (torch.rand(4, labels, *patch, device="cuda") > 0.8).float()
    optimiser = torch.optim.SGD(net.parameters(), 0.05, weight_decay=1e-5, foreach=True)

    def loss(x, y):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
            logits = net(x)
        p = torch.sigmoid(logits.float())
        space = tuple(range(2, x.ndim))
        return (1 - (2 * (p * y).sum(space) + 1) / (p.sum(space) + y.sum(space) + 1)).mean()

    function = torch.compile(loss) if compiled else loss

    def run():
        for _ in range(steps):
            optimiser.zero_grad(set_to_none=True)
            function(x, y).backward()
            optimiser.step()

    run()
    return median(run, repeats) / steps


def median(work, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
