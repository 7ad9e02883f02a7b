"""How do an assessment and a comparison grow?

    python bench/scale.py assess      `polysite assess` of 100 hospitals against 23, 30 cases each
    python bench/scale.py compare     `polysite compare` of 28 methods against one, 5 folds, 1251 cases

Each size runs in a process of its own and is timed there, without the start of Python and its imports. ``assess`` makes
up what the hospitals measure of their cases (no scans are read), and then runs the exchange, the analysis, the verdict
and the page of `polysite assess`. ``compare`` writes run folders with evaluations and runs the command itself.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

HERE = Path(__file__).resolve()
MODALITIES, LABELS = ("t1", "t1ce", "t2", "flair"), ("WT", "TC", "ET")
KINDS = 6  # in which embeddings differ


@dataclass(frozen=True)
class Described:
    """A hospital that makes up what it measures; ``apart`` is the deviation of the hospitals in units of the cases'."""

    number: int
    size: int
    apart: float
    fits = ()

    def at(self, round: int) -> "Described":
        return self

    def lift(self, params: object) -> object:
        return params

    def features(self, kind: str) -> Mapping[str, np.ndarray]:
        own = np.random.default_rng([self.number, 0]).normal(0, self.apart, KINDS + len(MODALITIES) + 1)
        rng = np.random.default_rng([self.number, 1 if kind == "embedding" else 2])
        if kind == "embedding":
            mixed = np.random.default_rng(0).normal(size=(KINDS, len(MODALITIES) * 64 * 2))
            cases = (rng.normal(size=(self.size, KINDS)) + own[:KINDS]) @ mixed
            return {"embedding": cases.reshape(self.size, len(MODALITIES), 64, 2), "encoder": np.array(7.0)}
        found = {
            f"intensity {m}": rng.lognormal(6.5 + 0.25 * shift, 0.25, self.size)
            for m, shift in zip(MODALITIES, own[KINDS:-1], strict=True)
        }
        whole = rng.lognormal(3.5 + 0.5 * own[-1], 0.5, self.size)
        found |= {f"volume {k}": whole * rng.uniform(0.1, 1, self.size) for k in LABELS}
        return {k: v == 0 for k, v in found.items()} if kind == "absent" else {**found, "metric": np.full(self.size, 3)}


def assess(count: int, given: argparse.Namespace, folder: Path) -> Path:
    """Assess so many hospitals; return the page."""
    from polysite import assessment
    from polysite.config import Study
    from polysite.engines.simulator import Simulator
    from polysite.heterogeneity.exchange import Assess
    from polysite.report.tables import show_assessment

    settings = Assess(permutations=given.permutations, resamples=given.resamples, projections=given.projections)
    names = [f"Universitätsklinikum Nummer {k:03}, Abteilung für Radiologie" for k in range(count)]
    sites = {s: Described(k, given.cases, given.apart) for k, s in enumerate(names)}

    engine = Simulator(settings, sites)  # type: ignore[arg-type]
    sizes = dict.fromkeys(names, given.cases)
    done = assessment.run_assessment(Study(assess=settings), engine, sizes, False, folder / "found")
    show_assessment(done.assessment, done.verdict)
    return done.folder / "index.html"


def write_runs(count: int, given: argparse.Namespace, folder: Path) -> None:
    """Write the runs of so many methods: every fold tests its share of the cases of 23 hospitals."""
    sys.path.insert(0, str(HERE.parents[1] / "tests"))
    from folders import row, write

    rng = np.random.default_rng(0)
    cases = [(f"hospital {k % 23:02}", f"case {k:04}") for k in range(given.cases)]
    for method in range(count):
        for fold in range(given.folds):
            own: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
            for site, case in cases[fold :: given.folds]:
                dice = np.clip(rng.normal(0.7 + 0.002 * method, 0.15, len(LABELS)), 0, 1)
                own.setdefault(site, {})[case] = {
                    k: row(float(x), 9.0 * (1 - x)) for k, x in zip(LABELS, dice, strict=True)
                }
            place, settings = folder / f"m{method:02}" / f"fold-{fold}", {"name": "fedprox", "mu": 0.001 * method}
            write(place, own, fold=fold, folds=given.folds, rounds=given.rounds, algorithm=settings)


def compare(count: int, given: argparse.Namespace, folder: Path) -> Path:
    """Compare so many methods by the command; return the page."""
    from polysite.cli import app

    runs = [f"m{m:02}={folder / f'm{m:02}' / f'fold-{f}'}" for m in range(count) for f in range(given.folds)]
    app(["compare", *runs, "--out", str(folder / "compared")], standalone_mode=False)
    return folder / "compared" / "index.html"


TASKS: Mapping[str, Callable[[int, argparse.Namespace, Path], Path]] = {"assess": assess, "compare": compare}
SIZES = {"assess": (100, 23), "compare": (28, 1)}
CASES = {"assess": 30, "compare": 1251}


def timed(count: int, given: argparse.Namespace) -> dict[str, float]:
    """Run a task of one size in this process."""
    import polysite.cli
    import polysite.report.assess_page
    import polysite.report.page  # noqa: F401  (imports are not timed)

    with TemporaryDirectory() as place:
        folder = Path(place)
        if given.what == "compare":
            write_runs(count, given, folder)
        wall, processor = time.perf_counter(), time.process_time()
        page = TASKS[given.what](count, given, folder)
        found = {"seconds": time.perf_counter() - wall, "processor": time.process_time() - processor}
        if given.keep:
            (Path(given.keep) / f"{given.what}-{count}.html").write_bytes(page.read_bytes())
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {**found, "page": page.stat().st_size / 1e6, "memory": memory}


def apart(count: int, arguments: list[str]) -> dict[str, float]:
    """Run a task of one size in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(HERE), *arguments, "--one", str(count)],
        capture_output=True, text=True, check=False, env={"OMP_NUM_THREADS": "1", **os.environ, "COLUMNS": "120"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{count} failed: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", choices=sorted(TASKS))
    options.add_argument("--sizes", type=int, nargs=2, metavar=("MANY", "FEW"), help="hospitals or methods")
    options.add_argument("--cases", type=int, help="of a hospital (assess), or in all (compare)")
    options.add_argument("--apart", type=float, default=0.3, help="deviation between hospitals, over that of cases")
    options.add_argument("--permutations", type=int, default=9999)
    options.add_argument("--resamples", type=int, default=300)
    options.add_argument("--projections", type=int, default=64)
    options.add_argument("--folds", type=int, default=5)
    options.add_argument("--rounds", type=int, default=50, help="of every run that is compared")
    options.add_argument("--keep", help="folder for the pages")
    options.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = options.parse_args()
    given.cases = given.cases or CASES[given.what]
    if given.one is not None:
        print(json.dumps(timed(given.one, given)))
        return
    many, few = given.sizes or SIZES[given.what]
    found = {count: apart(count, sys.argv[1:]) for count in (few, many)}
    noun = "hospitals" if given.what == "assess" else "methods"
    for count, each in found.items():
        print(
            f"{count} {noun}: {each['seconds']:.1f} s ({each['processor']:.1f} s of processor time), "
            f"page {each['page']:.2f} MB, peak memory {each['memory']:.0f} MB"
        )
    for clock in ("seconds", "processor"):
        ratio, goal = found[many][clock] / found[few][clock], "at most 20"
        if given.what == "compare":
            ratio, goal = ratio * few / many, "at most 1.3, per method"
        print(f"ratio of {clock}: {ratio:.2f} ({goal})")


if __name__ == "__main__":
    main()
