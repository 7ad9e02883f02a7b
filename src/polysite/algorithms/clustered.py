"""Any algorithm in groups of sites: every group trains a model of its own, without exchange between groups.

Paper: Manthe et al., Federated brain tumor segmentation: an extensive benchmark, 2024; Alekseenko et al., MIDL 2024

    w_c <- the inner algorithm over the sites k in c,    for every group c

The first paper has known groups (prior clusters), the second derives them from the distances between sites. A group
without replies keeps its state. One group of all sites is the inner algorithm itself; with one group per site, FedAvg
is ``local``.

Every site that trains is in exactly one group. A site that does not train is in no group and has no model, so a study
in which such a site is scored is refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polysite.algorithms import base
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.weighted import Weighted
from polysite.errors import ConfigError, nearest
from polysite.payload import Payload, SiteId
from polysite.tree import Tree


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    groups: Mapping[str, Any]  # state of the inner algorithm, by group


@dataclass(frozen=True)
class Clustered(base.Around):
    """An algorithm run separately in each group of sites.

    Args:
        groups: Names of the sites of every group, by name of the group; every training site is in exactly one.
        inner: Algorithm that trains within each group.
    """

    groups: Mapping[str, tuple[SiteId, ...]] = field(default_factory=dict)
    inner: base.Algorithm[Any] = field(default_factory=FedAvg)

    def __post_init__(self) -> None:
        if not base.facts(self.inner).groupable:
            name = type(self.inner).__name__.lower()
            raise ConfigError(f"{name} clusters patients across all sites and does not go into groups of sites")
        seen: dict[SiteId, str] = {}
        for name, members in self.groups.items():
            if not members:
                raise ConfigError(f"the group {name!r} has no sites; name them, or leave the group out")
            for site in members:
                if site in seen:
                    raise ConfigError(
                        f"{site!r} is named twice, in the groups {seen[site]!r} and {name!r}; a site has one group"
                    )
                seen[site] = name

    @property
    def facts(self) -> base.Facts:
        # a sum over all sites would mix the groups, and a site outside all groups has no model
        return replace(base.facts(self.inner), needs="each", strangers=False, poolable=False, shared_model=False)

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        self._cover(sites)
        inner = self.inner
        while isinstance(inner, Weighted):  # its factors may name sites of other groups, so it checks all sites
            inner.init({}, sites)
            inner = inner.inner
        return State({name: _begin(inner, params, name, self._of(name, sites)) for name in self.groups})

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return self._by_group(state, cohort, self.inner.send)

    def serving_payloads(self, state: State, sites: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return self._by_group(state, sites, lambda inner, asked: base.serving_payloads(self.inner, inner, asked))

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        heard = {name: {i: replies[i] for i in self._of(name, replies)} for name in self.groups}
        return State({name: self.inner.merge(s, heard[name]) if heard[name] else s for name, s in state.groups.items()})

    def shares(self, state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        """Return the share of every site in the model of its group."""
        heard = {name: {i: replies[i] for i in self._of(name, replies)} for name in self.groups}
        within = [base.shares(self.inner, state.groups[name], group) for name, group in heard.items() if group]
        return {i: share for group in within for i, share in group.items()}

    def diagnostics(self, state: State) -> Mapping[str, float]:
        groups = {name: base.diagnostics(self.inner, inner) for name, inner in state.groups.items()}
        return {f"{what} ({name})": value for name, numbers in groups.items() for what, value in numbers.items()}

    def site_clusters(self, state: State, sites: Sequence[SiteId]) -> Mapping[SiteId, str]:
        """Return the group of every site, divided further if the inner algorithm has clusters of its own."""
        found: dict[SiteId, str] = {}
        for name, inner in state.groups.items():
            within = self._of(name, sites)
            deeper = base.site_clusters(self.inner, inner, within) if hasattr(self.inner, "site_clusters") else {}
            found |= {i: f"{name}/{deeper[i]}" if i in deeper else name for i in within}
        return found

    def _by_group(
        self, state: State, sites: Sequence[SiteId], make: Callable[[Any, Sequence[SiteId]], Mapping[SiteId, Payload]]
    ) -> Mapping[SiteId, Payload]:
        """Return the payloads that the inner algorithm makes for the sites of every group."""
        made: dict[SiteId, Payload] = {}
        for name in self.groups:
            asked = self._of(name, sites)
            made.update(make(state.groups[name], asked) if asked else {})
        for site in sites:
            if site not in made:
                raise ConfigError(f"{site!r} is in none of the groups {_list(self.groups)}, so it has no model")
        return {i: made[i] for i in sites}

    def _of(self, group: str, sites: Iterable[SiteId]) -> list[SiteId]:
        """Return the sites that are in a group, in the given order."""
        return [i for i in sites if i in self.groups[group]]

    def _cover(self, sites: Sequence[SiteId]) -> None:
        """Refuse groups that do not contain exactly these sites."""
        if not self.groups:
            raise ConfigError(
                'clustered takes groups of sites; set them in [algorithm.groups], as in north = ["a", "b"]'
            )
        home = {site: name for name, members in self.groups.items() for site in members}
        for site, name in home.items():
            if site not in sites:
                raise ConfigError(
                    f"the group {name!r} names {site!r}, which is no site that trains; {nearest(site, sites)}"
                )
        for site in sites:
            if site not in home:
                raise ConfigError(
                    f"{site!r} is in none of the groups {_list(self.groups)}; every site that trains has one"
                )


def _begin(inner: base.Algorithm[Any], params: Tree, name: str, members: Sequence[SiteId]) -> Any:
    try:
        return inner.init(params, members)
    except ConfigError as problem:  # for example, the group may have too few sites
        raise ConfigError(f"in the group {name!r}, {problem}") from problem


def _list(names: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names))
