"""Who holds which patients: as it is, or as an experiment wants it.

A federation deals the patients of the data out to sites and has them split. A site without training cases does not
train; it is only served and judged. That is how an unseen hospital is tested, and how synthetic sites train while the
patients of the real ones judge.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from polysite.data.case import SPLITS, CaseRef
from polysite.data.split import SiteSplit
from polysite.errors import ConfigError, DataError, nearest

Sites = Mapping[str, Sequence[CaseRef]]
Splitter = Callable[[Sites], Mapping[str, SiteSplit]]


class Federation(Protocol):
    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]: ...


@dataclass(frozen=True)
class Natural:
    """Every hospital holds its own patients."""

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        return split(sites)


@dataclass(frozen=True)
class ByLabelSize:
    """All patients sorted by the volume of a label and dealt out in that order; every site keeps its size.

    Paper: Alekseenko et al., Distance-aware non-IID federated learning, MIDL 2024, appendix D.
    """

    label: str = ""  # which label

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        everyone = [(p.volumes(), p) for patients in sites.values() for p in patients]
        known = everyone[0][0]
        if self.label not in known:
            raise ConfigError(f"federation.label = {self.label!r} is not in the data; {nearest(self.label, known)}")
        everyone.sort(key=lambda e: (e[0][self.label], e[1].site, e[1].name))
        ends = np.cumsum([len(p) for p in sites.values()])
        ordered = [p for _, p in everyone]
        pieces = [ordered[b:e] for b, e in zip([0, *ends], ends, strict=False)]
        return _redealt(sites, dict(zip(sites, pieces, strict=True)), split)


@dataclass(frozen=True)
class Iid:
    """Training cases shuffled over equal synthetic sites; validation and test cases stay where they were.

    Paper: Manthe et al., Federated brain tumor segmentation: an extensive benchmark, 2024, section 4.3.1.
    """

    sites: int = 5

    def __post_init__(self) -> None:
        _at_least(self.sites, 1, "sites")

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        parts = split(sites)
        pool = _shuffled([p for each in parts.values() for p in each["train"]], seed)
        if len(pool) < self.sites:
            raise ConfigError(f"federation.sites = {self.sites}, but there are {len(pool)} training cases")
        dealt = _moved(_named([pool[k :: self.sites] for k in range(self.sites)], "iid", sites))
        judges = {site: {**each, "train": []} for site, each in parts.items()}
        return {**{s: {"train": p, "validation": [], "test": []} for s, p in dealt.items()}, **judges}


@dataclass(frozen=True)
class Limited:
    """Only patients whose group is known, and no more than so many a site.

    Paper: Manthe et al., 2024, section 4.3.2, where it is 35.
    """

    cases: int = 35

    def __post_init__(self) -> None:
        _at_least(self.cases, 2, "cases")

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        known = {site: [p for p in patients if p.group] for site, patients in sites.items()}
        if not any(known.values()):
            raise DataError("the limited federation keeps cases whose group is known; the data name no group at all")
        return split({s: _shuffled(p, seed)[: self.cases] for s, p in known.items() if p})


@dataclass(frozen=True)
class Dirichlet:
    """Each group (or class) is dealt out in shares drawn from a Dirichlet distribution: small alpha, unlike sites."""

    alpha: float = 0.5
    sites: int = 5
    least: int = 3  # cases that every site gets

    def __post_init__(self) -> None:
        _at_least(self.sites, 2, "sites")
        _at_least(self.least, 2, "least")
        if not self.alpha > 0:
            raise ConfigError(f"federation.alpha = {self.alpha} must be more than zero")

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        kinds = _kinds(sites)
        if sum(map(len, kinds.values())) < self.sites * self.least:
            raise ConfigError(f"{sum(map(len, kinds.values()))} cases do not give {self.sites} sites {self.least} each")
        rng = np.random.default_rng(seed)
        for _ in range(1000):
            dealt: list[list[CaseRef]] = [[] for _ in range(self.sites)]
            for patients in kinds.values():
                shares = rng.dirichlet([self.alpha] * self.sites)
                ends = np.round(np.cumsum(shares) * len(patients)).astype(int)
                order = [patients[i] for i in rng.permutation(len(patients))]
                for site, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                    dealt[site].extend(order[begin:end])
            if min(map(len, dealt)) >= self.least:
                return _redealt(sites, _named(dealt, "dirichlet"), split)
        raise ConfigError(
            f"federation.alpha = {self.alpha} left a site with fewer than {self.least} cases in 1000 draws: "
            "raise alpha, or lower federation.sites or federation.least"
        )


@dataclass(frozen=True)
class LabelRatio:
    """Every site has a class of its own, ``delta`` times as many as of each other class; the rest is left out.

    Paper: FedDiv; ratios 1:delta and 1:1:delta, the majority class going around the sites.
    """

    delta: float = 2.0
    sites: int = 5

    def __post_init__(self) -> None:
        _at_least(self.sites, 2, "sites")
        if not self.delta >= 1:
            raise ConfigError(f"federation.delta = {self.delta} must be at least one")

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        kinds = {k: _shuffled(p, seed) for k, p in _kinds(sites).items()}
        names = list(kinds)
        ratio = {(k, n): self.delta if names[k % len(names)] == n else 1.0 for k in range(self.sites) for n in names}
        unit = min(len(kinds[n]) / sum(ratio[k, n] for k in range(self.sites)) for n in names)
        # rounding down each site's share never asks for more than there is
        count = {at: int(unit * r + 1e-9) for at, r in ratio.items()}
        if min(count.values()) < 1:
            raise ConfigError(
                f"federation.delta = {self.delta} with {self.sites} sites needs more cases: "
                f"{', '.join(f'{len(p)} of {n!r}' for n, p in kinds.items())}"
            )
        dealt = [[kinds[n].pop() for n in names for _ in range(count[k, n])] for k in range(self.sites)]
        return _redealt(sites, _named(dealt, "ratio"), split)


@dataclass(frozen=True)
class HideModalities:
    """So many modalities are hidden from each site, others at the next one; what is hidden is zero.

    Paper: FedDiv, whose l is ``count``.
    """

    count: int = 1

    def __post_init__(self) -> None:
        _at_least(self.count, 0, "count")

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        total = {p.modalities for patients in sites.values() for p in patients}
        of = min(total)
        if self.count >= of:
            raise ConfigError(f"federation.count = {self.count} would hide all of {of} modalities")
        hidden = {s: tuple((k + i) % of for i in range(self.count)) for k, s in enumerate(sites)}
        return split({s: [replace(p, hidden=hidden[s]) for p in patients] for s, patients in sites.items()})


@dataclass(frozen=True)
class LeaveOut:
    """One hospital does not train; all its patients are test patients: how good is the model somewhere new?"""

    site: str = ""

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        if self.site not in sites:
            raise ConfigError(f"federation.site = {self.site!r} is no site; {nearest(self.site, sites)}")
        if len(sites) < 2:
            raise ConfigError(f"without {self.site!r} no site is left to train")
        rest = split({s: p for s, p in sites.items() if s != self.site})
        return {
            **rest,
            self.site: {"train": [], "validation": [], "test": sorted(sites[self.site], key=lambda p: p.name)},
        }


FEDERATIONS: Mapping[str, type] = {
    "natural": Natural,
    "by_label_size": ByLabelSize,
    "iid": Iid,
    "limited": Limited,
    "dirichlet": Dirichlet,
    "label_ratio": LabelRatio,
    "hide_modalities": HideModalities,
    "leave_out": LeaveOut,
}


def _kinds(sites: Sites) -> dict[str, list[CaseRef]]:
    """The patients by class, or by group where there are no classes."""
    found: dict[str, list[CaseRef]] = {}
    for p in sorted((p for patients in sites.values() for p in patients), key=lambda p: (p.site, p.name)):
        found.setdefault(p.category or p.group, []).append(p)
    if len(found) < 2:
        raise DataError("this federation is built from classes or groups, but the data have fewer than two of them")
    return dict(sorted(found.items()))


def _shuffled(patients: Sequence[CaseRef], seed: int) -> list[CaseRef]:
    ordered = sorted(patients, key=lambda p: (p.site, p.name))
    return [ordered[i] for i in np.random.default_rng(seed).permutation(len(ordered))]


def _redealt(natural: Sites, dealt: Sites, split: Splitter) -> Mapping[str, SiteSplit]:
    """The parts of patients at their new sites.

    Where a person has several cases, they may now be at several sites: then the parts are those of the natural sites,
    so that nobody trains here and is tested there.
    """
    people = [(p.site, p.patient) for patients in natural.values() for p in patients if p.patient]
    if len(set(people)) == len(people):
        return split(_moved(dealt))
    part = {p.source: k for parts in split(natural).values() for k in SPLITS for p in parts[k]}
    moved = _moved(dealt)
    return {s: {k: [p for p in patients if part.get(p.source) == k] for k in SPLITS} for s, patients in moved.items()}


def _named(dealt: Sequence[Sequence[CaseRef]], word: str, taken: Iterable[str] = ()) -> dict[str, Sequence[CaseRef]]:
    """Synthetic sites: iid-1, iid-2, ..."""
    width = len(str(len(dealt)))
    named = {f"{word}-{k:0{width}d}": p for k, p in enumerate(dealt, start=1)}
    clash = sorted(named.keys() & set(taken))
    if clash:
        raise DataError(f"a site of the data is called {clash[0]!r}, like one of this federation; rename it")
    return named


def _moved(sites: Sites) -> dict[str, list[CaseRef]]:
    """Patients at their new sites; where a name would be there twice, it begins with the old site."""
    names = [p.name for patients in sites.values() for p in patients]
    unique = len(set(names)) == len(names)
    return {
        site: [replace(p, site=site, name=p.name if unique else ".".join(p.source), origin=p.source) for p in patients]
        for site, patients in sites.items()
    }


def _at_least(value: int, least: int, name: str) -> None:
    if value < least:
        raise ConfigError(f"federation.{name} = {value} must be at least {least}")
