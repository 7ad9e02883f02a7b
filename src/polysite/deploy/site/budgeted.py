"""The privacy budget around a host: what it would exceed is not computed, and what leaves is written down before."""

from collections.abc import Iterable, Sequence

from polysite.algorithms.base import facts
from polysite.deploy.site.agreement import Agreed
from polysite.deploy.site.answers import Host
from polysite.deploy.site.hospital import Hospital
from polysite.deploy.site.policy import Refusal, obey
from polysite.deploy.site.privacy_budget import for_patients
from polysite.engines.host import HostPhase
from polysite.engines.messages import Assess, HostRequest, Response, Train, Trained
from polysite.engines.noise import release_of
from polysite.engines.site_turn import Turn
from polysite.privacy import Release


class Budgeted:
    """Takes every reply under differential privacy from the hospital's privacy budget (``privacy_budget.py``)."""

    def __init__(self, hospital: Hospital, agreed: Agreed, inner: Host):
        self.hospital, self.agreed, self.inner = hospital, agreed, inner

    def answer(self, request: HostRequest) -> Response:
        """Do what is asked; raise ``Refusal`` where this hospital does not."""
        match request:
            case Assess():
                return self._assessed(request)
            case Train():
                return self._trained(request)
        return self.inner.answer(request)

    def _assessed(self, request: Assess) -> Response:
        assess = self.agreed.study.assess
        if assess.release:  # before any case is opened
            self._refuse([assess.release])
        response = self.inner.answer(request)
        if assess.private.on and isinstance(response, Trained) and response.turn:
            self._spend(request, response.turn.releases)
        return response

    def _trained(self, request: Train) -> Response:
        phase = self.agreed.host.phases[request.phase]
        algorithm, private = phase.algorithm, phase.private
        if private.on:
            self._refuse()
        release = release_of(algorithm, request.payload)
        if private.unit == "patient" and release:  # sums of statistics: before anything is computed
            self._refuse([release])
        response = self.inner.answer(request)
        if private.on and isinstance(response, Trained) and response.turn and not _is_free(phase, response.turn):
            self._spend(request, for_patients(private, response.turn.releases))
        return response

    def _refuse(self, planned: Iterable[Release] = ()) -> None:
        policy = self.hospital.policy
        obey(self.hospital.budget.refuse(policy.epsilon, policy.delta, planned))

    def _spend(self, request: Assess | Train, used: Sequence[Release]) -> None:
        """Write down what a reply costs; refuse the reply if there is not so much left."""
        if not used:
            raise Refusal("the reply has no noise, and this study promises some: it does not leave")
        self._refuse(used)
        self.hospital.budget.note(self.agreed.id, request.phase, request.round, used)


def _is_free(phase: HostPhase, turn: Turn) -> bool:
    """Whether a reply costs nothing: it is empty, or of an algorithm with noise on its sums, whose counts are of
    validation cases, or public."""
    return not turn.reply or (facts(phase.algorithm).noisy_sums and set(turn.reply) <= {"counts", "weight"})
