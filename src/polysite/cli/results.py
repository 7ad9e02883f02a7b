"""Commands about finished runs: what does each hospital get, and is it more than chance?"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from polysite.cli.base import Json, Quiet, app, watching
from polysite.errors import ConfigError, PolysiteError

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; NAME=RUN gives one a name.")]
Reference = Annotated[
    str | None, typer.Option(metavar="NAME", help="The method that others are tested against; fedavg by default.")
]
Empty = Annotated[
    str,
    typer.Option(
        metavar="POLICY",
        help="A distance where exactly one mask is empty: the image diagonal (penalty), a number of mm, or excluded.",
    ),
]
Definition = Annotated[
    str, typer.Option(metavar="KIND", help="HD95 as the larger of both directions (max) or of both pooled (union).")
]
Speeds = Annotated[
    str | None, typer.Option(metavar="NAME", help="For simulated time: paper_b or fets; the runs' own by default.")
]
Assessment = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="An assessment, whose distances go onto the page.")
]
Scans = Annotated[bool, typer.Option("--scans/--no-scans", help="Whether slices of patients are on the page.")]


@app.command()
def evaluate(
    runs: Runs,
    split: Annotated[str, typer.Option(metavar="PART", help="test, validation or train.")] = "test",
    on: Annotated[Path | None, typer.Option(metavar="DATA", help="Other data: a manifest or a folder.")] = None,
    tolerance: Annotated[float, typer.Option(help="Of the surface Dice (NSD), in the unit of the voxels.")] = 1.0,
    others: Annotated[bool, typer.Option("--others/--own", help="Every model on everyone's patients.")] = True,
    scans: Annotated[bool, typer.Option("--scans/--no-scans", help="Keep answers and slices to look at.")] = True,
    parquet: Annotated[bool, typer.Option("--parquet", help="Write cases.parquet beside cases.csv.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Replace an evaluation that is there.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure every served model on every hospital's patients: all measures, per case and label."""
    from polysite.evaluation import evaluate as examine
    from polysite.report import tables
    from polysite.report.runs import methods, read

    with watching(quiet or as_json, False) as watch:
        for run in runs:
            done = examine(
                _named(run)[1], split, on, tolerance=tolerance, others=others, pictures=scans, parquet=parquet,
                again=again, watch=watch,
            )  # fmt: skip
    found = [read(path, name, done.name) for name, path in map(_named, runs)]
    if as_json:
        for each in found:
            about = each.evaluation.about if each.evaluation else {}
            print(json.dumps({"run": str(each.path), "evaluation": done.name, **about}))
    elif not quiet:
        tables.show(methods(found))
        print(f"\nEvery case: {', '.join(str(r.evaluation.path / 'cases.csv') for r in found if r.evaluation)}")


@app.command()
def serve_model(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    site: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose model; not needed where all hospitals use the same.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder; one below RUN/bundles/ by default.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write the model that a hospital uses as a MONAI bundle: weights, configuration, how to run it."""
    from polysite.export.serve import serve_model as export

    target = export(run, site, out)
    if as_json:
        about = json.loads((target / "configs" / "metadata.json").read_text(encoding="utf-8"))
        print(json.dumps({"bundle": str(target), **{k: about[k] for k in ("description", "eval_metrics", "weights")}}))
    elif not quiet:
        print(f"{target} is a MONAI bundle; {target / 'docs' / 'README.md'} says what it is and how to run it.")


@app.command()
def compare(
    runs: Runs,
    reference: Reference = None,
    out: Annotated[Path | None, typer.Option(help="A new folder; one below comparisons/ by default.")] = None,
    on: Annotated[str | None, typer.Option(metavar="NAME", help="The evaluation to compare, where not test.")] = None,
    empty: Empty = "penalty",
    hd95: Definition = "max",
    tail: Annotated[str, typer.Option(help="two-sided, or whether others are better (greater) or worse (less).")] = (
        "two-sided"
    ),
    speeds: Speeds = None,
    assessment: Assessment = None,
    scans: Scans = True,
    title: Annotated[str, typer.Option(help="Of the page.")] = "Methods compared",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare runs: tables, tests paired by case, costs; as page, Markdown, LaTeX and CSV.

    Runs that differ only in seed or fold are one method.
    """
    from polysite.engines.run_folder import RunFolder
    from polysite.report import publish, tables
    from polysite.report.runs import methods, read

    found = methods(read(path, name, on) for name, path in map(_named, runs))
    options = options_of(found, reference, empty, hd95, tail, speeds, assessment, scans)
    target = out or RunFolder.fresh(Path("comparisons"), "compare")
    done = publish.comparison(target, title, found, options)
    if as_json:
        print(json.dumps({"comparison": str(target), **publish.plain(done)}))
    elif not quiet:
        tables.show(found, options, full=True)
        print(f"\nThe page, and the tables as Markdown, LaTeX and CSV: {target / 'index.html'}")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, finished or not.")],
    out: Annotated[Path | None, typer.Option(help="The page; RUN/index.html by default.")] = None,
    empty: Empty = "penalty",
    hd95: Definition = "max",
    speeds: Speeds = None,
    assessment: Assessment = None,
    scans: Scans = True,
) -> None:
    """Write the page about a run, from its folder alone."""
    from polysite.report import publish
    from polysite.report.runs import methods, read

    found = methods([read(run)])
    options = options_of(found, None, empty, hd95, "two-sided", speeds, assessment, scans)
    print(publish.page(out or run / "index.html", found, options))


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8765,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    scans: Scans = True,
) -> None:
    """Show the page about a run on this machine, renewed while the run goes on."""
    from polysite.report.page import Options
    from polysite.report.watch import serve

    def ready(address: str) -> None:
        print(f"The page about {run}: {address} (end with Ctrl-C)", flush=True)
        if open_browser:
            typer.launch(address)

    serve(run, port, ready, Options(scans=scans))


def options_of(
    found: Any,
    reference: str | None,
    empty: str,
    hd95: str,
    tail: str,
    speeds: str | None,
    assessment: Path | None,
    scans: bool,
) -> Any:
    """What the options of a page mean."""
    from typing import get_args

    from polysite import config
    from polysite.costs.speeds import SPEEDS
    from polysite.errors import nearest
    from polysite.metrics.measures import EmptyMaskPolicy
    from polysite.metrics.statistics import Tail
    from polysite.report.page import Options

    if speeds is not None and speeds not in SPEEDS:
        raise ConfigError(f"there are no speeds called {speeds!r}; {nearest(speeds, SPEEDS)}")
    if tail not in get_args(Tail):
        raise ConfigError(f"--tail {tail}: choose {', '.join(get_args(Tail))}")
    chosen = SPEEDS[speeds] if speeds else config.parse(found[0].first.config).cost
    penalty: float | Literal["diagonal"] = "diagonal"
    kind = empty
    if empty not in ("penalty", "excluded"):
        try:
            kind, penalty = "penalty", float(empty)
        except ValueError:
            raise ConfigError(f"--empty {empty}: penalty, excluded, or a number of millimetres") from None
    policy = EmptyMaskPolicy(kind, penalty, hd95)  # type: ignore[arg-type]
    return Options(reference, policy, tail, chosen, assessment, scans)  # type: ignore[arg-type]


def _named(given: Path) -> tuple[str | None, Path]:
    """``NAME=RUN`` as both; a folder may have such a name itself."""
    name, sign, path = str(given).partition("=")
    if sign and not given.exists():
        if not name:
            raise PolysiteError(f"{given}: give the run a name before the sign, as in fedavg=runs/first")
        return name, Path(path)
    return None, given
