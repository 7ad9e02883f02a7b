"""The command that runs a benchmark: bench."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from polysite.cli.base import Override, Quiet, app, overrides_of, say, watching
from polysite.errors import ConfigError

if TYPE_CHECKING:
    from polysite.benchmark import Bench


@app.command()
def bench(
    name: Annotated[
        str | None, Argument(metavar="NAME", help="Name of a benchmark, or a .toml file; without it, list all.")
    ] = None,
    scale: Annotated[
        str, Option(help="full; small: phantoms, in minutes; tiny: your data, a tiny network and one or two rounds.")
    ] = "full",
    data: Annotated[Path | None, Option(metavar="DATA", help="Your data: a manifest or a folder of images.")] = None,
    folds: Annotated[
        Path | None, Option(metavar="FOLDER", help="Folder of the published folds; without it, polysite makes folds.")
    ] = None,
    plan: Annotated[bool, Option("--plan", help="List runs and hours on this device; train nothing.")] = False,
    only: Annotated[list[str] | None, Option(metavar="METHOD", help="Run only this method. May be repeated.")] = None,
    budget: Annotated[
        str | None,
        Option(
            metavar="KIND",
            help="steps or bytes: set the rounds of every method so that its local steps, or bytes, are those of the "
            "reference; rounds: leave them as they are.",
        ),
    ] = None,
    tuning: Annotated[
        bool, Option("--tuning/--no-tuning", help="Try the settings that a benchmark lists in [tuning].")
    ] = True,
    out: Annotated[
        Path | None, Option(help="Folder to write, benchmarks/NAME by default; an existing one is continued.")
    ] = None,
    jobs: Annotated[int | None, Option(min=1, help="Runs in parallel; as many as fit by default.")] = None,
    slurm: Annotated[
        list[str] | None,
        Option(
            "--slurm",
            metavar="KEY=VALUE",
            help="Run as a job array of SLURM, with this parameter of sbatch, as in partition=gpu. May be repeated.",
        ),
    ] = None,
    override: Override = None,
    quiet: Quiet = False,
) -> None:
    """Run a benchmark of several methods and compare them.

    The same command continues a benchmark that was interrupted. Without data, it prints the plan of a benchmark that
    has published sizes.
    """
    from polysite import benchmark
    from polysite.report import tables

    if name is None:
        width = max(map(len, benchmark.names()))
        for known in benchmark.names():
            say(f"{known:{width}}  {benchmark.load(known).title}")
        return
    loaded = benchmark.load(name, scale).only(only or []).at_equal(budget)
    chosen = loaded if tuning else loaded.untuned()
    given = {
        **({"data.name": "files", "data.path": json.dumps(str(data))} if data else {}),
        **overrides_of(override or []),
    }
    lacking = chosen.lacks_data(given, scale)
    if lacking and not chosen.sizes:
        raise ConfigError(lacking)
    target = out or Path("benchmarks") / (chosen.name if scale == "full" else f"{chosen.name}-{scale}")
    if lacking or plan:
        planned = chosen if lacking else chosen.on_folds(folds)
        tables.show_grid(benchmark.plan(planned, given, absent=bool(lacking)))
        if lacking and not plan:
            raise ConfigError(lacking)
        if lacking:
            say(f"The data are not here: {lacking}")
        return
    if chosen.radiomics is not None:
        _radiomics(chosen, target, given, quiet)
    else:
        array = overrides_of(slurm or [], "--slurm", "partition=gpu")
        _methods(chosen.on_folds(folds), target, given, jobs, array, quiet)


def _methods(
    chosen: "Bench",
    target: Path,
    given: dict[str, str],
    jobs: int | None,
    slurm: dict[str, str],
    quiet: bool,
) -> None:
    """Train and compare the methods of a benchmark."""
    from polysite import benchmark
    from polysite.report import tables
    from polysite.report.progress import counting

    trials = len(chosen.tuning.trials(None)) if chosen.tuning else 0
    count = (1 + trials) * len(chosen.places) * len(chosen.dealt) * len(benchmark.variants(chosen, given))
    with counting("runs", count, quiet) as step:
        results = benchmark.run(chosen, target, given, jobs, step, slurm)
    for job, why in results.failed.items():
        say(f"polysite: {job} failed: {why}", file=sys.stderr)
    if any(results.cells.values()):
        grids = benchmark.publish(chosen, target, results)
        if not quiet:
            for grid in grids:
                tables.show_grid(grid)
            if not grids:
                methods = next(iter(results.cells.values()))
                tables.show(methods, benchmark.options(chosen, target, methods, results), full=True)
            say(f"\nPage and tables: {target / 'comparison' / 'index.html'}")
    if results.failed:
        raise typer.Exit(1)


def _radiomics(chosen: "Bench", target: Path, given: dict[str, str], quiet: bool) -> None:
    """Extract and cluster the features of a benchmark's cases."""
    from polysite import benchmark
    from polysite.report import tables

    with watching(quiet, False) as watch:
        grids = benchmark.describe(chosen, target, given, watch)
    if not quiet:
        for grid in grids:
            tables.show_grid(grid)
        say(f"\nPage and tables: {target / 'comparison' / 'index.html'}")
