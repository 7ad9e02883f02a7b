"""One simulated FedAvg round of four hospitals, against a bare PyTorch loop doing the same steps on the same patches.

The bare loop gets its patches ready-made and has no records, no payloads, no site: what is left is the price of
polysite. Prints the median of the ratios of neighbouring rounds. Target: at most 1.05.
"""

import argparse
import statistics
import time

import torch

from polysite import config, study
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds

STUDY = """
[data]
shape = [48, 48, 48]
[data.sites.a]
cases = 12
[data.sites.b]
cases = 12
[data.sites.c]
cases = 12
[data.sites.d]
cases = 12
[train]
batch = 2
augment = "none"
lr = 0.01
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeats", type=int, default=9)
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = options.parse_args()
    chosen = config.parse(STUDY, dict(s.split("=", 1) for s in given.set))
    engine = study.simulator(chosen)
    sites = engine.sites
    start = next(iter(sites.values())).start
    patches = {
        i: [(x.clone(), y.clone()) for x, y in s.at(0)._batches((chosen.train.epochs, None), None)]
        for i, s in sites.items()
    }
    sizes = {i: s.size for i, s in sites.items()}
    source = chosen.data
    net = chosen.model.build(
        dims=source.dims, modalities=len(source.modality_names), outputs=len(source.label_names), seed=0
    ).to(next(iter(start.values())).device)

    def simulated() -> dict[str, torch.Tensor]:
        return next(run_rounds(chosen.algorithm, engine, start, Plan(), seed=0)).state.model

    def bare() -> dict[str, torch.Tensor]:
        return loop(net, list(start.values()), patches, sizes, chosen)

    assert_same(simulated(), bare(), start)
    pairs = [(seconds(simulated), seconds(bare)) for _ in range(given.repeats)]
    ratios = [a / b for a, b in pairs]
    steps, device = sum(map(len, patches.values())), next(iter(start.values())).device
    mine, theirs = (statistics.median(p[k] for p in pairs) for k in (0, 1))
    print(
        f"{steps} steps in {len(sites)} hospitals on {device}: simulated round {mine:.3f} s, bare loop {theirs:.3f} s"
    )
    print(f"ratio {statistics.median(ratios):.3f}   (median of {len(pairs)}; {min(ratios):.3f} to {max(ratios):.3f})")


def loop(net, start, patches, sizes, chosen):
    """FedAvg as one would write it by hand for a paper."""
    weights, total, mean = list(net.parameters()), sum(sizes.values()), None
    for site, batches in patches.items():
        with torch.no_grad():
            for w, s in zip(weights, start, strict=True):
                w.copy_(s)
        net.train()
        optimiser = torch.optim.SGD(weights, chosen.train.lr, weight_decay=chosen.train.weight_decay)
        for x, y in batches:
            optimiser.zero_grad()
            with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=x.is_cuda):
                logits = net(x)
            p = torch.sigmoid(logits.float())
            space = tuple(range(2, x.ndim))
            soft = 1 - (2 * (p * y).sum(space) + 1) / (p.sum(space) + y.sum(space) + 1)
            soft.mean().backward()
            optimiser.step()
        share = sizes[site] / total
        if mean is None:
            mean = [w.detach() * share for w in weights]
        else:
            mean = [m + w.detach() * share for m, w in zip(mean, weights, strict=True)]
    return mean


def assert_same(tree, values, start):
    """Both do the same work, or the ratio means nothing."""
    moved = max(float((x - start[k]).abs().max()) for k, x in tree.items())
    apart = max(float((x - y).abs().max()) for x, y in zip(tree.values(), values, strict=True))
    if not apart < 0.05 * moved:
        raise SystemExit(f"the two loops disagree: {apart:.2e} apart after moving {moved:.2e}")


def seconds(work) -> float:
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
