"""The page of an audit: what an attacker made of the numbers that describe a case, in plain words first."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from polysite.metrics.statistics import interval
from polysite.report import assess_figures
from polysite.report.figures import COLOURS
from polysite.report.grid import Cell, Grid, Line, name, number
from polysite.report.page import Folded, Picture, Section
from polysite.report.template import render

TITLE = "What could an attacker make of the numbers that describe a case?"
BESIDE = {
    "nearest": "the scan of the known case with the most similar numbers",
    "hospital": "the average scan of the hospital",
    "compressed": "the scan itself, compressed to as many numbers",
}
MARKS = {
    "nearest": ("s", 1, "nearest case"),
    "hospital": ("D", 3, "hospital's average"),
    "compressed": ("v", 2, "scan itself, compressed"),
}
CAUTION = "It is one attack with the cases at hand, not a proof of privacy."


@dataclass(frozen=True)
class Ratio:
    """Of a mean error to that of the average scan, with its 95 % interval over the test cases."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, errors: np.ndarray, average: np.ndarray) -> "Ratio":
        """Bootstrap of what every case adds to the ratio (its influence), whose mean is the ratio.

        >>> Ratio.of(np.array([1.0, 2.0]), np.array([2.0, 4.0]))
        Ratio(value=0.5, low=0.5, high=0.5)
        """
        value = float(errors.mean() / average.mean())
        return cls(value, *interval(value + (errors - value * average) / average.mean()))

    @property
    def words(self) -> str:
        return f"error ratio {self.value:.3f}, 95 % interval {self.low:.3f}–{self.high:.3f}"


@dataclass(frozen=True)
class Finding:
    """What came of the attack on one kind of numbers."""

    kind: str
    words: str  # what they are
    numbers: int  # of a case
    leaves: str  # what of it really leaves a hospital
    ratios: Mapping[str, Ratio]  # of attacks (network, linear) and of what they are measured against
    chosen: str  # the attack that the attacker prefers, by its validation cases
    tested: int  # cases
    coefficients: int  # of the compressed scan
    weights: int  # of a decoder
    found: int  # patients who were found again
    probes: int  # of so many
    gallery: int  # among so many

    @property
    def attack(self) -> Ratio:
        return self.ratios[self.chosen]

    @property
    def leaks(self) -> bool:
        """Whether the attack does better than the average scan, by more than chance."""
        return self.attack.high < 1

    @property
    def rate(self) -> Ratio:
        """How often a patient was found again, with Wilson's 95 % interval."""
        from scipy.stats import binomtest

        low, high = binomtest(self.found, self.probes).proportion_ci(method="wilson")
        return Ratio(self.found / self.probes, float(low), float(high))

    @property
    def recognises(self) -> bool:
        """Whether patients are found again more often than by chance."""
        return self.rate.low > 1 / self.gallery

    @property
    def verdict(self) -> str:
        start, ratio = (
            f"From the {self.numbers} numbers of a case ({self.words}), an attacker",
            f"({self.attack.words})",
        )
        if self.leaks:
            return (
                f"{start} removes {percent(1 - self.attack.value)} of the error of guessing the average scan {ratio}. "
                f"The average scan of the hospital, without any attack, {_removes(self.ratios['hospital'])}."
            )
        than = "worse than" if self.attack.low > 1 else f"no better, as far as {self.tested} test cases can tell, than"
        return f"{start} rebuilds the scan {than} by guessing the average scan {ratio}."

    @property
    def recognition(self) -> str:
        chance = f"by chance, 1 in {self.gallery} would be"
        if not self.recognises:
            return (
                f"They do not find a patient again: {self.found} of {self.probes} were, among {self.gallery}; {chance}."
            )
        return (
            f"They find a patient again: {self.found} of {self.probes} second scans were matched with the first of "
            f"the same patient, among {self.gallery} ({100 * self.rate.value:.0f} %, 95 % interval "
            f"{100 * self.rate.low:.0f}–{100 * self.rate.high:.0f} %); {chance}."
        )

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "rate": asdict(self.rate), "verdict": self.verdict, "recognition": self.recognition}


@dataclass(frozen=True, eq=False)
class View:
    """A test case in the middle of its volume: what it is, and what was made of it."""

    title: str
    slices: Mapping[str, np.ndarray]  # by what it is


def percent(share: float) -> str:
    """
    >>> percent(0.234), percent(0.003)
    ('23 %', 'less than 1 %')
    """
    return "less than 1 %" if share < 0.01 else f"{100 * share:.0f} %"


def _removes(ratio: Ratio) -> str:
    return f"removes {percent(1 - ratio.value)}" if ratio.value < 1 else "removes nothing"


def summary(findings: Sequence[Finding]) -> str:
    """The worst of it, in three sentences."""
    worst = min(findings, key=lambda f: f.attack.value if f.leaks else 1 + f.attack.value)
    if worst.leaks:
        said = (
            f"The strongest attack, on the {worst.words}, removes {percent(1 - worst.attack.value)} of the error that "
            f"guessing the average scan makes ({worst.attack.words})."
        )
    else:
        said = "From none of these numbers did the attack rebuild scans better than by guessing the average scan."
    known = max(findings, key=lambda f: f.rate.value)
    again = (
        f"By the {known.words}, {known.found} of {known.probes} second scans were matched with their patient among "
        f"{known.gallery}."
        if known.recognises
        else "By none of them were second scans matched with their patient more often than by chance."
    )
    return f"{said} {again} {CAUTION}"


def ratios(findings: Sequence[Finding]) -> Grid:
    """How well scans are rebuilt, by every attack and yardstick."""

    def cell(f: Finding, key: str) -> Cell:
        ratio = f.ratios[key]
        return Cell(f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})", ratio.value, key == f.chosen)

    order = ("network", "linear", *BESIDE)
    lines = [Line((name(f.kind), number(f.numbers, "d"), *(cell(f, key) for key in order))) for f in findings]
    head = ("", "numbers", "decoder", "linear", "nearest", "hospital", "compressed")
    note = (
        "Ratios of the mean squared error inside the head to that of the average scan: 1 is no better than guessing, 0 "
        "would be a perfect copy. In brackets the 95 % interval, by bootstrap over the test cases. Two attacks, a "
        "decoder and a linear map, of which the validation cases chose the marked one; for comparison the nearest "
        "known case, the average scan of the hospital, and the scan itself compressed to as many numbers."
    )
    return Grid("ratios", "Errors of rebuilt scans", head, tuple(lines), note)


def matches(findings: Sequence[Finding]) -> Grid:
    """How often patients are found again."""

    def line(f: Finding) -> Line:
        rate = Cell(f"{f.rate.value:.2f} ({f.rate.low:.2f}–{f.rate.high:.2f})", f.rate.value)
        return Line((name(f.kind), name(f"{f.found} of {f.probes}"), rate, number(1 / f.gallery)))

    head = ("", "found again", "rate", "by chance")
    note = (
        f"Second scans whose numbers are nearest to those of the same patient, among {findings[0].gallery}. In "
        "brackets Wilson's 95 % interval."
    )
    return Grid("matches", "Patients found again", head, tuple(map(line, findings)), note)


def write(folder: Path, findings: Sequence[Finding], views: Sequence[View], about: Mapping[str, Any]) -> Path:
    """Write ``index.html``, which needs nothing else, and its figures; ``about`` says how the audit was made."""
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    sections = list(_sections(figures, findings, views, about))
    kind = {Grid: "grid", Picture: "picture", Folded: "folded", Markup: "html", str: "words"}
    text = render(
        "page.html",
        title=TITLE,
        lead=summary(findings),
        said=[],
        remarks=limits(about),
        sections=[(s, [(kind[type(b)], b) for b in s.blocks]) for s in sections],
        version=about["versions"]["polysite"],
        live="",
    )
    page = folder / "index.html"
    page.write_text(text, encoding="utf-8")
    return page


def limits(about: Mapping[str, Any]) -> list[str]:
    """What the audit does not show."""
    cases = about["cases"]
    return [
        f"What this does not show. The attacker learned from {cases['train']} cases, chose by {cases['validation']} "
        f"and was judged by {cases['test']}: with more cases, a larger decoder or another method, an attack may do "
        "better. Intervals are over test cases, not over attackers, and each stands by itself: of several, one may "
        "miss 1 by chance.",
        f"Scans were rebuilt at {about['side']} voxels a side: what is finer was not asked for.",
        "The second scans, by which patients are found again, are made from the first: fresh noise of "
        f"{100 * about['noise']:.0f} % of the deviation, up to {100 * about['gain']:.0f} % more or less signal, "
        "outlines a little wider or tighter. A real second scan differs more.",
        "Models and updates, which leave a hospital in every round of training, were not attacked.",
    ]


def _sections(
    folder: Path, findings: Sequence[Finding], views: Sequence[View], about: Mapping[str, Any]
) -> Iterator[Section]:
    drawn = assess_figures.save(_dots(findings), folder, "ratios", "Error ratios of all attacks")
    caption = (
        "Blue: the attack that its validation cases speak for, with its 95 % interval. Further left is a better copy; "
        "the line at 1 is the average scan."
    )
    yield Section("ratios", "How well are scans rebuilt?", (Picture("", drawn, caption), ratios(findings)))
    yield Section("again", "Are patients found again?", (matches(findings),))
    words = Markup("<p><b>{}.</b> {} {} {}</p>")
    said = (words.format(f.kind.capitalize(), f.verdict, f.recognition, f.leaves) for f in findings)
    yield Section("kinds", "In words", tuple(said))
    if views:
        svg = assess_figures.save(_pictures(views), folder, "pictures", "Test cases and what was rebuilt of them")
        told = (
            f"Middle slices of {about['modalities'][0]}: the test cases that the strongest attack rebuilt best, "
            "middling and worst, measured by the average scan. These are pictures of patients; --no-scans makes a page "
            "without them."
        )
        yield Section("look", "What it looks like", (Picture("", svg, told),))
    yield Section("how", "How the attack works", tuple(_method(findings, about)))
    versions = "\n".join(f"{k}: {v}" for k, v in about["versions"].items())
    where = "Every number is in audit.json, every figure in figures/, as SVG and PNG."
    blocks = (where, Folded("Configuration", about["config"]), Folded("Versions", versions))
    yield Section("made", "How it was made", blocks)


def _method(findings: Sequence[Finding], about: Mapping[str, Any]) -> Iterator[str]:
    first, sizes = findings[0], sorted(f.weights for f in findings)
    millions = " to ".join(dict.fromkeys(f"{n / 1e6:.1f}" for n in (sizes[0], sizes[-1])))
    yield (
        "The attacker is given more than one should ever have: numbers and scans of all training cases of all "
        f"hospitals, and the numbers of the others. It trains {about['restarts']} decoders of {millions} million "
        f"weights, for {about['epochs']} epochs at most, and a linear map, from the numbers to the scans "
        f"({' and '.join(about['modalities'])}, prepared as for training, then shrunk). It stops and chooses by the "
        "validation cases, and is judged by the test cases."
    )
    lengths = ", ".join(f"{f.coefficients} for {f.kind}" for f in findings)
    yield (
        f"It is measured by the average scan of the training cases, and compared with {BESIDE['nearest']}; with "
        f"{BESIDE['hospital']}, which whoever knows the sender may know; and with {BESIDE['compressed']}, which is how "
        f"far so many numbers go by principal components ({lengths}; there cannot be more than training cases). That "
        "is a yardstick and no limit: a decoder may do better."
    )
    yield (
        f"To find patients again, the numbers of a second scan of the {first.probes} patients who are no training "
        f"cases are compared with those of the first scans of all {first.gallery}. Which numbers are steady from scan "
        "to scan is learned from the training cases."
    )


def _dots(findings: Sequence[Finding]) -> Figure:
    """A line a kind: the attack with its interval, and what it is compared with."""
    figure = Figure((7.2, 1.3 + 0.42 * len(findings)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(1, color="#5b6675", lw=1)
    rows = range(len(findings) - 1, -1, -1)
    for key, (mark, colour, label) in MARKS.items():
        values = [f.ratios[key].value for f in findings]
        axes.plot(values, rows, mark, color=COLOURS[colour], ms=6, label=label)
    at = np.array([[f.attack.value, f.attack.low, f.attack.high] for f in findings]).T
    reach = np.abs(at[1:] - at[0])
    axes.errorbar(at[0], list(rows), xerr=reach, fmt="o", color=COLOURS[0], ms=7, capsize=3, label="attack")
    axes.set_yticks(list(rows), [f.kind for f in findings])
    axes.set_ylim(-0.6, len(findings) - 0.4)
    axes.set_xlim(left=0)
    axes.set_xlabel("mean squared error, as a share of that of the average scan")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def _pictures(views: Sequence[View]) -> Figure:
    columns = list(views[0].slices)
    figure = Figure((1.15 * len(columns) + 0.2, 1.16 * len(views) + 0.2), layout="constrained")
    for row, view in enumerate(views):
        low, high = np.percentile(view.slices[columns[0]], (1, 99.5))
        for k, column in enumerate(columns):
            axes = figure.add_subplot(len(views), len(columns), row * len(columns) + k + 1)
            axes.imshow(view.slices[column], cmap="gray", vmin=low, vmax=max(high, low + 1e-6), interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
            if not row:
                axes.set_title(column, fontsize=8)
            if not k:
                axes.set_ylabel(assess_figures.short(view.title).replace("$", r"\$"), fontsize=8)
    return figure
