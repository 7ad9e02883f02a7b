"""The command that searches for the best method and its settings: ``tune``."""

import json
from pathlib import Path
from typing import Annotated

from typer import Option

from polysite.cli.base import Config, Json, Override, Quiet, app, folder_of, say, study_of


@app.command()
def tune(
    config: Config = None,
    override: Override = None,
    method: Annotated[
        list[str] | None, Option("--method", metavar="NAME", help="Try this method. May be repeated.")
    ] = None,
    space: Annotated[
        Path | None, Option(metavar="FILE", help="A search space in TOML that extends polysite's own.")
    ] = None,
    trainings: Annotated[float | None, Option(help="Budget: whole trainings of the reference; 30 by default.")] = None,
    hours: Annotated[float | None, Option(help="Budget: hours on this machine's device.")] = None,
    inner: Annotated[int, Option(help="Inner folds; the cases of each validate once.")] = 3,
    plan: Annotated[bool, Option("--plan", help="List the candidates and rungs; train nothing.")] = False,
    out: Annotated[
        Path | None, Option(help="Folder to write, tunings/STUDY by default; an existing one is continued.")
    ] = None,
    jobs: Annotated[int | None, Option(min=1, help="Runs in parallel; as many as fit by default.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Search for the best method and its settings within a budget.

    Candidates are compared on inner folds of the cases that are not tested: many train for few rounds, and the better
    third goes on. The same command continues a search that was interrupted.
    """
    study = study_of(config, override or [])
    from polysite import tuning
    from polysite.benchmark import Workers
    from polysite.report import tables
    from polysite.report.progress import counting

    known = tuning.load(space, method or ())
    planned = tuning.plan(study, known, tuning.budget(study, known, trainings, hours), inner)
    if plan:
        tables.show_grid(tuning.plan_table(planned))
        return
    target = folder_of(out, "tunings", config)
    runs = planned.inner * sum(rung.candidates for rung in planned.rungs)
    with counting("runs", runs, quiet or as_json) as step:
        found = tuning.tune(planned, target, Workers(jobs, step), tuning.write_page)
    best, scores = found.folder / "best.toml", {"score": found.best.score, "reference": found.reference.score}
    if as_json:
        print(
            json.dumps({"folder": str(found.folder), "best": found.best.candidate.name, **scores, "study": str(best)})
        )
    elif not quiet:
        tables.show_grid(tuning.table(found))
        say(f"\nPage: {found.folder / 'index.html'}\nThe best study: polysite train {best}")
