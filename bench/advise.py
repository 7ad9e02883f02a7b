"""Is the advice right? Tournaments on phantoms with a known structure, and on hospitals that are alike.

``structures``: for each structure of ``bench/structures.py`` and each seed, the family that ``polysite advise`` names,
against the family that fits. Target: right in at least 4 of 5 seeds. ``null``: hospitals that are alike; how often a
strategy, or a hospital's own model, is said to be better than FedAvg. Target: at most 2 of 20. Each tournament prints
its processor time; the target is 5 minutes. The structures and the rules of the advice were designed with seeds 0 to
3; other seeds measure them. ``--jobs`` tournaments run side by side, with one thread each. All cases are in inner
folds: none is kept for a test.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

INNER = 2
# families that fit a structure; an own model fits where one hospital differs, or where hospitals outline unlike
FITS = {
    "equal": ("one model",),
    "outlier": ("outlier", "groups", "own", "alone"),
    "groups": ("groups",),
    "scanners": ("patients",),
    "labels": ("own", "alone"),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", choices=["structures", "null", "one"])
    options.add_argument("--names", nargs="+", default=list(FITS), choices=list(FITS), metavar="STRUCTURE")
    options.add_argument("--seeds", type=int, nargs="+", help="7 to 11; for null 100 to 119")
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--out", type=Path, help="folder of the results; those that are there are not repeated")
    given = options.parse_args()
    if given.what == "one":
        one(given.names[0], given.seeds[0], given.out)
        return
    null = given.what == "null"
    names = ["equal"] if null else given.names
    seeds = given.seeds or (list(range(100, 120)) if null else list(range(7, 12)))
    out = given.out or Path(tempfile.mkdtemp())
    places = [(name, seed, out / f"{name}-{seed}") for name in names for seed in seeds]
    with ThreadPoolExecutor(given.jobs) as pool:
        found = list(pool.map(lambda place: begin(*place), places))
    right: dict[str, list[bool]] = {}
    for (name, seed, _), each in zip(places, found, strict=True):
        fits = (not each["shown to be better than one model for all"]) if null else each["family"] in FITS[name]
        right.setdefault(name, []).append(fits)
        verdict = "right" if fits else "WRONG"
        print(f"{name:9s} seed {seed:3d}: {each['family']:10s} {each['strategy']:18s} {verdict}", end="")
        print(f"   gain {each['gain over fedavg as given']['mean']:+.3f}   {each['processor seconds']:.0f} s")
    for name, each in right.items():
        print(f"{name}: {sum(each)} of {len(each)} {'without a claim' if null else 'right'}")


def begin(name: str, seed: int, out: Path) -> dict:
    """Advise in a process of its own, unless it is done; return the numbers."""
    file = out / "advice.json"
    if not (file.exists() and "processor seconds" in json.loads(file.read_text())):
        command = [sys.executable, __file__, "one", "--names", name, "--seeds", str(seed), "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}, seed {seed}: {done.stderr[-2000:]}")
        print(f"  {time.strftime('%H:%M:%S')} {name} {seed} done", file=sys.stderr, flush=True)
    found: dict = json.loads(file.read_text())
    return found


def one(name: str, seed: int, out: Path) -> None:
    """Advise on one federation; add the processor time of all processes to the numbers."""
    from structures import structure

    from polysite import advice, config
    from polysite.benchmark import Workers

    study = config.vary(structure(name, seed), {"split": {"test": 0.0}})  # all cases are in inner folds
    found = advice.advise(study, out, None, INNER, trainer=Workers(1))
    advice.write_page(found)
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    before = out / "seconds.txt"  # of a tournament that was interrupted
    seconds = sum(s.ru_utime + s.ru_stime for s in spent) + (float(before.read_text()) if before.exists() else 0.0)
    before.write_text(f"{seconds}")
    (out / "advice.json").write_text(json.dumps(advice.plain(found) | {"processor seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
