"""Commands for finished runs: evaluate, compare, report, serve-model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from polysite.cli.base import Json, Quiet, app, say, watching
from polysite.errors import ConfigError, PolysiteError

Runs = Annotated[list[Path], Argument(metavar="RUN...", help="Run folders; NAME=RUN gives one a name.")]
Reference = Annotated[
    str | None, Option(metavar="NAME", help="Method that the others are tested against; fedavg by default.")
]
EmptyMasks = Annotated[
    str,
    Option(
        metavar="POLICY",
        help="Distance if exactly one mask is empty: penalty (the image diagonal), a number of mm, excluded, or "
        "excluded-case, which drops the mean of a case if any label has no distance.",
    ),
]
Definition = Annotated[
    str, Option(metavar="KIND", help="HD95 as the larger of both directions (max), or over both together (union).")
]
Scans = Annotated[bool, Option("--scans/--no-scans", help="Show slices of patients on the page.")]
Figures = Annotated[
    list[str] | None,
    Option(
        "--figure",
        metavar="NAME",
        help="Add a figure: bars, boxes, groups, volumes, cases or clusters. May be repeated.",
    ),
]
Cases = Annotated[
    list[str] | None,
    Option("--case", metavar="NAME", help="Show this case: image, ground truth, every prediction. May be repeated."),
]


@app.command()
def evaluate(
    runs: Runs,
    split: Annotated[str, Option(metavar="SPLIT", help="Split to evaluate: test, validation or train.")] = "test",
    on: Annotated[
        Path | None, Option(metavar="DATA", help="Other data to evaluate on: a manifest or a folder.")
    ] = None,
    tolerance: Annotated[float, Option(help="Tolerance of the surface Dice (NSD), in the unit of the voxels.")] = 1.0,
    others: Annotated[
        bool, Option("--others/--own", help="Evaluate every hospital's model on all hospitals' cases.")
    ] = True,
    scans: Annotated[bool, Option("--scans/--no-scans", help="Keep predictions and scans to look at.")] = True,
    again: Annotated[bool, Option("--again", help="Replace an existing evaluation.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Evaluate finished runs again: another split or other data.

    Every run evaluates its test cases when it ends. This command evaluates the models on another split, on other data,
    or with other settings: all measures of every label of every case.
    """
    from polysite import evaluation
    from polysite.report import tables
    from polysite.report.runs import methods, read

    with watching(quiet or as_json, False) as watch:
        for run in runs:
            done = evaluation.evaluate(
                _named(run)[1], split, on, tolerance=tolerance, others=others, pictures=scans, again=again,
                watch=watch,
            )  # fmt: skip
    summaries = [read(path, name, done.name) for name, path in map(_named, runs)]
    if as_json:
        for each in summaries:
            about = each.evaluation.about if each.evaluation else {}
            print(json.dumps({"run": str(each.path), "evaluation": done.name, **about}))
    elif not quiet:
        tables.show(methods(summaries))
        files = [str(each.evaluation.path / "cases.csv") for each in summaries if each.evaluation]
        say(f"\nScores of every case: {', '.join(files)}")


@app.command()
def serve_model(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a finished run.")],
    site: Annotated[
        str | None, Option(metavar="NAME", help="Hospital whose model is exported; not needed if all use the same.")
    ] = None,
    out: Annotated[Path | None, Option(help="New folder to write; one below RUN/bundles/ by default.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Export the model of a hospital as a MONAI bundle.

    The bundle holds the weights, a configuration that prepares scans as polysite does, and instructions.
    """
    from polysite.export.serve import serve_model as export

    target = export(run, site, out)
    if as_json:
        about = json.loads((target / "configs" / "metadata.json").read_text(encoding="utf-8"))
        print(json.dumps({"bundle": str(target), **{k: about[k] for k in ("description", "eval_metrics", "weights")}}))
    elif not quiet:
        print(f"{target} is a MONAI bundle; {target / 'docs' / 'README.md'} explains how to run it.")


@app.command()
def compare(
    runs: Runs,
    reference: Reference = None,
    out: Annotated[Path | None, Option(help="New folder to write; one below comparisons/ by default.")] = None,
    on: Annotated[str | None, Option(metavar="NAME", help="Evaluation to compare; test by default.")] = None,
    empty: EmptyMasks = "penalty",
    hd95: Definition = "max",
    tail: Annotated[
        str, Option(help="Alternative of the tests: two-sided, greater (better than the reference) or less.")
    ] = ("two-sided"),
    test: Annotated[
        list[str] | None,
        Option(
            metavar="QUESTION",
            help="Test of your own, as in 'scaffold > fedavg @ 12,13 / TC': > better, < worse, != differs; @ sites or "
            "@ !sites to leave out; / label or measure. May be repeated; p is corrected over all of them (Holm).",
        ),
    ] = None,
    figure: Figures = None,
    case: Cases = None,
    scans: Scans = True,
    title: Annotated[str, Option(help="Title of the page.")] = "Methods compared",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare runs: tables, tests paired by case, costs.

    Writes a page, its figures as SVG, PDF and PNG, and all tables as Markdown, LaTeX and CSV. Runs that differ only
    in seed or fold are one method.
    """
    from polysite.engines.run_folder import RunFolder
    from polysite.report import publish, tables
    from polysite.report.runs import methods, read

    compared = methods(read(path, name, on) for name, path in map(_named, runs))
    options = options_of(compared, reference, empty, hd95, tail, scans, figure, case)
    options = replace(options, questions=tuple(test or ()))
    target = out or RunFolder.fresh(Path("comparisons"), "compare")
    done = publish.comparison(target, title, compared, options)
    if as_json:
        print(json.dumps({"comparison": str(target), **publish.plain(done)}))
    elif not quiet:
        tables.show(compared, options, full=True)
        say(f"\nPage: {target / 'index.html'}; tables as Markdown, LaTeX and CSV, and figures/ beside it")


@app.command()
def report(
    run: Annotated[Path, Argument(metavar="RUN", help="Run folder, finished or not.")],
    out: Annotated[Path | None, Option(help="Page to write; RUN/index.html by default.")] = None,
    empty: EmptyMasks = "penalty",
    hd95: Definition = "max",
    figure: Figures = None,
    case: Cases = None,
    scans: Scans = True,
) -> None:
    """Write the HTML page of a run, finished or not.

    Its figures are written beside it, as SVG, PDF and PNG.
    """
    from polysite.report import publish
    from polysite.report.runs import methods, read

    shown = methods([read(run)])
    options = options_of(shown, None, empty, hd95, "two-sided", scans, figure, case)
    print(publish.page(out or run / "index.html", shown, options, files=True))


def options_of(
    methods: Any,
    reference: str | None,
    empty: str,
    hd95: str,
    tail: str,
    scans: bool,
    figures: list[str] | None,
    cases: list[str] | None,
) -> Any:
    """Return the options of a page; refuse values that do not exist."""
    from typing import get_args

    from polysite import config
    from polysite.metrics.measures import Empty, EmptyMaskPolicy
    from polysite.metrics.statistics import Tail
    from polysite.report.page import Options

    if cases and not scans:
        raise ConfigError("--case shows images of patients and --no-scans leaves them out; leave one of the two out")
    if tail not in get_args(Tail):
        raise ConfigError(f"--tail {tail}: choose {', '.join(get_args(Tail))}")
    first = methods[0].first
    speeds = config.parse(first.config, where=str(first.path / "config.toml")).cost
    penalty: float | Literal["diagonal"] = "diagonal"
    kind = empty
    if empty not in get_args(Empty):
        try:
            kind, penalty = "penalty", float(empty)
        except ValueError:
            raise ConfigError(f"--empty {empty}: {', '.join(get_args(Empty))}, or a number of millimetres") from None
    policy = EmptyMaskPolicy(kind, penalty, hd95)  # type: ignore[arg-type]
    shown = Options(reference, policy, tail, speeds, scans=scans)  # type: ignore[arg-type]
    return replace(shown, figures=tuple(figures or ()), cases=tuple(cases or ()))


def _named(given: Path) -> tuple[str | None, Path]:
    """Split ``NAME=RUN``, unless a folder has that very name."""
    name, sign, path = str(given).partition("=")
    if sign and not given.exists():
        if not name:
            raise PolysiteError(f"{given}: write a name before the equals sign, as in fedavg=runs/first")
        return name, Path(path)
    return None, given
