"""Attack the numbers that a study computes from its cases: match second scans with their patients, rebuild scans.

A study sends most of these numbers as sums and sorted lists over many cases. The attack knows those of every single
case, which is the worst case: radiomics as a site computes them, and the reply of a hospital with this one case to an
assessment that accepts one case.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
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
from polysite.audit import findings
from polysite.audit.findings import OF_PATIENTS, Audit, Estimate, Finding, Row, picture
from polysite.audit.vectors import Rebuilt, Scans, Settings, matched, rebuild, shrunk
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
from polysite.report.drawing import COLOURS, name_axes, panels, pictures
from polysite.report.orientation import axes_of, turned
from polysite.report.page import Picture
from polysite.storage import vacant
from polysite.training.assessed_site import TorchAssessedSite
from polysite.training.network import device_of

RADIOMICS_LEAVE = (
    "a cfft phase sends sums and counts over the cases of a site and of its cases in every cluster, which may be one; "
    'a recipient of the sums of single sites may still work out some values. With fit = "pooled" it sends the features '
    "of every case, and without a cfft phase none of them leaves."
)
KINDS = {  # what the numbers are, and which part of them leaves a hospital
    "radiomics": ("radiomic features of all modalities", RADIOMICS_LEAVE),
    "modality": ("radiomic features of the rebuilt modality", RADIOMICS_LEAVE),
    "assessment": (
        "embedding, largest intensities and label amounts of an assessment",
        "an assessment sends the mean embedding over the cases of a hospital, at least assess.fewest of them, and "
        "every other number as a list over them. Each list is sorted separately, so that numbers of one case cannot be "
        "matched; for more than assess.levels cases it holds averages.",
    ),
}
MIN_CASES = {"train": 8, "validation": 2, "test": 2}
NOISE, GAIN = 0.1, 0.1  # of a second scan: noise relative to the standard deviation; largest change of the signal
OUTLINE = (0.4, 0.6)  # range of the threshold that turns a smoothed mask into a second outline

Dealt = Mapping[str, SiteSplit]
Listed = Sequence[tuple[str, str, CaseRef]]  # site, split, case
Vectors = dict[str, np.ndarray]  # kind -> case x number


def audit(
    study: Study,
    what: str = "",
    out: Path | str | None = None,
    *,
    settings: Settings = Settings(),
    modality: str = "",
    scans: bool = True,
    watch: Watch = Watch(),
) -> Audit:
    """Attack the numbers of a study's cases and write the results into a folder.

    Args:
        study: The study.
        what: Numbers to attack: radiomics, assessment, both (all), or modality (the radiomics of the modality that is
            rebuilt); by default all, and modality with the paper's decoder.
        out: The folder; a new one below audits/ by default.
        settings: Settings of the attack.
        modality: The modality to rebuild; the first by default.
        scans: Show three test cases on the page.
        watch: Observer of the progress.
    """
    study = config.whole(study)
    kinds = _kinds(what or ("modality" if settings.decoder == "paper" else "all"))
    channel = _channel(study, modality)
    target = vacant(Path(out) if out else RunFolder.fresh(Path("audits"), "audit"), "audit")
    dealt = _each(studies.deal_cases(study), _kept)
    listed, done = _listed(dealt), count(1)
    total = 2 * len(listed) + len(kinds)

    def step(words: str) -> None:
        watch.case(next(done), total, words)

    volumes, inside, axes = _volumes(study, listed, channel, settings.side)
    rows = _rows(listed, volumes, study.data.modality_names[channel])
    first = _vectors(study, dealt, kinds, channel, step)
    second = _vectors(study, _each(dealt, lambda p: rescanned(p, study.seed)), kinds, channel, step)
    learn, probe = ([k for k, (_, split, _) in enumerate(listed) if (split == "train") is own] for own in (True, False))
    hits, rebuilt = Vectors(), dict[str, Rebuilt]()
    for kind in kinds:
        hits[kind] = matched(first[kind], second[kind], learn, probe)
        known = Scans(first[kind], volumes, inside)
        train, validation, test = (known.part(rows[split]) for split in SPLITS)
        rebuilt[kind] = rebuild(train, validation, test, settings, study.seed, device_of(study.train.device))
        step(f"attack on {kind}")
    described = {kind: f"{first[kind].shape[1]} numbers: {KINDS[kind][0]}" for kind in kinds}
    figures = [_curves(rebuilt, settings)]
    if scans:
        tested = [(listed[k][2].name, axes[k], volumes[k]) for k in rows["test"]]
        figures.append(_slices(tested, rebuilt))
    about = {
        "cases": {split: len(own) for split, own in rows.items()},
        "modality": study.data.modality_names[channel],
        **asdict(settings),
        "seed": study.seed,
        "config": config.dump(studies.pinned(study)),
        "versions": versions(),
    }
    limits = [
        f"The attacker was trained on {len(rows['train'])} cases, validated on {len(rows['validation'])} and tested on "
        f"{len(rows['test'])}, with {settings.side} voxels a side: with more cases, a larger decoder or another "
        "method, an attack may do better, and finer details were not attacked. Intervals are over test cases, not over "
        "attackers, and are not corrected for their number: one of several may miss 1 by chance.",
        f"The second scans are made from the first: fresh noise of {100 * NOISE:.0f} % of the standard deviation, up "
        f"to {100 * GAIN:.0f} % more or less signal, slightly wider or tighter outlines. A real second scan differs "
        "more.",
        "Models and updates, which leave a hospital in every round of training, are attacked by 'polysite audit RUN'.",
    ]
    found = (_recognised(hits, described, len(listed)), _rebuilt(rebuilt, described, about, figures))
    title = "What an attacker can learn from the numbers that describe a case"
    return findings.write(target, title, found, limits, about)


# Arguments.


def _kinds(what: str) -> list[str]:
    if what not in (*KINDS, "all"):
        raise ConfigError(f"--what {what}: {nearest(what, [*KINDS, 'all'])}")
    return ["radiomics", "assessment"] if what == "all" else [what]


def _channel(study: Study, modality: str) -> int:
    """Return the index of the modality to rebuild."""
    names = study.data.modality_names
    if modality and modality not in names:
        raise ConfigError(f"--modality {modality}: there is no such modality; {nearest(modality, names)}")
    return names.index(modality) if modality else 0


def _bin_width(study: Study) -> float:
    """Return the bin width of the study's radiomics, or that of a cfft phase by default."""
    own: list[Any] = [s.algorithm for s in config.phases(study) if hasattr(s.algorithm, "case_clusters")]
    return float((own or [find("cfft", ALGORITHMS, "algorithm")()])[0].bin_width)


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


def _volumes(study: Study, listed: Listed, channel: int, side: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return the volumes to rebuild, the masks of the head, and the orientations."""
    # normalised as in an assessment: with raw intensities, a bright scan would count more than others
    prepare = replace(study.prepare, normalise="nonzero") if study.prepare.normalise == "none" else study.prepare
    volumes, masks, axes = [], [], []
    for site, _, case in listed:
        raw = case.open()
        image = prepare.apply(raw, [1] * study.data.dims).image
        volume, mask = shrunk(image[[channel]], (image != 0).any(0), side)
        if not mask.any():
            who = f"case {case.name!r} of site {site!r}"
            raise DataError(f"{who} shows nothing at {side} voxels a side; leave it out, or raise --side")
        volumes.append(volume)
        masks.append(mask)
        axes.append(study.prepare.orientation or axes_of(raw))
    return np.stack(volumes), np.stack(masks), axes


def _rows(listed: Listed, volumes: np.ndarray, modality: str) -> Mapping[str, list[int]]:
    """Return the cases of every split that have the modality to rebuild; refuse too few."""
    rows = {split: [k for k, (_, own, _) in enumerate(listed) if own == split and volumes[k].any()] for split in SPLITS}
    if any(len(rows[split]) < least for split, least in MIN_CASES.items()):
        wanted = ", ".join(f"{n} {split}" for split, n in MIN_CASES.items())
        present = ", ".join(f"{len(own)} {split}" for split, own in rows.items())
        raise DataError(
            f"an attack takes at least {wanted} cases with {modality}, and there are {present}; add "
            "cases, or change split.validation and split.test"
        )
    return rows


# Their numbers.


def _vectors(study: Study, dealt: Dealt, kinds: Sequence[str], channel: int, step: Callable[[str], None]) -> Vectors:
    """Return the numbers of every case."""
    listed, vectors = _listed(dealt), Vectors()
    if "radiomics" in kinds or "modality" in kinds:
        sites, width = studies.build_sites(study, dealt), _bin_width(study)
        vectors["radiomics"] = np.concatenate([sites[site].radiomics([case.name], width) for site, _, case in listed])
        vectors["modality"] = vectors["radiomics"][:, len(NAMES) * channel : len(NAMES) * (channel + 1)]
    embedder = Embedder(study.encoder, device_of(study.train.device)) if "assessment" in kinds else None
    replies = []
    for site, _, case in listed:
        replies.append(_reply(study, case, embedder) if embedder else np.empty(0))
        step(f"{site} · {case.name}")
    return vectors | {"assessment": np.stack(replies)}


def _reply(study: Study, case: CaseRef, embedder: Embedder) -> np.ndarray:
    """Return the reply to an assessment of a hospital that has only this case."""
    data = study.data
    about = data.modality_names, data.label_names, data.dims, data.task == "classification"
    site = TorchAssessedSite(case.site, [case], *about, study.prepare, embedder, Cache(place()))
    reply, _ = replace(study.assess, fewest=1).local(Payload(), Payload(), site)
    described = list(reply["quantiles"].values())
    if study.assess.projections:
        described += [*reply["mean"].values(), reply["directions"]["embedding"][:, 0]]
    return np.concatenate(described)


# Results.


def _recognised(hits: Vectors, described: Mapping[str, str], gallery: int) -> Finding:
    """Return whether second scans were matched with their patients."""
    rates, chance = {kind: Estimate.rate(same) for kind, same in hits.items()}, 1 / gallery
    rows = tuple(Row(kind, described[kind], rate, chance, rate.low > chance) for kind, rate in rates.items())
    best = max(rows, key=lambda row: row.estimate.value)
    same = hits[best.name]
    matches = f"{same.sum()} of {len(same)} second scans were matched with the first scan of the same patient"
    verdict = "The numbers identify patients" if best.leaks else "The numbers do not identify patients"
    answer = (
        f"{verdict}: by the {KINDS[best.name][0]}, {matches}, among {gallery} (rate {best.estimate.words}); by chance, "
        f"1 in {gallery} would be matched."
    )
    method = (
        f"The numbers of a second scan of the {len(same)} validation and test cases are compared with those of the "
        f"first scans of all {gallery}. Which numbers are stable between scans is learned from the training cases.",
        *(f"What leaves of the {kind} of a case: {KINDS[kind][1]}" for kind in hits),
    )
    note = "Share of second scans whose numbers are nearest to those of the same patient; the interval is Wilson's."
    return Finding(
        "patients", "Are patients identified?", answer, "matched second scans", "numbers of a case", rows, note, method
    )


def _rebuilt(
    rebuilt: Mapping[str, Rebuilt], described: Mapping[str, str], about: Mapping[str, Any], figures: Sequence[Picture]
) -> Finding:
    """Return how well scans were rebuilt."""
    ratios = {kind: Estimate.ratio(r.errors, r.usual) for kind, r in rebuilt.items()}
    rows = tuple(Row(kind, described[kind], ratio, 1.0, ratio.high < 1) for kind, ratio in ratios.items())
    best = min(rows, key=lambda row: (not row.leaks, row.estimate.value))
    verdict = "Something of the scans is rebuilt" if best.leaks else "Scans are not rebuilt better than by guessing"
    answer = (
        f"{verdict}: from the {KINDS[best.name][0]}, with {best.estimate.words} times the error of guessing the "
        "average scan (1: nothing was rebuilt, 0: a copy)."
    )
    decoder = "the decoder of appendix F of Manthe et al. 2023" if about["decoder"] == "paper" else "a small decoder"
    method = (
        "The attacker knows more than a real one would: numbers and scans of all training cases of all hospitals. It "
        f"trains {decoder}, for {about['epochs']} epochs, from the numbers to the scans "
        f"({about['modality']}, prepared as for training, then downsampled). The validation cases choose the epoch; "
        "the errors are those of the test cases.",
    )
    note = (
        "Ratio of the mean squared error inside the head to that of the average scan of the training cases: 1 is no "
        "better than guessing, 0 would be a copy. The interval is a bootstrap over the test cases."
    )
    details = {
        "errors": {kind: {"attack": r.errors.tolist(), "average": r.usual.tolist()} for kind, r in rebuilt.items()},
        "curves": {kind: {"training": r.training, "validation": r.validation} for kind, r in rebuilt.items()},
    }
    return Finding(
        "scans", "Are scans rebuilt?", answer, "error ratio", "numbers of a case", rows, note, method,
        tuple(figures), details,
    )  # fmt: skip


def _slices(tested: Sequence[tuple[str, str, np.ndarray]], rebuilt: Mapping[str, Rebuilt]) -> Picture:
    """Draw the cases that the strongest attack rebuilt best, at the median and worst."""
    first = min(rebuilt.values(), key=lambda r: r.errors.mean())
    order = np.argsort(first.errors / first.usual).tolist()

    def middle(volume: np.ndarray, axes: str) -> np.ndarray:
        slices = turned(volume[:1], axes)[0]
        image: np.ndarray = slices[len(slices) // 2]
        return image

    views = []
    for k in dict.fromkeys((order[0], order[len(order) // 2], order[-1])):  # of two cases, both
        name, axes, volume = tested[k]
        made = {"scan": volume, "average": first.average, **{kind: r.volumes[k] for kind, r in rebuilt.items()}}
        views.append((name, {what: middle(each, axes) for what, each in made.items()}))
    title = "Test cases and what was rebuilt of them"
    caption = (
        "Middle slices of the test cases that the strongest attack rebuilt best, at the median and worst, relative to "
        f"the average scan. {OF_PATIENTS}"
    )
    return picture(pictures(views, 1.15, 1.16), "pictures", title, caption)


def _curves(rebuilt: Mapping[str, Rebuilt], settings: Settings) -> Picture:
    """Draw the losses of every decoder, a panel per kind of numbers."""
    figure, made = panels(list(rebuilt), 2.2)
    for kind, axes in made:
        training, validation = rebuilt[kind].training, rebuilt[kind].validation
        epochs = range(1, len(validation) + 1)
        axes.plot(epochs, training, "--", color=COLOURS[1], lw=1)
        axes.plot(epochs, validation, "-", color=COLOURS[0], lw=1)
        axes.plot([1 + int(np.argmin(validation))], [min(validation)], "o", color=COLOURS[0], ms=5)
    name_axes(made, "epoch", "loss")
    what = "whole volumes" if settings.decoder == "paper" else "voxels inside the head"
    title = "Training and validation losses of the decoders"
    caption = (
        f"Mean squared error of {what} after each epoch: training cases (dashed) and validation cases (solid). The dot "
        "is the epoch that counts. The numbers are in audit.json."
    )
    return picture(figure, "curves", title, caption)
