"""Attack the numbers that a study computes from its cases: rebuild scans, match second scans with their patients.

::

    FOLDER/
        index.html    results, in plain words first
        audit.json    every number
        curves.csv    losses of every decoder after each epoch
        figures/      as SVG, PDF and PNG

A study sends most of these numbers as sums and sorted lists over many cases. The attack knows those of every single
case, which is the worst case: radiomics as a site computes them, and the reply of a hospital with this one case to an
assessment that accepts one case.
"""

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
from polysite.cluster.federated_mixture import mixture_of
from polysite.cluster.pooled_mixture import pooled
from polysite.config import Study
from polysite.data.cache import Cache, place
from polysite.data.case import SPLITS, Case, CaseRef
from polysite.data.split import SiteSplit
from polysite.engines.run_folder import RunFolder, versions
from polysite.engines.watch import Watch
from polysite.errors import ConfigError, DataError, nearest
from polysite.models.encoders import Embedder
from polysite.payload import Payload
from polysite.radiomics import NAMES
from polysite.report import audit_page
from polysite.report.audit_page import AttackedNumbers, Audit, Finding, Ratio
from polysite.report.orientation import axes_of, turned
from polysite.storage import vacant
from polysite.training.assessed_site import TorchAssessedSite
from polysite.training.attack import Outcome, Scans, Settings, attack, matched, shrunk
from polysite.training.network import device_of

KINDS = {
    "radiomics": "radiomic features",
    "components": "principal components of the radiomic features",
    "embedding": "embedding of an assessment",
    "directions": "embedding of an assessment along its random directions",
    "quantities": "largest intensities and label amounts of an assessment",
    "modality": "radiomic features of the rebuilt modality",
}
RADIOMICS = ("radiomics", "components", "modality")
OF = {
    "radiomics": ("radiomics", "components"),
    "embedding": ("embedding",),
    "quantiles": ("directions", "quantities"),
    "modality": ("modality",),
    "all": tuple(kind for kind in KINDS if kind != "modality"),
}
MIN_CASES = {"train": 8, "validation": 2, "test": 2}
NOISE, GAIN = 0.1, 0.1  # of a second scan: noise relative to the standard deviation; largest change of the signal
OUTLINE = (0.4, 0.6)  # range of the threshold that turns a smoothed mask into a second outline

Dealt = Mapping[str, SiteSplit]
Listed = Sequence[tuple[str, str, CaseRef]]  # site, split, case
View = tuple[str, dict[str, np.ndarray]]  # title and slices of a case, by what they show
Vectors = dict[str, np.ndarray]  # kind -> case x number
Rows = Mapping[str, list[int]]  # split -> indices in the list of all cases


@dataclass(frozen=True, eq=False)
class Withheld:
    """A test case, which the attack rebuilds."""

    site: str
    case: CaseRef
    axes: str  # orientation, such as RAS
    volume: np.ndarray


def audit(
    study: Study,
    what: str = "",
    out: Path | str | None = None,
    *,
    settings: Settings = Settings(),
    modality: str = "",
    scans: bool = True,
    watch: Watch = Watch(),
) -> Audit[AttackedNumbers]:
    """Attack the numbers of a study's cases and write the results into a folder.

    Args:
        study: The study.
        what: Numbers to attack: radiomics, embedding, quantiles, all, or modality (the radiomics of the modality that
            is rebuilt); by default all, and modality with the paper's decoder.
        out: The folder; a new one below audits/ by default.
        settings: Settings of the attack.
        modality: The modality to rebuild, or ``all``; the first by default.
        scans: Show three test cases on the page.
        watch: Observer of the progress.
    """
    study = config.whole(study)
    what = what or ("modality" if settings.decoder == "paper" else "all")
    target = vacant(Path(out) if out else RunFolder.fresh(Path("audits"), "audit"), "audit")
    kinds, channels = _kinds(study, what), _channels(study, modality)
    dealt = _each(studies.deal_cases(study), _kept)
    listed, done = _listed(dealt), count(1)
    total = 2 * len(listed) + len(kinds)

    def step(words: str) -> None:
        watch.case(next(done), total, words)

    volumes, inside, axes = _volumes(study, listed, channels, settings.side)
    rows = _rows(listed, volumes, [study.data.modality_names[k] for k in channels])
    seen, again = _first_and_second(study, dealt, kinds, channels, step)
    learn, probe = ([k for k, (_, split, _) in enumerate(listed) if (split == "train") is own] for own in (True, False))
    sites, outcomes, findings = tuple(site for site, _, _ in listed), {}, []
    for kind in kinds:
        known = Scans(sites, seen[kind], volumes, inside)
        train, validation, test = (known.part(rows[split]) for split in SPLITS)
        outcomes[kind] = attack(train, validation, test, settings, study.seed, device_of(study.train.device))
        hits = matched(seen[kind], again[kind], learn, probe)
        findings.append(_finding(kind, study, outcomes[kind], seen[kind].shape, hits))
        step(f"attack on {kind}")
    tested = [Withheld(*listed[k][::2], axes[k], volumes[k]) for k in rows["test"]]
    views = _views(tested, findings, outcomes) if scans else []
    found = AttackedNumbers(findings, views, _by_case(tested, outcomes))
    return audit_page.write(target, found, _about(study, rows, channels, settings))


# Arguments.


def _kinds(study: Study, what: str) -> tuple[str, ...]:
    if what not in OF:
        raise ConfigError(f"--what {what}: {nearest(what, OF)}")
    kinds = OF[what] if study.assess.projections else tuple(k for k in OF[what] if k not in ("embedding", "directions"))
    if not kinds:
        raise ConfigError("assess.projections = 0, so this study sends no embeddings; audit something else with --what")
    return kinds


def _channels(study: Study, modality: str) -> list[int]:
    """Return the indices of the modalities to rebuild."""
    names = study.data.modality_names
    if modality in ("", "all"):
        return list(range(len(names)))[: None if modality else 1]
    if modality not in names:
        raise ConfigError(f"--modality {modality}: there is no such modality; {nearest(modality, [*names, 'all'])}")
    return [names.index(modality)]


def _tuning(study: Study) -> tuple[Any, bool]:
    """Return the algorithm whose settings are used to compute radiomics, and whether the study contains it."""
    own = [s.algorithm for s in config.phases(study) if hasattr(s.algorithm, "case_clusters")]
    return (own[0], True) if own else (find("cfft", ALGORITHMS, "algorithm")(), False)


# The cases.


def _listed(dealt: Dealt) -> Listed:
    return [(site, split, case) for site, splits in dealt.items() for split in SPLITS for case in splits[split]]


def _each(dealt: Dealt, change: Callable[[CaseRef], CaseRef]) -> Dealt:
    return {site: {split: list(map(change, splits[split])) for split in SPLITS} for site, splits in dealt.items()}


def _kept(case: CaseRef) -> CaseRef:
    """Return the case; a phantom is then drawn only once and cached, while files are opened at every read."""
    return case if case.files else replace(case, read=cache(case.read))


def rescanned(ref: CaseRef, seed: int) -> CaseRef:
    """Return a second scan of the same patient: other noise and signal, slightly wider or tighter outlines."""

    def read() -> Case:
        case = ref.open()
        rng = np.random.default_rng([seed, crc32(f"{ref.site}/{ref.name}".encode())])
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

    return replace(ref, read=read, files=(), hidden=())


def _volumes(
    study: Study, listed: Listed, channels: Sequence[int], side: int
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return the volumes to rebuild, the masks of the head, and the orientations."""
    # normalised as in an assessment: with raw intensities, a bright scan would count more than others
    prepare = replace(study.prepare, normalise="nonzero") if study.prepare.normalise == "none" else study.prepare
    volumes, masks, axes = [], [], []
    for site, _, case in listed:
        raw = case.open()
        image = prepare.apply(raw, [1] * study.data.dims).image
        volume, mask = shrunk(image[list(channels)], (image != 0).any(0), side)
        if not mask.any():
            who = f"case {case.name!r} of site {site!r}"
            raise DataError(f"{who} shows nothing at {side} voxels a side; leave it out, or raise --side")
        volumes.append(volume)
        masks.append(mask)
        axes.append(study.prepare.orientation or axes_of(raw))
    return np.stack(volumes), np.stack(masks), axes


def _rows(listed: Listed, volumes: np.ndarray, modalities: Sequence[str]) -> Rows:
    """Return the cases of every split that have all modalities to rebuild; refuse too few."""
    acquired = [bool(np.all([modality.any() for modality in volume])) for volume in volumes]
    rows = {split: [k for k, (_, own, _) in enumerate(listed) if own == split and acquired[k]] for split in SPLITS}
    if any(len(rows[split]) < least for split, least in MIN_CASES.items()):
        wanted = ", ".join(f"{n} {split}" for split, n in MIN_CASES.items())
        present = ", ".join(f"{len(own)} {split}" for split, own in rows.items())
        raise DataError(
            f"an attack takes at least {wanted} cases with {' and '.join(modalities)}, and there are {present}; add "
            "cases, or change split.validation and split.test"
        )
    return rows


# Their numbers.


def _first_and_second(
    study: Study, dealt: Dealt, kinds: Sequence[str], channels: Sequence[int], step: Callable[[str], None]
) -> tuple[Vectors, Vectors]:
    """Return the numbers of every case and of its second scan; radiomics scaled as in a cfft phase."""
    seen = _vectors(study, dealt, kinds, step)
    again = _vectors(study, _each(dealt, lambda p: rescanned(p, study.seed)), kinds, step)
    if any(kind in RADIOMICS for kind in kinds):
        train = [k for k, (_, split, _) in enumerate(_listed(dealt)) if split == "train"]
        one = mixture.Settings(components=1, dimensions=_tuning(study)[0].dimensions)
        fitted = mixture_of(pooled(seen["radiomics"][train], one))
        for vectors in (seen, again):
            vectors["components"] = fitted.transform(vectors["radiomics"])
            vectors["radiomics"] = mixture.scaled(vectors["radiomics"], fitted.low, fitted.high)
            own = [len(NAMES) * channel + k for channel in channels for k in range(len(NAMES))]
            vectors["modality"] = vectors["radiomics"][:, own]
    return seen, again


def _vectors(study: Study, dealt: Dealt, kinds: Sequence[str], step: Callable[[str], None]) -> Vectors:
    """Return the numbers of every case; radiomics as they are extracted."""
    listed, vectors = _listed(dealt), {}
    if any(kind in RADIOMICS for kind in kinds):
        sites, width = studies.build_sites(study, dealt), _tuning(study)[0].bin_width
        vectors["radiomics"] = np.concatenate([sites[site].radiomics([case.name], width) for site, _, case in listed])
    asked = [k for k in kinds if k not in RADIOMICS]
    seeing = any(k != "quantities" for k in asked)
    embedder = Embedder(study.encoder, device_of(study.train.device)) if seeing else None
    replies = []
    for site, _, case in listed:
        replies.append(_reply(study, case, embedder) if asked else {})
        step(f"{site} · {case.name}")
    return vectors | {kind: np.stack([reply[kind] for reply in replies]) for kind in asked}


def _reply(study: Study, case: CaseRef, embedder: Embedder | None) -> Vectors:
    """Return the reply to an assessment of a hospital that has only this case."""
    data, projections = study.data, study.assess.projections if embedder else 0
    about = data.modality_names, data.label_names, data.dims, data.task == "classification"
    site = TorchAssessedSite(case.site, [case], *about, study.prepare, embedder, Cache(place()))
    reply, _ = replace(study.assess, fewest=1, projections=projections).local(Payload(), Payload(), site)
    vectors = {"quantities": np.concatenate(list(reply["quantiles"].values()))}
    if embedder:
        vectors["embedding"] = np.concatenate(list(reply["mean"].values()))
        vectors["directions"] = reply["directions"]["embedding"][:, 0]
    return vectors


def _leaves(kind: str, study: Study) -> str:
    """Describe which part of the numbers leaves a hospital."""
    fewest, levels = study.assess.fewest, study.assess.levels
    if kind in RADIOMICS:
        tuning, own = _tuning(study)
        whole = "the features of every case once, as its fit is pooled"
        sums = (
            "sums and counts over the cases of a site and of its cases in every cluster, which may be one, instead of "
            "the features of each; a recipient of the sums of single sites may still work out some values"
        )
        if own:
            return f"This study sends {whole if tuning.fit == 'pooled' else sums}."
        return f"This study sends none of them. One with algorithm cfft would send {sums}; with a pooled fit, all."
    if kind == "embedding":
        alone = ", never that of one case" if fewest > 1 else "; the mean of one case is its embedding"
        return f"An assessment sends its mean over the cases of a hospital, at least {fewest}{alone}."
    return (
        f"An assessment sends every number as a list over the cases of a hospital, at least {fewest}. Each list is "
        f"sorted separately, so that numbers of one case cannot be matched; for more than {levels} cases it holds "
        "averages."
    )


# Results.


def _finding(kind: str, study: Study, outcome: Outcome, shape: tuple[int, ...], hits: np.ndarray) -> Finding:
    average = outcome.errors["average"]
    ratios = {name: Ratio.of(e, average) for name, e in outcome.errors.items() if name != "average"}
    return Finding(
        kind, KINDS[kind], shape[1], _leaves(kind, study), ratios, outcome.chosen, len(average), outcome.coefficients,
        outcome.weights, int(hits.sum()), len(hits), shape[0], outcome.curves,
    )  # fmt: skip


def _about(study: Study, rows: Rows, channels: Sequence[int], settings: Settings) -> dict[str, Any]:
    names = [study.data.modality_names[k] for k in channels]
    return {
        "cases": {split: len(own) for split, own in rows.items()},
        "modalities": names,
        "noise": NOISE,
        "gain": GAIN,
        **asdict(settings),
        "seed": study.seed,
        "config": config.dump(studies.pinned(study)),
        "versions": versions(),
    }


def _views(tested: Sequence[Withheld], findings: Sequence[Finding], outcomes: Mapping[str, Outcome]) -> list[View]:
    """Return the cases that the strongest attack rebuilt best, at the median and worst."""
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
        image: np.ndarray = slices[len(slices) // 2]
        return image

    chosen = dict.fromkeys((order[0], order[len(order) // 2], order[-1]))  # of two cases, both
    return [(tested[k].case.name, {what: middle(k, each) for what, each in made.items()}) for k in chosen]


def _by_case(tested: Sequence[Withheld], outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    def errors(k: int) -> dict[str, dict[str, float]]:
        return {kind: {name: float(e[k]) for name, e in outcome.errors.items()} for kind, outcome in outcomes.items()}

    return [{"site": t.site, "case": t.case.name, "errors": errors(k)} for k, t in enumerate(tested)]
