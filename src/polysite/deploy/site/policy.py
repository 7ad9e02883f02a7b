"""What a hospital allows: the file policy.toml, which is its own, and the reasons with which it says no.

Every request is checked before anything is computed, and every reply again before it leaves. A reason is one sentence
that names the key of policy.toml behind it. It goes to the coordinator, so it tells no number of cases.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from polysite.algorithms.base import Kind
from polysite.deploy.protocol import RequestKind
from polysite.errors import ConfigError, nearest

WORK = ("assess", "train", "score", "examine")  # what takes the machine for a while
BARE = ("one", "rate")  # kinds that say nothing about cases
KINDS: tuple[Kind, ...] = tuple(k for k in get_args(Kind) if k != "cases")  # those have a key of their own
CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-(?:([01]\d|2[0-3]):([0-5]\d)|24:00)")

TEXT = """\
# What this hospital allows. The file is yours: change it as you see fit, then start `polysite site run` again.
# A request outside of it is refused here, at the hospital, and the coordinator is told why.

# which algorithms may train here, by name; "*" stands for anything, as in ["fed*", "scaffold"]
algorithms = ["*"]

# what may leave: "model" and "update" are parameters of networks, "count" and "counts" are numbers of cases or voxels,
# "one", "rate" and "cost" belong to training (weights, learning rates, losses), "statistics" describe all cases
# together, "number" is any other number
kinds = ["model", "update", "count", "counts", "one", "rate", "cost", "statistics", "number"]

# cases that must be behind anything that leaves: training cases behind a model, cases behind statistics
fewest = 5

# most rounds of one study; twice as many trainings, since a coordinator that was stopped repeats some
rounds = 10000

# most new studies within 24 hours: each one prepares all cases, and takes space on the disk
studies = 100

# when this machine may work for a study, in local time, as in "20:00-06:00"; "" is always
hours = ""

# most of the GPU's memory that may be taken, from above 0 to 1
gpu_share = 1.0

# whether numbers of single cases may leave: radiomics of every case, embeddings of every case
case_vectors = false

# whether the Dice of every validation and test case may leave, under numbers instead of names; in a classification it
# is the true class of the case and what the network says
case_scores = true

# whether the assessment may describe the cases here
assess = true
"""


@dataclass(frozen=True)
class Intent:
    """What is asked of a hospital, and what would leave it.

    ``leaves`` is the ``reply`` of an algorithm: a field whose name ends in ``?`` may be left out, so it is judged only
    when it is in the reply. A field of the kind ``cases`` has a row for every case, as ``case_vectors`` says it.
    """

    kind: RequestKind
    algorithm: str = ""
    round: int = 0  # the first is 0; as this hospital counts them, which need not be what the server says
    cases: int = 0  # the fewest behind anything that would leave
    leaves: Mapping[str, Kind] = field(default_factory=dict)
    case_vectors: bool = False  # numbers of single cases would leave
    case_scores: bool = False  # the Dice of single cases would leave
    studies: int = 0  # that were new within 24 hours, if this is of another one


@dataclass(frozen=True)
class SitePolicy:
    """The keys of policy.toml; ``TEXT`` says what each means."""

    algorithms: tuple[str, ...] = ("*",)
    kinds: tuple[str, ...] = KINDS
    fewest: int = 5
    rounds: int = 10000
    studies: int = 100
    hours: str = ""
    gpu_share: float = 1.0
    case_vectors: bool = False
    case_scores: bool = True
    assess: bool = True

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind == "cases":
                raise ConfigError("kinds names 'cases'; numbers of single cases have a key of their own, case_vectors")
            if kind not in KINDS:
                raise ConfigError(f"kinds names {kind!r}, which is no kind of reply; {nearest(kind, KINDS)}")
        for name in ("fewest", "rounds", "studies"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1")
        if not 0 < self.gpu_share <= 1:
            raise ConfigError(f"gpu_share = {self.gpu_share} must be more than 0 and at most 1")
        if self.hours and (not CLOCK.fullmatch(self.hours) or len(set(self._span)) == 1):
            raise ConfigError(f'hours = "{self.hours}" must be of the form "20:00-06:00", or "" for always')

    @classmethod
    def load(cls, path: Path) -> "SitePolicy":
        """The policy in a file; a key that is not there has its default."""
        given = settings(path, get_type_hints(cls))
        try:
            return cls(**given)
        except ConfigError as problem:
            raise ConfigError(f"{path}: {problem}") from problem

    def refuse(self, intent: Intent, now: datetime) -> str | None:
        """Why this is not done here, or None if it may be; ``now`` decides about the hours."""
        return next(self._objections(intent, now), None)

    def refuse_reply(
        self,
        fields: Mapping[str, Kind],
        cases: int,
        *,
        behind: Mapping[str, int] = MappingProxyType({}),
        case_vectors: bool = False,
        case_scores: bool = False,
    ) -> str | None:
        """Why a reply must not leave, or None if it may. ``fields`` are those that are really in it, ``cases`` the
        cases behind it, ``behind`` those behind a single field where they are fewer: the model of a cluster."""
        intent = Intent("train", "", 0, cases, fields, case_vectors, case_scores)
        return next(self._leaks(intent, behind), None)

    def _objections(self, intent: Intent, now: datetime) -> Iterator[str]:
        if intent.kind not in get_args(RequestKind):
            known = get_args(RequestKind)
            yield f"{intent.kind!r} is nothing that a hospital can be asked; {nearest(intent.kind, known)}"
        if intent.kind == "assess" and not self.assess:
            yield "the cases here may not be described: policy.toml says assess = false"
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
        """What is wrong with what would leave."""
        vectors = next((name for name, kind in intent.leaves.items() if kind == "cases"), "")
        if (intent.case_vectors or vectors) and not self.case_vectors:
            what = f" ({vectors!r})" if vectors else ""
            yield f"numbers of single cases{what} may not leave: policy.toml says case_vectors = false"
        if intent.case_scores and not self.case_scores:
            yield "the scores of single cases may not leave: policy.toml says case_scores = false"
        # behind the score of a case is one case, and where they may leave, so may what is made of them
        free = (*BARE, "cost", "number") if intent.case_scores else BARE
        for name, kind in intent.leaves.items():
            if kind not in self.kinds and kind != "cases":
                allowed = ", ".join(self.kinds) or "none"
                yield f"{name!r} is of the kind {kind!r} and may not leave: policy.toml allows these kinds: {allowed}"
            if kind not in free and min(intent.cases, behind.get(name, intent.cases)) < self.fewest:
                yield f"too few cases are behind {name!r}: policy.toml says fewest = {self.fewest}"

    @property
    def _span(self) -> tuple[int, int]:
        """The hours in minutes after midnight."""
        start, end = ((int(h) * 60 + int(m)) for h, m in (t.split(":") for t in self.hours.split("-")))
        return start, end

    def _open(self, now: datetime) -> bool:
        if not self.hours:
            return True
        here = now.astimezone()  # a time without a zone is local already
        (start, end), minute = self._span, here.hour * 60 + here.minute
        return start <= minute < end if start < end else minute >= start or minute < end


def settings(path: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a TOML file, each of the type that it is known to have; any other is refused."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark
    except FileNotFoundError as problem:
        raise ConfigError(f"{path} is missing; it came with the archive or the project, put it back") from problem
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path} cannot be read: {problem}") from problem
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"{path} is not valid TOML: {problem}") from problem
    for key in given:
        if key not in known:
            raise ConfigError(f"{path} has an unknown key {key!r}; {nearest(key, known)}")
    return {key: _typed(f"{path}: {key}", value, known[key]) for key, value in given.items()}


def _typed(what: str, value: Any, kind: Any) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if kind == tuple[str, ...] and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if type(value) is kind:
        return value
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a section"}
    raise ConfigError(f"{what} = {value!r} must be {words.get(kind, 'a list of texts')}")
