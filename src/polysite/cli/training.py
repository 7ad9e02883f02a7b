"""Commands that train, and what leads to it."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from polysite.cli.base import Config, Json, Override, Quiet, app, overrides_of, study_of, watching
from polysite.errors import PolysiteError


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Where to write; a new folder below demo/ by default.")] = None,
    seed: Annotated[int, typer.Option(help="Another seed draws other patients.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Four drawn hospitals: what each gets alone, federated and pooled."""
    from polysite import demo as demonstration

    with watching(quiet, False) as watch:
        page = demonstration.run(out, seed, watch)
    if not quiet:
        demonstration.show(page.parent)
        print(f"\nThe page with the figures: {page}")


@app.command()
def train(
    config: Config = None,
    override: Override = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; a new one below runs/ by default.")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Continue this run folder to the same end.")
    ] = None,
    after: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A finished run of the first phases, which need not be repeated.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show the whole study, explained, and stop.")
    ] = False,
    track: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help="Also write for tensorboard or mlflow.")
    ] = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate/--no-evaluate", help="Measure the test patients when it is done.")
    ] = True,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Write RUN/index.html when it is done.")] = True,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a study, measure what every hospital gets, and write a run folder."""
    from polysite import config as configuration

    if resume and (config or override or out or after):
        raise PolysiteError(
            "--resume takes its configuration from the run folder; leave out the file, --set, --out and --after"
        )
    if resume and print_config:
        from polysite.engines.run_folder import RunFolder

        print(RunFolder.open(resume).config, end="")
        return
    if not resume:
        study = study_of(config, override or [])
        if print_config:
            print(configuration.dump(study, notes=True), end="")
            return
    from polysite import study as studies

    with watching(quiet, as_json) as watch:
        tracked = track or ()
        if resume:
            run = studies.resume(resume, watch, tracked, evaluate)
        else:
            run = studies.train(study, out, watch, tracked, after, evaluate)
    if as_json:
        print(json.dumps({"run": str(run.folder.path), **run.result.plain()}))
    if quiet and not page:
        return
    from polysite.report import publish, tables
    from polysite.report.page import Options
    from polysite.report.runs import methods, read

    found = methods([read(run.folder.path)])
    options = Options(speeds=configuration.parse(run.folder.config).cost)
    if page:
        publish.page(run.folder.path / "index.html", found, options)
    if not quiet and not as_json:
        tables.show(found, options)
        where = f"The page: {run.folder.path / 'index.html'}" if page else f"The run folder: {run.folder.path}"
        print(f"\n{where}")


@app.command()
def assess(
    config: Config = None,
    override: Override = None,
    out: Annotated[Path | None, typer.Option(help="A new folder; one below assessments/ by default.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure how the hospitals differ, and say which strategy that speaks for."""
    study = study_of(config, override or [])
    from polysite import assessment

    with watching(quiet, False) as watch:
        done = assessment.assess(study, out, watch)
    if as_json:
        print(json.dumps(json.loads((done.folder / "assessment.json").read_text())))
    elif not quiet:
        from polysite.report import tables

        tables.show_assessment(done.assessment, done.verdict)
        print(f"\nThe page with the figures: {done.folder / 'index.html'}")
        first = next(iter(sorted((done.folder / "strategies").iterdir())))
        print(f"To train what comes first: polysite train {first}")


@app.command()
def bench(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A benchmark by name, or a .toml file; none: list them.")
    ] = None,
    scale: Annotated[str, typer.Option(help="full, or small: phantoms and few rounds, in minutes.")] = "full",
    data: Annotated[
        Path | None, typer.Option(metavar="DATA", help="Your data: a manifest or a folder of images.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="METHOD", help="Only these methods.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder; asked again, it goes on there.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default as many as fit.")] = None,
    override: Override = None,
    quiet: Quiet = False,
) -> None:
    """Run a whole benchmark: methods x folds x seeds, then compare; it can be interrupted and goes on."""
    from polysite import benchmark
    from polysite.report import publish, tables

    if scale not in ("full", "small"):
        raise PolysiteError(f"--scale {scale}: full or small")
    if name is None:
        for known in benchmark.names():
            print(f"{known:12} {benchmark.load(known).title}")
        return
    chosen = benchmark.load(name, scale == "small").only(only or [])
    given = {
        **({"data.name": "files", "data.path": json.dumps(str(data))} if data else {}),
        **overrides_of(override or []),
    }
    chosen.check_data(given, scale)
    target = out or Path("benchmarks") / (f"{chosen.name}-small" if scale == "small" else chosen.name)
    with tables.counting("runs", len(chosen.places) * len(chosen.methods), quiet) as step:
        found, failed = benchmark.run(chosen, target, given, jobs, step)
    for words, why in failed.items():
        print(f"polysite: {words} failed: {why}", file=sys.stderr)
    if found:
        options = benchmark.options(chosen, target, found, failed)
        place = publish.comparison(target / "comparison", chosen.title, found, options, replace=True)
        if not quiet:
            tables.show(place.methods, options, full=True)
            print(f"\nThe page and the tables: {target / 'comparison' / 'index.html'}")
    if failed:
        raise typer.Exit(1)


@app.command()
def cost(
    config: Config = None,
    override: Override = None,
    as_json: Json = False,
) -> None:
    """Say what a study would cost before it runs: steps, bytes, simulated time, energy."""
    study = study_of(config, override or [])
    from polysite import study as studies
    from polysite.report import costs, tables

    found = studies.cost(study)
    if as_json:
        print(json.dumps({**asdict(found), "seconds": found.seconds}))
    else:
        tables.show_grid(costs.forecast(studies.title(study), found, study.cost))


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(help="One of them, in full: its equation and its keys.")] = None,
    as_json: Json = False,
) -> None:
    """List the algorithms: name, paper, one line."""
    from polysite.algorithms import describe

    if name:
        from polysite import config as configuration

        text = configuration.explain(name)
        print(json.dumps({"name": name, "text": text}) if as_json else text)
        return
    found = list(describe())
    if as_json:
        for name, paper, line, needs in found:
            print(json.dumps({"name": name, "paper": paper, "summary": line, "needs": needs}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "what it does", "paper"):
        table.add_column(column, overflow="fold")
    for name, paper, line, _ in found:
        table.add_row(name, line, paper)
    Console().print(table)
