"""The demonstration over several seeds: does centralised training beat FedAvg, and FedAvg local training?

``--tune`` chooses the learning rates of the demonstration by one rule for all methods: of the same rates, that with the
highest mean validation Dice over the tuning seeds, which are not among the reported ones. Without it, the mean test
Dice of every method and seed is printed, with the rates of the demonstration.
"""

import argparse
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from polysite import demo, study
from polysite.config import parse, vary

Job = tuple[str, float | None, int]  # method, learning rate (None: that of the demonstration), seed
Score = tuple[float, float, dict[str, float]]  # mean validation Dice, mean test Dice, that of every hospital

RATES = (0.01, 0.02, 0.04, 0.08, 0.16)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, nargs="+", help="0 1 2, or 100 101 102 with --tune")
    options.add_argument("--tune", action="store_true", help="choose the learning rates")
    options.add_argument("--jobs", type=int, default=1, help="runs side by side, with one thread each if several")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = options.parse_args()
    seeds = given.seeds or ([100, 101, 102] if given.tune else [0, 1, 2])
    train = partial(trained, dict(s.split("=", 1) for s in given.set))
    rates: tuple[float | None, ...] = RATES if given.tune else (None,)
    jobs = list(product(demo.METHODS, rates, seeds))
    if given.jobs > 1:
        os.environ["OMP_NUM_THREADS"] = "1"
        with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
            scores = dict(zip(jobs, pool.map(train, jobs), strict=True))
    else:
        scores = {job: train(job) for job in jobs}
    (tuning if given.tune else results)(scores, seeds)


def trained(sets: dict[str, str], job: Job) -> Score:
    """Train one method with one seed and return its scores."""
    method, rate, seed = job
    chosen = demo.studies(parse(demo.STUDY, {**sets, "seed": str(seed)}))[method]
    chosen = chosen if rate is None else vary(chosen, {"train": {"lr": rate}})
    with tempfile.TemporaryDirectory() as root:
        run = study.train(chosen, Path(root) / "run", evaluate=False, page=False)
    validation = [s.mean for site in run.result.validation.values() for s in site.values()]
    return statistics.fmean(validation), run.mean, dict(run.dice())


def tuning(scores: dict[Job, Score], seeds: list[int]) -> None:
    """Print the mean validation Dice of every rate, and the rate to choose."""
    print(f"mean validation Dice over seeds {', '.join(map(str, seeds))}")
    print("rate  " + "".join(f"{m:>14}" for m in demo.METHODS))
    means = {(m, r): statistics.fmean(scores[m, r, s][0] for s in seeds) for m in demo.METHODS for r in RATES}
    for rate in RATES:
        print(f"{rate:<6}" + "".join(f"{means[m, rate]:>14.3f}" for m in demo.METHODS))
    print("best  " + "".join(f"{max(RATES, key=lambda r, m=m: means[m, r]):>14}" for m in demo.METHODS))


def results(scores: dict[Job, Score], seeds: list[int]) -> None:
    """Print the mean test Dice of every method and seed, and in how many seeds the order is the expected one."""
    print("seed  " + "".join(f"{m:>14}" for m in demo.METHODS))
    for seed in seeds:
        print(f"{seed:<6}" + "".join(f"{scores[m, None, seed][1]:>14.3f}" for m in demo.METHODS))
        for m in demo.METHODS:
            print(f"      {m:12}" + "  ".join(f"{s} {d:.3f}" for s, d in scores[m, None, seed][2].items()))
    means = {m: [scores[m, None, s][1] for s in seeds] for m in demo.METHODS}
    print("mean  " + "".join(f"{statistics.fmean(means[m]):>14.3f}" for m in demo.METHODS))
    for better, worse in (("centralised", "fedavg"), ("fedavg", "local")):
        wins = sum(b > w for b, w in zip(means[better], means[worse], strict=True))
        print(f"{better} > {worse} in {wins} of {len(seeds)} seeds")


if __name__ == "__main__":
    main()
