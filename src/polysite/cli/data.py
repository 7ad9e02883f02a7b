"""Commands about image files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from polysite.cli.base import Json, Override, Quiet, Source, app, overrides_of, study_of, watching
from polysite.errors import ConfigError, PolysiteError

PHANTOM = "WT=1,2,4; TC=1,4; ET=4"


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
    study = configuration.parse("", {"seed": str(seed), **overrides_of(override or [])})
    patients = study.data.case_refs(study.seed)
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

    files = study_of(source, override or []).data
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

    study = study_of(source, override or [])
    if isinstance(study.data, Files):  # to look at, whatever is there
        study = replace(study, data=replace(study.data, allow=("missing", "empty")))
    for file in sheets.draw(study, out, cases):
        print(file)


@app.command()
def radiomics(
    source: Source,
    out: Annotated[Path | None, typer.Option(help="A new folder; one below radiomics/ by default.")] = None,
    override: Override = None,
    bin_width: Annotated[float, typer.Option(help="Of the grey levels, in the unit of the prepared images.")] = 0.09,
    bin_count: Annotated[
        int | None, typer.Option(metavar="N", help="So many grey levels instead, whatever the range.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="NAME", help="The region: a label of the truth; by default the whole brain.")
    ] = None,
    clusters: Annotated[
        str | None, typer.Option(metavar="K", help="Cluster the cases: 10, or 2,4,8 to choose by BIC.")
    ] = None,
    dimensions: Annotated[int, typer.Option(min=1, help="Principal components to cluster by.")] = 30,
    fewest: Annotated[int, typer.Option(min=0, help="Cases behind a sum that leaves a site; 0 to switch off.")] = 5,
    jobs: Annotated[int | None, typer.Option(min=1, help="Cases at a time; by default one for every core.")] = None,
    parquet: Annotated[bool, typer.Option("--parquet", help="Write features.parquet beside features.csv.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Extract 93 radiomic features of every modality of every case; find outliers, cluster the cases."""
    from polysite import extract
    from polysite.cluster.mixture import Settings as MixtureSettings
    from polysite.radiomics import Settings

    study = study_of(source, override or [])
    settings = Settings(bin_width=bin_width, bin_count=bin_count)
    try:
        counts = tuple(int(k) for k in clusters.split(",")) if clusters else ()
    except ValueError:
        raise ConfigError(f"--clusters {clusters}: a number of clusters, or several as in 2,4,8") from None
    mixture = MixtureSettings(dimensions=dimensions, components=counts or 1, fewest=fewest, seed=study.seed)
    with watching(quiet or as_json, False) as watch:
        done = extract.run(
            study, out, settings=settings, label=label, clusters=mixture if counts else None, jobs=jobs,
            parquet=parquet, watch=watch,
        )  # fmt: skip
    if as_json:
        print(json.dumps({"radiomics": str(done.folder), **done.about}))
    elif not quiet:
        from polysite.report import tables

        for grid in extract.tables(done):
            tables.show_grid(grid)
        for sentence in extract.words(done):
            print(sentence)
