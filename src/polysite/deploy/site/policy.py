"""The policy of a hospital: the file policy.toml, and the reasons for which a request or a reply is refused.

Every request is checked before anything is computed, and every reply again before it leaves. A reason is one sentence
that names the key of policy.toml behind it. It is sent to the coordinator, so it contains no number of cases.

The file has a ``version``. Version 1 (0.1.0, which did not write it) has the same keys; there ``case_scores`` was
described as the Dice of every case, and now covers all measures.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from polysite.algorithms.base import Kind
from polysite.costs.model import Demand
from polysite.engines.messages import RequestKind
from polysite.errors import ConfigError, PolysiteError, nearest, shown
from polysite.foreign import read_toml, without_removed
from polysite.heterogeneity.bounds import PrivateSums

VERSION = 2  # of policy.toml
WORK = ("assess", "train", "score", "examine")  # requests that occupy the machine for a while
MAX_LIMIT, MAX_DAYS = 1e7, 400
GIGABYTE = 1e9
BARE = ("one", "rate")  # kinds that say nothing about cases
LARGEST = 8.0  # epsilon of an assessment where replies are masked and there is no budget
KINDS: tuple[Kind, ...] = tuple(k for k in get_args(Kind) if k != "cases")  # these have a key of their own
PACKAGE = re.compile(r"\w+ [0-9a-f]{64}")  # a package and the digest of its files
CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-(?:([01]\d|2[0-3]):([0-5]\d)|24:00)")

TEXT = resources.files("polysite").joinpath("deploy", "site", "policy.toml").read_text(encoding="utf-8")


class Refusal(PolysiteError):
    """A request that this hospital does not do; the sentence is sent to the coordinator."""


def obey(reason: str | None) -> None:
    """Refuse for a reason of the policy, if there is one."""
    if reason:
        raise Refusal(reason)


@dataclass(frozen=True)
class Intent:
    """A request as the policy sees it: what is asked, and what would leave the hospital.

    Args:
        kind: Kind of the request.
        algorithm: Name of the algorithm.
        round: The round, from 0, as this hospital counts; the server may say otherwise.
        cases: The fewest cases behind anything that would leave.
        leaves: The ``reply`` of an algorithm. A field whose name ends in ``?`` may be absent, so it is checked only
            when it is in the reply.
        case_scores: Scores of single cases would leave.
        studies: Number of new studies within 24 hours, if this is another new one.
        noise: Differential privacy of an assessment.
    """

    kind: RequestKind
    algorithm: str = ""
    round: int = 0
    cases: int = 0
    leaves: Mapping[str, Kind] = field(default_factory=dict)
    case_scores: bool = False
    studies: int = 0
    noise: PrivateSums = PrivateSums()


@dataclass(frozen=True)
class SitePolicy:
    """The keys of policy.toml; ``TEXT``, the file that hospitals get, explains each."""

    version: int = VERSION
    algorithms: tuple[str, ...] = ("*",)
    kinds: tuple[str, ...] = KINDS
    fewest: int = 5
    small_sums: bool = False
    rounds: int = 10000
    studies: int = 20
    similar_days: float = 30.0
    parameters: int = 100_000_000
    memory: float = 12.0
    disk: float = 100.0
    seconds: float = 21600.0
    hours: str = ""
    gpu_share: float = 1.0
    case_vectors: bool = False
    case_scores: bool = True
    assess: bool = True
    packages: tuple[str, ...] = ()
    masked: bool = False
    masked_sites: int = 3
    masked_peers: tuple[str, ...] = ()
    epsilon: float = 0.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if self.version not in range(1, VERSION + 1):
            raise ConfigError(f"version = {self.version}, and this polysite reads up to {VERSION}: install a newer one")
        odd = next((p for p in self.packages if not PACKAGE.fullmatch(p)), None)
        if odd is not None:
            raise ConfigError(
                f"packages names {odd!r}; write a package and its digest, as 'polysite site package' does"
            )
        for kind in self.kinds:
            if kind == "cases":
                raise ConfigError("kinds names 'cases'; numbers of single cases have a key of their own, case_vectors")
            if kind not in KINDS:
                raise ConfigError(f"kinds names {kind!r}, which is no kind of reply; {nearest(kind, KINDS)}")
        for name in ("fewest", "rounds", "studies", "parameters"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("memory", "disk", "seconds"):
            if not 0 < getattr(self, name) <= MAX_LIMIT:
                raise ConfigError(f"{name} = {getattr(self, name)} must be more than 0 and at most {MAX_LIMIT:g}")
        if not 0 <= self.similar_days <= MAX_DAYS:
            raise ConfigError(f"similar_days = {self.similar_days} must lie between 0 and {MAX_DAYS}")
        if self.masked_sites < 3:
            raise ConfigError(
                f"masked_sites = {self.masked_sites} must be at least 3: of a sum over two hospitals, each knows the "
                "reply of the other"
            )
        for peer in self.masked_peers:
            if not re.fullmatch("[0-9a-f]{32}", "".join(peer.split())):
                raise ConfigError(
                    f"masked_peers names {shown(peer, 80)!r}, which is no fingerprint; 'polysite site enrol' prints it"
                )
        if not 0 <= self.epsilon < 1e6:
            raise ConfigError(f"epsilon = {self.epsilon} must not be negative; 0 means that there is no budget")
        if not 0 < self.delta < 0.1:
            raise ConfigError(f"delta = {self.delta} must be more than 0 and less than 0.1")
        if not 0 < self.gpu_share <= 1:
            raise ConfigError(f"gpu_share = {self.gpu_share} must be more than 0 and at most 1")
        if self.hours and (not CLOCK.fullmatch(self.hours) or len(set(self._span)) == 1):
            raise ConfigError(f'hours = "{self.hours}" must be of the form "20:00-06:00", or "" for always')

    @classmethod
    def load(cls, path: Path) -> "SitePolicy":
        """Read a policy from a file; a missing key has its default."""
        given = {"version": 1, **settings(path, get_type_hints(cls), "policy")}  # files of 0.1.0 have none
        try:
            return cls(**given)
        except ConfigError as problem:
            raise ConfigError(f"{path}: {problem}") from problem

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences for a person about a policy of an earlier version."""
        if self.version >= 2 or not self.case_scores:
            return ()
        return (
            "policy.toml has version 1: case_scores = true now lets all measures of a case leave, not only its Dice; "
            "write version = 2 into it if that is meant, or case_scores = false",
        )

    @property
    def digests(self) -> dict[str, str]:
        """The digest of every package whose code a study may name."""
        return dict(entry.split() for entry in self.packages)

    def refuse(self, intent: Intent, now: datetime) -> str | None:
        """Return why a request is refused, or None if it is allowed. ``now`` decides about the hours."""
        return next(self._objections(intent, now), None)

    def refuse_small(self, sums: str, models: str) -> str | None:
        """Return why a study that may send sums or models of too few cases is refused, or None if it is allowed.

        Args:
            sums: Sentence about sums over fewer than ``fewest`` cases; empty if there are none.
            models: Sentence about models of fewer than ``fewest`` training cases; empty if there are none.
        """
        if sums and not self.small_sums:
            return f"{sums}: policy.toml says fewest = {self.fewest} and small_sums = false"
        return f"{models}: policy.toml says fewest = {self.fewest}" if models else None

    def refuse_open(self, masked: bool) -> str | None:
        """Return why a study whose replies leave without masks is refused, or None if it is allowed."""
        if self.masked and not masked:
            return "replies leave here only under masks (run.secure.use = 'on'): policy.toml says masked = true"
        return None

    def refuse_without_noise(self, private: bool) -> str | None:
        """Return why a study whose replies leave without noise is refused, or None if it is allowed."""
        if self.epsilon and not private:
            return (
                "replies leave here only under differential privacy (train.private): policy.toml says epsilon = "
                f"{self.epsilon:g}"
            )
        return None

    def may_assess(self, noise: PrivateSums) -> bool:
        """Whether cases may be described under so much noise. A budget is asked apart, with all that was spent."""
        enough = noise.on and bool(self.epsilon or (noise.epsilon <= LARGEST and noise.delta <= self.delta))
        return self.assess and (enough or not (self.masked or self.epsilon))

    def refuse_demand(self, demand: Demand, main_memory: int, gpu_memory: int, free_disk: int) -> str | None:
        """Return why a study that needs so much is refused, or None if it is allowed.

        Args:
            demand: What the study takes at least.
            main_memory: Bytes of main memory of this machine.
            gpu_memory: Bytes of memory of the GPU; 0 without one.
            free_disk: Free bytes of the disk.
        """
        if demand.parameters > self.parameters:
            size = f"{demand.parameters / 1e6:.0f} million parameters"
            return f"the network of this study has {size}: policy.toml says parameters = {self.parameters}"
        if demand.memory > min(self.memory * GIGABYTE, main_memory):
            own = demand.memory <= self.memory * GIGABYTE
            why = "more than this computer has" if own else f"policy.toml says memory = {self.memory:g}"
            return f"this study takes at least {demand.memory / GIGABYTE:.1f} GB of memory: {why}"
        if demand.gpu > self.gpu_share * gpu_memory:
            size = f"{demand.gpu / GIGABYTE:.1f} GB of the memory of a GPU"
            return f"this study takes at least {size}, more than there is with gpu_share = {self.gpu_share:g}"
        if demand.disk > min(self.disk * GIGABYTE, free_disk):
            own = demand.disk <= self.disk * GIGABYTE
            why = "more than is free here" if own else f"policy.toml says disk = {self.disk:g}"
            return f"this study takes at least {demand.disk / GIGABYTE:.1f} GB on the disk: {why}"
        return None

    def refuse_reply(
        self, fields: Mapping[str, Kind], cases: int, *, behind: Mapping[str, int] = MappingProxyType({})
    ) -> str | None:
        """Return why a reply must not leave, or None if it may.

        Args:
            fields: The fields that are in the reply, and their kinds.
            cases: Number of cases behind the reply.
            behind: Number of cases behind single fields, where it is smaller: the model of a cluster.
        """
        return next(self._leaks(Intent("train", cases=cases, leaves=fields), behind), None)

    def _objections(self, intent: Intent, now: datetime) -> Iterator[str]:
        if intent.kind not in get_args(RequestKind):
            known = get_args(RequestKind)
            yield f"{intent.kind!r} is nothing that a hospital can be asked; {nearest(intent.kind, known)}"
        if intent.kind == "assess" and not self.may_assess(intent.noise):
            said = f"epsilon = {self.epsilon:g}" if self.epsilon else "masked = true"
            limit = "" if self.epsilon else f" of epsilon up to {LARGEST:g} and delta up to {self.delta:g}"
            noise = f"{said}, and this assessment has no noise{limit} (assess.private)"
            yield f"the cases here may not be described: policy.toml says {noise if self.assess else 'assess = false'}"
        trains = intent.kind not in ("hello", "assess") or (intent.kind == "hello" and intent.algorithm)
        if trains and not any(fnmatchcase(intent.algorithm, pattern) for pattern in self.algorithms):
            allowed = ", ".join(self.algorithms) or "none"
            yield f"{intent.algorithm!r} may not train here: policy.toml allows these algorithms: {allowed}"
        if not 0 <= intent.round < self.rounds:
            yield f"round {intent.round + 1} is not one that is allowed: policy.toml says rounds = {self.rounds}"
        if intent.studies >= self.studies:
            yield f"no more new studies today: policy.toml says studies = {self.studies}"
        if intent.kind in WORK and not self._open(now):
            yield f'it is {now.astimezone():%H:%M} here: policy.toml says hours = "{self.hours}"'
        sure = {name: kind for name, kind in intent.leaves.items() if not name.endswith("?")}
        yield from self._leaks(replace(intent, leaves=sure), {})

    def _leaks(self, intent: Intent, behind: Mapping[str, int]) -> Iterator[str]:
        """Yield the reasons against what would leave."""
        vectors = next((name for name, kind in intent.leaves.items() if kind == "cases"), "")
        if vectors and not self.case_vectors:
            yield f"numbers of single cases ({vectors!r}) may not leave: policy.toml says case_vectors = false"
        if intent.case_scores and not self.case_scores:
            yield "the scores of single cases may not leave: policy.toml says case_scores = false"
        # a score stands for one case; where scores may leave, so may numbers made of them
        free = (*BARE, "cost", "number") if intent.case_scores else BARE
        for name, kind in intent.leaves.items():
            if kind not in self.kinds and kind != "cases":
                allowed = ", ".join(self.kinds) or "none"
                yield f"{name!r} is of the kind {kind!r} and may not leave: policy.toml allows these kinds: {allowed}"
            if kind not in free and min(intent.cases, behind.get(name, intent.cases)) < self.fewest:
                yield f"too few cases are behind {name!r}: policy.toml says fewest = {self.fewest}"

    @property
    def _span(self) -> tuple[int, int]:
        """The allowed hours in minutes after midnight."""
        start, end = ((int(h) * 60 + int(m)) for h, m in (t.split(":") for t in self.hours.split("-")))
        return start, end

    def _open(self, now: datetime) -> bool:
        if not self.hours:
            return True
        here = now.astimezone()  # a time without a zone is local
        (start, end), minute = self._span, here.hour * 60 + here.minute
        return start <= minute < end if start < end else minute >= start or minute < end


def settings(path: Path, known: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Read a TOML file, which is a ``site``, ``policy`` or ``server`` file; refuse an unknown key or a value of the
    wrong type."""
    try:
        given = without_removed(read_toml(path), str(path), f"{file}.")
    except ConfigError as problem:
        if not path.exists():
            raise ConfigError(f"{path} is missing; it came with the archive or the project, put it back") from problem
        raise
    for key in given:
        if key not in known:
            raise ConfigError(f"{path} has an unknown key {shown(key, 80)!r}; {nearest(key, known)}")
    return {key: _typed(f"{path}: {key}", value, known[key]) for key, value in given.items()}


def _typed(what: str, value: Any, kind: Any) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if kind == tuple[str, ...] and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if type(value) is kind:
        return value
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a section"}
    raise ConfigError(f"{what} = {shown(repr(value))} must be {words.get(kind, 'a list of texts')}")
