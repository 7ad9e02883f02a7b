"""Finished runs: their folders, their cases and their models, to evaluate or attack them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from polysite import config
from polysite.algorithms.base import facts
from polysite.config import Study
from polysite.data.split import SiteSplit, table
from polysite.engines.phases import Models, Phase, find_models
from polysite.engines.run_folder import RunFolder
from polysite.engines.simulator import Simulator
from polysite.engines.watch import Watch
from polysite.errors import RunError
from polysite.models.ensemble import Ensemble
from polysite.payload import SiteId
from polysite.study.cases import deal_cases
from polysite.training.torch_site import TorchSite


def open_finished(run: Path | str) -> RunFolder:
    """Open the folder of a finished, simulated run."""
    folder = RunFolder.open(Path(run))
    if not folder.finished:
        raise RunError(f"{folder.path} has not finished; 'polysite train --resume {folder.path}' brings it to its end")
    if (folder.path / "deployment.json").exists():
        raise RunError(f"{folder.path} was trained by real hospitals: its cases are there, and so is their evaluation")
    return folder


def study_of(folder: RunFolder) -> Study:
    """Return the study of a run; an ensemble whose members have different splits reads its own from its folder."""
    study = config.parse(folder.config, where=str(folder.path / "config.toml"))
    if isinstance(study.model, Ensemble) and study.split.file and not study.split.validation:
        return replace(study, split=replace(study.split, file=str(folder.path / "split.csv")))
    return study


def models_of(
    folder: RunFolder, chosen: Study, trained: Sequence[SiteId], sites: Mapping[SiteId, TorchSite]
) -> tuple[list[SiteId], Models]:
    """Return the sites that a finished run has models for, and these models.

    Args:
        folder: The run folder.
        chosen: Its study.
        trained: Sites with training cases.
        sites: All sites.
    """
    phases = config.phases(chosen)
    built: list[Phase] = []
    engine: Simulator | None = None
    for s in phases:
        engine = Simulator(s.algorithm, {i: site.under(s.train) for i, site in sites.items()}, after=engine)
        built.append(Phase(s.algorithm, engine, s.run))
    strangers = all(facts(s.algorithm).strangers for s in phases)  # a phase starts from what the phases before it serve
    known = sorted(sites) if strangers else [s for s in trained if s in sites]
    return known, find_models(folder, built, folder.result, known)


def dealt_as_trained(folder: RunFolder, chosen: Study, watch: Watch = Watch()) -> Mapping[SiteId, SiteSplit]:
    """Return the cases of every site; refuse data that are not those of the run."""
    dealt = deal_cases(chosen, watch)
    if table(dealt) != folder.split:
        raise RunError(
            f"the data are not those that {folder.path} was trained with: its split.csv names other cases or parts; "
            "bring them back, or start a new run"
        )
    return dealt
