"""Export the model of a hospital from a finished run as a MONAI bundle.

::

    FOLDER/
        configs/inference.json     reads scans, prepares them as polysite does, predicts, writes the predictions
        configs/metadata.json      inputs and outputs, required packages, the digest of the weights
        models/model.safetensors   the parameters, by the names of the network
        docs/README.md             description and instructions
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import safetensors
import safetensors.torch

from polysite import config, study
from polysite.config import Study
from polysite.data import images
from polysite.data.federation import HideModalities
from polysite.data.files import Files
from polysite.engines.run_folder import RunFolder, file_name
from polysite.errors import ConfigError, RunError, nearest
from polysite.export.bundle import WEIGHTS, Bundle, Config, Scans, Whose, inference, metadata, method_of, readme
from polysite.payload import SiteId
from polysite.report.runs import title
from polysite.storage import draft_folder, vacant
from polysite.tree import Tree


def serve_model(run: Path | str, site: SiteId | None = None, out: Path | str | None = None) -> Path:
    """Write the model of a hospital as a MONAI bundle into a new folder, and return the folder.

    Args:
        run: The folder of a finished run.
        site: The hospital; not needed if all hospitals use the same model.
        out: The new folder; one below RUN/bundles/ by default.
    """
    folder = RunFolder.open(Path(run))
    if not folder.finished:
        raise RunError(f"{folder.path} has not finished; 'polysite train --resume {folder.path}' brings it to its end")
    own = folder.path / "bundles" / (file_name(site) if site else "shared")
    target = vacant(Path(out) if out else own, "bundle")
    bundle = _find(folder, site)
    weights = safetensors.torch.save(bundle.weights, {"format": "pt"})
    files = {
        "configs/inference.json": _json(inference(bundle)),
        "configs/metadata.json": _json(metadata(bundle, weights)),
        "docs/README.md": readme(bundle, target.name).encode(),
    }
    with draft_folder(target, "bundle") as draft:
        for name, content in {WEIGHTS: weights, **files}.items():
            (draft / name).parent.mkdir(exist_ok=True)
            (draft / name).write_bytes(content)
        if target.exists():
            raise RunError(f"{target} was written meanwhile by another process; it is left as it is")
    return target


def _json(value: Config) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _find(folder: RunFolder, site: SiteId | None) -> Bundle:
    """Return the model of a hospital, or the shared one, with its description."""
    chosen = config.parse(folder.config, where=str(folder.path / "config.toml"))
    result, hospitals = folder.result, sorted(folder.result.validation)
    sites = {row["Site"] for row in csv.DictReader(io.StringIO(folder.split))}
    if site is not None and site not in sites:
        raise ConfigError(f"there is no site {site!r} in {folder.path}; {nearest(site, hospitals)}")
    if site is not None and site not in hospitals:
        raise ConfigError(f"{site!r} is no hospital but was made to train; choose one of {', '.join(hospitals)}")
    for name in (*result.modalities, *result.labels):
        if name.startswith(("$", "%")) or "@" in name:
            raise ConfigError(
                f"{name!r} cannot be the name of a modality or label in a bundle, where MONAI reads '$', '%' and '@' "
                "as code: rename it in the data and train again"
            )
    trained = site is None or _trained(folder, site)
    if not trained and not all(phase.algorithm.strangers for phase in config.phases(chosen)):
        raise RunError(  # its model would be an untrained network
            f"{site!r} did not train until the best round of {folder.path}, and {method_of(chosen)} has no model for "
            "such a hospital: train longer, with a larger run.share, or use an algorithm that has one"
        )
    file = _file(folder, chosen, site)
    whose: Whose = "all" if file.stem == "best" else "own" if trained else "others"
    return Bundle(title(folder.path), chosen, result, site, whose, _open(file), _scans(chosen, result.modalities, site))


def _trained(folder: RunFolder, site: SiteId) -> bool:
    """Return whether a site trained in a round up to the one whose model it uses."""
    until = [r for r in folder.records() if r.round <= folder.result.round_of(site)]
    return any(site in r.sites and site not in r.refused for r in until)


def _file(folder: RunFolder, chosen: Study, site: SiteId | None) -> Path:
    """Return the file of the model: one for all, or one per hospital."""
    models = folder.path / "models"
    if (models / "best.group-1.safetensors").exists():  # shared models, one per cluster of patients
        raise ConfigError(
            f"{method_of(chosen)} has a model for every cluster of patients and chooses by the scan, which a bundle "
            f"cannot; the models are in {models}, and 'polysite evaluate {models.parent} --on' evaluates other scans"
        )
    shared = models / "best.safetensors"
    if site is None and not shared.exists():
        raise ConfigError(
            f"the hospitals of {folder.path} have models of their own; choose whose with --site: "
            f"{', '.join(sorted(folder.result.validation))}"
        )
    if site is None or shared.exists():
        return shared
    if (models / f"{file_name(f'best.{site}.group-1')}.safetensors").exists():
        raise RunError(
            f"{method_of(chosen)} serves several models to {site!r}, each to some of its patients, and a bundle holds "
            f"one: let polysite choose, with 'polysite evaluate {folder.path} --on DATA'"
        )
    return models / f"{file_name(f'best.{site}')}.safetensors"


def _open(file: Path) -> Tree:
    try:
        return safetensors.torch.load_file(file)
    except (safetensors.SafetensorError, OSError) as problem:
        raise RunError(f"the model {file} cannot be read: {problem}") from problem


def _scans(chosen: Study, modalities: Sequence[str], site: SiteId | None) -> Scans:
    """Return the file format of the scans that the model was trained on."""
    scans = Scans(tuple(modalities))
    if isinstance(chosen.federation, HideModalities) and site is not None:
        splits = study.deal_cases(chosen)[site]
        scans = replace(scans, hidden=next(case.hidden for cases in splits.values() for case in cases))
    if not isinstance(chosen.data, Files):
        return scans
    listed = chosen.data.manifest
    cells = [[listed.file(f) for f in row.images.values() if f] for row in listed.rows]
    channels = tuple(index for _, index in cells[0] if index is not None)
    alike = all(len({file for file, _ in row}) == 1 and [i for _, i in row] == list(channels) for row in cells)
    return replace(
        scans,
        channels=channels if alike and len(channels) == len(modalities) else (),
        flat=images.suffix(cells[0][0][0].name) in images.FLAT,
        boxes=any(row.box for row in listed.rows),
    )
