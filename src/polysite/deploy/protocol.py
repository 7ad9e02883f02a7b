"""Messages between coordinator and sites: every request and response, written and validated only here.

A message is a flat header (text, numbers, lists of them) and a body of bytes. A request asks a site for one thing:

=========  =============================================  ==========================================
kind       request                                        response
=========  =============================================  ==========================================
hello      the study's configuration                      ``Greeting``: numbers of cases, permissions
assess     payload of the assessment                      ``Trained`` and a payload
train      payload of a round                             ``Trained`` and a payload
score      payload to serve from, split                   ``Scored``: Dice or accuracy of every case
examine    payload to serve from, split, tolerance        ``Measured``: all measures of every case
serve      payload to serve from, name to save under      ``Digests`` of the models
begin      payload of the best round of an earlier phase  ``Begun``
mask       a step of a secure sum (engines/secure)        ``MaskTaken`` and a payload
=========  =============================================  ==========================================

Instead of any response, a site may answer ``Refused`` (its policy or settings forbid the request) or ``Failed``.
Neither side trusts the other: a header that does not fit raises ``PayloadError``.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from polysite.buffers import Buffer
from polysite.data.case import SPLITS
from polysite.engines.record import scores_from_plain, scores_to_plain
from polysite.engines.secure.member import STEPS, MaskStep
from polysite.errors import PayloadError, shown
from polysite.metrics.measures import MEASURES
from polysite.metrics.overlap import BACKGROUND
from polysite.privacy import Release
from polysite.site import CaseScore, Count, Counts, Examined, Fit, Scores

PROTOCOL = 2  # 0.1.0 spoke 1

Header = Mapping[str, Any]
RequestKind = Literal["hello", "begin", "assess", "train", "score", "examine", "serve", "mask"]

NUMBERS = range(-1, 1_000_000)  # of rounds, phases and versions
MAX_LISTED = 10_000  # numbers in a list
MAX_LENGTHS = {"config": 1 << 20}  # characters of a text; 64 of any other
MAX_TOLERANCE = 1e6
CHOICES: Mapping[str, tuple[str, ...]] = {
    "kind": get_args(RequestKind),
    "split": ("", "validation", "test"),
    "name": ("", "best", "common", "last"),
    "step": STEPS,
}
STUDY = re.compile(r"[A-Za-z0-9-]{1,64}")

MAX_COUNT = 1e9  # cases, steps, seconds
MAX_VOXELS = 1e15
MAX_FLOAT = 3.5e38  # single precision
MAX_CASES = 100_000  # that a site may score if its policy hides how many it has
MAX_TEXT = 48 << 20  # characters of all scores or measures
MAX_MODELS = 64  # of one site
CLASS_MEASURES = ("accuracy", "predicted", "true")


@dataclass(frozen=True, slots=True)
class Request:
    """What the coordinator asks of a site.

    Args:
        kind: What is asked.
        study: Name by which both sides know the study.
        phase: The phase of the study, from 0.
        round: The round, counted from 0 through all phases.
        version: Version of the site's memory to use: the last round in which its reply was merged, or -1.
        keep: Versions that may still be asked for; the site can delete all others.
        before: The phase that the new one begins after (``begin``).
        begins: The first round of the new phase (``begin``).
        split: The cases to score or examine.
        name: Name under which the site saves the models that it is served.
        tolerance: Distance of surfaces that still agree (``examine``).
        config: The study as TOML (``hello``).
        step: The step of a secure sum (``mask``).
        body: An encoded payload.
    """

    kind: RequestKind
    study: str
    phase: int = 0
    round: int = -1
    version: int = -1
    keep: tuple[int, ...] = ()
    before: int = 0
    begins: int = 0
    split: str = ""
    name: str = ""
    tolerance: float = 1.0
    config: str = ""
    step: MaskStep = "keys"
    body: Buffer = field(default=b"", repr=False)

    @property
    def words(self) -> str:
        """The request in a few words, for logs."""
        kind = f"{self.kind} ({self.step})" if self.kind == "mask" else self.kind
        return f"{kind}, round {self.round + 1}" if self.round >= 0 else kind

    def header(self, identity: Mapping[str, str]) -> dict[str, Any]:
        """Return the header to send, with what identifies the coordinator's code."""
        values = {name: getattr(self, name) for name in ("kind", "study", *FIELDS[self.kind])}
        listed = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
        return {"protocol": PROTOCOL, **identity, **listed}

    @classmethod
    def parse(cls, header: Header, body: Buffer = b"") -> "Request":
        """Parse the header of a request. Unknown fields are ignored; a field of the wrong type is refused."""
        if header.get("protocol") != PROTOCOL:
            raise PayloadError(
                f"the coordinator speaks protocol {shown(header.get('protocol'), 40)} and this site {PROTOCOL}: "
                "install the same polysite on both sides"
            )
        given = {f.name: header[f.name] for f in fields(cls) if f.name in header and f.name != "body"}
        for name in ("kind", "study"):
            given.setdefault(name, "")
        for name, value in given.items():
            if not _is_sound(name, value):
                raise PayloadError(f"{name} = {shown(repr(value), 80)} is not valid in a request")
        if "keep" in given:
            given["keep"] = tuple(given["keep"])
        return cls(**given, body=body)


FIELDS: Mapping[RequestKind, tuple[str, ...]] = {
    "hello": ("config",),
    "begin": ("phase", "begins", "before", "round", "version"),
    "assess": ("phase", "round", "version", "keep"),
    "train": ("phase", "round", "version", "keep"),
    "score": ("phase", "round", "version", "keep", "split"),
    "examine": ("phase", "round", "version", "keep", "split", "tolerance"),
    "serve": ("phase", "round", "version", "keep", "name"),
    "mask": ("phase", "round", "step"),
}


def _is_sound(name: str, value: Any) -> bool:
    if name == "keep":
        return (
            isinstance(value, list) and len(value) <= MAX_LISTED and all(type(v) is int and v in NUMBERS for v in value)
        )
    if name == "tolerance":
        return _is_number(value) and 0 <= value <= MAX_TOLERANCE
    if name in ("phase", "round", "version", "before", "begins"):
        return type(value) is int and value in NUMBERS
    if not isinstance(value, str) or len(value) > MAX_LENGTHS.get(name, 64):
        return False
    return value in CHOICES[name] if name in CHOICES else name != "study" or bool(STUDY.fullmatch(value))


@dataclass(frozen=True, slots=True)
class Subject:
    """Labels or classes of a study, which determine the scores of a case."""

    labels: tuple[str, ...] = ()
    classification: bool = False

    @property
    def scored(self) -> tuple[str, ...]:
        """Names of the scores of a case."""
        return ("accuracy",) if self.classification else self.labels


@dataclass(frozen=True, slots=True)
class Refused:
    """A site does not do what was asked, for a reason that it states."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A site could not do what was asked, or its response is not valid."""

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

    def header(self) -> dict[str, Any]:
        """Return the header to send."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "cases"}
        return {**self.cases, **named}

    @classmethod
    def parse(cls, header: Header) -> "Greeting":
        """Parse a header."""
        cases = {split: header.get(split) for split in SPLITS}
        for split, count in cases.items():
            if type(count) is not int or not 0 <= count < MAX_COUNT:
                raise PayloadError(f"{split}: {count!r:.40} is not a number of cases")
        allowed = {name: header.get(name, True) for name in ("may_score", "may_assess")}
        for name, value in allowed.items():
            if type(value) is not bool:
                raise PayloadError(f"{name}: {value!r:.40} is neither true nor false")
        machine = {name: shown(header.get(name, ""))[:80] for name in ("torch", "device")}
        studies = header.get("studies", -1)
        if type(studies) is not int or not -1 <= studies < MAX_COUNT:
            raise PayloadError(f"studies: {studies!r:.40} is not a number of studies")
        listed = header.get("listed", "")
        if not isinstance(listed, str) or not re.fullmatch("[0-9a-f]{0,64}", listed):
            raise PayloadError(f"listed: {listed!r:.40} is not a digest")
        return cls(cases, **allowed, **machine, studies=studies, listed=listed)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Trained:
    """The effort behind a payload: what the local fits report, without their parameters."""

    fits: tuple[Fit, ...] = ()
    seconds: float = 0.0
    releases: tuple[Release, ...] = ()  # uses of its data under differential privacy

    def header(self) -> dict[str, Any]:
        """Return the header to send; the worker adds the seconds. Under differential privacy no loss leaves."""
        names = ("loss", "steps", "lr_sum", "reach")
        fits = {f"fit_{n}": [float(getattr(f, n)) for f in self.fits] for n in names}
        if not self.releases:
            return fits
        used = {f"release_{f.name}": [float(getattr(r, f.name)) for r in self.releases] for f in fields(Release)}
        return {**fits, "fit_loss": [0.0] * len(self.fits), **used}

    @classmethod
    def parse(cls, header: Header) -> "Trained":
        """Parse a header."""
        columns = [header.get(f"fit_{name}", []) for name in ("loss", "steps", "lr_sum", "reach")]
        if not all(isinstance(c, list) for c in columns) or len({len(c) for c in columns}) > 1:
            raise PayloadError("losses, steps and learning rates of the training are not lists of one length")
        fits = tuple(
            Fit({}, _loss("loss", a), int(_number("steps", b)), _number("learning rates", c), _number("reach", d))
            for a, b, c, d in zip(*columns, strict=True)
        )
        releases = _releases(header)
        fits = tuple(replace(fit, loss=math.nan) for fit in fits) if releases else fits  # it did not leave
        return cls(fits, _number("seconds", header.get("seconds", 0.0)), releases)


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of cases, under pseudonyms, without counts of voxels."""

    scores: Scores

    def header(self) -> dict[str, Any]:
        """Return the header to send, sorted by pseudonym so that the order says nothing."""
        bare = {case: replace(score, counts={}) for case, score in sorted(self.scores.items())}
        return {"scores": json.dumps(scores_to_plain(bare))}

    @classmethod
    def parse(cls, header: Header, count: int, subject: Subject) -> "Scored":
        """Parse the scores in the header of a response; refuse more than ``count`` cases and invalid values."""
        cases = _cases(header.get("scores"), count)
        return cls({name: _score(name, given, subject) for name, given in cases.items()})


@dataclass(frozen=True, slots=True)
class Measured:
    """All measures of cases, under pseudonyms, without the predictions."""

    cases: tuple[Examined, ...]

    def header(self) -> dict[str, Any]:
        """Return the header to send, sorted by pseudonym."""
        scores = scores_to_plain({e.case: e.score for e in self.cases})
        listed = {
            e.case: {
                **scores[e.case],
                "measures": {label: {k: _packed(v) for k, v in m.items()} for label, m in e.measures.items()},
                "unit": e.unit,
            }
            for e in sorted(self.cases, key=lambda e: e.case)
        }
        return {"measures": json.dumps(listed)}

    @classmethod
    def parse(cls, header: Header, count: int, subject: Subject) -> "Measured":
        """Parse the measures in the header of a response; refuse more than ``count`` cases and invalid values."""
        return cls(tuple(_examined(k, v, subject) for k, v in _cases(header.get("measures"), count).items()))


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of the models that a site is served, one per group of its cases."""

    models: tuple[str, ...]

    def header(self) -> dict[str, Any]:
        """Return the header to send."""
        return {"digests": list(self.models)}

    @classmethod
    def parse(cls, header: Header) -> "Digests":
        """Parse a header."""
        given = header.get("digests")
        if not isinstance(given, list) or not 0 < len(given) <= MAX_MODELS:
            raise PayloadError(f"digests: {given!r:.40} are not those of 1 to {MAX_MODELS} models")
        for each in given:
            if not isinstance(each, str) or not re.fullmatch("[0-9a-f]{64}", each):
                raise PayloadError(f"digests: {each!r:.40} is not a digest")
        return cls(tuple(given))


@dataclass(frozen=True, slots=True)
class Begun:
    """A site has begun a phase."""


@dataclass(frozen=True, slots=True)
class MaskTaken:
    """A site has taken a step of a secure sum."""


Response = Refused | Failed | Greeting | Trained | Scored | Measured | Digests | Begun | MaskTaken


def parse_response(request: Request, header: Header, cases: Mapping[str, int], subject: Subject) -> Response:
    """Parse the response to a request.

    Args:
        request: What was asked.
        header: The header of the response.
        cases: Numbers of cases that the site reported.
        subject: What cases are scored by.
    """
    if header.get("error"):
        return Failed(shown(header["error"]))
    if header.get("refused"):
        return Refused(shown(header["refused"]))
    try:
        match request.kind:
            case "hello":
                return Greeting.parse(header)
            case "train" | "assess":
                return Trained.parse(header)
            case "score":
                return Scored.parse(header, cases.get(request.split, 0), subject)
            case "examine":
                return Measured.parse(header, cases.get(request.split, 0), subject)
            case "serve":
                return Digests.parse(header)
            case "begin":
                return Begun()
            case "mask":
                return MaskTaken()
    except PayloadError as problem:
        return Failed(f"its response to {request.words} is not valid: {problem}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _releases(header: Header) -> tuple[Release, ...]:
    """Parse what was used under differential privacy."""
    columns = [header.get(f"release_{f.name}", []) for f in fields(Release)]
    sound = all(isinstance(c, list) and all(map(_is_number, c)) for c in columns) and len({*map(len, columns)}) == 1
    if not sound or len(columns[0]) > MAX_MODELS:
        raise PayloadError("noise, rates and steps of differential privacy are not lists of one length")
    try:
        rows = zip(*columns, strict=True)
        return tuple(Release(float(noise), float(rate), int(steps), float(delta)) for noise, rate, steps, delta in rows)
    except (ValueError, OverflowError) as problem:
        raise PayloadError(str(problem)) from problem


def _number(what: str, value: Any, most: float = MAX_COUNT, least: float = 0.0) -> float:
    if not _is_number(value) or not least <= value <= most:
        raise PayloadError(f"{what}: {value!r:.40} is not a number from {least:g} to {most:g}")
    return float(value)


def _loss(what: str, value: Any) -> float:
    """Parse a loss. An infinite loss, which a diverged model may have, becomes NaN; other values must be numbers."""
    if not _is_number(value):
        raise PayloadError(f"{what}: {value!r:.40} is not a number")
    return float(value) if abs(value) < MAX_FLOAT else math.nan


def _cases(text: Any, count: int) -> dict[str, Any]:
    """Parse the JSON of at most ``count`` cases. A count of 1 may stand for a number that the policy hides."""
    most = count if count != 1 else MAX_CASES
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise PayloadError("the scores are not a text, or one that is too long")
    try:
        cases = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise PayloadError(f"the scores cannot be read: {problem}") from problem
    if not isinstance(cases, dict) or len(cases) > most:
        raise PayloadError(f"the scores are not those of at most {most} cases")
    for name in cases:
        if not name.isprintable() or not 0 < len(name) <= 64:
            raise PayloadError(f"{name!r:.40} is not the name of a case")
    return cases


def _score(case: str, given: Any, subject: Subject) -> CaseScore:
    labels = given.get("labels") if isinstance(given, dict) else None
    named = {"labels", "loss", *(("predicted", "true") if subject.classification else ())}
    if not isinstance(labels, dict) or labels.keys() != set(subject.scored) or given.keys() != named:
        raise PayloadError(f"{case!r} is not scored by {', '.join(subject.scored)} and the loss")
    for name in subject.scored:
        _number(f"{name} of {case!r}", labels[name], 1.0)
    for name in named & {"predicted", "true"}:
        _class(f"{name} of {case!r}", given[name], subject)
    loss = math.nan if given["loss"] is None else _loss(f"loss of {case!r}", given["loss"])
    score = scores_from_plain({case: {**given, "labels": {k: labels[k] for k in subject.scored}}})[case]
    return replace(score, loss=loss)


def _class(what: str, value: Any, subject: Subject) -> int:
    if type(value) is not int or value not in range(len(subject.labels)):
        raise PayloadError(f"{what}: {value!r:.40} is not one of the {len(subject.labels)} classes")
    return value


def _examined(case: str, given: Any, subject: Subject) -> Examined:
    measures, unit = (given.get(k) if isinstance(given, dict) else None for k in ("measures", "unit"))
    if not isinstance(measures, dict) or not isinstance(unit, str) or not (unit == "" or unit.isidentifier()):
        raise PayloadError(f"{case!r} has no measures, or no unit")
    score = _score(case, {k: v for k, v in given.items() if k not in ("measures", "unit", "counts")}, subject)
    true = (subject.labels[score.true or 0],)
    labels, names = (true, CLASS_MEASURES) if subject.classification else (subject.labels, MEASURES)
    if measures.keys() != set(labels):
        raise PayloadError(f"the measures of {case!r} are not those of {', '.join(labels)}")
    return Examined(
        case,
        replace(score, counts=_counts(case, given.get("counts", {}), subject)),
        {k: _measures(f"{k} of {case!r}", measures[k], names, subject) for k in labels},
        None,
        shown(unit, 16),
    )


def _counts(case: str, given: Any, subject: Subject) -> Counts:
    """Parse the counts of voxels of every label and the background; none in a classification."""
    wanted = set() if subject.classification else {*subject.labels, BACKGROUND}
    if not isinstance(given, dict) or given.keys() not in (set(), wanted):
        raise PayloadError(f"the counts of {case!r} are not those of {', '.join(sorted(wanted)) or 'a classification'}")
    return {name: _count(f"counts of {name} of {case!r}", given[name]) for name in given}


def _count(what: str, given: Any) -> Count:
    if not isinstance(given, list) or len(given) != 4 or any(type(n) is not int for n in given):
        raise PayloadError(f"{what}: {given!r:.40} is not four whole numbers")
    tp, fp, fn, tn = (int(_number(what, n, MAX_VOXELS)) for n in given)
    return tp, fp, fn, tn


def _measures(what: str, given: Any, names: Iterable[str], subject: Subject) -> dict[str, float]:
    if not isinstance(given, dict) or given.keys() != set(names):
        raise PayloadError(f"{what} is not measured by {', '.join(names)}")
    return {name: _measure(f"{name} of {what}", name, given[name], subject) for name in names}


def _measure(what: str, name: str, value: Any, subject: Subject) -> float:
    """Parse one measure: null becomes NaN in fractions and distances, and "inf" becomes infinity in distances."""
    if subject.classification:
        return _number(what, value, 1.0 if name == "accuracy" else len(subject.labels) - 1.0)
    known = MEASURES[name]
    if value is None and not known.defined:
        return math.nan
    if value == "inf" and known.distance:
        return math.inf
    return _number(what, value, known.high, known.low)


def _packed(value: float) -> float | str | None:
    """Return a value that JSON can hold without loss: NaN is null, infinity a text."""
    value = float(value)
    return None if math.isnan(value) else value if math.isfinite(value) else repr(value)
