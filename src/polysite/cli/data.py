"""Commands for image files: ``polysite data`` and ``polysite radiomics``."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from polysite.cli.base import Json, Override, Quiet, Source, app, keep_old_name, overrides_of, say, study_of, watching
from polysite.errors import ConfigError, PolysiteError

PHANTOM = "WT=1,2,4; TC=1,4; ET=4"


data = typer.Typer(help="List, check, look at and draw image files.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data, name="data")


@data.command()
def scan(
    folder: Annotated[Path, Argument(help="Folder of images in a known layout.")],
    out: Annotated[Path, Option(help="Manifest to write, .csv or .jsonl.")] = Path("manifest.csv"),
    format: Annotated[str, Option(help="Layout; 'polysite data formats' lists them.")] = "auto",
    table: Annotated[
        list[Path] | None, Option(help="CSV with the site, group or split of each case, e.g. partitioning_1.csv.")
    ] = None,
    labels: Annotated[
        str | None, Option(metavar="NAMES", help="Names of the label values: 'WT=1,2,4; TC=1,4; ET=4'.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Overwrite the manifest.")] = False,
) -> None:
    """Recognise a folder of images and write its manifest."""
    from polysite.data import layouts, manifest
    from polysite.errors import RunError
    from polysite.report import tables

    if out.suffix not in (".csv", ".jsonl"):
        raise RunError(f"--out {out}: a manifest ends in .csv or .jsonl")
    if out.exists() and not force:
        raise RunError(f"{out} exists already; give another --out, or --force to overwrite it")
    scanned = layouts.scan(folder, format, table or [], manifest.parse_labels(labels) if labels else None)
    manifest.write(scanned.manifest, out)
    tables.show_manifest(scanned.format, scanned.manifest)
    for remark in scanned.remarks:
        say(f"note: {remark}", hang=2)
    say(f"\nThe manifest: {out}. Next: polysite data check {out}")


@data.command()
def formats() -> None:
    """List the layouts that are recognised.

    They are tried in this order.
    """
    from polysite.data.layouts import LAYOUTS

    for name, layout in LAYOUTS.items():
        say(f"{name:12} {(layout.__doc__ or '').strip().splitlines()[0]}", hang=13)


@data.command()
def cache(clear: Annotated[bool, Option("--clear", help="Delete all prepared cases.")] = False) -> None:
    """Show the folder and size of the cache of prepared cases."""
    from polysite.data.cache import Cache, place

    kept = Cache(place())
    size = kept.clear() if clear else kept.size
    say(f"{place()}: {size / 2**30:.2f} GiB {'removed' if clear else 'of prepared cases'}")


@data.command()
def check(
    source: Source,
    override: Override = None,
    strict: Annotated[bool, Option("--strict", help="Exit with code 1 on warnings, too.")] = False,
    every: Annotated[
        bool, Option("--all", help="List every case of a problem that many cases of a site have.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Open every case and list its problems.

    Exits with code 1 if there is an error.
    """
    from polysite.data import check as checks
    from polysite.data.files import Files
    from polysite.data.slices import summary
    from polysite.report import tables
    from polysite.report.progress import counting

    study = study_of(source, override or [])
    files = study.data
    if not isinstance(files, Files):
        raise PolysiteError(f"{source} is a study of drawn phantoms; there are no files to check")
    with counting("cases", len(files.manifest.rows), as_json) as step:
        report = checks.check(files, step)
    if study.slices.axis and not report.errors:
        study.check()
        volumes = [case for cases in files.case_refs(study.seed).values() for case in cases]
        report = replace(report, remarks=(*report.remarks, *summary(study.cut(volumes))))
    if as_json:
        print(json.dumps(report.plain()))
    else:
        tables.show_check(report, every)
    if report.errors or (strict and report.problems):
        raise typer.Exit(1)


@data.command()
def plan(
    sources: Annotated[
        list[Path],
        Argument(
            metavar="DATA",
            help="A manifest, a folder of images, or a study in TOML; or statistics of hospitals, .json.",
        ),
    ],
    override: Override = None,
    out: Annotated[Path | None, Option(help="New file: the whole study in TOML.")] = None,
    modalities: Annotated[
        str, Option(metavar="NAMES", help="With statistics: the modalities of all hospitals, as in 't1, flair'.")
    ] = "",
    labels: Annotated[
        str, Option(metavar="NAMES", help="With statistics: the labels, or classes, of all hospitals.")
    ] = "",
    gpu: Annotated[bool, Option("--gpu", help="With statistics: all hospitals train on GPUs.")] = False,
) -> None:
    """Show the settings that training takes from the data.

    Hospitals that keep their images send the file of 'polysite site statistics' instead.
    """
    from polysite import config as configuration
    from polysite.errors import RunError
    from polysite.storage import write_file

    if out is not None and out.exists():
        raise RunError(f"{out} exists already; give another --out")
    if any(source.suffix == ".json" for source in sources):
        study, said = _plan_of_hospitals(sources, modalities, labels, "cuda" if gpu else "cpu")
    elif len(sources) > 1:
        raise ConfigError("a plan is for one manifest, folder or study; only statistics (.json) may be several")
    else:
        said = []
        study = study_of(sources[0], override or [], said)
    lines = said or ["nothing is planned: the study states its own train.patch, has a preset, or is not about files"]
    say(*lines, hang=4)
    if out is not None:
        text = configuration.dump(study)
        write_file(out, lambda draft: draft.write_text(text, encoding="utf-8"))
        say(f"\nThe study: {out}")


def _plan_of_hospitals(sources: list[Path], modalities: str, labels: str, device: str) -> tuple[Any, list[str]]:
    """Return a study for real hospitals, and the lines of its plan."""
    from polysite.planning import statistics, studies

    sites = [statistics.read(source) for source in sources]
    named = [[word.strip() for word in text.split(",") if word.strip()] for text in (modalities, labels)]
    study, plan = studies.for_hospitals(sites, named[0], named[1], device)
    return study, plan.lines()


@data.command()
def preview(
    source: Source,
    out: Annotated[Path, Option(help="Folder for one PNG per site.")] = Path("preview"),
    cases: Annotated[int, Option(min=1, help="Cases per site, spread evenly over its list.")] = 6,
    override: Override = None,
) -> None:
    """Draw a sheet per site: slices and outlines."""
    from polysite.data.files import Files
    from polysite.report import preview as sheets

    study = study_of(source, override or [])
    if isinstance(study.data, Files):  # incomplete cases are shown as they are
        study = replace(study, data=replace(study.data, allow=("missing", "empty")))
    for file in sheets.draw(study, out, cases):
        print(file)


@data.command()
def phantom(
    out: Annotated[Path, Argument(help="New folder for SITE/CASE/modality.nii.gz.")],
    override: Override = None,
    seed: Annotated[int, Option(help="Seed of the drawn patients.")] = 0,
) -> None:
    """Write the phantom federation as NIfTI files."""
    from polysite import config as configuration
    from polysite.data.phantom import write
    from polysite.errors import RunError

    if out.exists():
        raise RunError(f"{out} exists already; name a new folder")
    study = configuration.parse("", {"seed": str(seed), **overrides_of(override or [])})
    cases = study.data.case_refs(study.seed)
    write((case.open() for site in cases.values() for case in site), out)
    count = sum(map(len, cases.values()))
    say(f"{count} cases of {len(cases)} hospitals in {out}. Next: polysite data scan {out} --labels '{PHANTOM}'")


for _old, _command in (("check-data", check), ("preview", preview), ("phantom", phantom)):
    keep_old_name(_old, f"data {_command.__name__}", _command)


@app.command()
def radiomics(
    source: Source,
    out: Annotated[Path | None, Option(help="New folder to write; one below radiomics/ by default.")] = None,
    override: Override = None,
    bin_width: Annotated[float, Option(help="Width of a grey level, in the unit of the prepared images.")] = 0.09,
    bin_count: Annotated[
        int | None, Option(metavar="N", help="Fixed number of grey levels instead of a fixed width.")
    ] = None,
    bin_range: Annotated[
        tuple[float, float] | None,
        Option(metavar="LOW HIGH", help="Range of a whole dataset, for the same grey levels in all scans."),
    ] = None,
    label: Annotated[
        str | None, Option(metavar="NAME", help="Label whose region is described; the whole brain by default.")
    ] = None,
    clusters: Annotated[
        str | None, Option(metavar="K", help="Number of clusters: 10, or 2,4,8 to choose by BIC.")
    ] = None,
    dimensions: Annotated[int, Option(min=1, help="Principal components to cluster by.")] = 30,
    repeats: Annotated[
        int, Option(min=0, help="Fits with other seeds, and to bootstrap samples, to measure how clusters vary.")
    ] = 10,
    jobs: Annotated[int | None, Option(min=1, help="Cases to process in parallel; one per core by default.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Extract radiomic features, find outliers, cluster cases.

    Every modality of every case is described by 93 features.
    """
    from polysite import extract
    from polysite.cluster.mixture import Settings as MixtureSettings
    from polysite.radiomics import Settings

    study = study_of(source, override or [])
    settings = Settings(bin_width=bin_width, bin_count=bin_count, bin_range=bin_range or ())
    try:
        counts = tuple(int(k) for k in clusters.split(",")) if clusters else ()
    except ValueError:
        raise ConfigError(f"--clusters {clusters}: a number of clusters, or several as in 2,4,8") from None
    mixture = MixtureSettings(dimensions=dimensions, components=counts or 1, seed=study.seed)
    with watching(quiet or as_json, False) as watch:
        done = extract.run(
            study, out, settings=settings, label=label, clusters=mixture if counts else None, jobs=jobs,
            repeats=repeats, watch=watch,
        )  # fmt: skip
    if as_json:
        print(json.dumps({"radiomics": str(done.folder), **done.about}))
    elif not quiet:
        from polysite.report import tables

        for grid in extract.tables(done):
            tables.show_grid(grid)
        for sentence in extract.words(done):
            say(sentence)
