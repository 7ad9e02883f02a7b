"""What may be asked: the policy about a request, before anything is computed, and the count of what was answered."""

from collections.abc import Mapping
from pathlib import Path

from polysite import assessment
from polysite.algorithms import names_of
from polysite.data.case import SPLITS
from polysite.deploy.site.agreement import Agreed, leaves_of
from polysite.deploy.site.answers import Leaving, Sender
from polysite.deploy.site.hospital import Hospital
from polysite.deploy.site.policy import Intent, Refusal, obey
from polysite.engines.messages import Assess, Begin, Examine, HostRequest, RequestKind, Score, Train

# number of requests of a kind that count as one round of the policy: a server that was restarted repeats some requests,
# and it scores validation and test cases of a round
REPEATED: Mapping[str, int] = {"score": 4, "serve": 4, "mask": 8}  # a secure sum has four steps


class Allowed:
    """Has answered what the policy allows, with the rounds as this hospital counts them."""

    def __init__(self, hospital: Hospital, agreed: Agreed, inner: Sender):
        self.hospital, self.agreed, self.inner = hospital, agreed, inner

    def answer(self, request: HostRequest) -> Leaving:
        """Do what is asked; raise ``Refusal`` where this hospital does not."""
        self._ask_policy(request)
        self._check_cases(request)
        found = self.inner.answer(request)
        with self._count_file(request.kind).open("ab") as file:  # only now: what failed has not used up a round
            file.write(b".")
        return found

    def _ask_policy(self, request: HostRequest) -> None:
        phases = self.agreed.host.phases
        asked = (request.phase, request.before) if isinstance(request, Begin) else (request.phase,)
        if unknown := [number for number in asked if number not in phases]:
            raise Refusal(f"the study has no phase {unknown[0] + 1}")
        assess, algorithm = self.agreed.study.assess, phases[request.phase].algorithm
        describes = isinstance(request, Assess)
        splits = SPLITS if describes and assess.cases == "all" else SPLITS[:1]
        leaves = leaves_of(assess if describes else algorithm) if isinstance(request, Assess | Train) else {}
        count = self._count_file(request.kind)
        answered = count.stat().st_size if count.exists() else 0
        for name in ("assess",) if describes else names_of(algorithm):
            intent = Intent(
                kind=request.kind,
                algorithm=name,
                round=max(request.round, answered // REPEATED.get(counted_as(request.kind), 2)),
                cases=sum(len(self.agreed.volumes[split]) for split in splits),
                leaves=leaves,
                case_scores=isinstance(request, Score | Examine),
                noise=assess.private,
            )
            obey(self.hospital.policy.refuse(intent, self.hospital.now()))

    def _check_cases(self, request: HostRequest) -> None:
        """Refuse to describe, to train or to score cases that this request must not reach, or that are not there."""
        if isinstance(request, Assess) and assessment.is_unprotected(self.agreed.study):
            raise Refusal(assessment.UNPROTECTED)
        if isinstance(request, Train) and not self.agreed.host.phases[request.phase].site.size:
            raise Refusal("it has no training cases")
        if isinstance(request, Score | Examine) and not request.split:
            raise Refusal("models are scored on validation and test cases only")

    def _count_file(self, kind: RequestKind) -> Path:
        """Return the file with a byte for every answer."""
        return self.agreed.folder / f"{counted_as(kind)}.count"


def counted_as(kind: RequestKind) -> RequestKind:
    """Return the kind under which a request is counted: ``examine`` counts as ``score``, since it scores cases too."""
    return "score" if kind == "examine" else kind
