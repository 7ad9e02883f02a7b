"""The model that a finished run has for a hospital: exported as a bundle, or used for predictions.

Only the run folder is read; the data of the run need not be there. (Where a federation hides modalities, they must be:
the federation says which.)
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import safetensors
import safetensors.torch

from polysite import config, study
from polysite.algorithms import name_of
from polysite.algorithms.base import case_clusters, facts, serving_payloads
from polysite.cluster.mixture import CaseClusters
from polysite.config import Study
from polysite.data.federation import hides_modalities
from polysite.engines import checkpoint
from polysite.engines.phases import Checkpoint
from polysite.engines.record import Result
from polysite.engines.run_folder import RunFolder, file_name
from polysite.errors import ConfigError, RunError, nearest
from polysite.models.ensemble import Ensemble
from polysite.payload import SiteId
from polysite.report.runs import title
from polysite.spreadsheets import rows as csv_rows
from polysite.tree import Tree

Whose = Literal["all", "own", "others"]  # a model of all hospitals, of this one, or of others that trained it


@dataclass(frozen=True)
class ServedModel:
    """A model with its run, its study and its result."""

    run: str
    study: Study
    result: Result
    site: SiteId | None
    whose: Whose
    model: Tree
    clusters: CaseClusters | None = None  # by which the model of a scan is chosen; ``model`` is then the global one


def open_finished(run: Path | str) -> RunFolder:
    """Open the folder of a finished run, simulated or of real hospitals."""
    folder = RunFolder.open(Path(run))
    if not folder.finished:
        raise RunError(f"{folder.path} has not finished; 'polysite train --resume {folder.path}' brings it to its end")
    return folder


def served_model(folder: RunFolder, site: SiteId | None) -> ServedModel:
    """Return the model of a hospital, or the one that all share.

    Args:
        folder: The folder of a finished run.
        site: The hospital; None where all hospitals use the same model.
    """
    result, hospitals = folder.result, sorted(folder.result.validation)
    chosen = study.study_of(folder)
    sites = {row["Site"] for row in csv_rows(io.StringIO(folder.split))}
    if site is not None and site not in sites:
        raise ConfigError(f"there is no site {site!r} in {folder.path}; {nearest(site, hospitals)}")
    if site is not None and site not in hospitals:
        raise ConfigError(f"{site!r} is no hospital but was made to train; choose one of {', '.join(hospitals)}")
    if chosen.slices.axis and result.task == "classification":
        raise RunError(f"{folder.path} classifies slices, and its model cannot classify whole scans; train on volumes")
    trained = site is None or _trained(folder, site)
    if not trained and not all(facts(phase.algorithm).strangers for phase in config.phases(chosen)):
        raise RunError(  # its model would be an untrained network
            f"{site!r} did not train until the best round of {folder.path}, and {method_of(chosen)} has no model for "
            "such a hospital: train longer, with a larger run.share, or use an algorithm that has one"
        )
    name = title(folder.path)
    if (folder.path / "models" / "best.group-1.safetensors").exists():  # shared models, one per cluster of patients
        known = _clusters(folder, chosen)
        if chosen.slices.axis:
            raise RunError(
                f"the models of {folder.path} are chosen slice by slice, not for a whole scan: let polysite choose, "
                f"with 'polysite evaluate {folder.path} --on DATA'"
            )
        return ServedModel(name, chosen, result, None, "all", known.start, known)
    file = _file(folder, chosen, site)
    whose: Whose = "all" if file.stem == "best" else "own" if trained else "others"
    return ServedModel(name, chosen, result, site, whose, _open(file))


def method_of(chosen: Study) -> str:
    """Describe the algorithms of a study."""
    if isinstance(chosen.model, Ensemble):
        return f"ensemble of {len(chosen.model.members)} networks"
    if chosen.run.pooled:
        return study.POOLED
    return ", then ".join(_named(phase.algorithm) for phase in config.phases(chosen))


def _named(algorithm: object) -> str:
    inner = getattr(algorithm, "inner", None)
    return f"{name_of(algorithm)} around {_named(inner)}" if inner else name_of(algorithm)


def hidden_modalities(chosen: Study, site: SiteId | None) -> tuple[int, ...]:
    """Return the modalities that a federation hides from a hospital, by number."""
    if site is None or not hides_modalities(chosen.federation):
        return ()
    hidden = {case.hidden for cases in study.deal_cases(chosen)[site].values() for case in cases}
    if len(hidden) > 1:
        raise RunError(f"the cases of site {site!r} lack different modalities, so no single input fits its model")
    return next(iter(hidden))


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
            f"{method_of(chosen)} serves several models to {site!r}, each to some of its patients, and does not say "
            f"which one a new scan gets: let polysite choose, with 'polysite evaluate {folder.path} --on DATA'"
        )
    return models / f"{file_name(f'best.{site}')}.safetensors"


def _open(file: Path) -> Tree:
    try:
        return safetensors.torch.load_file(file)
    except (safetensors.SafetensorError, OSError) as problem:
        raise RunError(f"the model {file} cannot be read: {problem}") from problem
