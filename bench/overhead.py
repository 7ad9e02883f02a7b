"""One simulated FedAvg round of four hospitals, against a bare PyTorch loop with the same steps on the same patches.

The bare loop gets its patches ready-made and has no records, no payloads, no site: what is left is the price of
polysite. On a GPU both are compiled, and both replay short steps as CUDA graphs. Prints the median of the ratios of
neighbouring rounds. Target: at most 1.05.

    python bench/overhead.py                        patches of 32^3, on the device that is there
    python bench/overhead.py --network small        the small U-Net of TCGA-LGG (1.4 M, batch 4 x 3 x 96 x 96 x 16)
    python bench/overhead.py --network fets         that of FeTS 2022 (22.6 M, batch 4 x 4 x 128^3)
"""

import argparse
import statistics
import time

import numpy as np
import torch
from gpu import drawn

from polysite.algorithms.fedavg import FedAvg
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.simulator import Simulator
from polysite.models.unet import UNet
from polysite.training.network import Network
from polysite.training.settings import Train
from polysite.training.torch_site import TorchSite

NETWORKS = {  # filters, modalities, labels, patch, batch, size of a patient, patients of a hospital
    "default": ((16, 32, 64, 128), 4, 3, (32, 32, 32), 2, (48, 48, 48), 8),
    "small": ((16, 32, 64, 128), 3, 1, (96, 96, 16), 4, (112, 112, 20), 40),
    "fets": ((32, 64, 128, 256, 512), 4, 3, (128, 128, 128), 4, (136, 136, 136), 12),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--network", choices=NETWORKS, default="default")
    options.add_argument("--repeats", type=int, default=9)
    given = options.parse_args()
    filters, modalities, labels, patch, batch, whole, count = NETWORKS[given.network]
    train = Train(lr=0.01, batch=batch, patch=patch, augment="none", compile=torch.cuda.is_available())

    def module() -> torch.nn.Module:
        return UNet(filters=filters).build(dims=3, modalities=modalities, outputs=labels, seed=0)

    network, titles, rng = Network(module(), train), [f"L{k}" for k in range(labels)], np.random.default_rng(0)
    sites = {}
    for name in "abcd":
        cases = [drawn(rng, f"{name}{k}", modalities, labels, whole) for k in range(count)]
        sites[name] = TorchSite(name, network, {"train": cases}, titles, train, 0)
    engine, start = Simulator(FedAvg(), sites), sites["a"].start
    patches = {i: [(x.clone(), y.clone()) for x, y in s.at(0)._batches((1, None), None)] for i, s in sites.items()}
    bare = Bare(module().to(network.device), start, train, next(iter(patches["a"])))

    def simulated() -> dict[str, torch.Tensor]:
        return next(run_rounds(FedAvg(), engine, start, Plan(), seed=0)).state.model

    assert_same(simulated(), bare(patches), start)
    pairs = [(seconds(simulated), seconds(lambda: bare(patches))) for _ in range(given.repeats)]
    ratios = [a / b for a, b in pairs]
    steps = sum(map(len, patches.values()))
    mine, theirs = (statistics.median(p[k] for p in pairs) for k in (0, 1))
    print(
        f"{given.network}: {steps} steps in {len(sites)} hospitals on {network.device}: simulated round {mine:.3f} s, "
        f"{bare.how} loop {theirs:.3f} s ({1000 * mine / steps:.2f} and {1000 * theirs / steps:.2f} ms a step)"
    )
    print(f"ratio {statistics.median(ratios):.3f}   (median of {len(pairs)}; {min(ratios):.3f} to {max(ratios):.3f})")


class Bare:
    """FedAvg as one would write it by hand for a paper; on a GPU compiled, with CUDA graphs if these are faster."""

    def __init__(self, net: torch.nn.Module, start, train: Train, sample):
        self.net, self.start, self.train, self.how = net, list(start.values()), train, "bare"
        self.weights = list(net.parameters())
        self.step = self.loss
        if next(net.parameters()).is_cuda:
            torch.backends.cudnn.benchmark = True
            took = {}
            for mode in ("default", "reduce-overhead"):
                self.step = torch.compile(self.loss, mode=mode)
                self.site([sample] * 4)
                took[mode] = seconds(lambda: self.site([sample] * 10)), self.step
            best = min(took, key=lambda mode: took[mode][0])
            self.step, self.how = took[best][1], f"bare compiled ({best})"

    def loss(self, x, y):
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=x.is_cuda):
            logits = self.net(x)
        p = torch.sigmoid(logits.float())
        space = tuple(range(2, x.ndim))
        return (1 - (2 * (p * y).sum(space) + 1) / (p.sum(space) + y.sum(space) + 1)).mean()

    def site(self, batches) -> None:
        self.net.train()
        optimiser = torch.optim.SGD(
            self.weights, self.train.lr, weight_decay=self.train.weight_decay, foreach=self.weights[0].is_cuda
        )
        for x, y in batches:
            optimiser.zero_grad()
            self.step(x, y).backward()
            optimiser.step()

    def __call__(self, patches):
        """Return the mean of the sites' models after a round."""
        mean = None
        for batches in patches.values():
            with torch.no_grad():
                for w, s in zip(self.weights, self.start, strict=True):
                    w.copy_(s)
            self.site(batches)
            share = 1 / len(patches)
            new = [w.detach() * share for w in self.weights]
            mean = new if mean is None else [m + w for m, w in zip(mean, new, strict=True)]
        return mean


def assert_same(tree, values, start):
    """Both do the same work, or the ratio means nothing."""
    moved = max(float((x - start[k]).abs().max()) for k, x in tree.items())
    apart = max(float((x - y).abs().max()) for x, y in zip(tree.values(), values, strict=True))
    if not apart < 0.05 * moved:
        raise SystemExit(f"the two loops disagree: {apart:.2e} apart after moving {moved:.2e}")


def seconds(work) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
