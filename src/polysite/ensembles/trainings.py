"""Train a study several times with different seeds, and average the predictions: an ensemble of trainings.

The trainings have the same cases in the same splits, so that they differ by their luck alone: initial parameters, order
of cases, random patches. Their run folders lie beside that of the ensemble, in ``OUT-trainings/``.
"""

from dataclasses import replace
from pathlib import Path

from polysite import config, study
from polysite.algorithms.base import facts
from polysite.config import Study
from polysite.engines.run_folder import RunFolder
from polysite.engines.watch import Watch
from polysite.ensembles.making import ABOUT, made_ensemble
from polysite.errors import ConfigError, RunError
from polysite.study import Engine, Run


def train_ensemble(
    chosen: Study,
    out: Path | str | None = None,
    trainings: int = 3,
    watch: Watch = Watch(),
    *,
    engine: str | Engine = "simulator",
) -> Run:
    """Train a study several times and make an ensemble of the runs; a call with the same folder continues what was
    interrupted.

    Args:
        chosen: The study; the first training has its seed, the others the next ones.
        out: The new folder of the ensemble; by default one below ``runs/``.
        trainings: Number of trainings, at least two.
        watch: Observer of the progress.
        engine: ``simulator``, ``ray``, or an ``Engine`` with an address and a number of workers.
    """
    if trainings < 2:
        raise ConfigError(f"an ensemble of {trainings} trainings: it takes at least two")
    if any(facts(phase.algorithm).ends_study for phase in config.phases(chosen)):
        raise ConfigError(
            "the study ends with a model for each cluster of patients, and such models cannot be averaged: leave out "
            "the number of trainings"
        )
    target = Path(out) if out else RunFolder.fresh(Path("runs"), "ensemble")
    if target.exists() and (RunFolder(target).finished or not (target / ABOUT).exists()):
        raise RunError(f"{target} exists already; an ensemble never overwrites a run: choose another folder")
    fixed = study.with_fixed_cases(chosen)
    places = target.with_name(f"{target.name}-trainings")
    runs = []
    for seed in range(chosen.seed, chosen.seed + trainings):
        runs.append(places / f"seed{seed}")
        _train(replace(fixed, seed=seed), runs[-1], watch, engine)
    return made_ensemble(runs, target, watch=watch)


def _train(chosen: Study, run: Path, watch: Watch, engine: str | Engine) -> None:
    """Train one member, or go on where it stopped."""
    if not run.exists():
        study.train(chosen, run, watch, page=False, evaluate=False, engine=engine)
        return
    folder = RunFolder.open(run)
    if config.parse(folder.config, where=str(run / "config.toml")) != config.parse(config.dump(study.pinned(chosen))):
        raise RunError(f"{run} was trained with another configuration; choose another --out, or remove it")
    if not folder.finished:
        study.resume(run, watch, page=False, evaluate=False, engine=engine)
