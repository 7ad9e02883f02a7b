"""Run folders written by hand, for tests of what is read out of them."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from polysite import config
from polysite.engines.record import Result, RoundRecord, SiteRecord, SiteValidation
from polysite.engines.run_folder import RunFolder
from polysite.report.runs import methods, read
from polysite.site import CaseScore

SIZE = 8  # of the cubes
SITES = {"north": 6, "south": 5, "island": 2}


def row(dice, hd95=1.0, truth=10.0, predicted=10.0):
    """One label of one case, as an evaluation has it."""
    empty = not (truth and predicted)
    far = np.nan if empty else hd95
    return {
        "dice": dice, "iou": dice / (2 - dice), "sensitivity": dice, "specificity": 0.99, "hd95": far,
        "hd95_union": far, "assd": far if empty else hd95 / 2, "nsd": np.nan if empty else dice, "truth": truth,
        "predicted": predicted, "diagonal": 100.0,
    }  # fmt: skip


def write(
    path: Path, cases, *, own=False, alone=False, rounds=3, split="test", unit="mm", seed=0, fold=0, folds=0, file="",
    split_seed=None, counts=None, peeked=(), **settings,
):  # fmt: skip
    """A finished and evaluated run; ``cases`` is site -> case -> label -> Dice or a whole row.

    ``own``: every site has a model of its own. ``alone``: nothing is sent, and every model is evaluated on all cases,
    with half the Dice on those of other sites. ``counts``: site -> case -> label -> count; ``peeked``: for every round
    the test scores, site -> `SiteValidation`.
    """
    study = config.build({"seed": seed, **settings})
    folds = folds or 5 * bool(fold)
    study = replace(study, split=replace(study.split, folds=folds, fold=fold, file=file)) if folds else study
    study = replace(study, split=replace(study.split, seed=split_seed))
    folder = RunFolder.create(path, config.dump(study), seed)
    whole = {
        s: {c: {k: v if isinstance(v, dict) else row(v) for k, v in labels.items()} for c, labels in found.items()}
        for s, found in cases.items()
    }
    scores = {
        s: {
            c: CaseScore({k: v["dice"] for k, v in labels.items()}, loss=0.5, counts=counts[s][c] if counts else {})
            for c, labels in found.items()
        }
        for s, found in whole.items()
    }
    sent = (0, 0) if alone else (100, 200)
    effort = dict.fromkeys(cases, SiteRecord(1.0, 4, lr_sum=0.1, seconds=0.1))
    moved = {k: dict.fromkeys(cases, n) for k, n in zip(("bytes_down", "bytes_up"), sent, strict=True) if n}
    shares = {s: 1 / len(cases) for s in cases}
    for k in range(rounds):
        validation = dict.fromkeys(cases, SiteValidation(2, 0.5, {"WT": 0.2 * k}))
        found = {"measure": "Dice", "mean_score": 0.2 * k, "best_round": k, "peeked": peeked[k] if peeked else {}}
        told = {"shares": shares, "validation": validation, "elapsed": 0.1 * k, **found, **moved}
        folder.append(RoundRecord(k, 0, effort, **told))
    other = {s: {} for s in cases}
    validation, test = (scores if split == name else other for name in ("validation", "test"))
    folder.finish(Result("segmentation", ("WT",), ("t1",), rounds, rounds - 1, 0, validation, test))
    _evaluation(path / "evaluation" / split, whole, own, unit, alone)
    return path


def _evaluation(place: Path, whole, own, unit, alone) -> None:
    place.mkdir(parents=True)
    lines = [
        {"model": m, "site": s, "case": c, "label": k, **(row(v["dice"] / 2, 9.0) if alone and m != s else v)}
        for s, found in whole.items()
        for c, labels in found.items()
        for k, v in labels.items()
        for m in (whole if alone else [s if own else "*"])
    ]
    with (place / "cases.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    labels = sorted({line["label"] for line in lines})
    grid = {"axes": "RAS", "slices": list(range(SIZE)), "step": 1, "pixel": [1.0, 1.0], "sides": True}
    ranked = [(s, c, why) for s, found in whole.items() for c, why in zip(found, ("worst", "best"), strict=False)]
    shown = [{"site": s, "case": c, "why": why, **grid} for s, c, why in ranked]
    about = {
        "split": "test", "data": "", "cases": {s: len(c) for s, c in whole.items()}, "trained": sorted(whole),
        "tolerance": 1.0, "unit": unit, "labels": labels, "modalities": ["t1"], "versions": {}, "shown": shown,
    }  # fmt: skip
    (place / "about.json").write_text(json.dumps(about))
    rng = np.random.default_rng(0)
    cube = np.zeros((SIZE,) * 3, np.uint8)
    cube[2:6, 2:6, 2:6] = 1
    answers = {f"{s}/{c}": np.roll(cube, 1, 0) for s, found in whole.items() for c in found}
    np.savez_compressed(place / "predictions.npz", **answers)
    scans = {}
    for site, case, _ in ranked:
        scans[f"{site}/{case}/image"] = rng.integers(0, 255, (1, *cube.shape)).astype(np.uint8)
        scans[f"{site}/{case}/truth"] = cube[None]
    np.savez_compressed(place / "scans.npz", **scans)


def cases(shift=0.0, noise=0.0, seed=0, labels=("WT", "ET")):
    """Dice that differ from case to case; shifted, and more or less by chance."""
    rng, own = np.random.default_rng(7), np.random.default_rng(seed)

    def dice(_):
        return float(np.clip(rng.uniform(0.3, 0.8) + shift + noise * own.normal(), 0, 1))

    return {s: {f"{s}-{k}": {label: dice(label) for label in labels} for k in range(n)} for s, n in SITES.items()}


def load(*paths):
    """The methods of run folders, called as these are."""
    return methods(read(p, p.name) for p in paths)
