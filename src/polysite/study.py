"""From a study to a finished run: load the cases, build the sites, train, write everything down."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polysite import config
from polysite.algorithms import name_of
from polysite.config import Study
from polysite.data.folder import Folder
from polysite.data.prepare import prepare
from polysite.engines import rounds
from polysite.engines.folder import RunFolder
from polysite.engines.simulator import Simulator
from polysite.errors import RunError
from polysite.train.torch_site import Network, TorchSite

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
        """Mean Dice of every hospital, over its cases and labels."""
        scores = self.result[self.split]
        return {site: rounds.mean_dice({site: cases}, "site") for site, cases in scores.items() if cases}

    @property
    def mean(self) -> float:
        """Mean Dice over all cases of all hospitals."""
        return rounds.mean_dice(self.result[self.split], "case")


def hospitals(study: Study) -> dict[str, TorchSite]:
    """The sites of a study, sharing one network."""
    source = study.data
    cases = source.load(study.seed)
    module = study.model.build(
        dims=source.dims, modalities=len(source.modality_names), labels=len(source.label_names), seed=study.seed
    )
    network = Network(module, study.train)
    split = {s: study.split.apply(s, c, study.seed) for s, c in cases.items()}
    ready = {s: {k: [prepare(c, study.train.patch) for c in v] for k, v in parts.items()} for s, parts in split.items()}
    return {s: TorchSite(s, network, parts, source.label_names, study.train, study.seed) for s, parts in ready.items()}


def simulator(study: Study) -> Simulator:
    """The simulated federation; ``pooled`` puts all training cases into one site and lets the hospitals judge."""
    sites = hospitals(study)
    if not study.run.pooled:
        return Simulator(study.algorithm, sites, wire=study.run.wire)
    return Simulator(study.algorithm, {POOLED: TorchSite.pool(POOLED, sites)}, guests=sites, wire=study.run.wire)


def run(study: Study, out: Path | str | None = None, watch: rounds.Watch = rounds.Watch()) -> Run:
    """Run a study into a new folder."""
    engine = simulator(study)  # before the folder: bad data leaves nothing behind
    name = POOLED if study.run.pooled else name_of(study.algorithm)
    path = Path(out) if out else RunFolder.fresh(Path("runs"), name)
    folder = RunFolder.create(path, config.dump(_pinned(study)), study.seed)
    with folder.alone():
        return _train(study, engine, folder, None, watch)


def resume(path: Path | str, watch: rounds.Watch = rounds.Watch()) -> Run:
    """Continue a run that was interrupted, to the same end; a finished run is returned as it is."""
    folder = RunFolder.open(Path(path))
    if folder.finished:
        return Run(folder, folder.result)
    with folder.alone():
        study = config.parse(folder.config, where=str(folder.path / "config.toml"))
        engine = simulator(study)
        with _log(folder):
            at = rounds.find_progress(folder, engine, study.algorithm)
        return _train(study, engine, folder, at, watch)


def _pinned(study: Study) -> Study:
    """The study as it can be resumed from anywhere: a folder by its full path, its modalities by name."""
    if not isinstance(study.data, Folder):
        return study
    path = str(Path(study.data.path).resolve())
    return replace(study, data=replace(study.data, path=path, modalities=study.data.modality_names))


def _train(study: Study, engine: Simulator, folder: RunFolder, at: rounds.Progress | None, watch: rounds.Watch) -> Run:
    with _log(folder) as log:
        log.info("%s over %s", name_of(study.algorithm), ", ".join(engine.names))
        watch.begin(folder.path.name, study.run.rounds, *((at.round + 1, at.best_dice) if at else (0, 0.0)))
        start = next(iter(engine.sites.values())).start
        result = rounds.train(study.algorithm, engine, start, study.run, study.seed, folder, resume=at, watch=watch)
        watch.end()
        log.info("finished; best round %d", result["best_round"])
    return Run(folder, result)


@contextmanager
def _log(folder: RunFolder) -> Iterator[logging.Logger]:
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
    except BaseException as problem:
        log.error("stopped: %s: %s", type(problem).__name__, problem)
        raise
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        handler.close()
