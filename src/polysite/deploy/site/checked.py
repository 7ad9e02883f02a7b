"""What may leave: the policy about a response, field by field, when it is known; and pseudonyms instead of names."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from polysite.algorithms.base import facts
from polysite.deploy.site.agreement import Agreed
from polysite.deploy.site.answers import Host, is_masked
from polysite.deploy.site.hospital import Hospital
from polysite.deploy.site.policy import Refusal, obey
from polysite.engines import messages
from polysite.engines.site_turn import Turn
from polysite.site import Fit


class Checked:
    """Keeps back what may not leave: fields, names of cases, efforts that may be of single cases, models."""

    def __init__(self, hospital: Hospital, agreed: Agreed, inner: Host):
        self.hospital, self.agreed, self.inner = hospital, agreed, inner

    def answer(self, request: messages.HostRequest) -> messages.Response:
        """Do what is asked; raise ``Refusal`` where this hospital does not."""
        response, pseudonym = self.inner.answer(request), self.hospital.pseudonyms.of
        match response:
            case messages.Trained(turn=Turn() as turn) if isinstance(request, messages.Assess):
                self._check(turn, len(self.agreed.volumes["train"]))
                return replace(response, fits=(), releases=())
            case messages.Trained(turn=Turn() as turn) if isinstance(request, messages.Train):
                return self._effort(response, self._check_trained(request, turn))
            case messages.Scored(scores=scores):
                return messages.Scored({pseudonym(case): score for case, score in scores.items()})
            case messages.Measured(cases=cases):
                return messages.Measured(tuple(replace(e, case=pseudonym(e.case), prediction=None) for e in cases))
            case messages.Models() | messages.Begun() | messages.MaskTaken():  # of models, no more than digests is sent
                return response
        raise Refusal(f"this hospital does not answer {request.kind}")

    def _check_trained(self, request: messages.Train, turn: Turn) -> int:
        """Refuse a reply that may not leave; return how many cases are behind it."""
        algorithm = self.agreed.host.phases[request.phase].algorithm
        behind = _cases_behind(turn.fits, self.agreed)
        hidden = facts(algorithm).cost_split == "validation" and not self.hospital.policy.case_scores
        # where no score of a single case may leave, a cost of validation cases must not stand for one case either
        self._check(turn, behind, {"cost": len(self.agreed.volumes["validation"]) if hidden else behind})
        return behind

    def _check(self, turn: Turn, cases: int, behind: Mapping[str, int] = MappingProxyType({})) -> None:
        """Refuse a reply that may not leave.

        Args:
            turn: The turn, after all outgoing steps.
            cases: Number of cases behind the reply.
            behind: Number of cases behind single fields, where it is smaller.
        """
        odd = sorted(turn.reply.keys() - turn.kinds.keys() - ({"weight"} if is_masked(turn) else set()))
        if odd:
            raise Refusal(f"the answer holds {odd[0]!r}, which the algorithm does not announce")
        obey(self.hospital.policy.refuse_reply(turn.kinds, cases, behind=behind))

    def _effort(self, response: messages.Trained, behind: int) -> messages.Trained:
        """Return a response with the effort behind it, if that may leave."""
        policy = self.hospital.policy
        if behind < policy.fewest or not {"cost", "number"} <= set(policy.kinds):
            return replace(response, fits=(), releases=())
        return replace(response, fits=_together(response.fits))


def _cases_behind(fits: Sequence[Fit], agreed: Agreed) -> int:
    """Return the smallest number of training cases that influence a fit; slices of a volume count as one, and so do
    the mini-batches of a round."""
    batches = [f.cases for f in fits if f.minibatch]
    seen = [f.cases for f in fits if not f.minibatch] + ([frozenset().union(*batches)] if batches else [])
    volume = {case.name: case.source for case in agreed.splits["train"]}
    return min((len({volume.get(n, n) for n in names}) for names in seen), default=len(agreed.volumes["train"]))


def _together(fits: Sequence[Fit]) -> tuple[Fit, ...]:
    """Return the fits as they may be reported: the mini-batches of a round as one, since each may be a single case."""
    batches = [f for f in fits if f.minibatch]
    steps = sum(f.steps for f in batches)
    if not steps:
        return tuple(fits)
    loss = math.fsum(f.loss * f.steps for f in batches) / steps
    lr_sum, reach = (math.fsum(getattr(f, name) for f in batches) for name in ("lr_sum", "reach"))
    whole = replace(batches[-1], loss=loss, steps=steps, lr_sum=lr_sum, reach=reach)
    return (*(f for f in fits if not f.minibatch), whole)
