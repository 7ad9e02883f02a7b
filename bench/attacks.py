"""Attacks and defences: what do hostile hospitals cost the honest ones?

Phantom hospitals with unlike scanners train a small U-Net; one of five or two of seven attack (``tests/hostile.py``).
Printed is the mean test Dice of the honest hospitals, each by the mean of its cases, of the model that is chosen in the
end, and its difference from "left out": the same study without the hostile hospitals, so without their data. ``no
attack`` has all hospitals honest. Two federations have no attacker, to see what the guard costs honest hospitals that
differ: ``natural`` (unequal sizes, one unlike scanner, one with wide outlines) and ``outlines`` (from narrow to wide).

    none       plain FedAvg
    guard      FedAvg with the guard of deployments (run.guard)
    others     FedAvg with a robust rule (algorithm "robust"), without the guard

Every cell is a run of its own and is kept as a line of the file ``--out``: a stopped table goes on where it was. After
a change of the guard or of the study, delete the lines that it concerns.
"""

import argparse
import csv
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

from hostile import ATTACKS, Hostile
from polysite import config
from polysite.config import Study
from polysite.engines.phase_sites import Reply
from polysite.engines.phases import Phase, run_phases
from polysite.engines.run_folder import RunFolder
from polysite.engines.simulator import Simulator
from polysite.payload import Payload, SiteId
from polysite.site import Scores
from polysite.storage import write_file
from polysite.study import deal_cases, load_cases
from polysite.study.sites import Materials, train_sizes, with_cases

torch.set_num_threads(1)

STUDY: dict[str, Any] = {
    "model": {"name": "unet_small", "filters": [8, 16, 32]},
    "split": {"validation": 0.2, "test": 0.33},
    "train": {
        "optimiser": "adam", "lr": 0.02, "gamma": 0.8, "epochs": 3, "batch": 2,
        "patch": [16, 16, 16], "augment": "none",
    },
    "run": {"rounds": 10, "validate_every": 2, "checkpoint_every": 1000},
}  # fmt: skip
PATIENTS = {"cases": 15, "low_grade": 0.0, "tumour": 1.5}
UNLIKE: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {"scanner": 1, "contrast": 0.3},
    "c": {"scanner": 2, "contrast": 0.3, "noise": 0.05},
    "d": {"gamma": 1.2, "cases": 12},
    "e": {"scanner": 3, "contrast": 0.3},
    "f": {"bias": 0.4},
    "g": {"scanner": 4, "contrast": 0.3},
}
FEDERATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "1 of 5": {i: UNLIKE[i] for i in "abcde"},
    "2 of 7": UNLIKE,
    "natural": {
        "a": {"cases": 36},
        "b": {"scanner": 1, "contrast": 0.3},
        "c": {"scanner": 2, "contrast": 0.3, "cases": 9},
        "d": {"margin": 2},
        "e": {"scanner": 11, "contrast": 2.0},
    },
    "outlines": {"a": {"margin": -1}, "b": {}, "c": {"margin": 1}, "d": {"cases": 12}, "e": {"margin": 3}},
}
HOSTILE = {"1 of 5": ("e",), "2 of 7": ("e", "g"), "natural": (), "outlines": ()}
ROBUST = ("median", "trimmed_mean", "krum", "geometric_median", "centred_clipping")
DEFENCES = ("none", "guard", *ROBUST)
CALM = ("no attack", "left out")
CELLS = Path(__file__).resolve().parents[1] / "docs/results/attacks.csv"


def study(federation: str, defence: str, seed: int, without: Sequence[str] = ()) -> Study:
    """Return a study with a defence, without some sites."""
    sites = {i: {**PATIENTS, **given} for i, given in FEDERATIONS[federation].items() if i not in without}
    given = {**STUDY, "data": {"name": "phantom", "shape": [24, 24, 24], "sites": sites}, "seed": seed}
    if defence in ROBUST:
        bad = max(len(HOSTILE[federation]), 1)
        own = {"krum": {"f": bad}, "trimmed_mean": {"beta": (bad + 0.1) / len(sites)}}.get(defence, {})
        given["algorithm"] = {"name": "robust", "rule": defence, **own}
    given["run"] = {**given["run"], "guard": {"use": "on" if defence == "guard" else "off"}}
    return config.build(given, {})


class Remembered(Simulator):
    """A simulation that computes nothing twice: equal models give equal turns and scores, whatever the cell.

    Cells of a federation and a seed share their first round, and all rounds in which a defence undoes an attack.
    """

    known: ClassVar[dict[tuple[Any, ...], Any]] = {}
    kept = 2000  # turns and scores
    cell: tuple[Any, ...] = ()  # what turns and scores depend on, beside the model

    def _turn(self, round: int, name: SiteId, payload: Payload) -> Reply:
        reply: Reply = self._once(
            ("turn", round, name), payload, lambda: super(Remembered, self)._turn(round, name, payload)
        )
        self._new[name] = self.store.put(Payload())  # neither FedAvg nor the robust rules have a memory
        return reply

    def score(self, round: int, sent: Mapping[SiteId, Payload], split: str) -> Mapping[SiteId, Scores]:
        """Score models that were not scored before."""
        scored = super().score
        return {
            i: self._once((split, i), payload, lambda i=i, p=payload: scored(round, {i: p}, split)[i])
            for i, payload in sent.items()
        }

    def _once(self, what: tuple[Any, ...], payload: Payload, compute: Callable[[], Any]) -> Any:
        digest = hashlib.sha256()
        for name in sorted(payload["model"]):
            digest.update(name.encode() + payload["model"][name].numpy().tobytes())
        numbers = tuple(sorted((k, v) for k, v in payload.items() if isinstance(v, float)))
        key = (*self.cell, *what, numbers, digest.digest())
        self.known[key] = self.known.pop(key) if key in self.known else compute()
        while len(self.known) > self.kept:
            del self.known[next(iter(self.known))]
        return self.known[key]


class Table(Hostile, Remembered):
    """The federation of a cell."""


def measured(federation: str, attack: str, defence: str, seed: int) -> dict[str, Any]:
    """Run one cell of the table."""
    began, hostile = time.process_time(), HOSTILE[federation]
    one = study(federation, defence, seed, hostile if attack == "left out" else ())
    ready = load_cases(one, deal_cases(one))
    if attack == "label flip":
        for site in hostile:
            ready[site]["train"] = [replace(c, label=1 - c.label) for c in ready[site]["train"]]
    sites = with_cases(one, ready, Materials().network(one, train_sizes(ready)))
    transport = Table(one.algorithm, sites)
    transport.cell = (federation, seed, attack == "label flip")
    transport.attacked("" if attack in CALM else attack, hostile, liked=one.run.validate_every - 1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = RunFolder.create(Path(temporary) / "run", config.dump(one), seed)
        start = next(iter(sites.values())).start
        result = run_phases([Phase(one.algorithm, transport, one.run)], start, seed, folder)
        records = folder.records()
    test = {i: fmean(s.mean for s in cases.values()) for i, cases in result.test.items() if i not in hostile}
    lowered = {i: min(r.guard[i].factor for r in records if i in r.guard) for i in records[-1].guard}
    return {
        "dice": f"{fmean(test.values()):.4f}",
        "best_round": result.best_round + 1,
        "lowered": " ".join(f"{i}:{factor:.2f}" for i, factor in lowered.items() if factor < 1),
        "seconds": f"{time.process_time() - began:.0f}",
    }


Key = tuple[str, str, str, int]  # federation, attack, defence, seed
COLUMNS = ("federation", "attack", "defence", "seed", "dice", "best_round", "lowered", "seconds")


def read(out: Path) -> dict[Key, dict[str, Any]]:
    """Return the cells that are known."""
    if not out.exists():
        return {}
    with out.open(newline="") as file:
        return {(r["federation"], r["attack"], r["defence"], int(r["seed"])): r for r in csv.DictReader(file)}


def write(out: Path, cells: Mapping[Key, Mapping[str, Any]]) -> None:
    """Write all cells, one line each."""

    def lines(temporary: Path) -> None:
        with temporary.open("w", newline="") as file:
            table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            table.writeheader()
            table.writerows(cells[key] for key in sorted(cells))

    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, lines)


def cell(out: Path, federation: str, attack: str, defence: str, seed: int) -> Mapping[str, Any]:
    """Return a cell of the table, from the file or newly measured."""
    key, known = (federation, attack, defence, seed), read(out)
    if key not in known:
        found = measured(federation, attack, defence, seed)
        known = {**read(out), key: {**dict(zip(COLUMNS, key, strict=False)), **found}}
        write(out, known)
        line = f"{federation}, {attack}, {defence}, seed {seed}: {found['dice']}"
        print(f"  {line} ({found['seconds']} s) {found['lowered']}", file=sys.stderr, flush=True)
    return known[key]


def table(out: Path, federation: str, attacks: Sequence[str], defences: Sequence[str], seeds: Sequence[int]) -> None:
    """Print the table of a federation, in Markdown."""
    print(f"\n{federation}, seeds {', '.join(map(str, seeds))}: Dice of honest hospitals (difference from left out)\n")
    print(f"| attack | {' | '.join(defences)} |\n|---|{'---|' * len(defences)}")
    rows = ("no attack",) if not HOSTILE[federation] else (*CALM, *attacks)
    reference = mean(out, federation, "left out" if HOSTILE[federation] else "no attack", "none", seeds)
    for attack in rows:
        known = {d: mean(out, federation, attack, d, seeds) for d in defences if attack != "left out" or d == "none"}
        cells = " | ".join(f"{known[d]:.3f} ({known[d] - reference:+.3f})" if d in known else "" for d in defences)
        print(f"| {attack} | {cells} |", flush=True)
    if "guard" in defences:
        guarded = [attack for attack in rows if attack != "left out"]
        found = [cell(out, federation, attack, "guard", s)["lowered"] for attack in guarded for s in seeds]
        bad = {each.split(":")[0] for lowered in found for each in lowered.split()} - {*HOSTILE[federation]}
        print(f"\nhonest hospitals that the guard ever counted less: {', '.join(sorted(bad)) or 'none'}")


def mean(out: Path, federation: str, attack: str, defence: str, seeds: Sequence[int]) -> float:
    """Return the mean Dice of a cell over seeds."""
    return fmean(float(cell(out, federation, attack, defence, s)["dice"]) for s in seeds)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--federations", nargs="+", default=list(FEDERATIONS), choices=list(FEDERATIONS))
    options.add_argument("--attacks", nargs="*", default=list(ATTACKS), choices=list(ATTACKS))
    options.add_argument("--defences", nargs="+", default=list(DEFENCES), choices=list(DEFENCES))
    options.add_argument("--seeds", type=int, nargs="+", default=[20, 21, 22])
    options.add_argument("--out", type=Path, default=CELLS, help="file of the cells")
    given = options.parse_args()
    for federation in given.federations:
        table(given.out, federation, given.attacks, given.defences, given.seeds)


if __name__ == "__main__":
    main()
