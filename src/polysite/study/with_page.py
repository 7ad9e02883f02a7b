"""Train as the command line does: ``ps.train`` and ``ps.resume`` also write the page of the run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polysite import config
from polysite.config import Study
from polysite.engines.rounds import Watch
from polysite.study import training
from polysite.study.engine import Engine
from polysite.study.training import Run


def train(
    study: Study,
    out: Path | str | None = None,
    watch: Watch = Watch(),
    track: Sequence[str] = (),
    after: Path | str | None = None,
    evaluate: bool = True,
    page: bool = True,
    *,
    engine: str | Engine = "simulator",
    until: int | None = None,
) -> Run:
    """Train a study into a new run folder, evaluate it, and write its page, ``index.html``.

    Args:
        study: The study.
        out: The new folder; by default one below ``runs/``.
        watch: Observer of the progress.
        track: Also write for ``tensorboard`` or ``mlflow``.
        after: A finished run of the same study with fewer phases, whose rounds are taken over.
        evaluate: Compute every measure of the final model, not only Dice, and write ``evaluation/``.
        page: Write ``index.html``.
        engine: ``simulator``, ``ray``, or an ``Engine`` with an address and a number of workers.
        until: Number of rounds after which to raise ``polysite.errors.Paused``; ``resume`` goes on. None for all.
    """
    run = training.train(study, out, watch, track, after, evaluate, engine=engine, until=until)
    return with_page(run) if page else run


def resume(path: Path | str, watch: Watch = Watch(), page: bool = True, **options: Any) -> Run:
    """Continue an interrupted run to the same end, and write its page; ``polysite.study.resume`` has the options."""
    run = training.resume(path, watch, **options)
    return with_page(run) if page else run


def with_page(run: Run) -> Run:
    """Write the page of a run; return the run."""
    from polysite.report import publish
    from polysite.report.page import Options
    from polysite.report.runs import methods, read

    path = run.folder.path
    options = Options(speeds=config.parse(run.folder.config, where=str(path / "config.toml")).cost)
    publish.page(path / "index.html", methods([read(path)]), options)
    return run
