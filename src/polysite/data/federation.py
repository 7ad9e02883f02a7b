"""Federations: the assignment of cases to sites, natural or synthetic.

A federation assigns the cases of the data to sites and splits them. A site without training cases does not train; its
cases are only predicted and scored. This is how an unseen hospital is tested, and how synthetic sites train while the
validation and test cases stay at the real ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from polysite.data.case import SPLITS, CaseRef
from polysite.data.parts import Sites, Splitter, parts_of, with_parts
from polysite.data.split import SiteSplit
from polysite.errors import ConfigError, DataError, nearest

QUARTERS = 4  # groups of equal size, by the volume of a label


@dataclass(frozen=True)
class Natural:
    """Every hospital holds its own cases."""

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        """Split the sites of the data.

        Args:
            sites: The cases of every site of the data.
            split: Splits the cases of sites, as ``[split]`` says.
            seed: Seed of random assignments.
        """
        return split(sites)


@dataclass(frozen=True)
class ByLabelSize:
    """All cases sorted by the volume of a label and assigned in that order; every site keeps its size.

    Paper: Alekseenko et al., Distance-aware non-IID federated learning, MIDL 2024, appendix D.

    Args:
        label: Label to sort by; several joined by "+" mean the sum of their volumes.
    """

    label: str = ""

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        """Assign the sorted cases to the sites and split them."""
        measured = [(self._size(case.volumes()), case) for cases in sites.values() for case in cases]
        measured.sort(key=lambda pair: (pair[0], pair[1].site, pair[1].name))
        ends = np.cumsum([len(cases) for cases in sites.values()])
        ordered = [case for _, case in measured]
        pieces = [ordered[b:e] for b, e in zip([0, *ends], ends, strict=False)]
        return _redealt(sites, dict(zip(sites, pieces, strict=True)), split)

    def _size(self, volumes: Mapping[str, float]) -> float:
        names = [self.label] if self.label in volumes else [name.strip() for name in self.label.split("+")]
        for name in names:
            if name not in volumes:
                raise ConfigError(
                    f"federation.label names {name!r}, which is not in the data; {nearest(name, volumes)}"
                )
        return sum(volumes[name] for name in names)


@dataclass(frozen=True)
class Iid:
    """Training cases, or all cases, shuffled over equal synthetic sites.

    Paper: Manthe et al., Federated brain tumor segmentation: an extensive benchmark, 2024, section 4.3.1.

    Args:
        sites: Number of synthetic sites.
        parts: "train" moves training cases, and validation and test cases stay at their own sites; "all" moves all
            cases, so that every synthetic site trains, validates and tests.
    """

    sites: int = 5
    parts: Literal["train", "all"] = "train"

    def __post_init__(self) -> None:
        _at_least(self.sites, 1, "sites")

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        """Assign the cases to the synthetic sites."""
        if self.parts == "all":
            return _redealt(sites, self._pieces([case for cases in sites.values() for case in cases], seed), split)
        splits = split(sites)
        dealt = _moved(self._pieces([case for each in splits.values() for case in each["train"]], seed, sites))
        scored = {site: {**each, "train": []} for site, each in splits.items()}
        return {**{s: {"train": cases, "validation": [], "test": []} for s, cases in dealt.items()}, **scored}

    def _pieces(self, cases: Sequence[CaseRef], seed: int, taken: Iterable[str] = ()) -> Sites:
        """Return the shuffled cases in equal pieces, one for every synthetic site."""
        pool = _shuffled(cases, seed)
        if len(pool) < self.sites:
            kind = "training cases" if self.parts == "train" else "cases"
            raise ConfigError(f"federation.sites = {self.sites}, but there are {len(pool)} {kind}")
        return _named([pool[k :: self.sites] for k in range(self.sites)], "iid", taken)


@dataclass(frozen=True)
class Limited:
    """Only cases with a known group, and at most a given number of them per site.

    Paper: Manthe et al., 2024, section 4.3.2, with 35 cases.

    Args:
        cases: Largest number of cases of a site.
    """

    cases: int = 35

    def __post_init__(self) -> None:
        _at_least(self.cases, 2, "cases")

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        """Draw the cases of every site and split them."""
        known = {site: [case for case in cases if case.group] for site, cases in sites.items()}
        if not any(known.values()):
            raise DataError("the limited federation keeps cases with a known group; the data name no group at all")
        return split({s: _shuffled(cases, seed)[: self.cases] for s, cases in known.items() if cases})


@dataclass(frozen=True)
class Dirichlet:
    """Each group (or class) divided over synthetic sites in shares drawn from a Dirichlet distribution.

    Args:
        alpha: Concentration of the distribution; the smaller, the more the sites differ.
        sites: Number of synthetic sites.
        least: Smallest number of cases of a site.
        by: What is divided over the sites: empty for classes (groups, if there are no classes), "site" for the
            hospitals of the data, or the name of a label for quarters of the cases by its volume.
        draw: Number of the draw; with the same seed and split, every number gives another federation.
    """

    alpha: float = 0.5
    sites: int = 5
    least: int = 3
    by: str = ""
    draw: int = 0

    def __post_init__(self) -> None:
        _at_least(self.sites, 2, "sites")
        _at_least(self.least, 2, "least")
        if not self.alpha > 0:
            raise ConfigError(f"federation.alpha = {self.alpha} must be more than zero")

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        """Draw assignments until every site has enough cases, and split the cases."""
        kinds = _kinds(sites) if not self.by else self._divided(sites)
        if sum(map(len, kinds.values())) < self.sites * self.least:
            raise ConfigError(f"{sum(map(len, kinds.values()))} cases do not give {self.sites} sites {self.least} each")
        rng = np.random.default_rng([seed, self.draw] if self.draw else seed)
        for _ in range(1000):
            dealt: list[list[CaseRef]] = [[] for _ in range(self.sites)]
            for cases in kinds.values():
                shares = rng.dirichlet([self.alpha] * self.sites)
                ends = np.round(np.cumsum(shares) * len(cases)).astype(int)
                order = [cases[i] for i in rng.permutation(len(cases))]
                for site, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                    dealt[site].extend(order[begin:end])
            if min(map(len, dealt)) >= self.least:
                return _redealt(sites, _named(dealt, "dirichlet"), split)
        raise ConfigError(
            f"federation.alpha = {self.alpha} left a site with fewer than {self.least} cases in 1000 draws: "
            "raise alpha, or lower federation.sites or federation.least"
        )

    def _divided(self, sites: Sites) -> dict[str, list[CaseRef]]:
        """Return the cases by hospital, or in four groups by the volume of a label."""
        if self.by == "site":
            return {site: sorted(cases, key=lambda case: case.name) for site, cases in sites.items()}
        measured = [(case.volumes(), case) for cases in sites.values() for case in cases]
        known = measured[0][0]
        if self.by not in known:
            raise ConfigError(
                f"federation.by = {self.by!r} is neither 'site' nor a label; {nearest(self.by, ['site', *known])}"
            )
        ordered = sorted(measured, key=lambda pair: (pair[0][self.by], pair[1].site, pair[1].name))
        groups = np.array_split(np.arange(len(ordered)), QUARTERS)
        return {f"quarter {k}": [ordered[i][1] for i in each] for k, each in enumerate(groups, start=1)}


@dataclass(frozen=True)
class LabelRatio:
    """Every synthetic site has a majority class, with ``delta`` cases for one case of each other class.

    Paper: FedDiv; ratios 1:delta and 1:1:delta. The majority class rotates over the sites; surplus cases are left out.

    Args:
        delta: Cases of the majority class for one case of each other class.
        sites: Number of synthetic sites.
    """

    delta: float = 2.0
    sites: int = 5

    def __post_init__(self) -> None:
        _at_least(self.sites, 2, "sites")
        if not self.delta >= 1:
            raise ConfigError(f"federation.delta = {self.delta} must be at least one")

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        """Draw the cases of every site by their class, and split them."""
        kinds = {k: _shuffled(cases, seed) for k, cases in _kinds(sites).items()}
        names = list(kinds)
        ratio = {(k, n): self.delta if names[k % len(names)] == n else 1.0 for k in range(self.sites) for n in names}
        unit = min(len(kinds[n]) / sum(ratio[k, n] for k in range(self.sites)) for n in names)
        # rounded down, the shares never exceed the cases of a class
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
    """Some modalities hidden (set to zero) at each site, different ones at the next site.

    Paper: FedDiv.

    Args:
        count: Number of modalities hidden at each site; l in the paper.
    """

    count: int = 1

    def __post_init__(self) -> None:
        _at_least(self.count, 0, "count")

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        """Hide modalities of every case and split the cases."""
        total = min(case.modalities for cases in sites.values() for case in cases)
        if self.count >= total:
            raise ConfigError(f"federation.count = {self.count} would hide all of {total} modalities")
        hidden = {s: tuple((k + i) % total for i in range(self.count)) for k, s in enumerate(sites)}
        return split({s: [_hidden(case, hidden[s]) for case in cases] for s, cases in sites.items()})


@dataclass(frozen=True)
class LeaveOut:
    """One hospital excluded from training; all its cases are test cases, to measure the model at an unseen site.

    Args:
        site: Name of the hospital.
    """

    site: str = ""

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        """Split the other sites and add this one."""
        if self.site not in sites:
            raise ConfigError(f"federation.site = {self.site!r} is no site; {nearest(self.site, sites)}")
        if len(sites) < 2:
            raise ConfigError(f"without {self.site!r} no site is left to train")
        rest = split({s: cases for s, cases in sites.items() if s != self.site})
        tested = sorted(sites[self.site], key=lambda case: case.name)
        return {**rest, self.site: {"train": [], "validation": [], "test": tested}}


@dataclass(frozen=True)
class Steps:
    """Several federations in steps: each assigns the cases of the sites that the step before it made.

    The first step splits the cases into training, validation and test; in later steps every case keeps its part.

    Args:
        steps: The federations, in their order.
    """

    steps: tuple["Federation", ...]

    def deal(self, sites: Sites, split: Splitter, seed: int) -> Mapping[str, SiteSplit]:
        """Apply one federation after the other."""
        first, *others = self.steps
        dealt = first.deal(sites, split, seed)
        for step in others:
            held = {site: [case for k in SPLITS for case in each[k]] for site, each in dealt.items()}
            dealt = step.deal(held, partial(with_parts, parts=parts_of(dealt)), seed)
        return dealt


Federation = Natural | ByLabelSize | Iid | Limited | Dirichlet | LabelRatio | HideModalities | LeaveOut | Steps


def hides_modalities(federation: Federation) -> bool:
    """Return whether a federation, or one of its steps, hides modalities."""
    steps = federation.steps if isinstance(federation, Steps) else (federation,)
    return any(isinstance(step, HideModalities) for step in steps)


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
    """Return the cases by class, or by group if there are no classes."""
    kinds: dict[str, list[CaseRef]] = {}
    for case in sorted((c for cases in sites.values() for c in cases), key=lambda c: (c.site, c.name)):
        kinds.setdefault(case.category or case.group, []).append(case)
    if len(kinds) < 2:
        raise DataError("this federation is built from classes or groups, but the data have fewer than two of them")
    return dict(sorted(kinds.items()))


def _shuffled(cases: Sequence[CaseRef], seed: int) -> list[CaseRef]:
    ordered = sorted(cases, key=lambda case: (case.site, case.name))
    return [ordered[i] for i in np.random.default_rng(seed).permutation(len(ordered))]


def _redealt(natural: Sites, dealt: Sites, split: Splitter) -> Mapping[str, SiteSplit]:
    """Split the cases at their new sites.

    The cases of one patient may be at several sites now. Then the splits of the natural sites apply, so that all cases
    of a patient stay in one split.
    """
    patients = [(case.site, case.patient) for cases in natural.values() for case in cases if case.patient]
    moved = _moved(dealt)
    if len(set(patients)) == len(patients):
        return split(moved)
    return with_parts(moved, parts_of(split(natural)))


def _hidden(case: CaseRef, modalities: tuple[int, ...]) -> CaseRef:
    """Hide modalities of a case in addition to those that an earlier step has hidden."""
    hidden = (*case.hidden, *(m for m in modalities if m not in case.hidden))
    if len(hidden) == case.modalities:
        raise ConfigError(f"the steps of the federation hide all {case.modalities} modalities of case {case.name!r}")
    return replace(case, hidden=hidden)


def _named(dealt: Sequence[Sequence[CaseRef]], word: str, taken: Iterable[str] = ()) -> dict[str, Sequence[CaseRef]]:
    """Name the synthetic sites: iid-1, iid-2, ..."""
    width = len(str(len(dealt)))
    named = {f"{word}-{k:0{width}d}": cases for k, cases in enumerate(dealt, start=1)}
    clash = sorted(named.keys() & set(taken))
    if clash:
        raise DataError(f"a site of the data is called {clash[0]!r}, like one of this federation; rename it")
    return named


def _moved(sites: Sites) -> dict[str, list[CaseRef]]:
    """Move the cases to their new sites. If a name would occur twice, all names get the old site as a prefix."""
    names = [case.name for cases in sites.values() for case in cases]
    unique = len(set(names)) == len(names)
    return {
        site: [replace(c, site=site, name=c.name if unique else ".".join(c.source), origin=c.source) for c in cases]
        for site, cases in sites.items()
    }


def _at_least(value: int, least: int, name: str) -> None:
    if value < least:
        raise ConfigError(f"federation.{name} = {value} must be at least {least}")
