"""The transport between server and sites: all that differs between a simulation and real hospitals."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from polysite.engines.record import Incident
from polysite.engines.secure.member import MaskStep
from polysite.payload import Payload, SiteId
from polysite.privacy import Release
from polysite.site import Examined, Fit, Scores
from polysite.tree import Tree


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of a site as it left the site, with the effort behind it."""

    payload: Payload
    fits: tuple[Fit, ...]
    seconds: float
    nbytes: int  # that crossed from the site to the server
    releases: tuple[Release, ...] = ()  # what it cost under differential privacy


@dataclass(frozen=True, slots=True)
class Served:
    """Models that sites would use, one tree per group of their cases, as far as the server may see them."""

    models: Mapping[SiteId, tuple[Tree, ...]]
    hidden: Mapping[SiteId, int] = field(default_factory=dict)  # number of models that stay at their site
    order: Any = None  # what a remote transport needs to have sites begin a phase from these models

    @property
    def groups(self) -> dict[SiteId, int]:
        """Number of models of every site."""
        return {**{i: len(trees) for i, trees in self.models.items()}, **self.hidden}

    @property
    def shared(self) -> tuple[Tree, ...] | None:
        """The models, if all sites use the same."""
        first, *others = [[Payload(model=t) for t in trees] for trees in self.models.values()] or [[]]
        return None if self.hidden or any(each != first for each in others) else tuple(p["model"] for p in first)


class Transport(Protocol):
    """Interface for the exchange with the sites of one phase."""

    @property
    def names(self) -> tuple[SiteId, ...]:
        """Sites that train."""
        ...

    @property
    def audience(self) -> tuple[SiteId, ...]:
        """Sites that are served a model and score it on their own cases."""
        ...

    @property
    def can_cross(self) -> bool:
        """Whether a site's own model can be examined on the cases of other sites. Only a simulation can."""
        ...

    def train(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Reply]]:
        """Deliver the payloads and yield each reply as it arrives."""
        ...

    def settle(self, heard: Collection[SiteId]) -> None:
        """Commit the new memories of the sites in ``heard``; all others return to their previous memory."""
        ...

    def score(self, round: int, sent: Mapping[SiteId, Payload], split: str) -> Mapping[SiteId, Scores]:
        """Have every site score the model that it would be served, on one split of its cases."""
        ...

    def examine(
        self, round: int, sent: Mapping[SiteId, Payload], split: str, tolerance: float, others: bool
    ) -> Iterator[tuple[SiteId, SiteId, Examined]]:
        """Yield (owner of the model, site of the case, all measures) where the images are; every case is predicted
        once per model. ``others`` also examines every site's model on the cases of all other sites."""
        ...

    def serve(self, round: int, sent: Mapping[SiteId, Payload], name: str = "") -> Served:
        """Return the parameters that every site would use; with a name, a site may keep a copy under it."""
        ...

    def begin(self, round: int, served: Served) -> None:
        """Start a phase in this round from these models; learning-rate schedules restart."""
        ...

    def memories(self) -> Mapping[SiteId, Payload]:
        """Return the memories of the sites that the server keeps; those of real hospitals stay there."""
        ...

    def remember(self, memories: Mapping[SiteId, Payload], versions: Mapping[SiteId, int]) -> None:
        """Restore the sites' memories after a restart. A site that stores its memory itself goes back to the given
        version, the last round in which its reply was merged."""
        ...

    def retain(self, versions: Mapping[SiteId, Collection[int]]) -> None:
        """Announce which versions may still be asked for; sites can delete all others."""
        ...

    def incidents(self) -> Sequence[Incident]:
        """Return the incidents since the last call: absent, late or refusing sites, and why."""
        ...

    def lift(self, params: Tree) -> Tree:
        """Return the parameters on the device on which the server computes."""
        ...


@runtime_checkable
class Repeating(Protocol):
    """Further interface of a transport that can deliver the replies of a round once more.

    The server then sums models as they arrive instead of holding them (``replies.py``).
    """

    @property
    def sizes(self) -> Mapping[SiteId, int]:
        """Number of training cases of every site: the weights to expect in its replies. Empty if sites reply in any
        order: replies are then summed as they are delivered again."""
        ...

    def repeat(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Reply]]:
        """Yield the replies to the payloads of this round again, before ``settle``."""
        ...


@runtime_checkable
class Masking(Protocol):
    """Further interface of a transport whose sites can reply under masks (``secure/``)."""

    def train(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Reply]]:
        """Deliver the payloads and yield each masked reply as it arrives."""
        ...

    def mask_step(
        self, step: MaskStep, round: int, sent: Mapping[SiteId, Payload], least: int
    ) -> Mapping[SiteId, Payload]:
        """Have the sites take a step of a secure sum; return the answers of those that did.

        ``least`` is the number of answers without which the sum fails: real hospitals are waited for.
        """
        ...
