"""The command line. Heavy imports wait inside the commands, so that help answers at once."""

import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from polysite.errors import PolysiteError

# Threads that spin long while they wait for one another starve on a shared machine: beside one busy process a training
# step took 3 times as long by default and twice as long with this. Must be set before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

typer.core.HAS_RICH = False  # plain help: with rich there, typer escapes brackets even where it does not use it

app = typer.Typer(
    help="Federated learning for medical image segmentation, for hospitals whose data differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[
    Path | None,
    typer.Argument(
        metavar="STUDY",
        help="A study in TOML, a manifest (.csv, .jsonl) or a folder of images; without one, the phantom federation.",
        show_default=False,
    ),
]
Source = Annotated[
    Path, typer.Argument(metavar="DATA", help="A manifest (.csv, .jsonl), a folder of images, or a study in TOML.")
]
Override = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value, e.g. train.lr=0.2.")
]
PHANTOM = "WT=1,2,4; TC=1,4; ET=4"
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line instead of tables, for scripts.")]


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Where to write; a new folder below demo/ by default.")] = None,
    seed: Annotated[int, typer.Option(help="Another seed draws other patients.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Four drawn hospitals: what each gets alone, federated and pooled."""
    from polysite import demo as demonstration

    with _watching(quiet, False) as watch:
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
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show the whole study, explained, and stop.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a study and write a run folder."""
    from polysite import config as configuration

    if resume and (config or override or out):
        raise PolysiteError("--resume takes its configuration from the run folder; leave out the file, --set and --out")
    if resume and print_config:
        from polysite.engines.folder import RunFolder

        print(RunFolder.open(resume).config, end="")
        return
    if not resume:
        study = _study(config, override or [])
        if print_config:
            print(configuration.dump(study, notes=True), end="")
            return
    from polysite import study as studies

    with _watching(quiet, as_json) as watch:
        run = studies.resume(resume, watch) if resume else studies.run(study, out, watch)
    if as_json:
        print(json.dumps({"run": str(run.folder.path), **run.result}))
    elif not quiet:
        from polysite.report import tables

        tables.show([run.folder.path])
        print(f"\nThe run folder: {run.folder.path}")


@app.command()
def assess(
    config: Config = None,
    override: Override = None,
    out: Annotated[Path | None, typer.Option(help="A new folder; one below assessments/ by default.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure how the hospitals differ, and say which strategy that speaks for."""
    study = _study(config, override or [])
    from polysite import study as studies

    with _watching(quiet, False) as watch:
        done = studies.survey(study, out, watch)
    if as_json:
        print(json.dumps(json.loads((done.folder / "assessment.json").read_text())))
    elif not quiet:
        from polysite.report import tables

        tables.show_assessment(done.assessment, done.verdict)
        print(f"\nThe page with the figures: {done.folder / 'index.html'}")
        first = next(iter(sorted((done.folder / "strategies").iterdir())))
        print(f"To train what comes first: polysite train {first}")


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
        for name, paper, line in found:
            print(json.dumps({"name": name, "paper": paper, "summary": line}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "what it does", "paper"):
        table.add_column(column, overflow="fold")
    for name, paper, line in found:
        table.add_row(name, line, paper)
    Console().print(table)


@app.command()
def phantom(
    out: Annotated[Path, typer.Argument(help="A new folder for SITE/CASE/modality.nii.gz.")],
    override: Override = None,
    seed: Annotated[int, typer.Option(help="Another seed draws other patients.")] = 0,
) -> None:
    """Write the phantom federation as NIfTI files, to try polysite on."""
    from polysite import config as configuration
    from polysite.data.phantom import write
    from polysite.errors import RunError

    if out.exists():
        raise RunError(f"{out} exists already; name a new folder")
    study = configuration.parse("", {"seed": str(seed), **_overrides(override or [])})
    patients = study.data.patients(study.seed)
    write((p.open() for site in patients.values() for p in site), out)
    count = sum(map(len, patients.values()))
    print(f"{count} cases of {len(patients)} hospitals in {out}. Next: polysite data scan {out} --labels '{PHANTOM}'")


data = typer.Typer(help="Describe and look after image files.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data, name="data")


@data.command()
def scan(
    folder: Annotated[Path, typer.Argument(help="A folder of images in one of the known layouts.")],
    out: Annotated[Path, typer.Option(help="The manifest to write, .csv or .jsonl.")] = Path("manifest.csv"),
    format: Annotated[str, typer.Option(help="The layout; polysite data formats lists them.")] = "auto",
    table: Annotated[
        list[Path] | None,
        typer.Option(help="A CSV that says which case is of which site, group or split, such as partitioning_1.csv."),
    ] = None,
    labels: Annotated[
        str | None, typer.Option(metavar="NAMES", help="What the label values mean: 'WT=1,2,4; TC=1,4; ET=4'.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the manifest.")] = False,
) -> None:
    """Recognise a folder of images and write its manifest."""
    from polysite.data import layouts, manifest
    from polysite.errors import RunError
    from polysite.report import tables

    if out.suffix not in (".csv", ".jsonl"):
        raise RunError(f"--out {out}: a manifest ends in .csv or .jsonl")
    if out.exists() and not force:
        raise RunError(f"{out} exists already; give another --out, or --force to overwrite it")
    found = layouts.scan(folder, format, table or [], manifest.parse_labels(labels) if labels else None)
    manifest.write(found.manifest, out)
    tables.show_manifest(found.format, found.manifest)
    for remark in found.remarks:
        print(f"note: {remark}")
    print(f"\nThe manifest: {out}. Next: polysite check-data {out}")


@data.command()
def formats() -> None:
    """List the layouts that are recognised, in the order they are tried."""
    from polysite.data.layouts import LAYOUTS

    for name, layout in LAYOUTS.items():
        print(f"{name:12} {(layout.__doc__ or '').strip().splitlines()[0]}")


@data.command()
def cache(clear: Annotated[bool, typer.Option("--clear", help="Remove all prepared cases.")] = False) -> None:
    """Where prepared cases are kept, and how much there is."""
    from polysite.data.cache import Cache, place

    kept = Cache(place())
    size = kept.clear() if clear else kept.size
    print(f"{place()}: {size / 2**30:.2f} GiB {'removed' if clear else 'of prepared cases'}")


@app.command()
def check_data(
    source: Source,
    override: Override = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors.")] = False,
    as_json: Json = False,
) -> None:
    """Open every case and say what is wrong with it; exit code 1 if something is."""
    from polysite.data.check import check
    from polysite.data.files import Files
    from polysite.report import tables

    files = _study(source, override or []).data
    if not isinstance(files, Files):
        raise PolysiteError(f"{source} is a study of drawn phantoms; there are no files to check")
    with tables.counting("cases", len(files.manifest.rows), as_json) as step:
        report = check(files, step)
    if as_json:
        print(json.dumps(report.plain()))
    else:
        tables.show_check(report)
    if report.errors or (strict and report.problems):
        raise typer.Exit(1)


@app.command()
def preview(
    source: Source,
    out: Annotated[Path, typer.Option(help="A folder for one PNG a site.")] = Path("preview"),
    cases: Annotated[int, typer.Option(min=1, help="Cases a site, evenly over its list.")] = 6,
    override: Override = None,
) -> None:
    """Draw a sheet per site: slices, outlines, histograms."""
    from polysite.data.files import Files
    from polysite.report import preview as sheets

    study = _study(source, override or [])
    if isinstance(study.data, Files):  # to look at, whatever is there
        study = replace(study, data=replace(study.data, allow=("missing", "empty")))
    for file in sheets.draw(study, out, cases):
        print(file)


def main() -> None:
    """Run the command line: a refusal is one sentence and exit code 2."""
    warnings.filterwarnings("ignore", module=r"PIL\.")  # what it says about a damaged picture, we say with its name
    try:
        app()
    except (PolysiteError, OSError) as problem:  # the system's own refusals name the file, too
        print(f"polysite: {problem}", file=sys.stderr)
        sys.exit(2)


def _study(path: Path | None, override: list[str]) -> Any:
    """The study that a file means: TOML, or all defaults around a manifest or a folder."""
    from polysite import config as configuration

    given = _overrides(override)
    if path is None or (path.suffix not in (".csv", ".jsonl") and not path.is_dir()):
        return configuration.load(path, given) if path else configuration.parse("", given)
    plain = {"data.name": "files", "data.path": json.dumps(str(path), ensure_ascii=False)}
    files = configuration.parse("", {**plain, **{k: v for k, v in given.items() if k.startswith("data.")}}).data
    if files.dims == 2:  # defaults that fit
        plain["train.patch"] = "[32, 32]"
    if files.task == "classification":
        plain["model.name"] = "densenet_small"
    return configuration.parse("", {**plain, **given})


def _overrides(given: list[str]) -> dict[str, str]:
    from polysite.errors import ConfigError

    wrong = next((g for g in given if "=" not in g), None)
    if wrong is not None:
        raise ConfigError(f"--set {wrong}: write KEY=VALUE, for example --set algorithm.lr=0.2")
    return dict(g.split("=", 1) for g in given)


@contextmanager
def _watching(quiet: bool, as_json: bool) -> Iterator[Any]:
    """What is shown while a study runs: nothing, JSON lines or a progress bar."""
    from polysite.engines.rounds import Watch

    class Lines(Watch):
        def round(self, record: Mapping[str, Any]) -> None:
            print(json.dumps(record), flush=True)

    if quiet or as_json:
        yield Lines() if as_json else Watch()
        return
    from polysite.report.progress import progress

    with progress() as watch:
        yield watch


if __name__ == "__main__":
    main()
