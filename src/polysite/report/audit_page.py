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
from polysite.report.drawing import COLOURS, pictures
from polysite.report.grid import Cell, Grid, Line, name, number
from polysite.report.page import Folded, Picture, Section, layout
from polysite.training.attack import Curve

TITLE = "What an attacker can learn from the numbers that describe a case"
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
    """Ratio of a mean error to that of the average scan, with its 95 % interval over the test cases."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, errors: np.ndarray, average: np.ndarray) -> "Ratio":
        """Return the ratio of two mean errors; the interval is a bootstrap of the cases' influence on it.

        >>> Ratio.of(np.array([1.0, 2.0]), np.array([2.0, 4.0]))
        Ratio(value=0.5, low=0.5, high=0.5)
        """
        value = float(errors.mean() / average.mean())
        return cls(value, *interval(value + (errors - value * average) / average.mean()))

    @property
    def words(self) -> str:
        """The ratio and its interval as text."""
        return f"error ratio {self.value:.3f}, 95 % interval {self.low:.3f}–{self.high:.3f}"


@dataclass(frozen=True)
class Finding:
    """The outcome of the attack on one kind of numbers."""

    kind: str
    words: str  # description of the numbers
    numbers: int  # per case
    leaves: str  # which part of them leaves a hospital
    ratios: Mapping[str, Ratio]  # of the attacks (network, linear) and of the baselines
    chosen: str  # attack with the lower error on the validation cases
    tested: int  # cases
    coefficients: int  # of the compressed scan
    weights: int  # of a decoder
    found: int  # second scans that were matched with their patient
    probes: int  # number of second scans
    gallery: int  # number of first scans
    curves: tuple[Curve, ...] = ()  # losses of the decoders

    @property
    def attack(self) -> Ratio:
        """Error ratio of the chosen attack."""
        return self.ratios[self.chosen]

    @property
    def leaks(self) -> bool:
        """Whether the attack is significantly better than the average scan."""
        return self.attack.high < 1

    @property
    def rate(self) -> Ratio:
        """Rate of matched second scans, with Wilson's 95 % interval."""
        from scipy.stats import binomtest

        low, high = binomtest(self.found, self.probes).proportion_ci(method="wilson")
        return Ratio(self.found / self.probes, float(low), float(high))

    @property
    def recognises(self) -> bool:
        """Whether second scans are matched significantly more often than by chance."""
        return self.rate.low > 1 / self.gallery

    @property
    def verdict(self) -> str:
        """The result of rebuilding scans, as a sentence."""
        start, ratio = (
            f"From the {self.numbers} numbers of a case ({self.words}), an attacker",
            f"({self.attack.words})",
        )
        if self.leaks:
            return (
                f"{start} removes {percent(1 - self.attack.value)} of the error of guessing the average scan {ratio}. "
                f"The average scan of the hospital alone {_removes(self.ratios['hospital'])}."
            )
        than = "worse than" if self.attack.low > 1 else f"not significantly better, with {self.tested} test cases, than"
        return f"{start} rebuilds the scan {than} by guessing the average scan {ratio}."

    @property
    def recognition(self) -> str:
        """The result of matching second scans, as a sentence."""
        chance = f"by chance, 1 in {self.gallery} would be matched"
        matched = f"{self.found} of {self.probes} second scans were matched with the first scan of the same patient"
        if not self.recognises:
            return f"The numbers do not identify patients: {matched}, among {self.gallery}; {chance}."
        return (
            f"The numbers identify patients: {matched}, among {self.gallery} ({100 * self.rate.value:.0f} %, 95 % "
            f"interval {100 * self.rate.low:.0f}–{100 * self.rate.high:.0f} %); {chance}."
        )

    def plain(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return {**asdict(self), "rate": asdict(self.rate), "verdict": self.verdict, "recognition": self.recognition}


@dataclass(frozen=True, eq=False)
class View:
    """Middle slices of a test case: the scan and its reconstructions."""

    title: str
    slices: Mapping[str, np.ndarray]  # by title


def percent(share: float) -> str:
    """Format a fraction as a percentage.

    >>> percent(0.234), percent(0.003)
    ('23 %', 'less than 1 %')
    """
    return "less than 1 %" if share < 0.01 else f"{100 * share:.0f} %"


def _removes(ratio: Ratio) -> str:
    return f"removes {percent(1 - ratio.value)}" if ratio.value < 1 else "removes nothing"


def summary(findings: Sequence[Finding]) -> str:
    """Return the strongest result of each kind, as three sentences."""
    worst = min(findings, key=lambda f: f.attack.value if f.leaks else 1 + f.attack.value)
    if worst.leaks:
        first = (
            f"The strongest attack, on the {worst.words}, removes {percent(1 - worst.attack.value)} of the error that "
            f"guessing the average scan makes ({worst.attack.words})."
        )
    else:
        first = "From none of these numbers did the attack rebuild scans better than by guessing the average scan."
    known = max(findings, key=lambda f: f.rate.value)
    again = (
        f"By the {known.words}, {known.found} of {known.probes} second scans were matched with their patient among "
        f"{known.gallery}."
        if known.recognises
        else "None of them matched second scans with their patient more often than by chance."
    )
    return f"{first} {again} {CAUTION}"


def ratios(findings: Sequence[Finding]) -> Grid:
    """Return a table of the errors of rebuilt scans, by attack and baseline."""

    def cell(f: Finding, key: str) -> Cell:
        ratio = f.ratios[key]
        return Cell(f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})", ratio.value, key == f.chosen)

    order = ("network", "linear", *BESIDE)
    lines = [Line((name(f.kind), number(f.numbers, "d"), *(cell(f, key) for key in order))) for f in findings]
    head = ("", "numbers", "decoder", "linear", "nearest", "hospital", "compressed")
    note = (
        "Ratios of the mean squared error inside the head to that of the average scan: 1 is no better than guessing, "
        "0 would be a perfect copy. In brackets the 95 % interval, by bootstrap over the test cases. Attacks: a "
        "decoder and a linear map; the one with the lower error on the validation cases is marked. Baselines: the "
        "nearest known case, the average scan of the hospital, and the scan itself compressed to as many numbers."
    )
    return Grid("ratios", "Errors of rebuilt scans", head, tuple(lines), note)


def matches(findings: Sequence[Finding]) -> Grid:
    """Return a table of matched second scans."""

    def line(f: Finding) -> Line:
        rate = Cell(f"{f.rate.value:.2f} ({f.rate.low:.2f}–{f.rate.high:.2f})", f.rate.value)
        return Line((name(f.kind), name(f"{f.found} of {f.probes}"), rate, number(1 / f.gallery)))

    head = ("", "matched", "rate", "by chance")
    note = (
        f"Second scans whose numbers are nearest to those of the same patient, among {findings[0].gallery}. In "
        "brackets Wilson's 95 % interval."
    )
    return Grid("matches", "Matched second scans", head, tuple(map(line, findings)), note)


def write(folder: Path, findings: Sequence[Finding], views: Sequence[View], about: Mapping[str, Any]) -> Path:
    """Write the self-contained ``index.html`` and its figures; ``about`` is ``audit.json`` without the findings."""
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    sections = list(_sections(figures, findings, views, about))
    text = layout(TITLE, summary(findings), sections, about["versions"]["polysite"], remarks=limits(about))
    page = folder / "index.html"
    page.write_text(text, encoding="utf-8")
    return page


def limits(about: Mapping[str, Any]) -> list[str]:
    """Return the limits of the audit, as sentences."""
    cases = about["cases"]
    return [
        f"Limits. The attacker was trained on {cases['train']} cases, validated on {cases['validation']} and tested on "
        f"{cases['test']}: with more cases, a larger decoder or another method, an attack may do better. Intervals are "
        "over test cases, not over attackers, and are not corrected for their number: one of several may miss 1 by "
        "chance.",
        f"Scans were rebuilt with {about['side']} voxels a side; finer details were not attacked.",
        f"The second scans are made from the first: fresh noise of {100 * about['noise']:.0f} % of the standard "
        f"deviation, up to {100 * about['gain']:.0f} % more or less signal, slightly wider or tighter outlines. A "
        "real second scan differs more.",
        "Models and updates, which leave a hospital in every round of training, are attacked by 'polysite audit RUN'.",
    ]


def _sections(
    folder: Path, findings: Sequence[Finding], views: Sequence[View], about: Mapping[str, Any]
) -> Iterator[Section]:
    drawn = assess_figures.save(_dots(findings), folder, "ratios", "Error ratios of all attacks")
    caption = (
        "Blue: the chosen attack with its 95 % interval. Further left is a better copy; the line at 1 is the average "
        "scan."
    )
    yield Section("ratios", "How well are scans rebuilt?", (Picture("", drawn, caption), ratios(findings)))
    yield Section("again", "Are patients identified?", (matches(findings),))
    words = Markup("<p><b>{}.</b> {} {} {}</p>")
    paragraphs = (words.format(f.kind.capitalize(), f.verdict, f.recognition, f.leaves) for f in findings)
    yield Section("kinds", "Results in words", tuple(paragraphs))
    if views:
        svg = assess_figures.save(_pictures(views), folder, "pictures", "Test cases and what was rebuilt of them")
        note = (
            f"Middle slices of {about['modalities'][0]}: the test cases that the strongest attack rebuilt best, at the "
            "median and worst, relative to the average scan. These are images of patients; --no-scans makes a page "
            "without them."
        )
        yield Section("look", "Rebuilt scans", (Picture("", svg, note),))
    if any(f.curves for f in findings):
        drawn = assess_figures.save(
            _curves(findings), folder, "curves", "Training and validation losses of the decoders"
        )
        what = "whole volumes" if about["decoder"] == "paper" else "voxels inside the head"
        note = (
            f"Mean squared error of {what} after each epoch: training cases (dashed) and validation cases (solid), a "
            "pair of lines per decoder. The dot is the epoch that counts. The numbers are in curves.csv."
        )
        yield Section("curves", "Loss curves", (Picture("", drawn, note),))
    yield Section("how", "How the attack works", tuple(_method(findings, about)))
    versions = "\n".join(f"{k}: {v}" for k, v in about["versions"].items())
    where = "Every number is in audit.json, the losses in curves.csv, every figure in figures/, as SVG, PDF and PNG."
    blocks = (where, Folded("Configuration", about["config"]), Folded("Versions", versions))
    yield Section("made", "Configuration and versions", blocks)


def _method(findings: Sequence[Finding], about: Mapping[str, Any]) -> Iterator[str]:
    first, sizes = findings[0], sorted(f.weights for f in findings)
    millions = " to ".join(dict.fromkeys(f"{n / 1e6:.1f}" for n in (sizes[0], sizes[-1])))
    yield (
        "The attacker knows more than a real one would: numbers and scans of all training cases of all hospitals, and "
        f"the numbers of the other cases. It trains {_decoders(about)} with {millions} million weights, for "
        f"at most {about['epochs']} epochs, and a linear map, from the numbers to the scans "
        f"({' and '.join(about['modalities'])}, prepared as for training, then downsampled). Stopping and the choice "
        "of the attack use the validation cases; the errors are those of the test cases."
    )
    lengths = ", ".join(f"{f.coefficients} for {f.kind}" for f in findings)
    yield (
        f"Errors are relative to the average scan of the training cases. Baselines: {BESIDE['nearest']}; "
        f"{BESIDE['hospital']}, which a recipient who knows the sender may know; and {BESIDE['compressed']} by "
        f"principal components ({lengths}; at most as many as training cases). The last is no limit: a decoder may do "
        "better."
    )
    yield (
        f"To identify patients, the numbers of a second scan of the {first.probes} validation and test cases are "
        f"compared with those of the first scans of all {first.gallery}. Which numbers are stable between scans is "
        "learned from the training cases."
    )


def _decoders(about: Mapping[str, Any]) -> str:
    kind = "of appendix F of Manthe et al. 2023 " if about["decoder"] == "paper" else ""
    count = about["restarts"]
    return f"{count} decoder{'' if count == 1 else 's'} {kind}".strip()


def curves_csv(findings: Sequence[Finding]) -> str:
    """Return the losses of all decoders as CSV, a line per epoch."""
    lines = ["kind,decoder,epoch,training,validation"]
    for f in findings:
        for k, curve in enumerate(f.curves, start=1):
            both = zip(curve.training, curve.validation, strict=True)
            lines += [f"{f.kind},{k},{epoch},{a:.6g},{b:.6g}" for epoch, (a, b) in enumerate(both, start=1)]
    return "\n".join(lines) + "\n"


def _curves(findings: Sequence[Finding]) -> Figure:
    """Draw the losses of all decoders, a panel per kind of numbers."""
    shown = [f for f in findings if f.curves]
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    figure = Figure((2.6 * columns + 0.6, 2.2 * rows + 0.2), layout="constrained")
    for place, f in enumerate(shown, start=1):
        axes = figure.add_subplot(rows, columns, place)
        for curve in f.curves:
            epochs = range(1, len(curve.validation) + 1)
            axes.plot(epochs, curve.training, "--", color=COLOURS[1], lw=1)
            axes.plot(epochs, curve.validation, "-", color=COLOURS[0], lw=1)
        best = min(f.curves, key=lambda c: min(c.validation))
        epoch = int(np.argmin(best.validation))
        axes.plot([epoch + 1], [best.validation[epoch]], "o", color=COLOURS[0], ms=5)
        axes.set_title(f.kind, fontsize=9)
        axes.set_xlabel("epoch", fontsize=8)
        axes.set_ylabel("loss", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _dots(findings: Sequence[Finding]) -> Figure:
    """Draw a row per kind of numbers: the attack with its interval, and the baselines."""
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
    axes.set_xlabel("mean squared error relative to the average scan")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def _pictures(views: Sequence[View]) -> Figure:
    return pictures([(view.title, view.slices) for view in views], 1.15, 1.16)
