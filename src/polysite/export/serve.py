"""Export the model of a hospital from a finished run as a MONAI bundle.

::

    FOLDER/
        configs/inference.json     reads scans, prepares them as polysite does, predicts, writes the predictions
        configs/metadata.json      inputs and outputs, required packages, the digest of the weights
        models/model.safetensors   the parameters, by the names of the network
        docs/README.md             description and instructions
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import safetensors.torch

from polysite.config import Study
from polysite.data import images
from polysite.data.files import Files
from polysite.engines.run_folder import RunFolder, file_name
from polysite.errors import ConfigError, RunError
from polysite.export.bundle import WEIGHTS, Bundle, Config, Scans, inference, metadata, readme
from polysite.export.served_model import ServedModel, hidden_modalities, open_finished, served_model
from polysite.models.ensemble import Ensemble
from polysite.models.monai import Monai
from polysite.models.unet import UNet
from polysite.payload import SiteId
from polysite.storage import draft_folder, vacant


def serve_model(run: Path | str, site: SiteId | None = None, out: Path | str | None = None) -> Path:
    """Write the model of a hospital as a MONAI bundle into a new folder, and return the folder.

    Args:
        run: The folder of a finished run.
        site: The hospital; not needed if all hospitals use the same model.
        out: The new folder; one below RUN/bundles/ by default.
    """
    folder = open_finished(run)
    own = folder.path / "bundles" / (file_name(site) if site else "shared")
    target = vacant(Path(out) if out else own, "bundle")
    bundle = _find(folder, site)
    weights = safetensors.torch.save(bundle.weights(), {"format": "pt"})
    files = {
        WEIGHTS: weights,
        "configs/inference.json": _json(inference(bundle)),
        "configs/metadata.json": _json(metadata(bundle, weights)),
        "docs/README.md": readme(bundle, target.name).encode(),
    }
    with draft_folder(target, "bundle", private=False) as draft:
        for name, content in files.items():
            (draft / name).parent.mkdir(exist_ok=True)
            (draft / name).write_bytes(content)
        if target.exists():
            raise RunError(f"{target} was written meanwhile by another process; it is left as it is")
    return target


def _json(value: Config) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _find(folder: RunFolder, site: SiteId | None) -> Bundle:
    """Return the model of a hospital, or the shared one, with its description."""
    found = served_model(folder, site)
    why = _beyond_monai(found)
    if why:
        words = f"'polysite predict {folder.path} SCANS --out FOLDER' predicts with it"
        raise RunError(f"{folder.path} {why}, so it cannot be a bundle: {words}")
    for name in (*found.result.modalities, *found.result.labels):
        if name.startswith(("$", "%")) or "@" in name:
            raise ConfigError(
                f"{name!r} cannot be the name of a modality or label in a bundle, where MONAI reads '$', '%' and '@' "
                "as code: rename it in the data and train again"
            )
    scans = _scans(found.study, found.result.modalities, site)
    return Bundle(**vars(found), scans=scans)


def _beyond_monai(found: ServedModel) -> str:
    """Return what of a model MONAI has no part for; empty if there is nothing."""
    model = found.study.model
    networks = model.members if isinstance(model, Ensemble) else (model,)
    reasons = {
        "cleans its masks (train.clean)": found.study.train.clean.does,
        "classifies images": found.result.task == "classification",
        "has a model for every cluster of patients": found.clusters is not None,
        "has a network that is not of MONAI": not all(isinstance(network, UNet | Monai) for network in networks),
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _scans(chosen: Study, modalities: Sequence[str], site: SiteId | None) -> Scans:
    """Return the file format of the scans that the model was trained on."""
    scans = Scans(tuple(modalities), hidden=hidden_modalities(chosen, site))
    if not isinstance(chosen.data, Files):
        return scans
    listed = chosen.data.manifest
    cells = [[listed.file(f) for f in row.images.values() if f] for row in listed.rows]
    channels = tuple(index for _, index in cells[0] if index is not None)
    alike = all(len({file for file, _ in row}) == 1 and [i for _, i in row] == list(channels) for row in cells)
    return replace(
        scans,
        channels=channels if alike and len(channels) == len(modalities) else (),
        flat=images.suffix(str(cells[0][0][0])) in images.FLAT,
        boxes=any(row.box for row in listed.rows),
    )
