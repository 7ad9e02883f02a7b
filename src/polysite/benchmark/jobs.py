"""The runs of a benchmark as studies, and everything that is checked before the first one trains."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any, Protocol

import tomli_w

from polysite import assessment, config, study
from polysite.algorithms.clustered import Clustered
from polysite.algorithms.weighted import Weighted
from polysite.benchmark import axes
from polysite.benchmark.axes import NamedFederation, Variant
from polysite.benchmark.bench import Bench
from polysite.benchmark.budget import equalise
from polysite.config import Study
from polysite.data.case import SPLITS
from polysite.data.federation import Natural
from polysite.data.files import Files
from polysite.data.sources import AtHospitals, Source
from polysite.data.split import SiteSplit, table
from polysite.engines.run_folder import RunFolder, file_name
from polysite.errors import ConfigError, DataError, PolysiteError, RunError, nearest
from polysite.foreign import read_toml
from polysite.storage import write_file
from polysite.study.estimate import TrainingStep, device_memory, folder_bytes, free_disk, gigabytes, step_bytes

ADVISED = ("outlier", "clusters")  # keys of a method that use the result of an assessment
OWN = (*ADVISED, "tuning")  # keys of a method that are no sections of a study
Key = tuple[str, str]  # site and name of a case
REFUSED = 2  # exit code of a job that was refused with a message; its worker process takes the next one


class Step(Protocol):
    """A callback for progress."""

    def __call__(self, note: str, done: int = 1) -> None:
        """Report what happens, and how many runs have ended with it."""
        ...


def silent(*progress: Any, **more: Any) -> None:
    """Ignore the progress."""


@dataclass(frozen=True, eq=False)
class Job:
    """One run of a benchmark."""

    method: str
    fold: int
    seed: int
    study: Study
    root: Path
    federations: tuple[str, ...] = ("",)  # titles; a pooled run serves all federations of the same cases
    until: int | None = None  # number of rounds after which it pauses; None: it trains to the end
    evaluate: bool = True  # compute all measures at the end, not only the score

    @property
    def place(self) -> str:
        """Relative path of the job."""
        within = f"{file_name(self.federations[0])}/" if self.federations[0] else ""
        return f"{file_name(self.method)}/{within}{_spot(self.fold, self.seed)}"

    @property
    def file(self) -> Path:
        """The file of its study."""
        return self.root / "studies" / f"{self.place}.toml"

    def write(self) -> None:
        """Write the file of its study."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = config.dump(self.study)
        write_file(self.file, lambda path: path.write_text(text, encoding="utf-8"))

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
        """Method, federation, fold and seed as text."""
        within = f"{self.federations[0]}, " if self.federations[0] else ""
        return f"{self.method}, {within}fold {self.fold}, seed {self.seed}"

    @property
    def done(self) -> bool:
        """Whether it has ended and is evaluated if it shall be, or has paused where it should."""
        if not (self.run / "config.toml").exists():
            return False
        if self.until is not None and RunFolder(self.run).reached(self.until):
            return True
        evaluated = not self.evaluate or any((self.run / "evaluation").glob("*/about.json"))
        return RunFolder(self.run).finished and evaluated

    @property
    def validated_once(self) -> bool:
        """Whether its study is validated only at its end."""
        return self.study.run.validate_every >= self.study.run.rounds

    def paused(self, share: float) -> "Job":
        """Return a job that trains up to a share of its rounds, rounded up to a validation.

        A study that is validated only at its end is validated where it pauses, too.
        """
        if share == 1:
            return self
        total = sum(phase.run.rounds for phase in config.phases(self.study))
        every = 1 if self.validated_once else self.study.run.validate_every
        return replace(self, until=min(total, every * ceil(share * total / every)))

    def first(self, among: "Iterable[Job]") -> "Job | None":
        """Return the job that trains most of the first phases of this one; None if there is none."""
        candidates = [other for other in among if config.is_beginning(other.study, of=self.study)]
        return max(candidates, key=lambda other: len(other.study.then), default=None)


class Trainer(Protocol):
    """What trains jobs: processes of this machine, or a cluster."""

    @property
    def step(self) -> Step:
        """Report progress."""
        ...

    def train(self, jobs: Sequence[Job]) -> Mapping[str, str]:
        """Train the study of every job into its run folder, unless that is done; return why some failed, by title.

        A job that begins with another one goes on from its run.
        """
        ...


def inner_jobs(root: Path, studies: Mapping[str, Study], inner: int, folds: Sequence[int] = ()) -> dict[str, list[Job]]:
    """Return runs of studies that leave out one inner fold each, all without any folds; they compute the score alone.
    Refuse runs that do not fit their data or disk."""
    found = {n: [_inner_job(root, n, s, inner, k) for k in folds or range(inner)] for n, s in studies.items()}
    every = [job for mine in found.values() for job in mine]
    check(every)
    refuse_too_large(every, root)
    return found


def _inner_job(root: Path, name: str, chosen: Study, inner: int, fold: int) -> Job:
    split = replace(chosen.split, seed=chosen.split.seed_of(chosen.seed), inner=inner, inner_fold=fold)
    return Job(name, fold, chosen.seed, replace(chosen, split=split), root, evaluate=False)


def variants(bench: Bench, overrides: Mapping[str, str], federation: NamedFederation | None = None) -> list[Variant]:
    """Return every method of a benchmark with every combination of its swept values."""
    chosen = federation or bench.dealt[0]
    asked = next((key for key in bench.sweep if key in overrides), None)
    if asked is not None:
        raise ConfigError(f"--set {asked}={overrides[asked]}, but {bench.name} sweeps this key; leave it out")
    bases = {n: _build(bench, Variant(n, n), overrides, chosen) for n in bench.methods} if bench.sweep else {}
    named = bench.sweep_methods
    swept = {n: bench.sweep if not named or n in named else {} for n in bench.methods}
    found = [v for n, base in bases.items() for v in axes.variants(n, base, swept[n], n in named)]
    for key in bench.sweep:
        if not any(key in v.point for v in found):
            raise ConfigError(f"sweep.{key!r}: no method of {bench.name} has this key; {_near(key, bases.values())}")
    return found or [Variant(n, n) for n in bench.methods]


def _near(key: str, among: Iterable[Study]) -> str:
    """Return a hint for a key that none of the studies has: the nearest name in its section, or all names there."""
    known = {tuple(k.rpartition(".")[::2]) for each in among for k in config.flat(config.plain(each))}
    section, last = key.rpartition(".")[::2]
    names = {name for at, name in known if at == section}
    if not names:
        return f"there is no section {section!r}; {nearest(section, {at for at, _ in known if at})}"
    return f"in {section!r}, {nearest(last, names)}"


def studies(
    bench: Bench, overrides: Mapping[str, str], fold: int = 0, seed: int = 0, federation: NamedFederation | None = None
) -> dict[str, Study]:
    """Return the study of every variant on one fold with one seed in one federation, before any assessment."""
    chosen = federation or bench.dealt[0]
    every = variants(bench, overrides, chosen)
    return {v.name: _placed(_build(bench, v, overrides, chosen), fold, seed, bench.folds) for v in every}


def _equal(bench: Bench, overrides: Mapping[str, str], federation: NamedFederation) -> dict[str, Study]:
    """Return the studies of a federation with the rounds that the budget gives, the same for all folds and seeds."""
    return equalise(studies(bench, overrides, *bench.places[0], federation), bench.reference, bench.budget)


def _as_long_as(like: Study, chosen: Study) -> Study:
    """Return a study with the rounds and the decay of ``like``, the same method on another fold and seed."""
    return replace(chosen, algorithm=like.algorithm, run=like.run, train=like.train, then=like.then)


def _build(bench: Bench, variant: Variant, overrides: Mapping[str, str], federation: NamedFederation) -> Study:
    changes = {k: v for k, v in bench.methods[variant.method].items() if k not in OWN}
    shared = config.merge(bench.study, federation.study)
    return config.build(config.merge(shared, changes), {**overrides, **variant.overrides})


def _placed(chosen: Study, fold: int, seed: int, folds: int) -> Study:
    """Return the study on one fold with one seed; the split is the same for all seeds."""
    split = replace(chosen.split, seed=chosen.split.seed_of(0))
    return replace(chosen, seed=seed, split=replace(split, folds=folds, fold=fold) if folds else split)


def _spot(fold: int, seed: int) -> str:
    return f"fold{fold}-seed{seed}"


def jobs(bench: Bench, out: Path, overrides: Mapping[str, str], step: Step = silent) -> list[Job]:
    """Return every run with its study. Studies with the same data share one source, which lists its files once.

    Pooled training does not depend on the site of a case, so it runs once for all federations of the same cases.
    """
    sources: list[Source] = []
    listed: list[Job] = []
    pooled: dict[tuple[Any, ...], int] = {}
    methods = {v.name: bench.methods[v.method] for v in variants(bench, overrides)}
    equal = {f.title: _equal(bench, overrides, f) for f in bench.dealt}
    for (fold, seed), federation in product(bench.places, bench.dealt):
        for name, chosen in studies(bench, overrides, fold, seed, federation).items():
            chosen = _as_long_as(equal[federation.title][name], chosen)
            same = next((s for s in sources if s == chosen.data), chosen.data)
            sources += [] if any(s is same for s in sources) else [same]
            chosen, method = replace(chosen, data=same), methods[name]
            key = (name, pooled_training(chosen) if bench.federations else None)
            if key[1] is not None and (at := pooled.setdefault(key, len(listed))) < len(listed):
                listed[at] = replace(listed[at], federations=(*listed[at].federations, federation.title))
                continue
            if any(word in method for word in ADVISED):
                step(f"assessing {federation.title or 'the hospitals'}, fold {fold}, seed {seed}", 0)
                base = _base(bench, overrides, federation, fold, seed)
                chosen = _advised(chosen, method, _distances(assess(out, base, federation, chosen, name)))
            listed.append(Job(name, fold, seed, chosen, out, (federation.title,)))
    return listed


def pooled_training(chosen: Study) -> tuple[Any, ...] | None:
    """Return what pooled training depends on: all settings except the federation, and the part and the hidden
    modalities of every case, at any site. None if a phase of the study is not pooled."""
    if not all(phase.run.pooled for phase in config.phases(chosen)):
        return None
    dealt = study.deal_cases(chosen)
    cases = frozenset((c.source, c.hidden, k) for splits in dealt.values() for k in SPLITS for c in splits[k])
    return config.dump(replace(chosen, federation=Natural())), cases


def _base(bench: Bench, overrides: Mapping[str, str], federation: NamedFederation, fold: int, seed: int) -> Study:
    """Return the study that all methods of a federation start from."""
    shared = config.merge(bench.study, federation.study)
    return _placed(config.build(shared, overrides), fold, seed, bench.folds)


def assess(out: Path, base: Study, federation: NamedFederation, chosen: Study | None = None, method: str = "") -> Path:
    """Assess a federation, unless the folder exists already; return the folder.

    A method with other data, another federation or another preparation than the benchmark has its own assessment.
    """
    trained = {k: getattr(base, k) for k in ("algorithm", "model", "train", "run", "cost", "then")}
    own = chosen is not None and replace(chosen, **trained) != base
    names = [*([federation.title] if federation.title else []), *([method] if own else [])]
    path = Path(out, "assess", *map(file_name, names), _spot(base.split.fold, base.seed))
    if not path.exists():
        assessment.assess(chosen if own and chosen is not None else base, path)
    return path


def assess_federations(bench: Bench, out: Path, overrides: Mapping[str, str], step: Step = silent) -> dict[str, str]:
    """Assess every federation once for every assignment of cases; return why some cannot be assessed, by title."""
    reasons: dict[str, str] = {}
    for federation in bench.federations:
        known: set[str] = set()
        for fold, seed in bench.places:
            base = _base(bench, overrides, federation, fold, seed)
            deal = table(study.deal_cases(base)) + ("" if isinstance(base.data, Files) else str(seed))  # phantoms
            if deal in known:
                continue
            known.add(deal)
            step(f"assessing {federation.title}, fold {fold}, seed {seed}", 0)
            try:
                assess(out, base, federation)
            except DataError as problem:
                reasons[federation.title] = str(problem)
    return reasons


def _distances(folder: Path) -> Mapping[str, Any]:
    """Return the distances between the hospitals from the folder of an assessment."""
    return assessment.read_part(folder, "distances")


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
    asked: dict[str, Any] = {
        "name": bench.name, "study": bench.study, "methods": bench.methods, "seeds": list(bench.seeds),
        "folds": bench.folds, "set": dict(overrides), "budget": bench.budget,
        "federations": [{"title": f.title, **f.study} for f in bench.federations], "sweep": bench.sweep,
        "tuning": bench.tuning.plain() if bench.tuning else {},
    }  # fmt: skip
    absent: dict[str, Any] = {"federations": [], "sweep": {}, "tuning": {}}
    file = out / "bench.toml"
    before = {"budget": "rounds", **absent, **read_toml(file)} if file.exists() else asked  # older ones name no budget
    odd = [key for key, value in asked.items() if key != "methods" and before.get(key) != value]
    known = before["methods"]
    odd += [f"method {n}" for n, each in asked["methods"].items() if n in known and known[n] != each]
    asked["methods"] = {**known, **asked["methods"]}
    if odd:
        raise RunError(f"{out} was begun with other settings ({odd[0]}); choose another --out, or remove it")
    return tomli_w.dumps({key: value for key, value in asked.items() if value or key not in absent})


def check(work: Sequence[Job], distance: bool = False) -> tuple[str, ...]:
    """Refuse, before anything trains, studies that do not fit their data, and methods that test different cases.

    Args:
        work: The runs.
        distance: Whether the figure ``distance`` was asked for, which compares federations.

    Returns:
        Remarks on what the comparison of the federations rests on.
    """
    tested: dict[tuple[str, int, int], tuple[str, dict[Key, Key]]] = {}
    for job in work:
        try:
            dealt = study.check(job.study)
        except PolysiteError as problem:
            raise type(problem)(f"{job.title}: {problem}") from problem
        fits(job, dealt)
        cases = _scored(dealt)
        at = job.federations[0], job.fold, job.seed
        other, known = tested.setdefault(at, (job.method, cases))
        if not cases.keys() & known.keys():
            where = f"{job.federations[0]}, fold {job.fold}".removeprefix(", ")
            raise ConfigError(
                f"{job.method} and {other} test different cases in {where}, so they cannot be compared: give "
                "them the same split and sites"
            )
        tested[at] = other, {case: source for case, source in known.items() if case in cases}
    if any(job.study.run.pooled for job in work):  # a loss is then one within a federation
        return ()
    by_seed: dict[int, dict[str, set[Key]]] = {}
    for (federation, _, seed), (_, cases) in tested.items():
        by_seed.setdefault(seed, {}).setdefault(federation, set()).update(cases.values())
    return _on_shared(list(by_seed.values()), distance)


def _scored(dealt: Mapping[str, SiteSplit]) -> dict[Key, Key]:
    """Return the cases that a run reports, with their site and name in the data: test cases, or validation cases
    without any."""
    split = "test" if any(splits["test"] for splits in dealt.values()) else "validation"
    return {(site, case.name): case.source for site, splits in dealt.items() for case in splits[split]}


def _on_shared(seeds: Sequence[Mapping[str, set[Key]]], distance: bool) -> tuple[str, ...]:
    """Return a remark if federations test different cases; refuse ``distance`` if they share none.

    Args:
        seeds: The cases that every federation tests, for every seed.
        distance: Whether losses are drawn against distances.
    """
    fewest = min(seeds, key=lambda tested: len(set.intersection(*tested.values())), default={"": set[Key]()})
    shared, sizes = len(set.intersection(*fewest.values())), sorted(map(len, fewest.values()))
    if shared == sizes[-1]:
        return ()
    advice = "set split.keep = true, or add a method with run.pooled = true"
    if distance and not shared:
        raise ConfigError(
            f"the figure 'distance' compares the scores of {len(sizes)} federations, but no case is tested in all of "
            f"them: {advice}"
        )
    each = f"{sizes[0]} to {sizes[-1]}" if sizes[0] < sizes[-1] else str(sizes[0])
    return (
        f"Losses compare federations on the cases that they share: all {len(sizes)} federations share {shared} test "
        f"cases, and each has {each}. To compare more, {advice}.",
    )


def refuse_too_large(work: Sequence[Job], out: Path) -> None:
    """Refuse, by lower bounds, a run whose training step exceeds the memory, and runs whose models exceed the free
    disk space. Every run estimates the rest when it starts.

    Args:
        work: The runs.
        out: Folder of the models, which need not exist.
    """
    steps: dict[Any, TrainingStep] = {}
    stored = 0
    for job in work:
        chosen = job.study
        key = (chosen.model, chosen.train, chosen.data.task)
        if key not in steps:
            steps[key] = step_bytes(chosen, study.build_module(chosen))
            needed, (device, memory) = steps[key].total, device_memory(chosen)
            if needed > memory.total:
                patch = " x ".join(map(str, chosen.train.patch))
                raise ConfigError(
                    f"{job.title}: a training step with {chosen.train.batch} patches of {patch} takes at least "
                    f"{gigabytes(needed)} of memory, and {device} has {gigabytes(memory.total)}; choose a smaller "
                    "train.batch or train.patch"
                )
        model = steps[key].model
        stored += 0 if job.run.exists() else folder_bytes(chosen, model, model)
    free = free_disk(out)
    if stored > free:
        raise ConfigError(
            f"the models of {len(work)} runs take at least {gigabytes(stored)}, and {out} has {gigabytes(free)} "
            "free; choose another --out, or fewer methods with --only"
        )


def why_failed(work: Mapping[str, Sequence[Job]], failed: Mapping[str, str]) -> dict[str, str]:
    """Return the first reason for which a run of every name failed; empty if there is none."""
    return {name: next((failed[j.title] for j in jobs if j.title in failed), "") for name, jobs in work.items()}


def fits(job: Job, dealt: Mapping[str, SiteSplit]) -> None:
    """Refuse an existing run folder with another configuration or other cases."""
    if not job.run.exists():
        return
    wanted = config.parse(config.dump(study.pinned(job.study)))
    folder = RunFolder.open(job.run)
    known = config.parse(folder.config, where=str(job.run / "config.toml"))
    if isinstance(known.data, AtHospitals):  # here they are only counted
        known = replace(known, data=wanted.data)
    if known != wanted:
        raise RunError(f"{job.run} was trained with another configuration; choose another --out, or remove it")
    if folder.split and table(dealt) != folder.split:  # real hospitals keep theirs
        raise RunError(f"{job.run} was trained on other cases than there are now; choose another --out, or remove it")
