"""Parts of cases (training, validation, test) while a federation moves the cases from site to site."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from polysite.data.case import SPLITS, CaseRef
from polysite.data.split import SiteSplit, Split, by_patient

Sites = Mapping[str, Sequence[CaseRef]]
Splitter = Callable[[Sites], Mapping[str, SiteSplit]]
Parts = Mapping[tuple[str, str], str]  # site and name of a case in the data -> its part


def splitter(split: Split, sites: Sites, seed: int) -> Splitter:
    """Return the function that splits the sites of a federation: anew, or by the parts that cases have in the data.

    Args:
        split: The settings; ``split.keep`` chooses.
        sites: The sites of the data; their split gives every case its part.
        seed: Seed of the study.
    """

    def anew(dealt: Sites) -> Mapping[str, SiteSplit]:
        return split.apply(dealt, seed)

    if not split.keep:
        return anew
    parts = parts_of(anew(sites))

    def keep(dealt: Sites) -> Mapping[str, SiteSplit]:
        kept = with_parts({s: sorted(cases, key=lambda c: c.name) for s, cases in dealt.items()}, parts)
        if split.keep is True:
            return {s: _with_both(each) for s, each in kept.items()}
        # the marks of the data have already given the parts that are kept
        unmarked = {s: [replace(c, split="") for c in cases] for s, cases in dealt.items()}
        return {s: _resized(kept[s], each) for s, each in anew(unmarked).items()}

    return keep


def parts_of(dealt: Mapping[str, SiteSplit]) -> Parts:
    """Return the part of every case of a federation."""
    return {case.source: k for each in dealt.values() for k in SPLITS for case in each[k]}


def with_parts(sites: Sites, parts: Parts) -> Mapping[str, SiteSplit]:
    """Split the cases of sites by the parts that they have; a case without a part is left out."""
    return {s: {k: [c for c in cases if parts.get(c.source) == k] for k in SPLITS} for s, cases in sites.items()}


def _with_both(site: SiteSplit) -> SiteSplit:
    """Give a site that has only training cases, or only validation cases, the cases of one patient for the other part.

    A site with a single patient stays as it is: no patient is in two parts.
    """
    for lacking, other in (("train", "validation"), ("validation", "train")):
        patients = by_patient(site[other])
        if not site[lacking] and len(patients) > 1:
            moved = min(patients, key=lambda cases: len(cases))
            return {**site, lacking: list(moved), other: [case for case in site[other] if case not in moved]}
    return site


def _resized(kept: SiteSplit, anew: SiteSplit) -> SiteSplit:
    """Give the parts of a site the sizes of a new split. As few cases as possible change their part; those that the new
    split puts elsewhere change first."""
    patients = [case.patient for cases in kept.values() for case in cases if case.patient]
    if len(set(patients)) < len(patients):  # the cases of a patient stay together
        return kept
    chosen = {k: {case.source for case in anew[k]} for k in SPLITS}

    def likely(cases: Sequence[CaseRef], part: str) -> list[CaseRef]:
        return sorted(cases, key=lambda case: case.source not in chosen[part])

    sized = {k: likely(kept[k], k)[: len(anew[k])] for k in SPLITS}
    left = [case for k in SPLITS for case in likely(kept[k], k)[len(anew[k]) :]]
    for k in SPLITS:
        added = likely(left, k)[: len(anew[k]) - len(sized[k])]
        left = [case for case in left if case not in added]
        sized[k] = sorted([*sized[k], *added], key=lambda case: case.name)
    return sized
