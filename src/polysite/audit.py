"""What could be made of the numbers that leave a hospital: an attack on all that a study tells about its cases.

::

    FOLDER/
        index.html    what came of it, in plain words first
        audit.json    every number
        figures/      as SVG and PNG

A study sends most of these numbers as sums and sorted lists over many cases. The attack is given those of every case by
itself, the worst case: radiomics as a site computes them, and what an assessment would tell of a hospital that holds
this one case and tells of it all the same.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from scipy.ndimage import gaussian_filter

from polysite import config
from polysite import study as studies
from polysite.algorithms import ALGORITHMS, find
from polysite.cluster import mixture
from polysite.config import Study
from polysite.data.cache import Cache, place
from polysite.data.case import SPLITS, Case, CaseRef
from polysite.data.split import SiteSplit
from polysite.engines.rounds import Watch
from polysite.engines.run_folder import RunFolder, versions
from polysite.errors import ConfigError, DataError, nearest
from polysite.models.encoders import Embedder
from polysite.payload import Payload
from polysite.report import audit_page
from polysite.report.audit_page import Finding, Ratio, View
from polysite.report.preview import axes_of, turned
from polysite.storage import draft_folder, vacant
from polysite.training.assessed_site import TorchAssessedSite
from polysite.training.attack import Outcome, Scans, Settings, attack, matched, shrunk
from polysite.training.torch_site import device_of

KINDS = {
    "radiomics": "radiomic features",
    "components": "principal components of the radiomic features",
    "embedding": "embedding of an assessment",
    "directions": "embedding of an assessment along its random directions",
    "quantities": "largest intensities and label amounts of an assessment",
}
OF = {
    "radiomics": ("radiomics", "components"),
    "embedding": ("embedding",),
    "quantiles": ("directions", "quantities"),
    "all": tuple(KINDS),
}
LEAST = {"train": 8, "validation": 2, "test": 2}  # cases, below which an attack says nothing
NOISE, GAIN = 0.1, 0.1  # of a second scan: of the deviation inside the head; of the signal, at most
OUTLINE = (0.4, 0.6)  # of a second outline: where the smoothed first one is cut

Dealt = Mapping[str, SiteSplit]
Listed = Sequence[tuple[str, str, CaseRef]]  # site, part, patient
Vectors = dict[str, np.ndarray]  # kind -> case x number
Rows = Mapping[str, list[int]]  # part -> places in the list of all cases


@dataclass(frozen=True, eq=False)
class Withheld:
    """A case that was to be rebuilt."""

    site: str
    patient: CaseRef
    axes: str  # where they point
    volume: np.ndarray


@dataclass(frozen=True)
class Audit:
    """A finished audit."""

    folder: Path
    findings: tuple[Finding, ...]


def audit(
    study: Study,
    what: str = "all",
    out: Path | str | None = None,
    *,
    settings: Settings = Settings(),
    modality: str = "",
    scans: bool = True,
    watch: Watch = Watch(),
) -> Audit:
    """Attack the numbers that a study tells about cases, and write down what came of it.

    ``what``: radiomics, embedding, quantiles or all. ``modality``: which is to be rebuilt, the first by default, or
    ``all``. ``scans``: whether the page shows three test cases.
    """
    target, kinds, channels = _target(out), _kinds(study, what), _channels(study, modality)
    dealt = _each(studies.deal_cases(study), _kept)
    listed, done = _listed(dealt), count(1)
    total = 2 * len(listed) + len(kinds)

    def step(words: str) -> None:
        watch.case(next(done), total, words)

    volumes, inside, axes = _volumes(study, listed, channels, settings.side)
    rows = _rows(listed, volumes, [study.data.modality_names[k] for k in channels])
    seen, again = _first_and_second(study, dealt, kinds, step)
    learn, probe = ([k for k, (_, part, _) in enumerate(listed) if (part == "train") is own] for own in (True, False))
    sites, outcomes, findings = tuple(site for site, _, _ in listed), {}, []
    for kind in kinds:
        known = Scans(sites, seen[kind], volumes, inside)
        train, validation, test = (known.part(rows[part]) for part in SPLITS)
        outcomes[kind] = attack(train, validation, test, settings, study.seed, device_of(study.train.device))
        hits = matched(seen[kind], again[kind], learn, probe)
        findings.append(_finding(kind, study, outcomes[kind], seen[kind].shape, hits))
        step(f"attack on {kind}")
    tested = [Withheld(*listed[k][::2], axes[k], volumes[k]) for k in rows["test"]]
    views = _views(tested, findings, outcomes) if scans else []
    _publish(target, findings, views, _about(study, rows, channels, settings), _by_case(tested, outcomes))
    return Audit(target, tuple(findings))


# What is asked for.


def _target(out: Path | str | None) -> Path:
    return vacant(Path(out) if out else RunFolder.fresh(Path("audits"), "audit"), "audit")


def _kinds(study: Study, what: str) -> tuple[str, ...]:
    if what not in OF:
        raise ConfigError(f"--what {what}: {nearest(what, OF)}")
    kinds = OF[what] if study.assess.projections else tuple(k for k in OF[what] if k not in ("embedding", "directions"))
    if not kinds:
        raise ConfigError("assess.projections = 0, so this study sends no embeddings; audit something else with --what")
    return kinds


def _channels(study: Study, modality: str) -> list[int]:
    """The modalities to be rebuilt."""
    names = study.data.modality_names
    if modality in ("", "all"):
        return list(range(len(names)))[: None if modality else 1]
    if modality not in names:
        raise ConfigError(f"--modality {modality}: there is no such modality; {nearest(modality, [*names, 'all'])}")
    return [names.index(modality)]


def _tuning(study: Study) -> tuple[Any, bool]:
    """How radiomics are taken, and whether this study has a phase that sends something of them."""
    own = [s.algorithm for s in config.phases(study) if hasattr(s.algorithm, "case_clusters")]
    return (own[0], True) if own else (find("cfft", ALGORITHMS, "algorithm")(), False)


# The cases.


def _listed(dealt: Dealt) -> Listed:
    return [(site, part, p) for site, parts in dealt.items() for part in SPLITS for p in parts[part]]


def _each(dealt: Dealt, change: Callable[[CaseRef], CaseRef]) -> Dealt:
    return {site: {part: [change(p) for p in parts[part]] for part in SPLITS} for site, parts in dealt.items()}


def _kept(patient: CaseRef) -> CaseRef:
    """A phantom is drawn once; files are opened whenever they are needed."""
    return patient if patient.files else replace(patient, read=cache(patient.read))


def rescanned(patient: CaseRef, seed: int) -> CaseRef:
    """The same patient another day: other noise, more or less signal, outlines drawn a little wider or tighter."""

    def read() -> Case:
        case = patient.open()
        rng = np.random.default_rng([seed, crc32(f"{patient.site}/{patient.name}".encode())])
        image, label = case.image.copy(), case.label
        for volume in image:
            inside = volume != 0
            noise = NOISE * float(volume[inside].std()) if inside.any() else 0.0
            gain = 1 + GAIN * rng.uniform(-1, 1)
            volume[inside] = gain * (volume[inside] + noise * rng.standard_normal(int(inside.sum())))
        if label.ndim > 1:
            soft = [gaussian_filter(mask.astype(np.float32), 1) for mask in label]
            label = np.stack([mask > rng.uniform(*OUTLINE) for mask in soft]).astype(np.uint8)
        return replace(case, image=image, label=label)

    return replace(patient, read=read, files=(), hidden=())


def _volumes(
    study: Study, listed: Listed, channels: Sequence[int], side: int
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """What is to be rebuilt, where the head is, and where the axes point."""
    # as an assessment does it: with raw intensities, a bright scan would count more than others
    prepare = replace(study.prepare, normalise="nonzero") if study.prepare.normalise == "none" else study.prepare
    volumes, masks, axes = [], [], []
    for site, _, patient in listed:
        raw = patient.open()
        image = prepare.apply(raw, [1] * study.data.dims).image
        volume, mask = shrunk(image[list(channels)], (image != 0).any(0), side)
        if not mask.any():
            who = f"case {patient.name!r} of site {site!r}"
            raise DataError(f"{who} shows nothing at {side} voxels a side; leave it out, or raise --side")
        volumes.append(volume)
        masks.append(mask)
        axes.append(study.prepare.orientation or axes_of(raw))
    return np.stack(volumes), np.stack(masks), axes


def _rows(listed: Listed, volumes: np.ndarray, modalities: Sequence[str]) -> Rows:
    """The cases of every part of which all that is to be rebuilt was acquired; refuse too few."""
    acquired = [bool(np.all([modality.any() for modality in volume])) for volume in volumes]
    rows = {part: [k for k, (_, own, _) in enumerate(listed) if own == part and acquired[k]] for part in SPLITS}
    if any(len(rows[part]) < least for part, least in LEAST.items()):
        wanted, found = (", ".join(f"{n} {part}" for part, n in each.items()) for each in (LEAST, _counts(rows)))
        raise DataError(
            f"an attack takes at least {wanted} cases with {' and '.join(modalities)}, and there are {found}; add "
            "cases, or change split.validation and split.test"
        )
    return rows


def _counts(rows: Rows) -> dict[str, int]:
    return {part: len(own) for part, own in rows.items()}


# What is told about them.


def _first_and_second(
    study: Study, dealt: Dealt, kinds: Sequence[str], step: Callable[[str], None]
) -> tuple[Vectors, Vectors]:
    """The numbers of every case, and of a second scan of it; radiomics as the server of a cfft phase sees them."""
    seen = _vectors(study, dealt, kinds, step)
    again = _vectors(study, _each(dealt, lambda p: rescanned(p, study.seed)), kinds, step)
    if "radiomics" in kinds:
        train = [k for k, (_, part, _) in enumerate(_listed(dealt)) if part == "train"]
        one = mixture.Settings(components=1, dimensions=_tuning(study)[0].dimensions)
        fitted = mixture.pooled(seen["radiomics"][train], one)
        for found in (seen, again):
            found["components"] = fitted.transform(found["radiomics"])
            found["radiomics"] = mixture.scaled(found["radiomics"], fitted.low, fitted.high)
    return seen, again


def _vectors(study: Study, dealt: Dealt, kinds: Sequence[str], step: Callable[[str], None]) -> Vectors:
    """The numbers of every case; radiomics as they are extracted."""
    listed, found = _listed(dealt), {}
    if "radiomics" in kinds:
        sites, width = studies.build_sites(study, dealt), _tuning(study)[0].bin_width
        found["radiomics"] = np.concatenate([sites[site].radiomics([p.name], width) for site, _, p in listed])
    asked = [k for k in kinds if k not in OF["radiomics"]]
    seeing = any(k != "quantities" for k in asked)
    embedder = Embedder(study.encoder, device_of(study.train.device)) if seeing else None
    told = []
    for site, _, patient in listed:
        told.append(_told(study, patient, embedder) if asked else {})
        step(f"{site} · {patient.name}")
    return found | {kind: np.stack([each[kind] for each in told]) for kind in asked}


def _told(study: Study, patient: CaseRef, embedder: Embedder | None) -> Vectors:
    """What an assessment would tell of a hospital that holds this one case."""
    data, projections = study.data, study.assess.projections if embedder else 0
    about = data.modality_names, data.label_names, data.dims, data.task == "classification"
    site = TorchAssessedSite(patient.site, [patient], *about, study.prepare, embedder, Cache(place()))
    reply, _ = replace(study.assess, fewest=1, projections=projections).local(Payload(), Payload(), site)
    found = {"quantities": np.concatenate(list(reply["quantiles"].values()))}
    if embedder:
        found["embedding"] = np.concatenate(list(reply["mean"].values()))
        found["directions"] = reply["directions"]["embedding"][:, 0]
    return found


def _leaves(kind: str, study: Study) -> str:
    """What of it really leaves a hospital."""
    fewest, levels = study.assess.fewest, study.assess.levels
    if kind in OF["radiomics"]:
        tuning, own = _tuning(study)
        pooled = "the features of every case once, as its fit is pooled"
        sums = (
            f"sums and counts over the cases of a site, {tuning.fewest} at least, instead of the features of each; who "
            "sees those of single sites may still work out some values"
        )
        if own:
            return f"This study sends {pooled if tuning.fit == 'pooled' else sums}."
        return f"This study sends none of them. One with algorithm cfft would send {sums}; with a pooled fit, all."
    if kind == "embedding":
        alone = ", never that of one case" if fewest > 1 else ": where it is one, that is its embedding"
        return f"An assessment sends its mean over the cases of a hospital, {fewest} at least{alone}."
    return (
        f"An assessment sends every number in a list over the cases of a hospital, {fewest} at least, which is sorted "
        f"by itself, so that it is not told which numbers belong to one case; of more than {levels} cases, averages."
    )


# What came of it.


def _finding(kind: str, study: Study, outcome: Outcome, shape: tuple[int, ...], hits: np.ndarray) -> Finding:
    average = outcome.errors["average"]
    ratios = {name: Ratio.of(e, average) for name, e in outcome.errors.items() if name != "average"}
    return Finding(
        kind, KINDS[kind], shape[1], _leaves(kind, study), ratios, outcome.chosen, len(average), outcome.coefficients,
        outcome.weights, int(hits.sum()), len(hits), shape[0],
    )  # fmt: skip


def _about(study: Study, rows: Rows, channels: Sequence[int], settings: Settings) -> dict[str, Any]:
    names = [study.data.modality_names[k] for k in channels]
    return {
        "cases": _counts(rows),
        "modalities": names,
        "noise": NOISE,
        "gain": GAIN,
        **asdict(settings),
        "seed": study.seed,
        "config": config.dump(studies.pinned(study)),
        "versions": versions(),
    }


def _views(tested: Sequence[Withheld], findings: Sequence[Finding], outcomes: Mapping[str, Outcome]) -> list[View]:
    """The cases that the strongest attack rebuilt best, middling and worst, by the error of the average scan."""
    first = outcomes[min(findings, key=lambda f: f.attack.value).kind]
    longest = max(outcomes.values(), key=lambda o: o.coefficients)
    order = np.argsort(first.errors[first.chosen] / first.errors["average"]).tolist()
    made = {
        "scan": np.stack([t.volume for t in tested]),
        "average": first.rebuilt["average"],
        **{kind: outcome.rebuilt[outcome.chosen] for kind, outcome in outcomes.items()},
        "compressed": longest.rebuilt["compressed"],
    }

    def middle(k: int, volumes: np.ndarray) -> np.ndarray:
        slices = turned(volumes[k][:1], tested[k].axes)[0]
        found: np.ndarray = slices[len(slices) // 2]
        return found

    chosen = dict.fromkeys((order[0], order[len(order) // 2], order[-1]))  # of two cases, both
    return [View(tested[k].patient.name, {what: middle(k, each) for what, each in made.items()}) for k in chosen]


def _by_case(tested: Sequence[Withheld], outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    def errors(k: int) -> dict[str, dict[str, float]]:
        return {kind: {name: float(e[k]) for name, e in found.errors.items()} for kind, found in outcomes.items()}

    return [{"site": t.site, "case": t.patient.name, "errors": errors(k)} for k, t in enumerate(tested)]


def _publish(
    path: Path,
    findings: Sequence[Finding],
    views: Sequence[View],
    about: Mapping[str, Any],
    cases: Sequence[Mapping[str, Any]],
) -> None:
    summary = audit_page.summary(findings)
    numbers = {"summary": summary, "findings": [f.plain() for f in findings], "test": cases, "about": about}
    with draft_folder(path, "audit") as draft:
        (draft / "audit.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        audit_page.write(draft, findings, views, about)
