"""Tests paired by case: every method against a reference, or questions that a user asks.

A question is a line of text::

    scaffold > fedavg                           is scaffold better? One-tailed, over all cases, by the mean over labels
    scaffold > fedavg @ 12,13,14,15 / TC        on the cases of these hospitals, by the label TC
    scaffold != fedavg @ !1,18 / HD95           two-tailed, without these hospitals, by HD95
    fedper < fedavg / HD95 ET                   is fedper worse? By HD95 of the label ET

"Better" is a higher score or a smaller distance. The p-values are corrected over all questions asked (Holm).
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from polysite.data.slices import volume_of
from polysite.errors import ConfigError, nearest
from polysite.metrics.measures import MEASURES, EmptyMaskPolicy, about
from polysite.metrics.statistics import Tail, holm, interval, rank_biserial, signed_rank, wins
from polysite.report.evaluations import Key
from polysite.report.grid import Cell, Grid, Line, name, number
from polysite.report.runs import Method

LEVEL = 0.05
QUESTION = re.compile(r"(?P<one>.+?)\s*(?P<sign>!=|>|<)\s*(?P<other>.+?)(\s*@\s*(?P<sites>.+?))?(\s*/\s*(?P<by>.+))?")
TAILS: Mapping[str, Tail] = {">": "greater", "<": "less", "!=": "two-sided"}
FORM = "write it as 'scaffold > fedavg @ 12,13 / TC': two methods, then sites and a label if wanted"


@dataclass(frozen=True)
class Test:
    """The test of a method against the reference by one measure. A difference above 0 is better, also for distances."""

    measure: str
    method: str
    cases: int
    difference: float
    low: float
    high: float
    p: float
    adjusted: float
    effect: float
    cases_won: tuple[int, int, int]  # better, equal, worse
    hospitals_won: tuple[int, int, int]

    @property
    def significant(self) -> bool:
        """Whether the adjusted p-value is at most 0.05."""
        return self.adjusted <= LEVEL


@dataclass(frozen=True)
class Question:
    """A test that a user asks for."""

    text: str
    method: str
    reference: str
    tail: Tail
    sites: tuple[str, ...]  # whose cases are tested
    measure: str
    label: str  # empty: the mean over the labels


@dataclass(frozen=True)
class Answer:
    """A question with its test."""

    question: Question
    test: Test


def gains(
    method: Method, reference: Method, measure: str, policy: EmptyMaskPolicy, label: str | None = None
) -> dict[Key, float]:
    """Return by how much a method is better in every case: the mean over the labels for which at least one has a value.

    A distance is undefined if both masks are empty. If the other method predicts something there, its penalty is
    compared with 0, so that a false alarm stays in the comparison, unless the policy excludes such cases.
    """
    found: dict[Key, list[float]] = {}
    whole = about(measure).distance and policy.empty == "penalty"
    for each in [label] if label else method.first.labels:
        a, b = method.values(measure, policy, each), reference.values(measure, policy, each)
        for key in (a.keys() | b.keys()) if whole else (a.keys() & b.keys()):
            if key in method.keys and key in reference.keys:
                found.setdefault(key, []).append(about(measure).better * (a.get(key, 0.0) - b.get(key, 0.0)))
    if policy.empty == "excluded-case":
        both = method.values(measure, policy, label).keys() & reference.values(measure, policy, label).keys()
        found = {key: values for key, values in found.items() if key in both}
    return by_volume({key: fmean(found[key]) for key in sorted(found)}, method)


def by_volume(values: Mapping[Key, float], method: Method) -> dict[Key, float]:
    """Return the mean of every volume if cases are slices, since slices of a patient are not independent."""
    if not method.first.sliced:
        return dict(values)
    volumes: dict[Key, list[float]] = {}
    for (site, case), value in values.items():
        volumes.setdefault((site, volume_of(case)), []).append(value)
    return {key: fmean(numbers) for key, numbers in volumes.items()}


def paired(measure: str, title: str, pairs: Mapping[Key, float], tail: Tail) -> Test:
    """Test gains by case; the p-value is not yet corrected."""
    gain, sites = np.array(list(pairs.values())), [site for site, _ in pairs]
    hospitals = [float(gain[[s == site for s in sites]].mean()) for site in dict.fromkeys(sites)]
    alone = {
        site for site, count in Counter(sites).items() if count == 1
    }  # one case cannot be resampled within its hospital
    low, high = interval(gain, ["" if site in alone else site for site in sites])
    p, effect, mean = signed_rank(gain, tail), rank_biserial(gain), float(gain.mean())
    return Test(measure, title, len(pairs), mean, low, high, p, p, effect, wins(gain), wins(hospitals))


def corrected(tests: Sequence[Test]) -> list[Test]:
    """Return the tests with Holm's correction over all of them."""
    adjusted = holm(np.array([t.p for t in tests]))
    return [replace(t, adjusted=float(p)) for t, p in zip(tests, adjusted, strict=True)]


def parse(text: str, methods: Sequence[Method], measures: Collection[str]) -> Question:
    """Read a question; refuse unknown methods, sites, measures and labels."""
    found = QUESTION.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--test {text!r} cannot be read; {FORM}")
    named = {m.name: m for m in methods}
    for part in ("one", "other"):
        if found[part] not in named:
            raise ConfigError(f"--test {text!r}: there is no method {found[part]!r}; {nearest(found[part], named)}")
    if found["one"] == found["other"]:
        raise ConfigError(f"--test {text!r} compares a method with itself; {FORM}")
    first = named[found["one"]]
    sites = _sites(text, found["sites"] or "", sorted({*first.sites, *named[found["other"]].sites}))
    measure, label = _by(text, found["by"] or "", measures, first.first.labels)
    return Question(text.strip(), found["one"], found["other"], TAILS[found["sign"]], sites, measure, label)


def ask(
    texts: Sequence[str], methods: Sequence[Method], measures: Collection[str], policy: EmptyMaskPolicy
) -> list[Answer]:
    """Answer questions, corrected over all of them."""
    named, asked, tests = {m.name: m for m in methods}, [], []
    for question in (parse(text, methods, measures) for text in texts):
        found = gains(
            named[question.method], named[question.reference], question.measure, policy, question.label or None
        )
        pairs = {key: gain for key, gain in found.items() if key[0] in question.sites}
        if not pairs:
            raise ConfigError(f"--test {question.text!r}: no case of these sites was evaluated by both methods")
        asked.append(question)
        tests.append(paired(question.measure, question.method, pairs, question.tail))
    return [Answer(q, t) for q, t in zip(asked, corrected(tests), strict=True)]


def answers(asked: Sequence[Answer]) -> list[Grid]:
    """Return the table of the questions; none if nothing was asked."""
    if not asked:
        return []
    lines = []
    for question, t in ((a.question, a.test) for a in asked):
        asked_for = (name(question.text), name(question.tail), number(len(question.sites), "d"), number(t.cases, "d"))
        lines.append(Line((*asked_for, *outcome(t))))
    head = ("question", "test", "hospitals", "cases", "gain [95 %]", "effect", "p", "p (Holm)", "cases + / = / −")
    note = (
        "Wilcoxon's signed-rank test, paired by case, on the mean over labels or on the label named. A gain above 0 is "
        "better for the first method, also for distances: > asks whether it is better, < whether it is worse, != "
        f"whether they differ. p: not corrected; Holm: corrected for the {len(asked)} questions of this table, * at "
        f"{LEVEL:g}."
    )
    return [Grid("asked", "Questions", head, tuple(lines), note)]


def outcome(test: Test) -> tuple[Cell, ...]:
    """Return the cells of a test: gain, effect, p-values, and the cases that are better, equal and worse."""
    digits = about(test.measure).digits
    gain = f"{test.difference:+.{digits}f} [{test.low:+.{digits}f}, {test.high:+.{digits}f}]"
    won = Cell("{} / {} / {}".format(*test.cases_won), test.cases_won[0])
    adjusted = p_value(test.adjusted, " *" * test.significant)
    return Cell(gain, test.difference), number(test.effect, "+.2f"), p_value(test.p), adjusted, won


def p_value(value: float, star: str = "") -> Cell:
    """Return a cell that holds a p-value."""
    return Cell(f"{'< 0.001' if value < 0.001 else f'{value:.3f}'}{star}", value)


def find_site(text: str, known: Iterable[str]) -> str | None:
    """Return the site of a name; leading zeros may be left out where only one site fits.

    >>> find_site("1", ["01", "18"]), find_site("1", ["01", "001"]), find_site("18", ["01", "18"])
    ('01', None, '18')
    """
    names = list(known)
    if text in names:
        return text
    alike = [n for n in names if n.lstrip("0") == text.lstrip("0")]
    return alike[0] if len(alike) == 1 else None


def _sites(text: str, given: str, known: Sequence[str]) -> tuple[str, ...]:
    without = given.startswith("!")
    listed = given.removeprefix("!").strip()
    if not listed:
        return tuple(known)
    found = []
    for each in [listed] if find_site(listed, known) else [s.strip() for s in listed.split(",")]:
        site = find_site(each, known)
        if site is None:
            raise ConfigError(f"--test {text!r}: there is no site {each!r}; {nearest(each, known)}")
        found.append(site)
    return tuple(s for s in known if (s in found) != without)


def _by(text: str, given: str, measures: Collection[str], labels: Sequence[str]) -> tuple[str, str]:
    """Return measure and label: ``TC``, ``HD95`` or ``HD95 TC``."""
    main = next(iter(measures))
    titles = {about(k).title.lower(): k for k in measures} | {k: k for k in measures}
    word, _, rest = given.partition(" ")
    if not given or given in labels:
        return main, given
    measure, label = (titles[word.lower()], rest.strip()) if word.lower() in titles else (main, given)
    if label and label not in labels:
        choices = [*labels, *(about(k).title for k in measures if k in MEASURES)]
        raise ConfigError(f"--test {text!r}: there is no label or measure {label!r}; {nearest(label, choices)}")
    return measure, label
