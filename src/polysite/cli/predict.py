"""The command ``predict``."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from polysite.cli.base import Json, Quiet, app, say


@app.command()
def predict(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a finished run.")],
    scans: Annotated[
        Path, Argument(metavar="SCANS", help="A manifest, a folder of scans, or one scan. Labels are ignored.")
    ],
    out: Annotated[Path, Option(help="New folder to write.")],
    site: Annotated[
        str | None, Option(metavar="NAME", help="Hospital whose model is used; not needed if all use the same.")
    ] = None,
    mirror: Annotated[
        bool | None,
        Option("--mirror/--no-mirror", help="Average over mirror images: 8 times the time in 3D. As the run did."),
    ] = None,
    overlap: Annotated[
        float | None, Option(help="Overlap of the sliding window, 0 to less than 1; that of the run by default.")
    ] = None,
    batch: Annotated[int, Option(help="Windows per pass; 0: as many as fit into the free memory.")] = 0,
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    format: Annotated[
        str,
        Option(metavar="KIND", help="Format of the masks: nifti, nrrd, png, npy, dicom-seg; auto: that of the scan."),
    ] = "auto",
    preview: Annotated[int, Option(help="Cases on the preview sheet; 0 for no sheet.")] = 12,
    key: Annotated[
        Path | None, Option(metavar="FILE", help="New file that says which pseudonym stands for which DICOM folder.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Predict unlabelled scans with a finished run.

    Writes masks on the grid and in the format of every scan, a table of volumes and a preview sheet. The best model is
    used, or the one of a hospital. Exit code 1 if a scan could not be read.
    """
    from polysite import prediction
    from polysite.report.progress import counted

    shown: Any = nullcontext(lambda *_: None) if quiet or as_json else counted("scans")
    with shown as watch:
        done = prediction.predict(
            run, scans, out, site=site, mirror=mirror, overlap=overlap, batch=batch, device=device,
            format=format, preview=preview, key=key, watch=watch,
        )  # fmt: skip
    if as_json:
        for line in done.table:
            print(json.dumps(line))
        for case, reason in done.failed.items():
            print(json.dumps({"case": case, "failed": reason}))
    elif not quiet:
        _show(done, key)
    for case, reason in done.failed.items():
        say(f"polysite: {case} was left out: {reason}", file=sys.stderr)
    if done.failed:
        raise typer.Exit(1)


def _show(done: Any, key: Path | None) -> None:
    """Print how many scans were predicted and where the results are."""
    count = len({line["case"] for line in done.table})
    say(f"{count} scan{'s' * (count != 1)} predicted: {done.folder}")
    for name, what in (
        ("volumes.csv", "volumes of every label"),
        ("probabilities.csv", "probabilities of every class"),
        ("routes.csv", "cluster and model of every scan"),
        ("preview.png", "slices with outlines"),
    ):
        if (done.folder / name).exists():
            say(f"  {name:18} {what}")
    if done.pseudonyms:
        scans, listed = "scan was" if done.pseudonyms == 1 else "scans were", key or "--key FILE"
        say(f"{done.pseudonyms} DICOM {scans} called after the patient and got a pseudonym ({listed} lists them).")
