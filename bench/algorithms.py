"""Every global algorithm on one federation: mean Dice per hospital, over several seeds, and how it stands to FedAvg.

``phantom``: the demonstration's four simulated hospitals, of which ``island`` is the outlier; test patients.
``tcga``: four real hospitals of TCGA-LGG (--data names the folder), small U-Net, patches of 96 x 96 x 16; the last
three cases of each, by name, are for validation, so its figures are of validation patients, after the last round.

Runs are kept below --out; those that are finished there are not run again.
"""

import argparse
import csv
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

OMEGA = {"algorithm.name": "weighted", "algorithm.weights.OUTLIER": "0.3"}
METHODS = {
    "centralised": {"run.pooled": "true"},
    "local": {"algorithm.name": "local"},
    "fedavg": {},
    "fedprox": {"algorithm.name": "fedprox", "algorithm.mu": "0.01"},
    "scaffold": {"algorithm.name": "scaffold", "algorithm.uniform": "false"},
    "fednova": {"algorithm.name": "fednova"},
    "fedadam": {"algorithm.name": "fedadam", "algorithm.server.lr": "0.03"},
    "fedyogi": {"algorithm.name": "fedyogi", "algorithm.server.lr": "0.03"},
    "fedadagrad": {"algorithm.name": "fedadagrad", "algorithm.server.lr": "0.1"},
    "q-fedavg": {"algorithm.name": "qfedavg", "algorithm.q": "1.0"},
    "fedcostwavg": {"algorithm.name": "fedcostwavg"},
    "fedpidavg": {"algorithm.name": "fedpidavg"},
    "top-k": {"algorithm.name": "top_k", "algorithm.keep": "3"},
    "feddyn": {"algorithm.name": "feddyn", "algorithm.alpha": "0.1"},
    "fedexp": {"algorithm.name": "fedexp"},
    "moon": {"algorithm.name": "moon", "algorithm.mu": "0.1"},
    "median": {"algorithm.name": "median"},
    "trimmed mean": {"algorithm.name": "trimmed_mean", "algorithm.beta": "0.25"},
    "krum": {"algorithm.name": "krum", "algorithm.f": "0"},
    "multi-krum": {"algorithm.name": "krum", "algorithm.f": "0", "algorithm.keep": "3"},
    "geometric median": {"algorithm.name": "geometric_median"},
    "fedavg, omega 0.3": OMEGA,
    "fedprox, omega 0.3": {**OMEGA, "algorithm.inner.name": "fedprox"},
    "scaffold, omega 0.3": {**OMEGA, "algorithm.inner.name": "scaffold", "algorithm.inner.uniform": "false"},
}
ADAPTIVE = ("fedadam", "fedyogi", "fedadagrad")
RATES = {  # of the sites, where it is not that of the study: chosen on the validation patients of seed 0
    "phantom": dict.fromkeys(ADAPTIVE, "0.4"),
    "tcga": dict.fromkeys(("centralised", "local", *ADAPTIVE), "0.1"),
}
PHANTOM = {  # beside the demonstration's study
    "train.optimiser": "sgd",
    "train.lr": "1.6",
    "train.gamma": "0.98",
    "run.rounds": "40",
    "run.checkpoint_every": "1000",
}
TCGA = """
[model]
name = "unet_small"
[data]
name = "files"
exclude = ["EZ"]              # one case only
[train]
lr = 0.4
patches = 2                   # of every case in a round
batch = 4
patch = [96, 96, 16]
[run]
rounds = 150
validate_every = 10
checkpoint_every = 1000
"""
OUTLIERS = {"phantom": "island", "tcga": "HT"}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("federation", choices=["phantom", "tcga"])
    options.add_argument("--data", type=Path, default=Path("../shared/data/tcga_lgg"), help="for tcga")
    options.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options.add_argument("--outlier", help="the hospital that gets the factor omega")
    options.add_argument("--out", type=Path, help="where runs are kept; a temporary folder otherwise")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = options.parse_args()
    outlier = given.outlier or OUTLIERS[given.federation]
    sets = dict(s.split("=", 1) for s in given.set)
    with tempfile.TemporaryDirectory() as temporary:
        out = given.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        if given.federation == "tcga":
            sets = {"data.path": str(given.data), "split.file": str(validation_by_name(given.data, out)), **sets}
        jobs = {(m, s): (given.federation, m, s, outlier, sets, out) for m in given.methods for s in given.seeds}
        if given.jobs > 1:
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // given.jobs)))
        with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
            running = {pool.submit(score, *job): key for key, job in jobs.items()}
            for done in as_completed(running):
                method, seed = running[done]
                print(f"{method}, seed {seed}: {mean(done.result()[0]):.3f}", flush=True)
            found = {running[job]: job.result() for job in running}
    show(given.methods, given.seeds, found)


def validation_by_name(folder: Path, out: Path, last: int = 3) -> Path:
    """A fold file that puts the last cases of every hospital, by name, into validation and the others into training."""
    path = out / "validation_by_name.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["Subject_ID", "Partition_ID", "Split", "Site"])
        for site in ("CS", "DU", "FG", "HT"):
            cases = sorted(c.name for c in (folder / site).iterdir() if c.is_dir())
            for case in cases:
                table.writerow([case, site, "validation" if case in cases[-last:] else "train", site])
    return path


def score(federation, method, seed, outlier, sets, out):
    """(score of every hospital's cases, best validation score) of one run."""
    from polysite import config, demo, study

    chosen = {k.replace("OUTLIER", outlier): v for k, v in METHODS[method].items()}
    rates = {"train.lr": RATES[federation][method]} if method in RATES[federation] else {}
    path = out / federation / f"{method.replace(' ', '_').replace(',', '')}-{seed}"
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        run = study.resume(path, page=False)
    else:
        text, base = (demo.STUDY, PHANTOM) if federation == "phantom" else (TCGA, {})
        run = study.train(config.parse(text, {**base, **chosen, **rates, **sets, "seed": str(seed)}), path, page=False)
    last = run.folder.records()[-1].validation
    best = max(r.mean_score for r in run.folder.records() if r.mean_score is not None)
    if run.split == "test":
        return {s: [c.mean for c in cases.values()] for s, cases in run.result.test.items()}, best
    return {s: [statistics.fmean(v.score.values())] * v.cases for s, v in last.items()}, best


def mean(sites):
    return statistics.fmean(d for cases in sites.values() for d in cases)


def show(methods, seeds, found) -> None:
    """A table in Markdown: hospitals, all patients with the deviation over seeds, worst hospital, against FedAvg."""
    sites = sorted(next(iter(found.values()))[0])
    print(f"\n| method | {' | '.join(sites)} | all ± over seeds | worst | − FedAvg | best validation |")
    print("|---" * (len(sites) + 5) + "|")
    usual = [mean(found["fedavg", s][0]) for s in seeds] if "fedavg" in methods else [float("nan")]
    for m in methods:
        runs = [found[m, s] for s in seeds]
        each = [statistics.fmean(statistics.fmean(r[0][site]) for r in runs) for site in sites]
        whole = [mean(r[0]) for r in runs]
        spread = f" ± {statistics.stdev(whole):.3f}" if len(whole) > 1 else ""
        gain = f"{statistics.fmean(whole) - statistics.fmean(usual):+.3f}"
        best = statistics.fmean(r[1] for r in runs)
        cells = " | ".join(f"{d:.3f}" for d in each)
        print(f"| {m} | {cells} | {statistics.fmean(whole):.3f}{spread} | {min(each):.3f} | {gain} | {best:.3f} |")


if __name__ == "__main__":
    main()
