"""Evaluate a finished run again: on another split, on other data, or with other settings.

A run evaluates itself when it ends (``polysite.study``); the folder is the same (``polysite.evaluation_folder``).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from polysite import study
from polysite.config import Study
from polysite.data.case import SPLITS
from polysite.data.files import Files
from polysite.data.split import SiteSplit
from polysite.engines.phases import examine
from polysite.engines.run_folder import RunFolder, file_name
from polysite.engines.watch import Watch
from polysite.errors import ConfigError, DataError, RunError
from polysite.payload import SiteId
from polysite.study.training import evaluation_of


def evaluate(
    run: Path | str,
    split: str = "test",
    on: Path | str | None = None,
    *,
    tolerance: float = 1.0,
    others: bool = True,
    pictures: bool = True,
    again: bool = False,
    watch: Watch = Watch(),
) -> Path:
    """Examine the best model of a finished run; returns the folder of the evaluation.

    Args:
        run: The run folder.
        split: The split of the run's own data: train, validation or test.
        on: Other data, all of whose cases are examined instead.
        tolerance: Distance of surfaces that still agree, in the unit of the voxels.
        others: Examine every hospital's own model also on the cases of all others.
        pictures: Keep predictions and scans to look at.
        again: Replace an evaluation that exists.
        watch: Observer of the progress.
    """
    folder = study.open_finished(run)
    if not 0 <= tolerance < np.inf:
        raise ConfigError(f"the tolerance {tolerance} must be a distance, 0 or more")
    chosen, dealt, name = _subject(folder, split, on)
    split = split if on is None else "test"
    target = folder.path / "evaluation" / name
    if target.exists() and not again:
        raise RunError(f"{target} exists already; --again examines once more and replaces it")
    sites = study.build_sites(chosen, dealt, watch)
    trained = sorted(s for s, splits in dealt.items() if splits["train"])
    known, models = study.models_of(folder, chosen, trained, sites)
    sent = models.payloads([s for s in known if sites[s].cases(split)])

    data = str(Path(on).resolve()) if on else ""
    how = evaluation_of(chosen, dealt, sites, folder, name, tolerance, pictures=pictures, data=data)
    owners = [] if chosen.run.pooled else [s for s in trained if s in known]
    served = models.phase.transport.serve(models.round, sent)
    examine(models, sent, served, split, how, owners if others else None)
    return target


def _subject(folder: RunFolder, split: str, on: Path | str | None) -> tuple[Study, Mapping[SiteId, SiteSplit], str]:
    """Return the study, the cases of the run's own data, or all cases of other data, and the name of the evaluation."""
    chosen = study.study_of(folder)
    if on is None and split not in SPLITS:
        raise ConfigError(f"there is no split {split!r}; choose {', '.join(SPLITS)}")
    dealt = study.dealt_as_trained(folder, chosen)
    if on is not None:
        return chosen, *_elsewhere(chosen, dealt, Path(on))
    if not any(splits[split] for splits in dealt.values()):
        raise RunError(f"no case of {folder.path} is in the split {split!r}; choose another with --split")
    return chosen, dealt, split


def _elsewhere(chosen: Study, dealt: Mapping[SiteId, SiteSplit], path: Path) -> tuple[Mapping[SiteId, SiteSplit], str]:
    """Return all cases of other data as test cases, and a name for them.

    Hospitals of the run keep their training cases, which may choose a model.
    """
    mine = chosen.data
    plain = mine if isinstance(mine, Files) else Files(str(path))
    files = replace(
        plain, path=str(path), modalities=mine.modality_names, format="auto", tables=(), sites=(), exclude=()
    )
    for what in ("task", "dims", "label_names"):
        wanted, found = getattr(mine, what), getattr(files, what)
        if wanted != found:
            raise DataError(f"{path} does not fit this run: its {what.replace('_', ' ')}: {found}; the run's: {wanted}")
    listed = files.case_refs(chosen.seed)
    cut = chosen.cut([case for cases in listed.values() for case in cases])
    others = {site: [case for volume in volumes for case in cut[volume]] for site, volumes in listed.items()}
    joined = {
        site: {**dealt.get(site, {"train": [], "validation": []}), "test": others.get(site, [])}
        for site in (*dealt, *(s for s in others if s not in dealt))
    }
    name = file_name(path.stem if path.is_file() else path.resolve().name)
    return joined, f"on {name}" if name in SPLITS else name
