"""Plans put into studies: only where the study leaves a choice, and never over a preset."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polysite import config
from polysite.config import Study
from polysite.data.files import Files
from polysite.errors import ConfigError
from polysite.planning import statistics
from polysite.planning.rules import DataPlan, Frame, make_plan
from polysite.planning.statistics import SiteStatistics

CLASSIFIER = "densenet_small"  # the default network is for segmentation
SIZES = ("train.patch", "train.window")


def plan(data: Path | str, **sections: Any) -> Study:
    """Return a study on a manifest or a folder of images, with settings from the data; ``Study`` describes the rest.

    >>> plan("manifest.csv", run={"rounds": 50})  # doctest: +SKIP
    Study(...)

    Args:
        data: A manifest (.csv, .jsonl) or a folder of images.
        sections: Sections of the study as in TOML, such as ``train={"lr": 0.2}``; they take precedence.
    """
    given = {"data": {"name": "files", "path": str(data)}}
    return planned(config.merge(given, sections))[0]


def planned(given: dict[str, Any], overrides: dict[str, str] | None = None) -> tuple[Study, DataPlan | None]:
    """Build a study from parsed TOML, with settings from its images where the TOML has none.

    Nothing is planned (None) for a study with a preset, and for one that is not about image files.

    Args:
        given: The study as parsed TOML.
        overrides: Further values by dotted key, as of ``--set``.
    """
    wanted = {**given, **({"model": {"name": CLASSIFIER}} if _classifies(given, overrides) else {})}
    keys = {*config.flat(given), *(overrides or {})}
    if "preset" in keys:
        return config.build(given, overrides), None
    first = _without_sizes(wanted, overrides or {})
    if not isinstance(first.data, Files):
        return config.build(given, overrides), None
    found = make_plan(statistics.measure(first.data), _frame(first))
    values = {k: v for k, v in found.values.items() if not any(g == k or k.startswith(f"{g}.") for g in keys)}
    study = config.build(config.merge(config.nested({k: _toml(v) for k, v in values.items()}), wanted), overrides)
    return study, DataPlan(values, {k: found.reasons[k] for k in values})


def for_hospitals(
    sites: Sequence[SiteStatistics], modalities: Sequence[str], labels: Sequence[str], device: str = "cpu"
) -> tuple[Study, DataPlan]:
    """Return a study for real hospitals, planned from what they told about their cases, and the plan.

    Args:
        sites: Statistics of the hospitals.
        modalities: Modalities that every hospital has, in this order.
        labels: Labels, or classes, of every hospital.
        device: ``cpu`` or ``cuda``: what all hospitals train on.
    """
    first = sites[0]
    for what, count, names in (("modalities", first.channels, modalities), ("labels", first.labels, labels)):
        if len(names) != count:
            raise ConfigError(f"{len(names)} {what} are named, and the hospitals have {count}; name them all")
    found = make_plan(sites, Frame(device=device))
    values = {k: _toml(v) for k, v in found.values.items()}
    data = {"modalities": list(modalities), "labels": list(labels), "dims": first.dims, "task": first.task}
    named: dict[str, Any] = {"data": {"name": "hospitals", **data}}
    if first.task == "classification":
        named["model"] = {"name": CLASSIFIER}
    return config.build({**config.nested(values), **named}), found


def _classifies(given: dict[str, Any], overrides: dict[str, str] | None) -> bool:
    """Return whether the images are to be classified, and the study names no network."""
    if "model" in given or any(k.split(".")[0] == "model" for k in overrides or {}):
        return False
    data = {k: v for k, v in (overrides or {}).items() if k.split(".")[0] == "data"}
    source = config.build({"data": given["data"]} if "data" in given else {}, data).data
    return isinstance(source, Files) and source.task == "classification"


def _without_sizes(given: dict[str, Any], overrides: dict[str, str]) -> Study:
    """Build a study without the sizes of patches, which may not fit the default network's dimensions."""
    train = given.get("train")
    if isinstance(train, dict):
        given = {**given, "train": {k: v for k, v in train.items() if f"train.{k}" not in SIZES}}
    return config.build(given, {k: v for k, v in overrides.items() if k not in SIZES})


def _frame(study: Study) -> Frame:
    """Return what a study has decided."""
    from polysite.training.network import device_of

    split = study.split
    test = 1 / split.folds if split.folds else split.test
    return Frame(
        divisor=study.model.divisor,
        device=device_of(study.train.device).type,
        slices=study.slices.axis,
        orientation=study.prepare.orientation,
        spacing=study.prepare.spacing,
        train=max(0.1, 1 - test - split.validation),
        validation=split.validation,
    )


def _toml(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
