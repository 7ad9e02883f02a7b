"""Commands that train or plan a study: demo, train, assess, cost, algorithms."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from polysite.cli.base import Config, Json, Override, Quiet, app, say, study_of, watching
from polysite.errors import PolysiteError


@app.command()
def demo(
    out: Annotated[Path | None, Option(help="New folder to write; one below demo/ by default.")] = None,
    seed: Annotated[int, Option(help="Seed of the simulated patients and of training.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Train four simulated hospitals alone, federated and pooled."""
    from polysite import demo as demonstration

    with watching(quiet, False) as watch:
        page = demonstration.run(out, seed, watch)
    if not quiet:
        demonstration.show(page.parent)
        say(f"\nPage with figures: {page}")


@app.command()
def train(
    config: Config = None,
    override: Override = None,
    out: Annotated[Path | None, Option(help="New run folder; one below runs/ by default.")] = None,
    resume: Annotated[Path | None, Option(metavar="RUN", help="Continue an interrupted run.")] = None,
    after: Annotated[
        Path | None, Option(metavar="RUN", help="Finished run of the first phases; they are not repeated.")
    ] = None,
    print_config: Annotated[
        bool, Option("--print-config", help="Print the whole study with every key explained, and exit.")
    ] = False,
    trainings: Annotated[
        int, Option(min=1, help="Train this often with different seeds, and average the predictions.")
    ] = 1,
    evaluate: Annotated[
        bool, Option("--evaluate/--no-evaluate", help="Compute all measures of the test cases at the end.")
    ] = True,
    page: Annotated[bool, Option("--page/--no-page", help="Write RUN/index.html at the end.")] = True,
    engine: Annotated[str, Option(help="Where sites compute: simulator (this process) or ray.")] = "simulator",
    ray_address: Annotated[
        str, Option(metavar="ADDRESS", help="Ray cluster: auto or HOST:PORT; by default one is started here.")
    ] = "",
    workers: Annotated[int, Option(help="Ray workers; 0: one per GPU, or as many as the CPUs hold.")] = 0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a study, evaluate it, write a run folder and a page."""
    from polysite import config as configuration

    if resume and (config or override or out or after):
        raise PolysiteError(
            "--resume takes its configuration from the run folder; leave out the file, --set, --out and --after"
        )
    if trainings > 1 and (resume or after or not evaluate):
        raise PolysiteError(
            "--trainings makes an ensemble, which is evaluated: leave out --resume (the same command continues), "
            "--after and --no-evaluate"
        )
    if resume and print_config:
        from polysite.engines.run_folder import RunFolder

        print(RunFolder.open(resume).config, end="")
        return
    said: list[str] = []
    if not resume:
        study = study_of(config, override or [], said)
        if print_config:
            print(configuration.dump(study, notes=True), end="")
            return
    from polysite import study as studies

    if said and not quiet and not as_json:
        say("Settings from the data (--set changes them):", *(f"  {line}" for line in said), hang=4)
    with watching(quiet, as_json) as watch:
        where = studies.Engine(engine, ray_address, workers)
        if resume:
            run = studies.resume(resume, watch, False, evaluate, engine=where)
            if evaluate and not (run.folder.path / "evaluation" / run.split).exists():  # finished by 0.1.0
                from polysite.evaluation import evaluate as examine

                examine(run.folder.path, run.split)
        elif trainings > 1:
            from polysite.ensembles import train_ensemble

            run = train_ensemble(study, out, trainings, watch, engine=where)
        else:
            run = studies.train(study, out, watch, after, evaluate, False, engine=where)
    if as_json:
        print(json.dumps({"run": str(run.folder.path), **run.result.plain()}))
    if quiet and not page:
        return
    from polysite.report import publish, tables

    shown = publish.run_page(run.folder.path, page)
    if not quiet and not as_json:
        tables.show(*shown)
        say(f"\nPage: {run.folder.path / 'index.html'}" if page else f"\nRun folder: {run.folder.path}")


@app.command()
def assess(
    config: Config = None,
    override: Override = None,
    out: Annotated[Path | None, Option(help="New folder to write; one below assessments/ by default.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure how hospitals differ and recommend strategies."""
    study = study_of(config, override or [])
    from polysite import assessment

    with watching(quiet, False) as watch:
        done = assessment.assess(study, out, watch)
    if as_json:
        print(json.dumps(json.loads((done.folder / "assessment.json").read_text())))
    elif not quiet:
        from polysite.report import tables

        tables.show_assessment(done.assessment, done.verdict)
        say(f"\nPage with figures: {done.folder / 'index.html'}")
        first = done.folder / "strategies" / done.verdict.strategies[0].file
        say(f"To train the first strategy: polysite train {first}")


@app.command()
def cost(config: Config = None, override: Override = None, as_json: Json = False) -> None:
    """Estimate steps, bytes and time of a study."""
    study = study_of(config, override or [])
    from polysite import study as studies
    from polysite.report import costs, tables

    estimate, single = studies.cost(study), studies.cost(study, grid=False)
    if as_json:
        beside = {"without_grid": {**asdict(single), "seconds": single.seconds}} if single != estimate else {}
        print(json.dumps({**asdict(estimate), "seconds": estimate.seconds, **beside}))
    else:
        tables.show_grid(costs.forecast(studies.title(study), estimate, study.cost, single))


@app.command()
def algorithms(
    name: Annotated[str | None, Argument(help="Algorithm to explain: its equation and its keys.")] = None,
    as_json: Json = False,
) -> None:
    """List the algorithms, or explain one."""
    from polysite.algorithms import describe

    if name:
        from polysite import config as configuration

        text = configuration.explain(name)
        print(json.dumps({"name": name, "text": text}) if as_json else text)
        return
    if as_json:
        for name, paper, line, needs in describe():
            print(json.dumps({"name": name, "paper": paper, "summary": line, "needs": needs}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "what it does", "paper"):
        table.add_column(column, overflow="fold")
    for name, paper, line, _ in describe():
        table.add_row(name, line, paper)
    Console().print(table)
