"""Messages between coordinator and hospitals: every request and response, written and validated only here.

A message is a flat header (text, numbers, lists of them) and a body of bytes, which is an encoded payload. The requests
and responses themselves are those of ``polysite.engines.messages``. Neither side trusts the other: a header that does
not fit raises ``PayloadError``.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from polysite.buffers import Buffer
from polysite.data.case import SPLITS
from polysite.engines import messages
from polysite.engines.record import scores_from_plain, scores_to_plain
from polysite.engines.secure.member import STEPS
from polysite.errors import PayloadError, shown
from polysite.metrics.measures import MEASURES
from polysite.metrics.overlap import BACKGROUND
from polysite.payload import Limits, decode, encode, model_digest
from polysite.privacy import Release
from polysite.site import CaseScore, Count, Counts, Examined, Fit

PROTOCOL = 2  # 0.1.0 spoke 1

Header = Mapping[str, Any]
NAME = "body"  # of a request: digest of its body, which is left out where the site holds it
HOLDS = "holds"  # of a response: digest of the body that the site holds
MISSING = "missing"  # of a response: the site does not hold the body that was named

NUMBERS = range(-1, 1_000_000)  # of rounds, phases and versions
MAX_LISTED = 10_000  # numbers in a list
MAX_LENGTHS = {"config": 1 << 20}  # characters of a text; 64 of any other
MAX_TOLERANCE = 1e6
CHOICES: Mapping[str, tuple[str, ...]] = {
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
SMALL = Limits(nbytes=1 << 24, header=1 << 22, arrays=10_000, dimensions=1)  # of an answer to a step of a secure sum
CLASS_MEASURES = ("accuracy", "predicted", "true")


# the requests that hospitals understand, and the fields of each that are in its header; the payload is the body
FIELDS: Mapping[type[messages.Request], tuple[str, ...]] = {
    messages.Join: ("config",),
    messages.Begin: ("phase", "begins", "before", "round", "version"),
    messages.Assess: ("phase", "round", "version", "keep"),
    messages.Train: ("phase", "round", "version", "keep"),
    messages.Score: ("phase", "round", "version", "keep", "split"),
    messages.Examine: ("phase", "round", "version", "keep", "split", "tolerance"),
    messages.Serve: ("phase", "round", "version", "keep", "name"),
    messages.MaskTurn: ("phase", "round", "step"),
}
NAMED: Mapping[messages.RequestKind, type[messages.Request]] = {each.kind: each for each in FIELDS}


def header_of(request: messages.Request, study: str, identity: Mapping[str, str]) -> dict[str, Any]:
    """Return the header of a request.

    Args:
        request: The request.
        study: Name by which both sides know the study.
        identity: What identifies the coordinator's code.
    """
    values = {name: getattr(request, name) for name in FIELDS[type(request)]}
    listed = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
    return {"protocol": PROTOCOL, **identity, "kind": request.kind, "study": study, **listed}


def body_of(request: messages.Request) -> Buffer:
    """Return the body of a request."""
    return b"" if isinstance(request, messages.Join) else encode(request.payload)


def parse_request(header: Header, body: Buffer = b"") -> tuple[str, messages.Request]:
    """Return the name of the study, and the request. Unknown fields are ignored; one of the wrong type is refused."""
    if header.get("protocol") != PROTOCOL:
        raise PayloadError(
            f"the coordinator speaks protocol {shown(header.get('protocol'), 40)} and this site {PROTOCOL}: "
            "install the same polysite on both sides"
        )
    kind, study = header.get("kind", ""), header.get("study", "")
    for name, value, sound in (
        ("kind", kind, isinstance(kind, str) and kind in NAMED),
        ("study", study, isinstance(study, str) and STUDY.fullmatch(study)),
    ):
        if not sound:
            raise PayloadError(f"{name} = {shown(repr(value), 80)} is not valid in a request")
    made = NAMED[kind]
    given = {name: header[name] for name in FIELDS[made] if name in header}
    for name, value in given.items():
        if not _is_sound(name, value):
            raise PayloadError(f"{name} = {shown(repr(value), 80)} is not valid in a request")
    if "keep" in given:
        given["keep"] = tuple(given["keep"])
    if made is not messages.Join and len(body):
        given["payload"] = decode(body)
    return study, made(**given)


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
    return value in CHOICES.get(name, (value,))


@dataclass(frozen=True, slots=True)
class Subject:
    """Labels or classes of a study, which determine the scores of a case."""

    labels: tuple[str, ...] = ()
    classification: bool = False

    @property
    def scored(self) -> tuple[str, ...]:
        """Names of the scores of a case."""
        return ("accuracy",) if self.classification else self.labels


def greeting_header(greeting: messages.Greeting) -> dict[str, Any]:
    """Return the header of a greeting."""
    named = {f.name: getattr(greeting, f.name) for f in fields(messages.Greeting) if f.name != "cases"}
    return {**greeting.cases, **named}


def parse_greeting(header: Header) -> messages.Greeting:
    """Parse the header of a greeting."""
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
    return messages.Greeting(cases, **allowed, **machine, studies=studies, listed=listed)  # type: ignore[arg-type]


def effort_header(response: messages.Trained) -> dict[str, Any]:
    """Return the effort behind a reply as a header. Under differential privacy no loss leaves."""
    if not response.fits and not response.releases:
        return {}
    names = ("loss", "steps", "lr_sum", "reach")
    fits = {f"fit_{n}": [float(getattr(f, n)) for f in response.fits] for n in names}
    if not response.releases:
        return fits
    used = {f"release_{f.name}": [float(getattr(r, f.name)) for r in response.releases] for f in fields(Release)}
    return {**fits, "fit_loss": [0.0] * len(response.fits), **used}


def _trained(header: Header) -> messages.Trained:
    """Parse the effort behind a reply."""
    columns = [header.get(f"fit_{name}", []) for name in ("loss", "steps", "lr_sum", "reach")]
    if not all(isinstance(c, list) for c in columns) or len({len(c) for c in columns}) > 1:
        raise PayloadError("losses, steps and learning rates of the training are not lists of one length")
    fits = tuple(
        Fit({}, _loss("loss", a), int(_number("steps", b)), _number("learning rates", c), _number("reach", d))
        for a, b, c, d in zip(*columns, strict=True)
    )
    releases = _releases(header)
    fits = tuple(replace(fit, loss=math.nan) for fit in fits) if releases else fits  # it did not leave
    return messages.Trained(fits=fits, seconds=_number("seconds", header.get("seconds", 0.0)), releases=releases)


def scores_header(response: messages.Scored) -> dict[str, Any]:
    """Return scores of cases as a header, without counts of voxels, sorted so that the order says nothing."""
    bare = {case: replace(score, counts={}) for case, score in sorted(response.scores.items())}
    return {"scores": json.dumps(scores_to_plain(bare))}


def measures_header(response: messages.Measured) -> dict[str, Any]:
    """Return all measures of cases as a header, without predictions, sorted so that the order says nothing."""
    cases = sorted(response.cases, key=lambda e: e.case)
    scores = scores_to_plain({e.case: e.score for e in cases})
    listed = {
        e.case: {
            **scores[e.case],
            "measures": {label: {k: _packed(v) for k, v in m.items()} for label, m in e.measures.items()},
            "unit": e.unit,
        }
        for e in cases
    }
    return {"measures": json.dumps(listed)}


def _models(header: Header) -> messages.Models:
    given = header.get("digests")
    if not isinstance(given, list) or not 0 < len(given) <= MAX_MODELS:
        raise PayloadError(f"digests: {given!r:.40} are not those of 1 to {MAX_MODELS} models")
    for each in given:
        if not isinstance(each, str) or not re.fullmatch("[0-9a-f]{64}", each):
            raise PayloadError(f"digests: {each!r:.40} is not a digest")
    return messages.Models(tuple(given))


def response_message(response: messages.Response) -> tuple[dict[str, Any], Buffer]:
    """Return the header and the body of a response."""
    match response:
        case messages.Greeting():
            return greeting_header(response), b""
        case messages.Trained():
            return effort_header(response), encode(response.payload)
        case messages.Scored():
            return scores_header(response), b""
        case messages.Measured():
            return measures_header(response), b""
        case messages.Models():
            return {"digests": [m if isinstance(m, str) else model_digest(m) for m in response.models]}, b""
        case messages.MaskTaken():
            return {}, encode(response.payload)
        case messages.Begun():
            return {}, b""
        case messages.Refused():
            return {"refused": response.reason}, b""
        case messages.Failed() | messages.Unreadable():
            return {"error": response.reason}, b""


def parse_response(
    request: messages.Request,
    header: Header,
    take: Callable[[], Buffer],
    cases: Mapping[str, int],
    subject: Subject,
    limits: Limits = Limits(),
) -> messages.Response:
    """Parse the response to a request.

    Args:
        request: What was asked.
        header: The header of the response.
        take: Returns the body of the response.
        cases: Numbers of cases that the site reported.
        subject: What cases are scored by.
        limits: Largest payload that is accepted.
    """
    if header.get("error"):
        return messages.Failed(shown(header["error"]))
    if header.get("refused"):
        return messages.Refused(shown(header["refused"]))
    try:
        match request:
            case messages.Join():
                return parse_greeting(header)
            case messages.Train() | messages.Assess():
                return _with_payload(_trained(header), take, limits)
            case messages.MaskTurn():
                return _with_payload(messages.MaskTaken(), take, SMALL)
            case messages.Score(split=split):
                given = _cases(header.get("scores"), cases.get(split, 0))
                return messages.Scored({name: _score(name, each, subject) for name, each in given.items()})
            case messages.Examine(split=split):
                given = _cases(header.get("measures"), cases.get(split, 0))
                return messages.Measured(tuple(_examined(name, each, subject) for name, each in given.items()))
            case messages.Serve():
                return _models(header)
            case messages.Begin():
                return messages.Begun()
            case _:
                return messages.Failed(f"no hospital answers {messages.words_of(request)}")
    except PayloadError as problem:
        return messages.Failed(f"its response to {messages.words_of(request)} is not valid: {problem}")


def _with_payload(
    response: messages.Trained | messages.MaskTaken, take: Callable[[], Buffer], limits: Limits
) -> messages.Response:
    try:
        return replace(response, payload=decode(take(), limits))
    except PayloadError as problem:
        return messages.Unreadable(str(problem))


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
