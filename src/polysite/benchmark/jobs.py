"""The runs of a benchmark as studies, and everything that is checked before the first one trains."""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import tomli_w

from polysite import assessment, config, study
from polysite.algorithms.clustered import Clustered
from polysite.algorithms.weighted import Weighted
from polysite.benchmark.bench import Bench
from polysite.benchmark.budget import equalise
from polysite.config import Study
from polysite.data.sources import Source
from polysite.data.split import SiteSplit, table
from polysite.engines.run_folder import RunFolder, file_name
from polysite.errors import ConfigError, PolysiteError, RunError, nearest

ADVISED = ("outlier", "clusters")  # keys of a method that use the result of an assessment


class Step(Protocol):
    """A callback for progress, with a note and the number of runs that have ended."""

    def __call__(self, note: str, done: int = 1) -> None:
        """Report progress."""
        ...


def silent(note: str, done: int = 1) -> None:
    """Ignore the progress."""


@dataclass(frozen=True, eq=False)
class Job:
    """One run of a benchmark."""

    method: str
    fold: int
    seed: int
    study: Study
    root: Path

    @property
    def place(self) -> str:
        """Relative path of the job."""
        return f"{file_name(self.method)}/fold{self.fold}-seed{self.seed}"

    @property
    def file(self) -> Path:
        """The file of its study."""
        return self.root / "studies" / f"{self.place}.toml"

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.root / "runs" / self.place

    @property
    def output(self) -> Path:
        """The file that holds what the run printed."""
        return self.run.with_name(f"{self.run.name}.txt")

    @property
    def title(self) -> str:
        """Method, fold and seed as text."""
        return f"{self.method}, fold {self.fold}, seed {self.seed}"

    @property
    def done(self) -> bool:
        """Whether it has ended and is evaluated."""
        if not (self.run / "config.toml").exists():
            return False
        return RunFolder(self.run).finished and any((self.run / "evaluation").glob("*/about.json"))

    def first(self, among: "Iterable[Job]") -> "Job | None":
        """Return the job that trains most of the first phases of this one; None if there is none."""
        candidates = [other for other in among if config.is_beginning(other.study, of=self.study)]
        return max(candidates, key=lambda other: len(other.study.then), default=None)


def studies(bench: Bench, overrides: Mapping[str, str], fold: int = 0, seed: int = 0) -> dict[str, Study]:
    """Return the study of every method on one fold with one seed, before any assessment."""
    return {n: _placed(_build(bench, m, overrides), fold, seed, bench.folds) for n, m in bench.methods.items()}


def _as_long_as(like: Study, chosen: Study) -> Study:
    """Return the study with the rounds and the decay of another one, which differs in fold and seed."""
    return replace(chosen, run=like.run, train=like.train, then=like.then)


def _build(bench: Bench, method: Mapping[str, Any], overrides: Mapping[str, str]) -> Study:
    changes = {k: v for k, v in method.items() if k not in ADVISED}
    return config.build(config.merge(bench.study, changes), overrides)


def _placed(chosen: Study, fold: int, seed: int, folds: int) -> Study:
    """Return the study on one fold with one seed; the split is the same for all seeds."""
    split = replace(chosen.split, seed=chosen.split.seed_of(0))
    return replace(chosen, seed=seed, split=replace(split, folds=folds, fold=fold) if folds else split)


def jobs(bench: Bench, out: Path, overrides: Mapping[str, str], step: Step = silent) -> Iterator[Job]:
    """Yield every run with its study. Studies with the same data share one source, which lists its files once."""
    sources: list[Source] = []
    equal = equalise(studies(bench, overrides, *bench.places[0]), bench.reference, bench.budget)  # for all places
    for fold, seed in bench.places:
        for name, chosen in studies(bench, overrides, fold, seed).items():
            chosen = _as_long_as(equal[name], chosen)
            same = next((s for s in sources if s == chosen.data), chosen.data)
            sources += [] if any(s is same for s in sources) else [same]
            chosen, method = replace(chosen, data=same), bench.methods[name]
            if any(key in method for key in ADVISED):
                step(f"assessing fold {fold}, seed {seed}", 0)
                chosen = _advised(chosen, method, _assess(bench, out, overrides, fold, seed))
            yield Job(name, fold, seed, chosen, out)


def _assess(bench: Bench, out: Path, overrides: Mapping[str, str], fold: int, seed: int) -> Mapping[str, Any]:
    """Return the distances between the hospitals of a fold; assess the hospitals unless the folder exists already."""
    path = out / "assess" / f"fold{fold}-seed{seed}"
    if not path.exists():
        assessment.assess(_placed(config.build(bench.study, overrides), fold, seed, bench.folds), path)
    distances: Mapping[str, Any] = json.loads((path / "assessment.json").read_text(encoding="utf-8"))["distances"]
    return distances


def _advised(chosen: Study, method: Mapping[str, Any], distances: Mapping[str, Any]) -> Study:
    """Return the study with a lower weight for the outlier, or with the clusters, found by the method's distance."""
    wanted = method["outlier"]["distance"] if "outlier" in method else method["clusters"]
    if wanted not in distances:
        raise ConfigError(f"the assessment has no distance {wanted!r}; {nearest(wanted, distances)}")
    distance, inner = distances[wanted], chosen.algorithm
    if "outlier" in method:
        return replace(chosen, algorithm=Weighted({distance["outlier"]: float(method["outlier"]["weight"])}, inner))
    groups = {f"group {k}": tuple(members) for k, members in enumerate(distance["clusters"], start=1)}
    train = [site for site, splits in study.deal_cases(chosen).items() if splits["train"]]
    alone = [site for site in train if not any(site in members for members in groups.values())]
    largest = max(groups, key=lambda name: len(groups[name]))  # it takes the sites with too few cases to be compared
    return replace(chosen, algorithm=Clustered({**groups, largest: (*groups[largest], *alone)}, inner))


def settings(out: Path, bench: Bench, overrides: Mapping[str, str]) -> str:
    """Return bench.toml, with the methods of earlier calls; refuse a folder that was begun with other settings."""
    asked = {
        "name": bench.name, "study": bench.study, "methods": bench.methods, "seeds": list(bench.seeds),
        "folds": bench.folds, "set": dict(overrides), "budget": bench.budget,
    }  # fmt: skip
    file = out / "bench.toml"
    if not file.exists():
        return tomli_w.dumps(asked)
    before = {"budget": "rounds", **tomllib.loads(file.read_text(encoding="utf-8"))}  # older folders name no budget
    odd = [k for k in asked if k != "methods" and before.get(k) != asked[k]]
    known = before["methods"]
    odd += [f"method {n}" for n, m in bench.methods.items() if n in known and known[n] != m]
    if odd:
        raise RunError(f"{out} was begun with other settings ({odd[0]}); choose another --out, or remove it")
    return tomli_w.dumps({**asked, "methods": {**known, **bench.methods}})


def check(work: Sequence[Job]) -> None:
    """Refuse, before anything trains, studies that do not fit their data, and methods that test different cases."""
    tested: dict[tuple[int, int], tuple[str, set[tuple[str, str]]]] = {}
    for job in work:
        try:
            dealt = study.check(job.study)
        except PolysiteError as problem:
            raise type(problem)(f"{job.title}: {problem}") from problem
        fits(job, dealt)
        cases = _scored(dealt)
        other, shared = tested.setdefault((job.fold, job.seed), (job.method, cases))
        if not cases & shared:
            raise ConfigError(
                f"{job.method} and {other} test different cases in fold {job.fold}, so they cannot be compared: give "
                "them the same split and sites"
            )
        tested[job.fold, job.seed] = other, cases & shared


def _scored(dealt: Mapping[str, SiteSplit]) -> set[tuple[str, str]]:
    """Return site and name of the cases that a run reports: test cases, or validation cases without any."""
    split = "test" if any(splits["test"] for splits in dealt.values()) else "validation"
    return {(site, case.name) for site, splits in dealt.items() for case in splits[split]}


def fits(job: Job, dealt: Mapping[str, SiteSplit]) -> None:
    """Refuse an existing run folder with another configuration or other cases."""
    if not job.run.exists():
        return
    wanted = config.parse(config.dump(study.pinned(job.study)))
    folder = RunFolder.open(job.run)
    if config.parse(folder.config) != wanted:
        raise RunError(f"{job.run} was trained with another configuration; choose another --out, or remove it")
    if table(dealt) != folder.split:
        raise RunError(f"{job.run} was trained on other cases than there are now; choose another --out, or remove it")
