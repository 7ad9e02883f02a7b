"""Export the model of a hospital from a finished run as a MONAI bundle.

::

    FOLDER/
        configs/inference.json     reads scans, prepares them as polysite does, predicts, writes the predictions
        configs/metadata.json      inputs and outputs, required packages, the digest of the weights
        models/model.safetensors   the parameters, by the names of the network
        models/clusters.safetensors, models/cluster_K.safetensors   where models are chosen by the scan: routing.py
        docs/README.md             description and instructions
"""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import safetensors
import safetensors.numpy
import safetensors.torch

from polysite import config, postprocessing, study
from polysite.algorithms.base import case_clusters, serving_payloads
from polysite.cluster.mixture import CaseClusters
from polysite.config import Study
from polysite.data import images
from polysite.data.federation import hides_modalities
from polysite.data.files import Files
from polysite.engines import checkpoint
from polysite.engines.phases import Checkpoint
from polysite.engines.run_folder import RunFolder, file_name
from polysite.errors import ConfigError, RunError, nearest
from polysite.export.bundle import WEIGHTS, Bundle, Config, Scans, Whose, inference, metadata, method_of, readme
from polysite.export.routing import CLUSTERS, cluster_file
from polysite.payload import SiteId
from polysite.report.runs import title
from polysite.spreadsheets import rows as csv_rows
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
    models = _models(bundle)
    files = {
        "configs/inference.json": _json(inference(bundle)),
        "configs/metadata.json": _json(metadata(bundle, models)),
        "docs/README.md": readme(bundle, target.name).encode(),
    }
    with draft_folder(target, "bundle", private=False) as draft:
        for name, content in {**models, **files}.items():
            (draft / name).parent.mkdir(exist_ok=True)
            (draft / name).write_bytes(content)
        if target.exists():
            raise RunError(f"{target} was written meanwhile by another process; it is left as it is")
    return target


def _models(bundle: Bundle) -> dict[str, bytes]:
    """Return the files of the parameters, and of the clusters by which one is chosen."""
    known, place = bundle.clusters, Path(WEIGHTS).parent
    models = {WEIGHTS: bundle.model}
    if known is not None:
        models |= {str(place / cluster_file(k)): model for k, model in enumerate(known.models)}
    files = {name: safetensors.torch.save(bundle.weights(m), {"format": "pt"}) for name, m in models.items()}
    return files | ({str(place / CLUSTERS): safetensors.numpy.save(known.mixture.arrays())} if known else {})


def _json(value: Config) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _find(folder: RunFolder, site: SiteId | None) -> Bundle:
    """Return the model of a hospital, or the shared one, with its description."""
    result, hospitals = folder.result, sorted(folder.result.validation)
    chosen = postprocessing.study_of(folder)
    sites = {row["Site"] for row in csv_rows(io.StringIO(folder.split))}
    if site is not None and site not in sites:
        raise ConfigError(f"there is no site {site!r} in {folder.path}; {nearest(site, hospitals)}")
    if site is not None and site not in hospitals:
        raise ConfigError(f"{site!r} is no hospital but was made to train; choose one of {', '.join(hospitals)}")
    if chosen.slices.axis and result.task == "classification":
        raise RunError(f"{folder.path} classifies slices, and a bundle classifies whole scans; train on volumes")
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
    name, scans = title(folder.path), _scans(chosen, result.modalities, site)
    if (folder.path / "models" / "best.group-1.safetensors").exists():  # shared models, one per cluster of patients
        known = _clusters(folder, chosen)
        if chosen.slices.axis:
            raise RunError(
                f"the models of {folder.path} are chosen slice by slice, and a bundle chooses one for a whole scan: "
                f"let polysite choose, with 'polysite evaluate {folder.path} --on DATA'"
            )
        return Bundle(name, chosen, result, None, "all", known.start, scans, known)
    file = _file(folder, chosen, site)
    whose: Whose = "all" if file.stem == "best" else "own" if trained else "others"
    return Bundle(name, chosen, result, site, whose, _open(file), scans)


def _clusters(folder: RunFolder, chosen: Study) -> CaseClusters:
    """Return the clusters of patients with their models, from the checkpoint of the best round."""
    algorithm = config.phases(chosen)[folder.result.best_phase].algorithm
    path = folder.best(folder.result.best_round)
    kept: Checkpoint = checkpoint.load(path, modules={type(algorithm).__module__})
    if not isinstance(kept, Checkpoint):
        raise RunError(f"{path} does not hold the checkpoint of a round")
    known = case_clusters(algorithm, serving_payloads(algorithm, kept.at.state, ["anyone"])["anyone"])
    if known is None:
        raise RunError(
            f"the models of {folder.path} are for groups of patients, but {method_of(chosen)} does not say which; let "
            f"polysite choose, with 'polysite evaluate {folder.path} --on DATA'"
        )
    return known


def _trained(folder: RunFolder, site: SiteId) -> bool:
    """Return whether a site trained in a round up to the one whose model it uses."""
    until = [r for r in folder.records() if r.round <= folder.result.round_of(site)]
    return any(site in r.sites and site not in r.refused for r in until)


def _file(folder: RunFolder, chosen: Study, site: SiteId | None) -> Path:
    """Return the file of the model: one for all, or one per hospital."""
    models = folder.path / "models"
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
    if hides_modalities(chosen.federation) and site is not None:
        hidden = {case.hidden for cases in study.deal_cases(chosen)[site].values() for case in cases}
        if len(hidden) > 1:
            raise RunError(f"the cases of site {site!r} lack different modalities, so no single input fits its model")
        scans = replace(scans, hidden=next(iter(hidden)))
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
