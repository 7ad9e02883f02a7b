"""The command ``ensemble``."""

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from polysite.cli.base import Json, Quiet, app, say, watching


@app.command()
def ensemble(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Folders of finished runs of the same data.")],
    out: Annotated[Path, Option(help="New run folder.")],
    page: Annotated[bool, Option("--page/--no-page", help="Write OUT/index.html at the end.")] = True,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Average the models of finished runs into an ensemble.

    The members may be runs of other folds (split.inner), other methods, or a global and a personal model. Nothing is
    trained; the new folder is a finished run.
    """
    from polysite import ensembles
    from polysite.report import publish, tables

    with watching(quiet, as_json) as watch:
        run = ensembles.ensemble(runs, out, watch)
    made, options = publish.run_page(run.folder.path, page)
    if as_json:
        members = {"members": made[0].first.ensemble}
        print(json.dumps({"run": str(run.folder.path), "ensemble": members, **run.result.plain()}))
    elif not quiet:
        tables.show(made, options)
        say(f"\nPage: {run.folder.path / 'index.html'}" if page else f"\nRun folder: {run.folder.path}")
