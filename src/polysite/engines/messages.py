"""Requests to a site and its responses: all that crosses between a server and its sites, on every wire.

====================  =============================================  =======================================
request               asks a site to                                 response
====================  =============================================  =======================================
``Join``              take part in a study                           ``Greeting``: numbers of cases, permissions
``Begin``             start a phase from a model                     ``Begun``
``Assess``            describe its cases                             ``Trained``
``Train``             take its turn in a round                       ``Trained``: the reply and the effort
``Score``             score the model that it is served              ``Scored``
``Examine``           compute all measures of that model             ``Measured``
``Serve``             say which models it uses                       ``Models``
``ExamineModel``      compute all measures of another site's model   ``Measured``
``MaskTurn``          take a step of a secure sum                    ``MaskTaken``
====================  =============================================  =======================================

Instead of any response, a site may answer ``Refused`` or ``Failed``. What a request or response weighs is counted where
it is sent (``sites.py``): arrays by their bytes, numbers as 8 bytes each, digests as 32. The effort behind a reply is
not counted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from polysite.engines.secure.member import MaskStep
from polysite.engines.site_turn import Turn
from polysite.payload import Payload, SiteId
from polysite.privacy import Release
from polysite.site import Cases, CaseScore, Examined, Fit, Scores
from polysite.tree import Tree

RequestKind = Literal["hello", "begin", "assess", "train", "score", "examine", "serve", "examine_model", "mask"]


@dataclass(frozen=True, slots=True)
class Join:
    """Take part in a study.

    Args:
        config: The study as TOML; empty where the site has it already.
    """

    config: str = ""
    kind: ClassVar[RequestKind] = "hello"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the requests about a round have in common.

    Args:
        phase: The phase of the study, from 0.
        round: The round, counted from 0 through all phases.
        payload: What the algorithm sends to the site.
        version: Version of the site's memory to use: the last round in which its reply was merged, or -1.
        keep: Versions that may still be asked for; a site that stores its memory can delete all others.
        memory: The site's memory, where the server keeps it for the site; None where it stays at the site.
    """

    phase: int = 0
    round: int = -1
    payload: Payload = field(default_factory=Payload, repr=False)
    version: int = -1
    keep: tuple[int, ...] = ()
    memory: Payload | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(Asked):
    """Start a phase from the model that the site was served in a round of an earlier phase.

    Args:
        before: The earlier phase.
        begins: The first round of the new phase.
        start: The model; None for the one that the site derives from payload and memory.
    """

    before: int = 0
    begins: int = 0
    start: Tree | None = field(default=None, repr=False)
    kind: ClassVar[RequestKind] = "begin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assess(Asked):
    """Describe the cases, without any training."""

    kind: ClassVar[RequestKind] = "assess"


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(Asked):
    """Take a turn in a round of training."""

    kind: ClassVar[RequestKind] = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score(Asked):
    """Score the model that the site is served, on the cases of a split."""

    split: str = ""
    kind: ClassVar[RequestKind] = "score"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examine(Asked):
    """Compute all measures of the model that the site is served, on the cases of a split.

    Args:
        tolerance: Distance of surfaces that still agree.
    """

    split: str = ""
    tolerance: float = 1.0
    kind: ClassVar[RequestKind] = "examine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve(Asked):
    """Say which models the site uses, one per group of cases.

    Args:
        name: Name under which the site keeps a copy of the models; empty for none.
        cases: Cases to choose models for, also of other sites; None for the site's own validation cases.
    """

    name: str = ""
    cases: Cases | None = None
    kind: ClassVar[RequestKind] = "serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamineModel(Asked):
    """Compute all measures of a given model, ``payload["model"]``, on cases of the site.

    Args:
        cases: The cases.
        tolerance: Distance of surfaces that still agree.
        pictures: Whether predictions come with the measures.
    """

    cases: Cases = ()
    tolerance: float = 1.0
    pictures: bool = False
    kind: ClassVar[RequestKind] = "examine_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskTurn(Asked):
    """Take a step of a secure sum (``secure/member.py``)."""

    step: MaskStep = "keys"
    kind: ClassVar[RequestKind] = "mask"


HostRequest = Begin | Assess | Train | Score | Examine | Serve | ExamineModel | MaskTurn
Request = Join | HostRequest


def words_of(request: Request) -> str:
    """Return a request in a few words, for logs."""
    if isinstance(request, Join):
        return request.kind
    kind = f"{request.kind} ({request.step})" if isinstance(request, MaskTurn) else request.kind
    return f"{kind}, round {request.round + 1}" if request.round >= 0 else kind


@dataclass(frozen=True, slots=True)
class Refused:
    """A site does not do what was asked, for a reason that it states."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A site could not do what was asked, or its response is not valid."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A site has answered with a payload that cannot be read; asking again would bring the same."""

    reason: str


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a site reports about itself.

    Args:
        cases: Number of cases in every split; 1 may stand for any number that the policy hides.
        may_score: The policy lets scores of single cases leave.
        may_assess: The policy allows the assessment.
        torch: Version of torch.
        device: Name of the device that computes.
        studies: Number of further new studies that the policy allows now; -1 if it is not reported.
        listed: Digest of the list of cases, keyed by a secret of the hospital; empty if it is not reported.
    """

    cases: Mapping[str, int]
    may_score: bool = True
    may_assess: bool = True
    torch: str = ""
    device: str = ""
    studies: int = -1
    listed: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """A site has begun a phase.

    Args:
        start: The model that it begins from, which stays at the site.
    """

    start: Tree = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Trained:
    """The reply of a site, with the effort behind it.

    Args:
        payload: The reply, after all outgoing steps.
        fits: What the local fits report.
        seconds: Duration of the turn.
        releases: Uses of the site's data under differential privacy.
        turn: The whole turn with the new memory; None where it stayed at a hospital.
    """

    payload: Payload = field(default_factory=Payload, repr=False)
    fits: tuple[Fit, ...] = ()
    seconds: float = 0.0
    releases: tuple[Release, ...] = ()
    turn: Turn | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of cases."""

    scores: Scores


@dataclass(frozen=True, slots=True)
class Measured:
    """All measures of cases; in a simulation each is computed when it is asked for."""

    cases: Iterable[Examined]


@dataclass(frozen=True, slots=True)
class Models:
    """The models that a site uses, one per group of its cases: each as a tree, or as its digest.

    Args:
        models: The models.
        groups: The cases of every model, where the request named cases.
    """

    models: tuple[Tree | str, ...]
    groups: tuple[Cases, ...] = ()


@dataclass(frozen=True, slots=True)
class MaskTaken:
    """A site has taken a step of a secure sum."""

    payload: Payload = field(default_factory=Payload, repr=False)


def bytes_of(response: "Response | Examined") -> int:
    """Return the bytes that cross with a response; for all measures of cases, those of each case by itself."""
    match response:
        case Trained() | MaskTaken():
            return response.payload.nbytes
        case Scored():
            return 8 * sum(map(_numbers, response.scores.values()))
        case Examined():
            measures = sum(map(len, response.measures.values()))
            return 8 * (_numbers(response.score) + measures + 4 * len(response.score.counts))
        case Models():
            return 32 * len(response.models)
    return 0


def _numbers(score: CaseScore) -> int:
    """Return how many numbers the score of a case has: its labels, the loss, and the classes of a classification."""
    return len(score.labels) + 1 + 2 * (score.predicted is not None)


Response = Refused | Failed | Unreadable | Greeting | Begun | Trained | Scored | Measured | Models | MaskTaken
Answer = tuple[SiteId, Request, Response]  # with the request that it belongs to
