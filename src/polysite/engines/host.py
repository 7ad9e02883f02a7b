"""The site's half of every exchange, the same in a simulation, in a worker of a Ray cluster, and at a hospital.

A host has the cases of one site, in every phase of a study. It answers one request at a time. Between requests it keeps
the model that each phase began from and the keys of the current secure sum; the site's memory comes with a request and
goes with its response. A hospital wraps ``answer``: policy, ledger and privacy budget decide what is done and what
leaves, and the memory stays in files (``deploy/site``).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from polysite.algorithms.base import Algorithm
from polysite.engines import messages
from polysite.engines.memory_store import MemoryStore, Stored
from polysite.engines.noise import noise_steps
from polysite.engines.secure.member import Mask, Session, open_session, take_step
from polysite.engines.secure.settings import Secure
from polysite.engines.site_turn import OutgoingStep, take_turn
from polysite.errors import PayloadError
from polysite.payload import Payload, SiteId
from polysite.privacy import Private
from polysite.site import Cases, Site
from polysite.tree import Tree


@dataclass(frozen=True)
class HostPhase:
    """What a site needs to know of a phase.

    Args:
        algorithm: The algorithm.
        site: The site, with the settings of the phase.
        outgoing: Steps that change a reply before it leaves.
        secure: Settings of secure sums.
        private: Differential privacy of training.
    """

    algorithm: Algorithm[Any]
    site: Site
    outgoing: tuple[OutgoingStep, ...] = ()
    secure: Secure = Secure()
    private: Private = Private()

    @property
    def masked(self) -> bool:
        """Whether replies leave under masks; of a method that sends nothing, nothing is masked."""
        return self.secure.on and bool(self.algorithm.reply)


class Masks(Protocol):
    """Interface for the keys of the current secure sum of a site."""

    def step(self, request: messages.MaskTurn, secure: Secure) -> Payload:
        """Take a step of a sum; return the answer."""
        ...

    def joined(self, request: messages.Train) -> Session:
        """Return the session of the sum that a reply is masked for."""
        ...


class Sessions:
    """Keys of the current sum in main memory, for a simulation.

    Args:
        site: Name of the site.
    """

    def __init__(self, site: SiteId):
        self.site = site
        self._session: Session | None = None

    def step(self, request: messages.MaskTurn, secure: Secure) -> Payload:
        """Take a step of a sum; return the answer."""
        if request.step == "keys":
            self._session, answer = open_session(request.payload, self.site, secure.fewest, reveal=secure.reveal)
        else:
            self._session, answer = take_step(request.step, request.payload, self._opened())
        return answer

    def joined(self, request: messages.Train) -> Session:
        """Return the session of the current sum."""
        return self._opened()

    def _opened(self) -> Session:
        if self._session is None:
            raise PayloadError("no keys were agreed on for this secure sum")
        return self._session


class SiteHost:
    """Answers the requests to one site.

    Args:
        name: Name of the site.
        phases: What the site needs to know of every phase, by its number.
        assessment: Returns the site that describes its cases, with the settings of the assessment as algorithm.
        masks: Keys of the current secure sum.
        store: Where the models that phases began from are kept.
    """

    def __init__(
        self,
        name: SiteId,
        phases: dict[int, HostPhase],
        *,
        assessment: Callable[[], HostPhase] | None = None,
        masks: Masks | None = None,
        store: MemoryStore | None = None,
    ):
        self.name, self.phases = name, phases
        self._assessment, self._masks, self._store = assessment, masks or Sessions(name), store or MemoryStore()
        self._starts: dict[int, tuple[int, Stored]] = {}  # first round of a phase, and the model that it began from

    def answer(self, request: messages.HostRequest) -> messages.Response:
        """Do what is asked; PayloadError if the payload does not fit."""
        match request:
            case messages.Begin():
                return self._begin(request)
            case messages.Assess() | messages.Train():
                return self._train(request)
            case messages.Score():
                site = self._site(request)
                groups = self._served(request, site, site.cases(request.split))
                return messages.Scored(
                    {case: s for params, cases in groups for case, s in site.score(params, cases).items()}
                )
            case messages.Examine():
                site = self._site(request)
                groups = self._served(request, site, site.cases(request.split))
                return messages.Measured(e for p, cases in groups for e in site.examine(p, cases, request.tolerance))
            case messages.ExamineModel():
                site = self._site(request)
                model = site.lift(request.payload["model"])
                examined = site.examine(model, request.cases, request.tolerance)
                return messages.Measured(e if request.pictures else replace(e, prediction=None) for e in examined)
            case messages.Serve():
                site = self._site(request)
                cases = site.cases("validation") if request.cases is None else request.cases
                groups = self._served(request, site, cases)
                return messages.Models(
                    tuple(params for params, _ in groups), tuple(tuple(chosen) for _, chosen in groups)
                )
            case messages.MaskTurn():
                return self._mask(request)

    def has_begun(self, phase: int) -> bool:
        """Return whether a phase can go on here: the first one always, others once they have a model to start from."""
        return phase == 0 or phase in self._starts

    def enter(self, phase: int, begins: int, start: Tree) -> None:
        """Start a phase in this round from a model; learning-rate schedules restart."""
        self._starts[phase] = begins, self._store.put(Payload(model=start))

    def _begin(self, request: messages.Begin) -> messages.Response:
        start = request.start
        if start is None:
            earlier = self._site(request, request.before)
            groups = self._served(request, earlier, earlier.cases("validation"), request.before)
            if len(groups) != 1:
                at = request.phase + 1
                return messages.Refused(f"phase {at} starts from one model, and this site has {len(groups)}")
            ((start, _),) = groups
        self.enter(request.phase, request.begins, start)
        return messages.Begun(start)

    def _train(self, request: messages.Assess | messages.Train) -> messages.Response:
        phase = self.phases[request.phase]
        if isinstance(request, messages.Assess) and self._assessment:
            phase = self._assessment()
        site = phase.site.at(request.round) if isinstance(request, messages.Assess) else self._site(request)
        try:
            session = self._masks.joined(request) if isinstance(request, messages.Train) and phase.masked else None
            got, memory = request.payload.each(site.lift), self._memory(request, site)
            noise = noise_steps(phase.algorithm, phase.private, site, got, session)
            masks = (Mask(session, phase.secure.fraction),) if session else ()
            turn = take_turn(phase.algorithm, got, memory, site, (*noise, *phase.outgoing, *masks))
        except PayloadError as problem:  # it cannot be masked, as if it were not finite
            if not phase.masked:
                raise
            return messages.Refused(f"its reply cannot be masked: {problem}")
        return messages.Trained(turn.reply, turn.fits, turn.seconds, turn.releases, turn)

    def _mask(self, request: messages.MaskTurn) -> messages.Response:
        phase = self.phases[request.phase]
        if not phase.secure.on:
            return messages.Refused("this study has no secure sums")
        try:
            return messages.MaskTaken(self._masks.step(request, phase.secure))
        except PayloadError as problem:
            return messages.Refused(f"it refuses the step {request.step!r} of a secure sum: {problem}")

    def _site(self, request: messages.Asked, number: int | None = None) -> Site:
        """Return the site in the round of a request; in a later phase it starts from the model that it was served."""
        number = request.phase if number is None else number
        site = self.phases[number].site
        if number in self._starts:
            begins, start = self._starts[number]
            site = site.begin(begins, site.lift(start.get()["model"]))
        return site.at(request.round)

    def _memory(self, request: messages.Asked, site: Site) -> Payload:
        return request.memory.each(site.lift) if request.memory else Payload()

    def _served(
        self, request: messages.Asked, site: Site, cases: Cases, number: int | None = None
    ) -> list[tuple[Tree, Cases]]:
        """Return the models that the site uses for these cases, each with its cases."""
        algorithm = self.phases[request.phase if number is None else number].algorithm
        return list(algorithm.serve(request.payload.each(site.lift), self._memory(request, site), site, cases))
