"""From a study to a finished run: load the cases, build the sites, train, write everything down."""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

from polysite import config
from polysite.algorithms import name_of
from polysite.algorithms.base import Algorithm
from polysite.algorithms.cfft import Cfft
from polysite.algorithms.fine_tune import FineTune
from polysite.assess.assessment import Assessment, analyse
from polysite.assess.exchange import INTENSITY
from polysite.assess.verdict import Verdict, judge
from polysite.config import Study
from polysite.cost.model import Cost, Load, planned
from polysite.cost.rehearsal import Effort, rehearse
from polysite.data.cache import Cache, place
from polysite.data.case import PARTS, Case, Patient
from polysite.data.files import Files
from polysite.data.split import Parts, table
from polysite.engines import rounds
from polysite.engines.folder import RunFolder, versions
from polysite.engines.sampling import cohort
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError, DataError, RunError
from polysite.models.encoders import Embedder
from polysite.report import assess_page
from polysite.report.publish import drafted, vacant
from polysite.site import Site
from polysite.train import tasks
from polysite.train.survey import SurveySite
from polysite.train.torch_site import Network, TorchSite, device_of
from polysite.tree import Tree

POOLED = "pooled"


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: RunFolder
    result: Mapping[str, Any]

    @property
    def split(self) -> str:
        """Which patients the scores are of."""
        return rounds.examined(self.result)

    def dice(self) -> dict[str, float]:
        """Mean Dice of every hospital, over its cases and labels; in a classification, its accuracy."""
        scores = self.result[self.split]
        return {site: rounds.mean_score({site: cases}, "site") for site, cases in scores.items() if cases}

    @property
    def mean(self) -> float:
        """Mean Dice, or accuracy, over all cases of all hospitals."""
        return rounds.mean_score(self.result[self.split], "case")


def federation(study: Study) -> Mapping[str, Parts]:
    """Who holds which patients, and which of them train, validate and test. Nothing is opened but what that takes."""
    study.check()
    patients = study.data.patients(study.seed)
    study.split.check(patients)
    seed = study.split.seed_of(study.seed)
    dealt = study.federation.deal(patients, lambda sites: study.split.apply(sites, seed), seed)
    if not any(parts["train"] for parts in dealt.values()):
        raise DataError("no site has a training case")
    if not any(parts["validation"] for parts in dealt.values()):
        raise DataError("no site has a validation case, so no best round could be chosen; raise split.validation")
    return dealt


def hospitals(
    study: Study, dealt: Mapping[str, Parts] | None = None, watch: rounds.Watch = rounds.Watch()
) -> dict[str, TorchSite]:
    """The sites of a study, sharing one network; their cases prepared, from the cache where they are there."""
    source, dealt = study.data, dealt or federation(study)
    task = tasks.find(source.task, study.train.exclusive)
    module = study.model.build(
        dims=source.dims,
        modalities=len(source.modality_names),
        outputs=task.outputs(source.label_names),
        seed=study.seed,
    )
    network, cache = Network(module, study.train), Cache(place())
    everyone = [(site, part, p) for site, parts in dealt.items() for part in PARTS for p in parts[part]]
    ready: dict[str, dict[str, list[Case]]] = {site: {part: [] for part in PARTS} for site in dealt}
    _refuse_twins(cache, [p for _, _, p in everyone])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(cache.get, p, study.prepare, study.train.patch) for _, _, p in everyone]
        try:
            for done, ((site, part, p), job) in enumerate(zip(everyone, jobs, strict=True), start=1):
                ready[site][part].append(job.result())
                watch.case(done, len(everyone), f"{site} · {p.name}")
        except BaseException as problem:
            pool.shutdown(cancel_futures=True)
            if isinstance(problem, DataError) and isinstance(source, Files):
                raise DataError(f"{problem} ('polysite check-data' lists all problems)") from problem
            raise
    return {
        site: TorchSite(site, network, parts, source.label_names, study.train, study.seed, task)
        for site, parts in ready.items()
    }


def _refuse_twins(cache: Cache, patients: Iterable[Patient]) -> None:
    """Refuse the same scan in two cases, unless they are known to be of one person."""
    seen: dict[str, Patient] = {}
    for p in patients:
        twin = seen.setdefault(cache.digest(p.files[0]), p) if p.files else p
        if twin is not p and (not p.person or twin.person != p.person):
            raise DataError(
                f"case {p.name!r} of site {p.site!r} is the same scan as case {twin.name!r} of site {twin.site!r} "
                f"({p.files[0]}): one might train and the other test; remove one of them"
            )


def simulator(
    study: Study, dealt: Mapping[str, Parts] | None = None, watch: rounds.Watch = rounds.Watch()
) -> Simulator:
    """The simulated federation, in its first phase."""
    return _simulator(study, hospitals(study, dealt, watch))


def _simulator(study: Study, sites: Mapping[str, TorchSite]) -> Simulator:
    """One phase of it; ``pooled`` puts all training cases into one site and lets the hospitals judge."""
    train = {s: site for s, site in sites.items() if site.size}
    judge = {s: site for s, site in sites.items() if site.cases("validation") or site.cases("test")}
    strangers = sorted(judge.keys() - train.keys())
    if strangers and not study.algorithm.strangers:
        raise ConfigError(
            f"{name_of(study.algorithm)} has no model for {strangers[0]!r}, which does not train: choose another "
            "algorithm, or a federation in which every site trains"
        )
    if study.run.pooled:
        train = {POOLED: TorchSite.pool(POOLED, sites)}
    return Simulator(study.algorithm, train, guests=judge, wire=study.run.wire, compress=study.run.compress)


def refuse_bare(study: Study) -> None:
    """Refuse an algorithm that goes on from a model where there is none yet."""
    first = study.algorithm
    while hasattr(first, "inner"):
        first = first.inner
    if isinstance(first, FineTune | Cfft):
        name = name_of(first)
        raise ConfigError(f"{name} goes on from a model: let it come after another algorithm, under [[then]]")


def phases(study: Study, sites: Mapping[str, TorchSite]) -> list[rounds.Phase]:
    """The simulated federation, phase by phase; all have the same cases and take turns in the same network."""
    refuse_bare(study)
    stages = config.stages(study)
    engines = [_simulator(s, {i: site.under(s.train) for i, site in sites.items()}) for s in stages]
    return [rounds.Phase(s.algorithm, e, s.run) for s, e in zip(stages, engines, strict=True)]


@dataclass(frozen=True)
class Survey:
    """A finished assessment."""

    folder: Path
    assessment: Assessment
    verdict: Verdict


def survey(study: Study, out: Path | str | None = None, watch: rounds.Watch = rounds.Watch()) -> Survey:
    """Ask every hospital once what its cases are like; write down what that tells, and studies that it speaks for."""
    path = vacant(Path(out) if out else RunFolder.fresh(Path("assessments"), "assess"), "assessment")
    engine, dealt = surveyed(study, watch), federation(study)
    unseen = any(not parts["train"] and any(parts.values()) for parts in dealt.values())
    return describe(study, engine, {i: site.size for i, site in engine.sites.items()}, unseen, path, watch)


def describe(
    study: Study,
    engine: rounds.Transport,
    sizes: Mapping[str, int],
    unseen: bool,
    path: Path,
    watch: rounds.Watch = rounds.Watch(),
) -> Survey:
    """The exchange itself, with hospitals of these sizes; ``unseen``: some will be served that do not train."""
    large = sum(size >= study.assess.fewest for size in sizes.values())
    if isinstance(study.assess.take, int) and study.assess.take > max(large - 2, 0):
        raise ConfigError(
            f"assess.take = {study.assess.take}, but of {large} sites that are compared one stays outside"
        )
    asked = cast(Algorithm[Any], study.assess)
    (only,) = rounds.run(asked, engine, {}, rounds.Plan(rounds=1), study.seed, watch=watch)
    found = analyse(only.state.replies, study.assess, study.encoder.words)
    sent = {site: (only.replies[site].payload.nbytes, "what was refused") for site in only.refused}
    found = replace(found, refused={**only.refused, **found.refused}, left={**found.left, **sent})
    verdict = judge(found, modalities_can_change=isinstance(study.data, Files), unseen=unseen)
    base = _allowing(pinned(replace(study, run=replace(study.run, pooled=False))), found)
    ready = {s.file: config.dump(config.vary(base, s.changes), notes=True) for s in verdict.strategies}
    _publish(path, found, verdict, ready, {**versions(), "seed": study.seed})
    return Survey(path, found, verdict)


def _publish(
    path: Path, found: Assessment, verdict: Verdict, ready: Mapping[str, str], about: Mapping[str, Any]
) -> None:
    """The whole folder, or nothing: the page, its figures, all numbers, and a study for every strategy."""
    numbers = {**found.plain(), "verdict": asdict(verdict), "versions": dict(about)}
    with drafted(path, "assessment") as draft:
        (draft / "strategies").mkdir()
        for name, text in ready.items():
            (draft / "strategies" / name).write_text(text, encoding="utf-8")
        (draft / "assessment.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        (draft / "distances.csv").write_text(found.table(), encoding="utf-8")
        assess_page.write(draft, found, verdict, about)


def surveyed(study: Study, watch: rounds.Watch = rounds.Watch(), dealt: Mapping[str, Parts] | None = None) -> Simulator:
    """The hospitals, ready to describe their cases; what is missing there is no mistake but a finding."""
    if isinstance(study.data, Files):
        study = replace(study, data=replace(study.data, allow=("missing", "empty")))
    source, dealt = study.data, dealt or federation(study)
    asked = PARTS if study.assess.cases == "all" else PARTS[:1]
    chosen = {site: [p for k in asked for p in parts[k]] for site, parts in dealt.items()}
    embedder = Embedder(study.encoder, device_of(study.train.device)) if study.assess.projections else None
    everyone, done, cache = sum(map(len, chosen.values())), count(1), Cache(place())

    def step(case: str) -> None:
        watch.case(next(done), everyone, case)

    about = source.modality_names, source.label_names, source.dims, source.task == "classification"
    sites = {s: SurveySite(s, p, *about, study.prepare, embedder, cache, step) for s, p in chosen.items() if p}
    # an exchange like any other; only what may be asked of these sites is less than of those that train
    algorithm, hosts = cast(Algorithm[Any], study.assess), cast(Mapping[str, Site], sites)
    return Simulator(algorithm, hosts, wire=study.run.wire)


def _allowing(study: Study, found: Assessment) -> Study:
    """The study, letting in what the assessment met: modalities never acquired, cases without a label."""
    if not isinstance(study.data, Files):
        return study
    missing = any(any(q.absent.values()) for q in found.quantities.values() if q.kind == INTENSITY)
    met = {"missing": missing, "empty": any(found.unlabelled.values())}
    allow = tuple(dict.fromkeys([*study.data.allow, *(word for word, true in met.items() if true)]))
    return replace(study, data=replace(study.data, allow=allow))  # type: ignore[arg-type]


def initial(study: Study) -> Tree:
    """The parameters that every site starts from, for whoever has no site at hand."""
    source = study.data
    outputs = tasks.find(source.task, study.train.exclusive).outputs(source.label_names)
    module = study.model.build(
        dims=source.dims, modalities=len(source.modality_names), outputs=outputs, seed=study.seed
    )
    return Network(module, replace(study.train, device="cpu", compile=False)).start


def forecast(study: Study) -> Cost:
    """What a study would cost: its rounds are rehearsed with the sizes of its hospitals, and nothing is trained."""
    dealt, params = federation(study), initial(study)
    train = {site: len(parts["train"]) for site, parts in dealt.items() if parts["train"]}
    judged = {site: len(parts["validation"]) for site, parts in dealt.items() if parts["validation"]}
    loads: list[Mapping[str, Load]] = []
    for stage in config.stages(study):
        central = {POOLED: sum(train.values())}, {POOLED: sum(judged.values())}
        loads += _rehearsed(stage, params, *(central if stage.run.pooled else (train, judged)), loads)
    return planned(loads, study.cost, study.train.batch)


def _rehearsed(
    study: Study,
    params: Tree,
    train: Mapping[str, int],
    judged: Mapping[str, int],
    before: Sequence[Mapping[str, Load]],
) -> list[Mapping[str, Load]]:
    """What the sites would do in the rounds of a phase; to begin with, they receive once more what they did last."""
    effort = Effort(study.train.batch, study.train.epochs, study.train.patches, study.train.steps)

    def asked(index: int) -> Sequence[str]:
        return cohort(tuple(sorted(train)), study.run.share, study.seed, len(before) + index)

    plan = study.run
    loads = list(
        rehearse(
            study.algorithm,
            params,
            train,
            effort,
            rounds=plan.rounds,
            cohort=asked,
            validation=judged,
            validate_every=plan.validate_every,
            modalities=len(study.data.modality_names),
        )
    )
    for site in train if before else ():
        last = next((each[site].down for each in reversed(before) if site in each and each[site].down), 0)
        mine = loads[0].get(site, Load())
        loads[0][site] = replace(mine, down=mine.down + last)
    if plan.pooled:
        loads = [{i: replace(load, down=0, up=0) for i, load in each.items()} for each in loads]
    return list(loads)


def run(
    study: Study,
    out: Path | str | None = None,
    watch: rounds.Watch = rounds.Watch(),
    track: Sequence[str] = (),
    after: Path | str | None = None,
) -> Run:
    """Run a study into a new folder; ``track`` also writes it for ``tensorboard`` or ``mlflow``.

    ``after`` a finished run of the same study with fewer phases, its rounds are taken over, not trained again.
    """
    dealt = federation(study)
    for stage in config.stages(study):
        stage.algorithm.init({}, [site for site, parts in dealt.items() if parts["train"]])  # it may refuse these sites
        if isinstance(stage.algorithm, Cfft):
            clusterable(stage.algorithm, dealt)
    if isinstance(study.data, Files):
        for remark in study.data.remarks:
            logging.getLogger("polysite").warning(remark)
    sites = hospitals(study, dealt, watch)  # before the folder: bad data leaves nothing behind
    parts = phases(study, sites)
    for phase in parts:
        phase.algorithm.init(_start(sites), phase.transport.names)  # or this network
    path = Path(out) if out else RunFolder.fresh(Path("runs"), title(study))
    watch = tracked(watch, track, path)  # before the folder, too: a package may be missing
    before = _before(study, table(dealt), Path(after)) if after else None
    folder = RunFolder.create(path, config.dump(pinned(study)), study.seed, table(dealt), before)
    with folder.alone():
        with logged(folder):
            at = rounds.find_progress(folder, parts) if before else None
        return conduct(study, _words(study, dealt), parts, _start(sites), folder, at, watch)


def _before(study: Study, split: str, path: Path) -> RunFolder:
    """The run of the first phases of a study; refuse one that is of something else."""
    folder = RunFolder.open(path)
    if not folder.finished:
        raise RunError(f"{path} has not finished, so nothing can come after it; 'polysite train --resume {path}'")
    mine, other = pinned(study), config.parse(folder.config, where=str(path / "config.toml"))
    if other not in [replace(mine, then=mine.then[:k]) for k in range(len(mine.then))]:
        raise RunError(f"{path} is not the beginning of this study: without its last [[then]] it must be the same")
    if not (folder.path / "split.csv").is_file() or folder.split != split:
        raise RunError(f"{path} was trained on other cases, or other parts of them, than this study has")
    if not folder.checkpoints() or len(folder.records()) != folder.result["rounds"]:
        raise RunError(f"{path} lacks checkpoints or records, so nothing can come after it; train it again")
    return folder


def clusterable(algorithm: Cfft, dealt: Mapping[str, Parts]) -> None:
    """Refuse clusters that these hospitals cannot fit, or cannot judge, before anything is trained."""
    least = algorithm.fewest if algorithm.fit == "federated" else 1
    cases = sum(len(parts["train"]) for parts in dealt.values() if len(parts["train"]) >= least)
    if cases < max(algorithm.components):
        raise ConfigError(
            f"cfft wants {max(algorithm.components)} clusters, and sites with at least {least} training cases have "
            f"{cases} in all; lower algorithm.components or algorithm.fewest"
        )
    if not any(parts["train"] and parts["validation"] for parts in dealt.values()):
        raise DataError("no site that trains has a validation case, by which cfft chooses; raise split.validation")


def _start(sites: Mapping[str, TorchSite]) -> Tree:
    return next(iter(sites.values())).start


def tracked(watch: rounds.Watch, kinds: Sequence[str], path: Path) -> rounds.Watch:
    from polysite.report.tracking import Many, tracker

    return Many(watch, *(tracker(kind, path) for kind in kinds)) if kinds else watch


def title(study: Study) -> str:
    """What trains, by name.

    >>> title(Study(then=({"algorithm": "fine_tune"},)))
    'fedavg-then-fine_tune'
    """
    return "-then-".join(POOLED if s.run.pooled else _title(s.algorithm) for s in config.stages(study))


def _title(algorithm: Any) -> str:
    """Its name, with that of what it goes around: weighted-scaffold."""
    inner = getattr(algorithm, "inner", None)
    return f"{name_of(algorithm)}-{_title(inner)}" if inner else name_of(algorithm)


def resume(path: Path | str, watch: rounds.Watch = rounds.Watch(), track: Sequence[str] = ()) -> Run:
    """Continue a run that was interrupted, to the same end; a finished run is returned as it is."""
    folder = RunFolder.open(Path(path))
    if folder.finished:
        return Run(folder, folder.result)
    with folder.alone():
        study = config.parse(folder.config, where=str(folder.path / "config.toml"))
        dealt = federation(study)
        if table(dealt) != folder.split:
            raise RunError(
                f"the data are not those that {folder.path} began with: its split.csv names other cases or parts; "
                "bring them back, or start a new run"
            )
        sites = hospitals(study, dealt, watch)
        parts = phases(study, sites)
        watch = tracked(watch, track, folder.path)
        with logged(folder):
            at = rounds.find_progress(folder, parts)
        return conduct(study, _words(study, dealt), parts, _start(sites), folder, at, watch)


def pinned(study: Study) -> Study:
    """The study as it can be resumed from anywhere: files by their full path, modalities by name."""
    if isinstance(study.data, Files):
        files = study.data
        tables = tuple(str(Path(t).resolve()) for t in files.tables)
        path = str(Path(files.path).resolve())
        study = replace(study, data=replace(files, path=path, tables=tables, modalities=files.modality_names))
    if study.split.file:
        study = replace(study, split=replace(study.split, file=str(Path(study.split.file).resolve())))
    return study


def _words(study: Study, dealt: Mapping[str, Parts]) -> Iterator[str]:
    """What every hospital has."""
    for site, parts in dealt.items():
        hidden = {study.data.modality_names[k] for each in parts.values() for p in each for k in p.hidden}
        blind = f"; hidden in all of them: {', '.join(sorted(hidden))}" if hidden else ""
        yield f"{site}: {', '.join(f'{len(parts[k])} {k}' for k in PARTS)}{blind}"


def conduct(
    study: Study,
    words: Iterable[str],
    phases: Sequence[rounds.Phase],
    start: Tree,
    folder: RunFolder,
    at: rounds.Progress | None,
    watch: rounds.Watch,
) -> Run:
    """Train into a folder, from its beginning or from where it stands, whatever carries the messages."""
    with logged(folder) as log:
        log.info("%s over %s", title(study), ", ".join(phases[0].transport.names))
        for line in words:
            log.info(line)
        total = sum(phase.plan.rounds for phase in phases)
        watch.begin(folder.path.name, total, *((at.round + 1, at.best_score) if at else (0, 0.0)))
        about = {"task": study.data.task, "labels": study.data.label_names, "modalities": study.data.modality_names}
        result = rounds.train(phases, start, study.seed, folder, resume=at, watch=watch, about=about)
        watch.end()
        log.info("finished; best round %d", result["best_round"] + 1)
    return Run(folder, result)


@contextmanager
def logged(folder: RunFolder) -> Iterator[logging.Logger]:
    """Everything said meanwhile also goes into the folder's log."""
    log = logging.getLogger("polysite")
    try:
        handler = logging.FileHandler(folder.path / "log.txt")
    except OSError as problem:
        raise RunError(f"the log of {folder.path} cannot be written: {problem}") from problem
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield log
    except KeyboardInterrupt:
        command = "deploy run" if (folder.path / "deployment.json").exists() else "train"
        log.error("stopped by hand; 'polysite %s --resume %s' continues", command, folder.path)
        raise
    except BaseException as problem:
        log.error("stopped: %s: %s", type(problem).__name__, problem)
        raise
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        handler.close()
