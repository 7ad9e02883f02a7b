"""What an audit found, in one shape for every attack, and the folder that says it.

::

    FOLDER/
        index.html    the answers, in plain words first
        audit.json    every number
        figures/      as SVG, PDF and PNG
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from polysite.metrics.statistics import interval
from polysite.report.assess_figures import drawing
from polysite.report.drawing import COLOURS, WIDE, name_rows, new
from polysite.report.grid import Cell, Grid, Line, name, number
from polysite.report.page import Folded, Picture, Section, layout
from polysite.storage import draft_folder

OF_PATIENTS = "These are images of patients; --no-scans makes a page without them."
CAUTION = "These are single attacks with the cases at hand, not a proof of privacy."


@dataclass(frozen=True)
class Estimate:
    """A measured number with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def ratio(cls, errors: np.ndarray, reference: np.ndarray) -> "Estimate":
        """Return the ratio of two mean errors; the interval is a bootstrap of the cases' influence on it.

        >>> Estimate.ratio(np.array([1.0, 2.0]), np.array([2.0, 4.0]))
        Estimate(value=0.5, low=0.5, high=0.5)
        """
        value = float(errors.mean() / reference.mean())
        return cls(value, *interval(value + (errors - value * reference) / reference.mean()))

    @classmethod
    def rate(cls, hits: np.ndarray) -> "Estimate":
        """Return the rate of hits with Wilson's interval."""
        from scipy.stats import binomtest

        low, high = binomtest(int(hits.sum()), len(hits)).proportion_ci(method="wilson")
        return cls(float(hits.mean()), float(low), float(high))

    @property
    def words(self) -> str:
        """The number and its interval as text."""
        return f"{self.value:.2f} ({self.low:.2f}–{self.high:.2f})"


@dataclass(frozen=True)
class Row:
    """The outcome of one attack.

    Args:
        name: What was attacked.
        words: What that is, or who has it.
        estimate: What the attack reached.
        chance: What guessing reaches.
        leaks: Whether the attack is significantly better than guessing.
    """

    name: str
    words: str
    estimate: Estimate
    chance: float
    leaks: bool


@dataclass(frozen=True, eq=False)
class Finding:
    """A question about privacy and its answer.

    Args:
        id: Short name, as in ``audit.json``.
        question: The question.
        answer: The answer, in sentences.
        measure: What the numbers of the rows are.
        about: What the words of the rows are.
        rows: The attacks.
        note: How to read the numbers.
        method: How the attack works and what the attacker knows, in paragraphs.
        pictures: Further figures.
        details: Further numbers.
    """

    id: str
    question: str
    answer: str
    measure: str
    about: str
    rows: tuple[Row, ...]
    note: str
    method: tuple[str, ...]
    pictures: tuple[Picture, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def table(self) -> Grid:
        """Return the rows as a table; significant ones are marked."""
        lines = [
            Line((
                name(row.name), name(row.words), Cell(row.estimate.words, row.estimate.value, row.leaks),
                number(row.chance, ".2f"),
            ))
            for row in self.rows
        ]  # fmt: skip
        head = ("", self.about, f"{self.measure} (95 % interval)", "by guessing")
        note = f"{self.note} Marked: significantly better than guessing."
        return Grid(self.id, self.question, head, tuple(lines), note)

    def section(self) -> Section:
        """Return the section of the page."""
        caption = f"The {self.measure} with its 95 % interval (blue), and what guessing reaches (grey line)."
        dots = picture(self._dots(), self.id, self.question, caption)
        return Section(self.id, self.question, (self.answer, dots, self.table(), *self.pictures, *self.method))

    def plain(self) -> dict[str, Any]:
        """Return the finding without its figures, as JSON values."""
        rows = [asdict(row) for row in self.rows]
        return {"id": self.id, "question": self.question, "answer": self.answer, "rows": rows, **self.details}

    def _dots(self) -> Figure:
        figure, axes = new(WIDE, 1.0 + 0.4 * len(self.rows))
        for at, row in enumerate(reversed(self.rows)):
            found = row.estimate
            axes.plot([row.chance, row.chance], [at - 0.4, at + 0.4], color="#5b6675", lw=1)
            axes.plot([found.low, found.high], [at, at], color=COLOURS[0], lw=1.5)
            axes.plot([found.value], [at], "o", color=COLOURS[0], ms=6)
        name_rows(axes, [row.name for row in reversed(self.rows)])
        axes.set_xlim(left=0)
        axes.set_xlabel(self.measure)
        return figure


def picture(figure: Figure, name: str, title: str, caption: str) -> Picture:
    """Return a figure with the name of its files."""
    return Picture(title, drawing(figure, name, title), caption, name=name)


@dataclass(frozen=True, eq=False)
class Audit:
    """A finished audit."""

    folder: Path
    findings: tuple[Finding, ...]


def write(
    folder: Path,
    title: str,
    findings: Sequence[Finding],
    limits: Sequence[str],
    about: Mapping[str, Any],
    sections: Sequence[Section] = (),
) -> Audit:
    """Write the folder of an audit.

    Args:
        folder: The new folder.
        title: Title of the page.
        findings: What was found.
        limits: What that does not show, in paragraphs.
        about: How the audit was made: ``config``, ``versions`` and further settings.
        sections: Further sections of the page.
    """
    summary = " ".join([*(f.answer for f in findings), CAUTION])
    versions = "\n".join(f"{k}: {v}" for k, v in about["versions"].items())
    where = "Every number is in audit.json, every figure in figures/, as SVG, PDF and PNG."
    made = Section(
        "made", "How it was made", (where, Folded("Configuration", about["config"]), Folded("Versions", versions))
    )
    shown = [*(f.section() for f in findings), *sections, made]
    page = layout(title, summary, shown, about["versions"]["polysite"], remarks=limits)
    numbers = {"summary": summary, "findings": [f.plain() for f in findings], "limits": list(limits), "about": about}
    with draft_folder(folder, "audit") as draft:
        (draft / "audit.json").write_text(f"{json.dumps(numbers, indent=1)}\n", encoding="utf-8")
        page.write(draft)
    return Audit(folder, tuple(findings))
