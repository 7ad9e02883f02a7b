"""What an advice costs and delivers: local steps so far, and models of the advised study trained on all cases.

What is left of the budget trains the advised study for more rounds than were compared, up to 16 times as many; if it
affords that more than once, the study is trained up to five times and the predictions are averaged. On real hospitals
more rounds brought most (docs/results/advised.md), and the luck of a single training is as large as many differences
between methods (docs/results/hospitals.md).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from polysite import config, study
from polysite.advice.contenders import unselected
from polysite.advice.stages import MEMBERS, STEP, Effort, effort
from polysite.advice.tournament import Played, Runs
from polysite.benchmark.budget import lengthen, training_rounds
from polysite.benchmark.jobs import Job
from polysite.config import Study
from polysite.costs.budget import spent
from polysite.engines.run_folder import RunFolder
from polysite.ensembles import made_ensemble
from polysite.models.ensemble import Ensemble
from polysite.study import Run
from polysite.training.settings import Train

WATCHING = 0.05  # share of the cases that only watch the training of the advised study
CLIPPED = 1.0  # largest norm of a gradient in a long training, if the study has none
SETTLED = 0.9  # share of the rounds of a long first phase before which no model can start the last phase
WATCHED = 40  # validations of a long first phase, at least, if it has as many rounds
MODELS = "models"  # folder of the models of the advised study
LOWEST = 0.04  # learning rate at the end of a long training, of that at the beginning of its last phase


@dataclass(frozen=True)
class Delivered:
    """Models of a study, as a finished run."""

    run: Run
    members: int  # trainings on all cases whose predictions are averaged


@dataclass(frozen=True)
class Recipe:
    """What hospitals should train, and its models."""

    played: Played  # the strategy as it was compared
    study: Study  # to train on all cases
    name: str = ""  # of the strategy, if only some hospitals should use it
    delivered: Delivered | None = None

    def file(self, kind: str) -> str:
        """Return the name of its file, or folder, of a kind: of exceptions, such as study-own-1-after-fedavg."""
        return "-".join([kind, *self.name.split()])


def steps_of(chosen: Study) -> int:
    """Return the local steps of a study, over all hospitals and rounds."""
    return spent(study.loads(chosen), "steps")


def steps_spent(played: Iterable[Played]) -> int:
    """Return the local steps of all runs of a tournament; phases that a run took over from another count once.

    The inner folds of a study take nearly equal steps, so that the first one stands for all.
    """
    jobs = {job.run: job for each in played for job in each.jobs}
    steps: dict[tuple[str, Path], int] = {}
    for job in jobs.values():
        if (job.method, job.root) not in steps:
            first = job.first(other for other in jobs.values() if other is not job)
            steps[job.method, job.root] = steps_of(job.study) - (steps_of(first.study) if first else 0)
    return sum(steps[job.method, job.root] for job in jobs.values())


def to_train(
    compared: Sequence[Recipe], base: Study, left: float | None, members: int = MEMBERS
) -> tuple[list[Recipe], Effort]:
    """Return what is trained on all cases, and how long and how often what is left affords.

    Args:
        compared: Recipes with the studies as they were compared.
        base: The study that was given; theirs are validated as often.
        left: Steps that are left of the budget; None without a budget, where nothing is trained.
        members: Most trainings whose predictions are averaged.
    """
    short = [replace(recipe, study=watched(recipe.study, base)) for recipe in compared]
    if left is None:
        return short, Effort(1.0, 0)
    clusters = any(recipe.played.contender.ends_in_clusters for recipe in short)  # they cannot be averaged
    most = 1 if clusters else members
    found = effort(left, _steps(short), most)
    while True:  # numbers of rounds are rounded, so that the first one may take more than is left
        long = [replace(recipe, study=longer(recipe.study, found.times)) for recipe in short]
        if found.times == 1 or found.members * _steps(long) <= left:
            break
        found = replace(found, times=max(1.0, round(found.times - STEP, 2)))
    before, after = (sum(phase.run.rounds for r in each for phase in config.phases(r.study)) for each in (short, long))
    return (long if after > before else short), replace(found, times=round(after / before, 2))


def _steps(recipes: Iterable[Recipe]) -> int:
    return sum(steps_of(recipe.study) for recipe in recipes)


def watched(chosen: Study, base: Study) -> Study:
    """Return a study to train on all cases: it serves its last models, as was measured, and is validated as the given
    one.

    Nothing is chosen by validation cases, so few of them watch the training, and the others train; none ends it early.
    """
    last = unselected(chosen)
    every = max(1, round(base.run.validate_every * last.run.rounds / base.run.rounds))
    run = replace(last.run, validate_every=every, best_from=last.run.rounds, patience=None)
    return replace(last, run=run, split=replace(base.split, validation=min(base.split.validation, WATCHING)))


def longer(chosen: Study, times: float) -> Study:
    """Return a study with more rounds, clipped gradients and a learning rate that falls to nearly nothing at its end.

    While the rate is high, single batches can undo hundreds of rounds: on real hospitals FedAvg fell to Dice 0 for a
    while (docs/results/advised.md). So gradients are clipped in all phases. The last phase starts from the best model
    of the last tenth of the first one, by the watching cases, which are scored at least 40 times, or in every round.
    The watching cases are too few to choose among models that trained unequally long.

    Args:
        chosen: A study of at least two phases.
        times: Rounds, as a multiple of its own; 1: the study is returned as it is.
    """
    if times == 1:
        return chosen
    long = lengthen(chosen, times)
    gamma = LOWEST ** (1 / max(1, training_rounds(config.phases(long)[-1]) - 1))
    every = min(long.run.validate_every, max(1, long.run.rounds // WATCHED))
    *phases, last = long.then
    then = (*phases, replace(last, train=replace(last.train, gamma=gamma)))
    run = replace(long.run, best_from=ceil(SETTLED * long.run.rounds), validate_every=every)
    return replace(long, train=_clipped(long.train), run=run, then=then)


def _clipped(train: Train) -> Train:
    """Return settings with clipped gradients; differential privacy of patients clips by itself."""
    if train.clip_gradients or train.private.unit == "patient":
        return train
    return replace(train, clip_gradients=CLIPPED)


def train(recipes: Sequence[Recipe], count: int, runs: Runs) -> list[Recipe]:
    """Train on all cases that are not tested; return the recipes with their models.

    A training that fails is left out; a recipe of which all failed has no models.

    Args:
        recipes: What is trained.
        count: Number of trainings of each, with different seeds; a study of clusters of patients, whose models
            cannot be averaged, is trained once.
        runs: Where and how they take place.
    """
    out, trainer = runs.folder, runs.trainer
    jobs = {recipe.file(MODELS): _jobs(recipe, count, out / "trained") for recipe in recipes}
    missing = [job for name, mine in jobs.items() if not RunFolder(out / name).finished for job in mine]
    trainer.step(f"{len(missing)} trainings of the advised study on all cases", 0)
    failed = trainer.train(missing)
    for title, why in failed.items():
        trainer.step(f"{title} failed and is left out: {why}", 0)
    finished = {name: [job.run for job in mine if job.title not in failed] for name, mine in jobs.items()}
    made = {name: _delivered(folders, out / name) for name, folders in finished.items() if folders}
    return [replace(recipe, delivered=made.get(recipe.file(MODELS))) for recipe in recipes]


def _jobs(recipe: Recipe, count: int, root: Path) -> list[Job]:
    name, chosen = recipe.file(MODELS), recipe.study
    seeds = range(chosen.seed, chosen.seed + (1 if recipe.played.contender.ends_in_clusters else count))
    alone = len(seeds) == 1
    return [Job(name, chosen.split.fold, seed, replace(chosen, seed=seed), root, evaluate=alone) for seed in seeds]


def _delivered(runs: Sequence[Path], out: Path) -> Delivered:
    """Return the run of one training, moved to this folder, or the ensemble of several."""
    if not out.exists() and len(runs) == 1:
        runs[0].rename(out)
    run = made_ensemble(runs, out) if len(runs) > 1 else Run(RunFolder(out), RunFolder(out).result)
    model = config.parse(run.folder.config, where=str(out / "config.toml")).model
    return Delivered(run, len(model.members) if isinstance(model, Ensemble) else 1)
