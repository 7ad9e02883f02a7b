"""From a study to a finished run: train, evaluate, write everything down; resume what was interrupted."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from polysite import config
from polysite.algorithms import name_of
from polysite.cluster.mixture import CaseClusters
from polysite.config import Study
from polysite.data.case import SPLITS
from polysite.data.files import Files
from polysite.data.slices import left_out
from polysite.data.split import SiteSplit, table
from polysite.engines.phases import Evaluate, Phase, before_training, find_progress, run_phases
from polysite.engines.record import Result, mean_score
from polysite.engines.rounds import Progress
from polysite.engines.run_folder import RunFolder
from polysite.engines.watch import Watch
from polysite.errors import Paused, RunError
from polysite.evaluation_folder import EvaluationFolder, ExaminedSite
from polysite.frames import frame, number
from polysite.models.ensemble import Ensemble
from polysite.spreadsheets import rows as csv_rows
from polysite.storage import PRIVATE_FILE
from polysite.study.cases import deal_volumes, pinned
from polysite.study.engine import Engine, OpenedStudy, open_study
from polysite.study.finished import dealt_as_trained
from polysite.study.sites import POOLED, Materials, check
from polysite.tree import Tree

EFFORT, TRAFFIC = ("loss", "steps", "lr_sum", "seconds"), ("bytes_down", "bytes_up")  # columns of ``Run.rounds``


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

    def cases(self, evaluation: str | None = None) -> Any:
        """Return all measures of every case and label: a pandas DataFrame, or dictionaries where there is no pandas.

        Args:
            evaluation: Name of an evaluation below ``evaluation/``; by default that of ``split``.
        """
        file = self.folder.path / "evaluation" / (evaluation or self.split) / "cases.csv"
        if not file.is_file():
            raise RunError(f"there is no {file}; 'polysite evaluate {self.folder.path}' writes it")
        with file.open(newline="", encoding="utf-8") as lines:
            names = ("model", "site", "case", "label")
            found = [{k: v if k in names else number(v) for k, v in row.items()} for row in csv_rows(lines)]
        return frame(found)

    def rounds(self) -> Any:
        """Return a row for every round and site: a pandas DataFrame, or dictionaries where there is no pandas."""
        rows = []
        for record in self.folder.records():
            for site in sorted({*record.sites, *record.validation}):
                done, validated = record.sites.get(site), record.validation.get(site)
                effort = {k: getattr(done, k, None) for k in EFFORT}
                moved = {k: getattr(record, k).get(site) for k in TRAFFIC}
                score = fmean(validated.score.values()) if validated and validated.score else None
                at = {"round": record.round, "phase": record.phase, "site": site}
                rows.append({**at, **effort, **moved, "share": record.shares.get(site), "validation": score})
        return frame(rows)

    @property
    def mean(self) -> float:
        """Mean Dice, or accuracy, over all cases of all hospitals."""
        return mean_score(self.result.scores, "case")


def train(
    study: Study,
    out: Path | str | None = None,
    watch: Watch = Watch(),
    after: Path | str | None = None,
    evaluate: bool = True,
    page: bool = True,
    *,
    engine: str | Engine = "simulator",
    until: int | None = None,
    materials: Materials = Materials(),
) -> Run:
    """Train a study into a new run folder, evaluate it, and write its page, ``index.html``.

    Args:
        study: The study.
        out: The new folder; by default one below ``runs/``.
        watch: Observer of the progress.
        after: A finished run of the same study with fewer phases, whose rounds are taken over.
        evaluate: Compute every measure of the final model, not only Dice, and write ``evaluation/``.
        page: Write ``index.html``.
        engine: ``simulator``, ``ray``, or an ``Engine`` with an address and a number of workers.
        until: Number of rounds after which to raise ``polysite.errors.Paused``; ``resume`` goes on. None for all.
        materials: Loads the cases and builds the network; a benchmark keeps both for its next run.
    """
    chosen = Engine(engine) if isinstance(engine, str) else engine
    dealt = check(study, watch)
    for remark in _remarks(study, dealt):
        logging.getLogger("polysite").warning(remark)
    path = Path(out) if out else RunFolder.fresh(Path("runs"), title(study))
    with open_study(study, dealt, chosen, watch, path, materials) as opened:  # before the folder is made
        begins = before_training(opened.phases, opened.start)
        before = _before(study, table(dealt), Path(after)) if after else None
        folder = RunFolder.create(path, config.dump(pinned(study)), study.seed, table(dealt), before)
        with folder.alone():
            with logged(folder):
                at = find_progress(folder, opened.phases) if before else begins
            run = conducted(study, dealt, opened, folder, at, watch, evaluate, until)
    return with_page(run, page)


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
    final = evaluation_of(study, dealt, opened.sites, folder) if evaluate else None
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


def evaluation_of(
    study: Study,
    dealt: Mapping[str, SiteSplit],
    sites: Mapping[str, ExaminedSite],
    folder: RunFolder,
    name: str = "",
    tolerance: float = 1.0,
    **settings: Any,
) -> Evaluate:
    """Return how a simulated run is evaluated: with predictions and scans to look at.

    Args:
        study: The study.
        dealt: Cases of every site.
        sites: The sites.
        folder: The run folder.
        name: Name of the evaluation; by default that of the split.
        tolerance: Distance of surfaces that still agree.
        settings: Further settings of an `EvaluationFolder`.
    """
    trained = [POOLED] if study.run.pooled else sorted(s for s, splits in dealt.items() if splits["train"])
    known = {"dealt": dealt, "sites": sites, "tolerance": tolerance, **settings}

    def write(split: str, clusters: CaseClusters | None) -> EvaluationFolder:
        return EvaluationFolder(folder.path / "evaluation" / (name or split), study, split, trained, clusters, **known)

    return Evaluate(write, tolerance)


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
    page: bool = True,
    evaluate: bool = True,
    *,
    engine: str | Engine = "simulator",
    until: int | None = None,
    materials: Materials = Materials(),
) -> Run:
    """Continue an interrupted run to the same end, in any engine, and write its page; a finished run stays as it is."""
    folder = RunFolder.open(Path(path))
    if folder.finished:
        return with_page(Run(folder, folder.result), page)
    chosen = Engine(engine) if isinstance(engine, str) else engine
    with folder.alone():
        study = config.parse(folder.config, where=str(folder.path / "config.toml"))
        dealt = dealt_as_trained(folder, study, watch)
        with open_study(study, dealt, chosen, watch, folder.path, materials) as opened:
            with logged(folder):
                at = find_progress(folder, opened.phases)
            run = conducted(study, dealt, opened, folder, at, watch, evaluate, until)
    return with_page(run, page)


def with_page(run: Run, page: bool) -> Run:
    """Write the page of a run, if asked; return the run."""
    if page:
        from polysite.report import publish

        publish.run_page(run.folder.path)
    return run


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
    """Train into a run folder, from its beginning or from a checkpoint, on any engine."""
    with logged(folder) as log:
        log.info("%s over %s", title(study), ", ".join(phases[0].transport.names))
        for line in lines:
            log.info(line)
        total = sum(phase.plan.rounds for phase in phases)
        watch.begin(folder.path.name, total, *((at.round + 1, at.best_score) if at and at.round >= 0 else (0, 0.0)))
        source = study.data
        about = {"task": source.task, "labels": source.label_names, "modalities": source.modality_names}
        result = run_phases(
            phases, start, study.seed, folder, resume=at, watch=watch, about=about, evaluate=evaluate, until=until
        )
        watch.end()
        log.info("finished; best round %d", result.best_round + 1)
    return Run(folder, result)


@contextmanager
def logged(folder: RunFolder) -> Iterator[logging.Logger]:
    """Copy everything logged meanwhile into the folder's log.txt."""
    log = logging.getLogger("polysite")
    try:
        (folder.path / "log.txt").touch(PRIVATE_FILE)
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
