"""How a search chooses its candidates: polysite's successive halving against the samplers and pruners of Optuna.

First, every point of a small search space is trained once on phantoms, and its validation scores round by round are
kept (``--table``). Then searches are replayed on that table, with budgets in whole trainings: polysite's (equally many
random candidates of every method, the better third goes on), and Optuna's with its tree-structured Parzen estimator or
random sampler, and its pruner for asynchronous successive halving. Printed is the mean regret over ``--repeats`` seeds:
the last score of the best point of the table minus that of the chosen one. Optuna is installed into ``.cache/``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import polysite as ps
from polysite import config, study
from polysite.tuning.halving import affordable, rungs

ROUNDS, EVERY = 27, 1
RATES = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]
SERVER = {"adam": [0.01, 0.03, 0.1], "sgd": [0.1, 0.3, 1.0]}
OPTUNA = Path(".cache/optuna")

Point = tuple[str, float, float]  # method, learning rate, that of the server
Curves = dict[Point, list[float]]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--table", type=Path, default=Path(".cache/samplers.json"))
    options.add_argument("--repeats", type=int, default=200)
    options.add_argument("--budgets", type=float, nargs="+", default=[3, 6, 12])
    given = options.parse_args()
    curves = table(given.table)
    best = max(curve[-1] for curve in curves.values())
    print(f"{len(curves)} points; last scores {min(c[-1] for c in curves.values()):.3f} to {best:.3f}")
    for budget in given.budgets:
        for name, search in {"polysite": ours, "optuna, TPE": parzen, "optuna, random": drawn}.items():
            found = [best - curves[search(curves, budget, seed)][-1] for seed in range(given.repeats)]
            error = stdev(found) / len(found) ** 0.5
            print(f"{budget:5.1f} trainings  {name:15s} regret {fmean(found):.4f} ± {error:.4f}", flush=True)


def points() -> list[Point]:
    """Return the search space."""
    plain: list[Point] = [("fedavg", lr, 0.0) for lr in RATES]
    return plain + [(name, lr, rate) for name, rates in SERVER.items() for lr in RATES for rate in rates]


def table(file: Path) -> Curves:
    """Train every point once, unless the table is there; return its validation scores."""
    known = {tuple(k): v for k, v in json.loads(file.read_text())} if file.exists() else {}
    for point in points():
        if point not in known:
            known[point] = curve(point)
            print(point, f"{known[point][-1]:.3f}", flush=True)
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps([[list(k), v] for k, v in known.items()]))
    return known


def curve(point: Point) -> list[float]:
    """Return the validation scores of a training, round by round; those of a diverged one are 0."""
    method, lr, rate = point
    sites = {name: {"cases": 8, "scanner": k, "contrast": 1.0} for k, name in enumerate("abc")}
    server = {} if method == "fedavg" else {"server": {"name": method, "lr": rate}}
    server |= {"server": {**server["server"], "momentum": 0.9}} if method == "sgd" else {}
    chosen = config.build(
        {
            "algorithm": {"name": "fedavg", **server},
            "data": {"name": "phantom", "shape": [24, 24, 24], "sites": sites},
            "model": {"name": "unet_small", "filters": [4, 8, 16]},
            "split": {"validation": 0.4, "test": 0.0},
            "train": {"lr": lr, "batch": 2, "patch": [16, 16, 16], "augment": "none", "device": "cpu"},
            "run": {"rounds": ROUNDS, "validate_every": EVERY, "checkpoint_every": 1000},
        },
        {},
    )
    with tempfile.TemporaryDirectory() as place:
        try:
            run = study.train(chosen, Path(place) / "run", evaluate=False, page=False)
        except ps.errors.PolysiteError:
            return [0.0] * ROUNDS
        return [float(record.mean_score or 0.0) for record in run.folder.records()]


def ours(curves: Curves, budget: float, seed: int) -> Point:
    """Return the choice of polysite's search."""
    rng, methods = np.random.default_rng(seed), ["fedavg", *SERVER]
    shortest = 2 * EVERY / ROUNDS
    each = affordable(budget, len(curves), shortest) // len(methods)
    going: list[Point] = []
    for method in methods:
        mine = [p for p in curves if p[0] == method]
        going += [mine[k] for k in rng.permutation(len(mine))[: max(1, each)]]
    plan = rungs(len(going), shortest)
    for k, rung in enumerate(plan):
        at = max(1, round(rung.share * ROUNDS))
        going.sort(key=lambda p: -fmean(curves[p][max(0, at - 2) : at]))
        if k + 1 < len(plan):
            going = going[: plan[k + 1].candidates]
    return going[0]


def parzen(curves: Curves, budget: float, seed: int) -> Point:
    """Return the choice of Optuna's tree-structured Parzen estimator with its pruner."""
    import optuna

    return replayed(curves, budget, optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True))


def drawn(curves: Curves, budget: float, seed: int) -> Point:
    """Return the choice of Optuna's random sampler with its pruner."""
    import optuna

    return replayed(curves, budget, optuna.samplers.RandomSampler(seed=seed))


def replayed(curves: Curves, budget: float, sampler: object) -> Point:
    """Replay a search of Optuna until the budget is spent; the best of the points that were not pruned."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=3, reduction_factor=3)
    search = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)  # type: ignore[arg-type]
    left, whole = budget * ROUNDS, dict[Point, float]()
    seen: dict[Point, int] = {}
    while left > 0:
        trial = search.ask()
        method = trial.suggest_categorical("method", ["fedavg", *SERVER])
        lr = trial.suggest_categorical("lr", RATES)
        rate = trial.suggest_categorical(f"rate of {method}", SERVER[method]) if method in SERVER else 0.0
        point = (method, lr, rate)
        value, pruned = 0.0, False
        for k in range(ROUNDS):
            left -= k >= seen.get(point, 0)  # what was trained before is on disk
            value = fmean(curves[point][max(0, k - 1) : k + 1])
            trial.report(value, k + 1)
            if trial.should_prune():
                pruned = True
                break
            if left <= 0:
                break
        seen[point] = max(seen.get(point, 0), k + 1)
        if k + 1 == ROUNDS:
            whole[point] = value
        if pruned:
            search.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            search.tell(trial, value)
        if len(search.trials) > 400:
            break
    return max(whole or seen, key=lambda p: whole.get(p, curves[p][seen[p] - 1]))


if __name__ == "__main__":
    if not OPTUNA.exists():
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", OPTUNA, "optuna"], check=True)
    sys.path.append(str(OPTUNA))
    main()
