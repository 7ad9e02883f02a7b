"""How good is an assessment? Planted outliers, and real volumes sorted by size.

    python bench/assess.py planted --jobs 2     how often every distance names the hospital that was made different
    python bench/assess.py kits                 Fed-KiTS volumes: natural sites against sites sorted by size
    python bench/assess.py chance               equal hospitals, with and without an outlier: how often are tests wrong,
                                                how often do intervals hold the true distance?

``planted`` draws four hospitals that differ a little and a fifth that differs in one thing: its scanner (a rotation of
the contrasts), the size of its tumours, or modalities that it lacks; mildly, clearly and strongly. Chance names the
fifth in one of five federations; ``none`` is a fifth like the others.
"""

import argparse
import csv
import os
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from polysite import assessment
from polysite.config import Study
from polysite.data.phantom import Hospital
from polysite.data.sources import Phantom
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.heterogeneity import significance
from polysite.heterogeneity.analysis import analyse
from polysite.heterogeneity.assessment import Assessment
from polysite.heterogeneity.distances import earth_movers, earth_movers_of
from polysite.heterogeneity.exchange import Assess
from polysite.heterogeneity.verdict import differ
from polysite.models.encoders import ENCODERS, Encoder
from polysite.payload import Payload

SHARED = Path(__file__).parents[2] / "shared" / "data"


def replies(study: Study) -> dict[str, Payload]:
    """What every hospital of a study answers."""
    engine = assessment.assessed_sites(study)
    (only,) = run_rounds(study.assess, engine, {}, Plan(rounds=1), study.seed)
    return dict(only.state.replies)


def planted(seed: int, cases: int) -> dict[str, Hospital]:
    """Four usual hospitals, and one of every unusual kind."""
    rng = np.random.default_rng(seed)

    def usual(**changes: object) -> Hospital:
        noise, bias = rng.uniform(0.03, 0.05), rng.uniform(0.2, 0.3)
        plain = {"cases": cases, "scanner": int(rng.integers(1, 10**6)), "contrast": 0.1, "noise": noise, "bias": bias}
        return Hospital(**{**plain, **changes})  # type: ignore[arg-type]

    lacking = [str(m) for m in rng.permutation(["t1", "t1ce", "t2", "flair"])]
    return {
        **{f"usual-{k}": usual() for k in range(1, 5)},
        "none": usual(),
        **{f"scanner {x:g}": usual(contrast=x) for x in (0.2, 0.4, 0.8)},
        **{f"tumour {x:g}": usual(tumour=x) for x in (0.85, 0.7, 0.5)},
        **{f"missing {k}": usual(missing=tuple(lacking[:k])) for k in (1, 2, 3)},
    }


def one_seed(job: tuple[int, int, int, Assess, Encoder]) -> dict[str, dict[str, float]]:
    """For one draw of all hospitals: which distances name the planted one, and whether it is found to differ."""
    seed, cases, side, settings, encoder = job
    hospitals = planted(seed, cases)
    heard = replies(Study(seed=seed, data=Phantom((side, side, side), hospitals), assess=settings, encoder=encoder))
    usual = {s: r for s, r in heard.items() if s.startswith("usual")}
    found = {}
    for kind in hospitals.keys() - usual.keys():
        seen = analyse({**usual, "planted": heard[kind]}, settings)
        named = {name: d.outlier == "planted" for name, d in seen.distances.items()}
        significant = differ(seen)
        others = sum(s.startswith("usual") for s in significant) / 4
        found[kind] = {**named, "shown to differ": "planted" in significant, "of the usual four": others}
    print(f"seed {seed} done", flush=True)
    return found


def run_planted(given: argparse.Namespace) -> None:
    settings = Assess(cases="all", modalities=given.modalities)
    encoder = ENCODERS[given.encoder](*([given.path] if given.path else []))
    jobs = [(seed, given.cases, given.side, settings, encoder) for seed in range(given.seeds)]
    total: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        for found in pool.map(one_seed, jobs):
            for kind, row in found.items():
                for name, yes in row.items():
                    total[kind][name] += yes / given.seeds
    columns = list(total["none"])
    print(f"\n{given.encoder}, modalities {given.modalities}; chance: 20 %")
    print(f"{given.seeds} seeds, 5 hospitals of {given.cases} cases\n")
    print(f"| planted | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    for kind in planted(0, given.cases):
        if kind in total:
            print(f"| {kind} | " + " | ".join(f"{total[kind][c]:.0%}" for c in columns) + " |")


@dataclass
class Table:
    """A hospital of which only a table of quantities is known."""

    quantities: dict[str, np.ndarray]
    embedding: np.ndarray | None = None

    @property
    def size(self) -> int:
        return len(next(iter(self.quantities.values())))

    def features(self, kind: str) -> dict[str, np.ndarray]:
        if kind == "absent":
            return {name: values == 0 for name, values in self.quantities.items()}
        if kind == "embedding":
            return {"embedding": self.embedding, "encoder": np.array(1.0)}
        return {**self.quantities, "metric": np.full(self.size, 3.0)}


def kits_sites(
    sort: bool, labels: str = "together", path: Path = SHARED / "fed_kits" / "volumes.csv"
) -> dict[str, Table]:
    """Sites 0 to 4 as clients 1 to 5; or their cases dealt out by kidney and tumour volume, sizes kept.

    Kidney and tumour are one volume, or, as in the paper, two (``apart``).
    """
    with path.open() as file:
        rows = [r for r in csv.DictReader(file) if int(r["site"]) < 5]
    if sort:
        owners = sorted(r["site"] for r in rows)
        rows.sort(key=lambda r: float(r["kidney_ml"]) + float(r["tumour_ml"]))
        rows = [{**r, "site": s} for r, s in zip(rows, owners, strict=True)]
    sites = {}
    for site in sorted({r["site"] for r in rows}):
        kidney, tumour = (
            np.array([float(r[k]) for r in rows if r["site"] == site]) for k in ("kidney_ml", "tumour_ml")
        )
        volumes = {"volume kidney": kidney, "volume tumour": tumour}
        sites[f"client-{int(site) + 1}"] = Table(
            volumes if labels == "apart" else {"volume kidney+tumour": kidney + tumour}
        )
    return sites


def kits(sort: bool, settings: Assess = Assess(projections=0), labels: str = "together") -> Assessment:
    heard = {s: settings.local(Payload(), Payload(), site)[0] for s, site in kits_sites(sort, labels).items()}
    return analyse(heard, settings)


def run_kits(given: argparse.Namespace) -> None:
    for sort in (False, True):
        found = kits(sort)
        (quantity,) = found.quantities.values()
        distance = found.distances["emd"]
        size = f"EMD_maxL {quantity.mean:.2f} (in mL {quantity.mean * quantity.divisors['client-1']:.0f})"
        print(f"\n{'sorted by size' if sort else 'natural'}: {size}")
        print(f"most distant: {distance.outlier} ({distance.named[distance.outlier]:.0%} of resamples)")
        print(f"clusters: {distance.clusters}; linked: {distance.linked} (silhouette {distance.silhouette:.2f})")
        print(distance.matrix.round(2))
        print("p by Holm:\n", distance.adjusted.round(3))
    print("\nas in the paper (kidney and tumour apart, by the deviation of the first site; printed 0.87, 11.62):")
    for sort in (False, True):
        found = kits(sort, Assess(projections=0, scale="first"), "apart")
        means = ", ".join(f"{q.of} {q.mean:.3f}" for q in found.quantities.values())
        print(f"{'sorted by size' if sort else 'natural'}: {means}; most distant: {found.distances['emd'].outlier}")


def drawn(rng: np.random.Generator, cases: int, apart: float) -> Table:
    """A hospital of numbers alone, some deviations away from the usual one."""
    quantities = {f"intensity {m}": rng.normal(100 + 10 * apart, 10, cases) for m in ("t1", "t2")}
    quantities |= {f"volume {k}": rng.lognormal(apart / 2, 0.5, cases) for k in ("WT", "ET")}
    mixed = rng.normal(apart / 2, 1, (cases, 6)) @ np.random.default_rng(0).normal(size=(6, 128))
    return Table(quantities, mixed.reshape(cases, 1, 64, 2))


def run_chance(given: argparse.Namespace) -> None:
    settings = Assess(projections=32)
    for apart in (0.0, 3.0):
        found = {"outlier": 0.0, "an equal site": 0.0}
        for seed in range(given.draws):
            rng = np.random.default_rng(seed)
            sites = {s: drawn(rng, given.cases, apart if s == "e" else 0.0) for s in "abcde"}
            heard = {s: settings.local(Payload(), Payload(), site)[0] for s, site in sites.items()}
            named = differ(analyse(heard, settings))
            found["outlier"] += ("e" in named) / given.draws
            found["an equal site"] += any(s in named for s in "abcd") / given.draws
        told = f"e {apart:g} deviations away" if apart else "all five alike"
        print(f"{told}: said to differ: e {found['outlier']:.1%}, one of the other four {found['an equal site']:.1%}")
    for n, m in ((10, 10), (20, 20), (50, 50), (5, 300)):
        print(f"95 % intervals, {n} and {m} cases:", end="")
        for apart in (0.0, 1.0):
            print(f"  {apart:g} apart: {_held(n, m, apart, 2 * given.draws):.1%}", end="", flush=True)
        print()


def _held(n: int, m: int, apart: float, draws: int) -> float:
    """How often the interval of an Earth Mover's distance holds the true one."""
    rng, held = np.random.default_rng(1), 0
    for k in range(draws):
        a, b = np.sort(rng.normal(0, 1, (1, n))), np.sort(rng.normal(apart, 1, (1, m)))
        drawn = significance.counts(f"a{k}", n, 300), significance.counts(f"b{k}", m, 300)
        again = significance.resampled(a, b, drawn, earth_movers_of)
        p, _ = significance.permuted(a, b, earth_movers_of, 999)
        upper = significance.upper(again[0])
        low, high = significance.interval(earth_movers([a, b])[0, 0, 1], upper, p[0])
        held += bool(low <= apart <= high)
    return held / draws


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", choices=["planted", "kits", "chance"])
    options.add_argument("--seeds", type=int, default=20)
    options.add_argument("--draws", type=int, default=100, help="of chance")
    options.add_argument("--cases", type=int, default=12)
    options.add_argument("--side", type=int, default=48, help="voxels of a phantom")
    options.add_argument("--modalities", default="apart", choices=["apart", "mean"])
    options.add_argument("--encoder", default="bundled", choices=sorted(ENCODERS))
    options.add_argument("--path", default="", help="of the encoder's weights")
    options.add_argument("--jobs", type=int, default=2)
    given = options.parse_args()
    {"planted": run_planted, "kits": run_kits, "chance": run_chance}[given.what](given)


if __name__ == "__main__":
    main()
