"""From a study to a finished run: load the cases, build the sites, train, evaluate, write everything down."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch

from polysite import config, machine, peak, postprocessing
from polysite.algorithms import name_of
from polysite.algorithms.base import check_sites, facts, trials
from polysite.cluster.mixture import CaseClusters
from polysite.config import Study
from polysite.costs.model import Cost, Load, planned, without_grid
from polysite.costs.rehearsal import Effort, rehearse
from polysite.data.cache import Cache, place
from polysite.data.case import SPLITS, Case, CaseRef
from polysite.data.files import Files
from polysite.data.parts import splitter
from polysite.data.slices import left_out
from polysite.data.split import SiteSplit, table
from polysite.engines.phases import Evaluate, Phase, find_progress, run_phases
from polysite.engines.plan import cohort
from polysite.engines.record import Result, mean_score
from polysite.engines.rounds import Progress, Watch
from polysite.engines.run_folder import RunFolder
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError, DataError, Paused, RunError, nearest
from polysite.evaluation_folder import EvaluationFolder, ExaminedSite
from polysite.models.ensemble import Ensemble
from polysite.payload import Payload
from polysite.peak import Peak
from polysite.training import tasks
from polysite.training.network import Network, device_of
from polysite.training.torch_site import TorchSite
from polysite.tree import Tree

POOLED = "pooled"  # the site of centralised training
WORKER_SITES = "polysite.worker_sites:WorkerSites"  # what a worker of the Ray engine builds its sites with


@dataclass(frozen=True)
class Engine:
    """Where the sites of a study compute. Results do not depend on it, so a run may be resumed in another engine.

    Args:
        name: ``simulator``: all in this process; ``ray``: in the workers of a Ray cluster.
        address: Ray cluster to connect to: ``auto`` for the running one, or host:port; empty starts one on this machine
            unless ``$RAY_ADDRESS`` names one.
        workers: Number of Ray workers; 0 for one per GPU, or per CPU and thread.
    """

    name: str = "simulator"
    address: str = ""
    workers: int = 0

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise ConfigError(f"there is no engine called {self.name!r}; {nearest(self.name, ENGINES)}")
        if self.name != "ray" and (self.address or self.workers):
            raise ConfigError("a Ray address or a number of workers goes with the engine 'ray': --engine ray")


ENGINES = ("simulator", "ray")

PreparedCases = Mapping[str, Mapping[str, Sequence[Case]]]  # by site and split


@dataclass(frozen=True)
class Run:
    """A finished run and its folder."""

    folder: RunFolder
    result: Result

    @property
    def split(self) -> str:
        """The split that the scores are of: test, or validation if there are no test cases."""
        return self.result.split

    def dice(self) -> dict[str, float]:
        """Return the mean Dice of every hospital, over its cases and labels; in a classification its accuracy."""
        return {site: mean_score({site: cases}, "site") for site, cases in self.result.scores.items() if cases}

    @property
    def mean(self) -> float:
        """Mean Dice, or accuracy, over all cases of all hospitals."""
        return mean_score(self.result.scores, "case")


def deal_cases(study: Study, watch: Watch = Watch()) -> Mapping[str, SiteSplit]:
    """Return the training, validation and test cases of every site; slices, if the study has ``[slices]``.

    Only images that the federation measures or that are cut into slices are opened.
    """
    cases = cut(study, deal_volumes(study), watch)
    for split, purpose in (("train", "train on"), ("validation", "validate on")):
        if not any(splits[split] for splits in cases.values()) and (split == "train" or study.split.validation):
            raise DataError(f"no volume has a slice to {purpose}; set slices.labelled = false")
    return cases


def deal_volumes(study: Study) -> Mapping[str, SiteSplit]:
    """Return the training, validation and test cases of every site as the data list them, before slices are cut."""
    study.check()
    cases = study.data.case_refs(study.seed)
    study.split.check(cases)
    seed = study.split.seed_of(study.seed)
    dealt = study.federation.deal(cases, splitter(study.split, cases, seed), seed)
    if not any(splits["train"] for splits in dealt.values()):
        raise DataError("no site has a training case")
    if study.split.validation and not any(splits["validation"] for splits in dealt.values()):
        raise DataError("no site has a validation case, so no best round could be chosen; raise split.validation")
    return dealt


def cut(study: Study, dealt: Mapping[str, SiteSplit], watch: Watch = Watch()) -> Mapping[str, SiteSplit]:
    """Return the slices of dealt volumes; without ``[slices]`` the volumes themselves."""
    found = study.cut([case for splits in dealt.values() for k in SPLITS for case in splits[k]], watch.case)
    return {site: {k: [c for v in splits[k] for c in found[v]] for k in SPLITS} for site, splits in dealt.items()}


def check(study: Study, watch: Watch = Watch()) -> Mapping[str, SiteSplit]:
    """Return the cases of every site; refuse what the algorithms of the study cannot do with these sites.

    Nothing is prepared (except volumes that are cut) or trained: this finds unknown names of sites and too few cases
    before a long computation.
    """
    refuse_bare(study)
    refuse_ensemble(study)
    dealt = deal_cases(study, watch)
    for phase in config.phases(study):
        phase.algorithm.init({}, [site for site, splits in dealt.items() if splits["train"]])  # may refuse these sites
        check_sites(phase.algorithm, *({i: len(s[k]) for i, s in dealt.items()} for k in ("train", "validation")))
    return dealt


def build_sites(
    study: Study,
    dealt: Mapping[str, SiteSplit] | None = None,
    watch: Watch = Watch(),
    network: Network | None = None,
) -> dict[str, TorchSite]:
    """Return the sites of a study, which share one network; cases are prepared, or read from the cache."""
    ready = load_cases(study, dealt or deal_cases(study), watch)
    return _sites(study, ready, network or Materials().network(study, train_sizes(ready)))


def _sites(study: Study, ready: PreparedCases, network: Network) -> dict[str, TorchSite]:
    """Return the sites with these cases."""
    source = study.data
    task = tasks.find(source.task, study.train.exclusive)
    brain = partial(study.prepare.brain, modalities=source.modality_names)
    return {
        site: TorchSite(site, network, cases, source.label_names, study.train, study.seed, task, brain)
        for site, cases in ready.items()
    }


def load_cases(study: Study, dealt: Mapping[str, SiteSplit], watch: Watch = Watch()) -> PreparedCases:
    """Return the prepared cases of every site and split, newly made or mapped from the cache."""
    device_of(study.train.device)  # refuses one that is not here, before anything is read
    cache = Cache(place())
    listed = [(site, split, ref) for site, splits in dealt.items() for split in SPLITS for ref in splits[split]]
    ready: dict[str, dict[str, list[Case]]] = {site: {split: [] for split in SPLITS} for site in dealt}
    refuse_duplicates([ref for _, _, ref in listed])
    with ThreadPoolExecutor(machine.cores()) as pool:
        jobs = [pool.submit(cache.get, ref, study.prepare, study.train.patch) for _, _, ref in listed]
        try:
            for done, ((site, split, ref), job) in enumerate(zip(listed, jobs, strict=True), start=1):
                ready[site][split].append(job.result())
                watch.case(done, len(listed), f"{site} · {ref.name}")
        except BaseException as problem:
            pool.shutdown(cancel_futures=True)
            if isinstance(problem, DataError) and isinstance(study.data, Files):
                raise DataError(f"{problem} ('polysite data check' lists all problems)") from problem
            raise
    return ready


class Materials:
    """Loads the prepared cases of a run and builds its network."""

    def cases(self, study: Study, dealt: Mapping[str, SiteSplit], watch: Watch = Watch()) -> PreparedCases:
        """Return the prepared cases of every site and split."""
        return load_cases(study, dealt, watch)

    def network(self, study: Study, sizes: Mapping[str, int]) -> Network:
        """Return the network that all sites share; ``sizes`` are their numbers of training cases."""
        return Network(build_module(study), study.train, expected_steps(study, sizes))


def train_sizes(ready: PreparedCases) -> dict[str, int]:
    """Return the number of training cases of every site."""
    return {site: len(splits["train"]) for site, splits in ready.items()}


def foresee(study: Study, ready: PreparedCases, out: Path) -> Peak:
    """Return the memory and disk that a run of a study takes at its peak; refuse one that cannot fit."""
    module = build_module(study)
    params = Network(module, replace(study.train, device="cpu", compile=False)).start
    cases = sum(c.image.nbytes + c.label.nbytes for splits in ready.values() for k in SPLITS for c in splits[k])
    train = {site: len(splits["train"]) for site, splits in ready.items() if splits["train"]}
    return peak.estimate(study, module, params, cases, train, out).check()


def expected_steps(study: Study, sizes: Mapping[str, int]) -> int:
    """Return about how many training steps sites of these numbers of cases take in all rounds of a study."""
    total = 0
    for phase in config.phases(study):
        train, epochs = phase.train, getattr(phase.algorithm, "epochs", None) or phase.train.epochs
        for size in sizes.values():
            epoch = ceil(size * train.patches / train.batch)
            total += phase.run.rounds * (train.steps or epochs * epoch)
    return total


def build_module(study: Study) -> Any:
    """Return the untrained network of a study."""
    source, task = study.data, tasks.find(study.data.task, study.train.exclusive)
    return study.model.build(
        dims=study.dims,
        modalities=len(source.modality_names),
        outputs=task.outputs(source.label_names),
        seed=study.seed,
    )


def refuse_duplicates(cases: Iterable[CaseRef]) -> None:
    """Refuse the same scan in two cases, unless both are declared to be of one patient."""
    cache, seen = Cache(place()), dict[str, CaseRef]()
    for case in cases:
        twin = seen.setdefault(cache.digest(case.files[0]), case) if case.files else case
        if twin is not case and (not case.patient or twin.patient != case.patient):
            raise DataError(
                f"case {case.name!r} of site {case.site!r} is the same scan as case {twin.name!r} of site "
                f"{twin.site!r} ({case.files[0]}): one might train and the other test; remove one of them"
            )


def simulator(study: Study, dealt: Mapping[str, SiteSplit] | None = None, watch: Watch = Watch()) -> Simulator:
    """Return the simulated federation, in its first phase."""
    return _simulator(config.phases(study)[0], build_sites(study, dealt, watch))


def _simulator(study: Study, sites: Mapping[str, TorchSite]) -> Simulator:
    """Return one phase of the simulation. With ``run.pooled`` one site has all training cases; the hospitals score."""
    names, audience = _roles(study, {s: {k: site.cases(k) for k in SPLITS} for s, site in sites.items()})
    train = {POOLED: TorchSite.pool(POOLED, sites)} if study.run.pooled else {s: sites[s] for s in names}
    guests = {s: sites[s] for s in audience}
    return Simulator(study.algorithm, train, guests=guests, wire=study.run.wire, outgoing=study.run.outgoing)


def _roles(study: Study, cases: Mapping[str, Mapping[str, Sequence[Any]]]) -> tuple[list[str], list[str]]:
    """Return the sites that train in a phase and the sites that score its models, given the cases of every site."""
    train = [s for s, splits in cases.items() if splits["train"]]
    audience = [s for s, splits in cases.items() if splits["validation"] or splits["test"]]
    strangers = sorted({*audience} - {*train})
    if strangers and not study.algorithm.strangers:
        raise ConfigError(
            f"{name_of(study.algorithm)} has no model for {strangers[0]!r}, which does not train: choose another "
            "algorithm, or a federation in which every site trains"
        )
    return ([POOLED] if study.run.pooled else train), audience


def refuse_bare(study: Study) -> None:
    """Refuse a first phase whose algorithm continues from a trained model."""
    first = study.algorithm
    while hasattr(first, "inner"):
        first = first.inner
    if facts(first).needs_model:
        name = name_of(first)
        raise ConfigError(f"{name} goes on from a model: let it come after another algorithm, under [[then]]")


def refuse_ensemble(study: Study) -> None:
    """Refuse to train an ensemble."""
    if isinstance(study.model, Ensemble):
        raise ConfigError(
            "an ensemble is not trained: train its members, then 'polysite ensemble RUN RUN --out FOLDER'"
        )


def build_phases(study: Study, sites: Mapping[str, TorchSite]) -> list[Phase]:
    """Return the phases of the simulated federation; all use the same cases and take turns in the same network."""
    refuse_bare(study)
    phases = config.phases(study)
    engines = [_simulator(s, {i: site.under(s.train) for i, site in sites.items()}) for s in phases]
    return [Phase(s.algorithm, e, s.run) for s, e in zip(phases, engines, strict=True)]


@dataclass(frozen=True)
class OpenedStudy:
    """The sites of a study in an engine: its phases, the initial parameters, and the sites' cases for an evaluation."""

    phases: Sequence[Phase]
    start: Tree
    sites: Mapping[str, ExaminedSite]
    remarks: Sequence[str] = ()  # for the log


@contextmanager
def open_study(
    study: Study, dealt: Mapping[str, SiteSplit], engine: Engine, watch: Watch, out: Path, materials: Materials
) -> Iterator[OpenedStudy]:
    """Load the sites of a study into an engine; workers end with the block. A run that cannot fit is refused."""
    if engine.name == "ray":
        with _on_ray(study, dealt, engine, watch) as opened:
            yield opened
        return
    ready = materials.cases(study, dealt, watch)
    foreseen = foresee(study, ready, out)
    sites = _sites(study, ready, materials.network(study, train_sizes(ready)))
    yield OpenedStudy(build_phases(study, sites), next(iter(sites.values())).start, sites, [foreseen.line])


@contextmanager
def _on_ray(study: Study, dealt: Mapping[str, SiteSplit], engine: Engine, watch: Watch) -> Iterator[OpenedStudy]:
    """Place the sites of a study on a Ray cluster. The server lists the cases; only the workers open them."""
    from polysite.engines.ray.cluster import Workers, connected
    from polysite.engines.ray.transport import RaySites, RemoteSite

    refuse_bare(study)
    postprocessing.refuse_remote(study, "in the engine 'ray'")
    refuse_duplicates([ref for splits in dealt.values() for split in SPLITS for ref in splits[split]])
    cases = {site: {k: tuple(c.name for c in splits[k]) for k in SPLITS} for site, splits in dealt.items()}
    recipe = json.dumps({"study": _as_text(study), "cases": cases})
    phases = config.phases(study)
    roles = [_roles(phase, cases) for phase in phases]
    if any(phase.run.pooled for phase in phases):
        cases[POOLED] = {k: tuple(f"{i}/{n}" for i in dealt for n in cases[i][k] if k != "test") for k in SPLITS}
    sizes = {site: sum(map(len, splits.values())) for site, splits in cases.items()}
    device, threads = study.train.device, torch.get_num_threads()
    with connected(engine.address):
        workers = Workers(
            WORKER_SITES, recipe, sizes, device=device, threads=threads, count=engine.workers, watch=watch
        )
        try:
            transports = [RaySites(workers, k, *each, cases) for k, each in enumerate(roles)]
            built = [Phase(s.algorithm, t, s.run) for s, t in zip(phases, transports, strict=True)]
            sites = {i: RemoteSite(i, workers, cases[i], study.data.label_names) for i in dealt}
            yield OpenedStudy(built, initial_params(study), sites, [str(workers)])
        finally:
            workers.close()


def _as_text(study: Study) -> str:
    """Return a study as TOML, from which workers build their sites; refuse one that cannot be read back."""
    text = config.dump(pinned(study))
    try:
        config.parse(text)
    except ConfigError as problem:
        raise ConfigError(
            f"the engine 'ray' gives the study to its workers as TOML, which cannot be read back: {problem}"
        ) from problem
    return text


def initial_params(study: Study) -> Tree:
    """Return the parameters that every site starts from, without building a site."""
    return Network(build_module(study), replace(study.train, device="cpu", compile=False)).start


def cost(study: Study, grid: bool = True) -> Cost:
    """Forecast the steps, bytes, simulated time and energy of a study. Nothing is trained: the rounds are rehearsed
    with the sizes of its hospitals.

    Args:
        study: The study.
        grid: Count all candidates that fine-tuning chooses from; otherwise only the one that a site keeps.
    """
    done = loads(study)
    return planned(done if grid else without_grid(done), study.cost, study.train.batch)


def loads(study: Study, look: Callable[[Any, Mapping[str, Payload]], None] | None = None) -> list[Mapping[str, Load]]:
    """Return the work and traffic of every site in each round of a study, by rehearsing the rounds.

    ``look`` sees the server's state and the memories of the sites after every round.
    """
    dealt, params = deal_cases(study), initial_params(study)
    train = {site: len(splits["train"]) for site, splits in dealt.items() if splits["train"]}
    validation = {site: len(splits["validation"]) for site, splits in dealt.items() if splits["validation"]}
    done: list[Mapping[str, Load]] = []
    for phase in config.phases(study):
        central = {POOLED: sum(train.values())}, {POOLED: sum(validation.values())}
        done += _rehearsed(phase, params, *(central if phase.run.pooled else (train, validation)), done, look)
    return done


def _rehearsed(
    study: Study,
    params: Tree,
    train: Mapping[str, int],
    validation: Mapping[str, int],
    before: Sequence[Mapping[str, Load]],
    look: Callable[[Any, Mapping[str, Payload]], None] | None,
) -> list[Mapping[str, Load]]:
    """Return the load of every site in each round of a phase. The first round includes the model handed over."""
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
            validation=validation,
            validate_every=plan.validate_every,
            modalities=len(study.data.modality_names),
            look=look,
        )
    )
    for site in train if before else ():
        last = next((each[site].down for each in reversed(before) if site in each and each[site].down), 0)
        mine = loads[0].get(site, Load())
        loads[0][site] = replace(mine, down=mine.down + last)
    if plan.pooled:
        loads = [{i: replace(load, down=0, up=0) for i, load in each.items()} for each in loads]
    return [{i: replace(load, trials=trials(study.algorithm)) for i, load in each.items()} for each in loads]


def train(
    study: Study,
    out: Path | str | None = None,
    watch: Watch = Watch(),
    track: Sequence[str] = (),
    after: Path | str | None = None,
    evaluate: bool = True,
    materials: Materials = Materials(),
    *,
    engine: str | Engine = "simulator",
    until: int | None = None,
) -> Run:
    """Train a study into a new run folder.

    Args:
        study: The study.
        out: The new folder; by default one below ``runs/``.
        watch: Observer of the progress.
        track: Also write for ``tensorboard`` or ``mlflow``.
        after: A finished run of the same study with fewer phases, whose rounds are taken over.
        evaluate: Compute every measure of the final model, not only Dice, and write ``evaluation/``.
        materials: Loads the cases and builds the network; a benchmark keeps both for its next run.
        engine: ``simulator``, ``ray``, or an ``Engine`` with an address and a number of workers.
        until: Number of rounds after which to raise ``polysite.errors.Paused``; ``resume`` goes on. None for all.
    """
    chosen = Engine(engine) if isinstance(engine, str) else engine
    dealt = check(study, watch)
    for remark in _remarks(study, dealt):
        logging.getLogger("polysite").warning(remark)
    path = Path(out) if out else RunFolder.fresh(Path("runs"), title(study))
    with open_study(study, dealt, chosen, watch, path, materials) as opened:  # before the folder is made
        for each in opened.phases:
            each.algorithm.init(opened.start, each.transport.names)  # may refuse this network
        watch = tracked(watch, track, path)  # before the folder, too: a package may be missing
        before = _before(study, table(dealt), Path(after)) if after else None
        folder = RunFolder.create(path, config.dump(pinned(study)), study.seed, table(dealt), before)
        with folder.alone():
            with logged(folder):
                at = find_progress(folder, opened.phases) if before else None
            return conducted(study, dealt, opened, folder, at, watch, evaluate, until)


def conducted(
    study: Study,
    dealt: Mapping[str, SiteSplit],
    opened: OpenedStudy,
    folder: RunFolder,
    at: Progress | None,
    watch: Watch,
    evaluate: bool,
    until: int | None,
) -> Run:
    """Train the sites of a study into a run folder, from its beginning or from a checkpoint."""
    final = _evaluation(study, dealt, opened.sites, folder) if evaluate else None
    lines = (*opened.remarks, *_described(study, dealt))
    return conduct(study, lines, opened.phases, opened.start, folder, at, watch, final, until)


def _remarks(study: Study, dealt: Mapping[str, SiteSplit]) -> list[str]:
    """Return remarks on how the data and the split were read, and on volumes without slices."""
    read = study.data.remarks if isinstance(study.data, Files) else ()
    remarks = [*read, *study.split.remarks(study.data.case_refs(study.seed))]
    if not study.slices.labelled:
        return remarks
    cut = {case.source for splits in dealt.values() for cases in splits.values() for case in cases}
    volumes = [case for splits in deal_volumes(study).values() for cases in splits.values() for case in cases]
    return [*remarks, *left_out([volume for volume in volumes if volume.source not in cut])]


def _evaluation(
    study: Study, dealt: Mapping[str, SiteSplit], sites: Mapping[str, ExaminedSite], folder: RunFolder
) -> Evaluate:
    """Return how a simulated run is evaluated: with predictions and scans to look at."""
    trained = [POOLED] if study.run.pooled else sorted(s for s, splits in dealt.items() if splits["train"])

    def write(split: str, clusters: CaseClusters | None) -> EvaluationFolder:
        target = folder.path / "evaluation" / split
        return EvaluationFolder(target, study, split, trained, clusters, dealt=dealt, sites=sites)

    return Evaluate(write)


def _before(study: Study, split: str, path: Path) -> RunFolder:
    """Return the finished run in a folder; refuse it unless it trained the first phases of this study on this split."""
    folder = RunFolder.open(path)
    if not folder.finished:
        raise RunError(f"{path} has not finished, so nothing can come after it; 'polysite train --resume {path}'")
    mine, other = pinned(study), config.parse(folder.config, where=str(path / "config.toml"))
    if not config.is_beginning(other, of=mine):
        raise RunError(f"{path} is not the beginning of this study: without its last [[then]] it must be the same")
    if not (folder.path / "split.csv").is_file() or folder.split != split:
        raise RunError(f"{path} was trained on other cases, or other parts of them, than this study has")
    if not folder.checkpoints() or len(folder.records()) != folder.result.rounds:
        raise RunError(f"{path} lacks checkpoints or records, so nothing can come after it; train it again")
    return folder


def tracked(watch: Watch, kinds: Sequence[str], path: Path) -> Watch:
    """Return an observer that also writes for TensorBoard or MLflow."""
    from polysite.report.tracking import Many, tracker

    return Many(watch, *(tracker(kind, path) for kind in kinds)) if kinds else watch


def title(study: Study) -> str:
    """Return the names of the algorithms of a study.

    >>> title(Study(then=({"algorithm": "fine_tune"},)))
    'fedavg-then-fine_tune'
    """
    if isinstance(study.model, Ensemble):
        return "ensemble"
    return "-then-".join(POOLED if s.run.pooled else _title(s.algorithm) for s in config.phases(study))


def _title(algorithm: Any) -> str:
    """Return the name with that of the inner algorithm: weighted-scaffold."""
    inner = getattr(algorithm, "inner", None)
    return f"{name_of(algorithm)}-{_title(inner)}" if inner else name_of(algorithm)


def resume(
    path: Path | str,
    watch: Watch = Watch(),
    track: Sequence[str] = (),
    evaluate: bool = True,
    materials: Materials = Materials(),
    *,
    engine: str | Engine = "simulator",
    until: int | None = None,
) -> Run:
    """Continue an interrupted run to the same end, in any engine; a finished run is returned as it is."""
    chosen = Engine(engine) if isinstance(engine, str) else engine
    folder = RunFolder.open(Path(path))
    if folder.finished:
        return Run(folder, folder.result)
    with folder.alone():
        study = config.parse(folder.config, where=str(folder.path / "config.toml"))
        dealt = deal_cases(study, watch)
        if table(dealt) != folder.split:
            raise RunError(
                f"the data are not those that {folder.path} began with: its split.csv names other cases or parts; "
                "bring them back, or start a new run"
            )
        with open_study(study, dealt, chosen, watch, folder.path, materials) as opened:
            watch = tracked(watch, track, folder.path)
            with logged(folder):
                at = find_progress(folder, opened.phases)
            return conducted(study, dealt, opened, folder, at, watch, evaluate, until)


def pinned(study: Study) -> Study:
    """Return the study with full paths and modality names, so that it can be resumed from any folder."""
    if isinstance(study.data, Files):
        files = study.data
        tables = tuple(str(Path(t).resolve()) for t in files.tables)
        path = str(Path(files.path).resolve())
        study = replace(study, data=replace(files, path=path, tables=tables, modalities=files.modality_names))
    if study.split.file:
        study = replace(study, split=replace(study.split, file=str(Path(study.split.file).resolve())))
    return study


def _described(study: Study, dealt: Mapping[str, SiteSplit]) -> Iterator[str]:
    """Yield the remarks on data and split; a line per hospital: its number of cases, the modalities hidden from it."""
    yield from _remarks(study, dealt)
    for site, splits in dealt.items():
        hidden = [set(case.hidden) for cases in splits.values() for case in cases] or [set()]
        always, ever = set.intersection(*hidden), set.union(*hidden)
        blind = "".join(
            f"; hidden in {where} of them: {', '.join(sorted(study.data.modality_names[k] for k in found))}"
            for where, found in (("all", always), ("some", ever - always))
            if found
        )
        counts = ", ".join(f"{len(splits[k])} {k}" for k in SPLITS)
        volumes = len({case.source for cases in splits.values() for case in cases})
        cut = f" slices of {volumes} volume{'s' * (volumes != 1)}" if study.slices.axis else ""
        yield f"{site}: {counts}{cut}{blind}"


def conduct(
    study: Study,
    lines: Iterable[str],
    phases: Sequence[Phase],
    start: Tree,
    folder: RunFolder,
    at: Progress | None,
    watch: Watch,
    evaluate: Evaluate | None,
    until: int | None = None,
) -> Run:
    """Train into a run folder, from its beginning or from a checkpoint, over any transport."""
    choose = postprocessing.chooser(phases) if study.train.clean.auto else None
    with logged(folder) as log:
        log.info("%s over %s", title(study), ", ".join(phases[0].transport.names))
        for line in lines:
            log.info(line)
        total = sum(phase.plan.rounds for phase in phases)
        watch.begin(folder.path.name, total, *((at.round + 1, at.best_score) if at else (0, 0.0)))
        source = study.data
        about = {"task": source.task, "labels": source.label_names, "modalities": source.modality_names}
        result = run_phases(
            phases,
            start,
            study.seed,
            folder,
            resume=at,
            watch=watch,
            about=about,
            evaluate=evaluate,
            until=until,
            choose=choose,
        )
        watch.end()
        log.info("finished; best round %d", result.best_round + 1)
    return Run(folder, result)


@contextmanager
def logged(folder: RunFolder) -> Iterator[logging.Logger]:
    """Copy everything logged meanwhile into the folder's log.txt."""
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
    except Paused:
        log.info("paused")
        raise
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
