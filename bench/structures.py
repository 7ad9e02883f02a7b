"""Phantom federations with a known structure: which family of strategies truly wins on test cases?

    equal      four hospitals alike: nothing beats FedAvg
    outlier    three alike, one with the contrasts of another scanner: treat it apart
    groups     two and two hospitals with unlike scanners: a model per group
    scanners   two scanners inside each of four hospitals, and patients of the second one are outlined wider, by another
               protocol: clusters of patients
    labels     two hospitals alike that outline tumours narrow or wide: a model per hospital (a third one between them
               would be served well by their mean, and gain nothing by a model of its own)

``structure(NAME, SEED)`` is the study, with FedAvg; ``FAMILIES`` are the strategies. All have the local steps of
FedAvg: a phase after another shares its rounds with it, and Ditto, which trains twice, has half of the steps for each
model. Groups and the outlier are those of the assessment (EMD). For every family, the test Dice of all cases is printed
with its gain over FedAvg, hospital by hospital, and the p-value of Wilcoxon's signed-rank test paired by case. Over all
seeds, "most sure" is the hospital with the highest probability of a gain (``polysite.metrics.shrinkage``).

Every hospital has 8 training, 3 validation and 5 test cases with large tumours that have all three labels: small ones,
or labels that a patient may lack, make scores depend on the luck of a training, which differs by 0.03 Dice then.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from polysite import config
from polysite.assessment import assess
from polysite.config import Study
from polysite.metrics.shrinkage import shrink
from polysite.metrics.statistics import signed_rank
from polysite.study import train

torch.set_num_threads(1)

ROUNDS, EPOCHS, TUNING = 12, 5, 4  # of a study; in a round; rounds of a second phase
OTHER = {"scanner": 16, "contrast": 2.0}
SIDES = {"margin": 0, "second_margin": 6}  # outlines of patients of the first and of the second scanner
STUDY: dict[str, Any] = {
    "model": {"name": "unet_small", "filters": [8, 16, 32]},
    "split": {"validation": 0.2, "test": 0.33},
    "train": {
        "optimiser": "adam", "lr": 0.02, "gamma": 0.85, "epochs": EPOCHS, "batch": 2,
        "patch": [16, 16, 16], "window": [24, 24, 24], "augment": "none",
    },
    "run": {"rounds": ROUNDS, "validate_every": 2, "checkpoint_every": 1000},
    "assess": {"projections": 0},
}  # fmt: skip
PATIENTS = {"cases": 16, "low_grade": 0.0, "tumour": 1.5}  # of every hospital
SITES: dict[str, dict[str, dict[str, Any]]] = {
    "equal": {name: {} for name in "abcd"},
    "outlier": {"a": {}, "b": {}, "c": {}, "d": {"scanner": 11, "contrast": 2.0, "tumour": 1.0}},
    "groups": {"a": {}, "b": {}, "c": OTHER, "d": OTHER},
    "scanners": {name: {"scanner": 0, "second": 16, "contrast": 0.7, **SIDES} for name in "abcd"},
    "labels": {"a": {"margin": 0, "cases": 20}, "b": {"margin": 4, "cases": 20}},
}
RIGHT = {
    "equal": ("fedavg",),
    "outlier": ("apart", "fine_tune", "interpolated"),
    "groups": ("clusters",),
    "scanners": ("cfft",),
    "labels": ("fine_tune", "interpolated", "fedper"),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "omega 0.3": {"outlier": 0.3},
    "apart": {"apart": True},
    "clusters": {"clusters": True},
    "ifca": {"algorithm": {"name": "ifca", "k": 2, "warmup": 0.34, "settle": 0.34}},
    "cfft": {},
    "fine_tune": {},
    "interpolated": {},
    "ditto": {"algorithm": {"name": "ditto", "steps": 4, "own_steps": 4}},  # half of the local steps for each model
    "fedper": {"algorithm": {"name": "fedper"}},
    "local": {"algorithm": {"name": "local"}},
}
ADVISED = ("omega 0.3", "apart", "clusters")  # by the assessment
PHASES = ("cfft", "fine_tune", "interpolated")  # after FedAvg

Dice = dict[str, dict[str, float]]  # by hospital and case


def structure(name: str, seed: int) -> Study:
    """Return the study of a structure, with FedAvg."""
    sites = {site: {**PATIENTS, **given} for site, given in SITES[name].items()}
    return config.build({**STUDY, "data": {"name": "phantom", "shape": [24, 24, 24], "sites": sites}, "seed": seed}, {})


def shorter(study: Study, tuning: int) -> dict[str, Any]:
    """Return the changes that leave rounds for a second phase."""
    return {"run": {"rounds": study.run.rounds - tuning}}


def phase(name: str, tuning: int) -> dict[str, Any]:
    """Return the second phase of a family."""
    own = {
        "fine_tune": {"lr": [0.01]},
        "interpolated": {"lr": 0.01, "epochs": EPOCHS * tuning},
        "cfft": {"components": 2, "dimensions": 10, "rounds": tuning, "lr": 0.01, "bin_width": 0.15},
    }[name]
    rounds = {"fine_tune": tuning, "interpolated": 1, "cfft": 200}[name]  # cfft ends by itself
    return {"algorithm": {"name": name, **own}, "run": {"rounds": rounds, "validate_every": 1}}


def family(name: str, study: Study, distances: Mapping[str, Any], tuning: int = TUNING) -> Study:
    """Return the study with the strategy of a family, which for groups and the outlier uses the assessment."""
    changes = dict(FAMILIES[name])
    if name in PHASES:
        changes = {**shorter(study, tuning), "then": [phase(name, tuning)]}
    if changes.pop("clusters", False):
        groups = {f"group {k}": members for k, members in enumerate(distances["emd"]["clusters"], start=1)}
        changes["algorithm"] = {"name": "clustered", "groups": groups}
    if changes.pop("apart", False):
        outlier = distances["emd"]["outlier"]
        groups = {"outlier": [outlier], "others": [site for site in study.data.sites if site != outlier]}
        changes["algorithm"] = {"name": "clustered", "groups": groups}
    weight = changes.pop("outlier", None)
    if weight is not None:
        changes["algorithm"] = {"name": "weighted", "weights": {distances["emd"]["outlier"]: weight}}
    return config.vary(study, changes)


def measured(name: str, seed: int, families: list[str]) -> dict[str, Dice]:
    """Train every family; return the Dice of all test cases."""
    study, tuning, found = structure(name, seed), TUNING, {}
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)

        @cache
        def distances() -> Mapping[str, Any]:
            assess(study, out / "assess")
            known: Mapping[str, Any] = json.loads((out / "assess" / "assessment.json").read_text())["distances"]
            print(f"  EMD: clusters {known['emd']['clusters']}, outlier {known['emd']['outlier']}")
            return known

        @cache
        def before() -> Path:
            return train(config.vary(study, shorter(study, tuning)), out / "before", evaluate=False).folder.path

        for chosen in families:
            advised = chosen in ADVISED
            one = family(chosen, study, distances() if advised else {}, tuning)
            after = before() if chosen in PHASES else None
            began = time.process_time()
            run = train(one, out / chosen, after=after, evaluate=False)
            found[chosen] = {s: {c: x.mean for c, x in cases.items()} for s, cases in run.result.test.items()}
            show(chosen, found, run.folder.records()[-1].diagnostics, time.process_time() - began)
    return found


def gains(found: Mapping[str, Dice], name: str) -> dict[str, list[float]]:
    """Return the gain over FedAvg of every case, by hospital."""
    return {s: [found[name][s][c] - x for c, x in cases.items()] for s, cases in found["fedavg"].items()}


def show(name: str, found: Mapping[str, Dice], diagnostics: Mapping[str, float], seconds: float) -> None:
    cases = [x for site in found[name].values() for x in site.values()]
    apart = gains(found, name)
    every = [x for site in apart.values() for x in site]
    each = " ".join(f"{s} {fmean(x):+.3f}" for s, x in apart.items())
    said = " ".join(f"{k.removeprefix('alpha, ')}:{v:g}" for k, v in diagnostics.items() if k.startswith("alpha, "))
    line = f"  {name:<14}{fmean(cases):.3f} {fmean(every):+.3f} ({each})  p {signed_rank(every):.4f}"
    print(f"{line}  {seconds:.0f} s{'  alpha ' + said if said else ''}", flush=True)


def summary(name: str, runs: Mapping[int, Mapping[str, Dice]]) -> None:
    """Print the table of a structure over all seeds, in Markdown."""
    first = next(iter(runs.values()))
    print(f"\n{name}, seeds {', '.join(map(str, runs))}; expected: {', '.join(RIGHT[name])}")
    print("| family | Dice | gain | p | gain per hospital | most sure |\n|---|---|---|---|---|---|")
    for chosen in first:
        apart = {s: [x for found in runs.values() for x in gains(found, chosen)[s]] for s in first["fedavg"]}
        dice = fmean(x for found in runs.values() for site in found[chosen].values() for x in site.values())
        every = [x for site in apart.values() for x in site]
        sure = max(shrink(apart).sites.items(), key=lambda item: item[1].positive)
        each = ", ".join(f"{s} {fmean(x):+.3f}" for s, x in apart.items())
        most = f"{sure[0]} {sure[1].positive:.2f}" if chosen != "fedavg" else ""
        print(f"| {chosen} | {dice:.3f} | {fmean(every):+.3f} | {signed_rank(every):.4f} | {each} | {most} |")
    print(flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("structures", nargs="*", default=list(SITES), help=", ".join(SITES))
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    given = options.parse_args()
    families = ["fedavg", *(f for f in given.families if f != "fedavg")]
    for name in given.structures:
        runs = {}
        for seed in given.seeds:
            print(f"{name}, seed {seed}: Dice, gain over fedavg (by hospital)", flush=True)
            runs[seed] = measured(name, seed, families)
        summary(name, runs)


if __name__ == "__main__":
    main()
