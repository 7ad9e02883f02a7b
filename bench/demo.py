"""The demonstration over several seeds: does centralised beat FedAvg, and FedAvg local training?

Prints the mean test Dice of every method and seed, and how FedAvg stands between the two yardsticks.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from polysite import demo, study
from polysite.config import parse

METHODS = demo.METHODS


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = options.parse_args()
    sets = dict(s.split("=", 1) for s in given.set)
    print("seed  " + "".join(f"{m:>14}" for m in METHODS) + "    seconds", flush=True)
    found = []
    for seed in given.seeds:
        began, row = time.perf_counter(), {}
        with tempfile.TemporaryDirectory() as root:
            for name, each in demo.studies(parse(demo.STUDY, {**sets, "seed": str(seed)})).items():
                run = study.train(each, Path(root) / name)
                row[name] = (run.mean, run.dice())
        found.append(row)
        print(f"{seed:<6}" + "".join(f"{row[m][0]:>14.3f}" for m in METHODS) + f"{time.perf_counter() - began:>11.0f}")
        for m in METHODS:
            print(f"      {m:12}" + "  ".join(f"{s} {d:.3f}" for s, d in row[m][1].items()), flush=True)
    print("mean  " + "".join(f"{statistics.fmean(r[m][0] for r in found):>14.3f}" for m in METHODS))
    ordered = sum(r["centralised"][0] > r["fedavg"][0] > r["local"][0] for r in found)
    print(f"centralised > fedavg > local in {ordered} of {len(found)} seeds")


if __name__ == "__main__":
    main()
