"""The command that attacks what leaves hospitals: numbers that describe cases, and models of a run."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from polysite.cli.base import Json, Override, Quiet, app, say, study_of, watching


@app.command()
def audit(
    config: Annotated[
        Path | None,
        Argument(
            metavar="STUDY|RUN",
            help="A study in TOML, a manifest or a folder of images: attack the numbers that describe its cases; or "
            "the folder of a finished run: attack its models. Without one, the numbers of the phantoms.",
            show_default=False,
        ),
    ] = None,
    override: Override = None,
    what: Annotated[
        str,
        Option(
            metavar="KIND",
            help="Numbers to attack: radiomics, assessment, all (both), or modality (radiomics of the rebuilt "
            "modality); all by default, modality with --decoder paper.",
            show_default=False,
        ),
    ] = "",
    modality: Annotated[
        str, Option(metavar="NAME", help="Modality to rebuild; the first by default.", show_default=False)
    ] = "",
    decoder: Annotated[
        str,
        Option(metavar="NAME", help="Decoder of the attack: small, or paper (Manthe et al. 2023, 128 voxels a side)."),
    ] = "small",
    side: Annotated[
        int | None, Option(help="Side of the rebuilt scans in voxels, 16 to 128; default 32, with paper 128.")
    ] = None,
    epochs: Annotated[int | None, Option(help="Epochs of a decoder; default 60, with paper 300.")] = None,
    rate: Annotated[float | None, Option(help="Learning rate of a decoder; default 0.002, with paper 0.0001.")] = None,
    iterations: Annotated[
        int, Option(help="Of a run: steps of the search for an image; 0 leaves out gradient inversion.")
    ] = 300,
    scans: Annotated[bool, Option("--scans/--no-scans", help="Show slices of patients on the page.")] = True,
    out: Annotated[Path | None, Option(help="New folder to write; one below audits/ by default.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Attack what leaves hospitals.

    Of a study: tries to rebuild scans from the numbers that describe cases and to match second scans with patients. Of
    a finished run: tries to tell from its models who was trained on, and to rebuild images from its updates.
    """
    from polysite.audit import models, numbers
    from polysite.audit.findings import CAUTION
    from polysite.audit.vectors import settings_of

    with watching(quiet or as_json, False) as watch:
        if config is not None and models.is_run(config):
            done = models.audit_run(config, out, iterations=iterations, scans=scans, watch=watch)
        else:
            study = study_of(config, override or [])
            settings = settings_of(decoder, side=side, epochs=epochs, rate=rate)
            done = numbers.audit(study, what, out, settings=settings, modality=modality, scans=scans, watch=watch)
    if as_json:
        import json

        print(json.dumps(json.loads((done.folder / "audit.json").read_text(encoding="utf-8"))))
    elif not quiet:
        from polysite.report import tables

        for finding in done.findings:
            tables.show_grid(finding.table())
        for finding in done.findings:
            say(f"{finding.answer}\n")
        say(CAUTION, f"The page: {done.folder / 'index.html'}")
