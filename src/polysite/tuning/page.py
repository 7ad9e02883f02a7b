"""The page of a search: what is best, all candidates, and their scores rung by rung."""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from matplotlib.figure import Figure

from polysite.report.figure_files import Picture, draw
from polysite.report.page import Section, layout
from polysite.tuning.search import Row, Tuned
from polysite.tuning.tables import note, table

REFERENCE, OTHERS, BEST = "#1f5fa8", "#9aa3ad", "#c2410c"


def write(found: Tuned) -> Path:
    """Write ``index.html`` and ``figures/`` into the folder of a search, finished or not; return the page."""
    best, reference = found.best, found.reference
    count, sites = len(found.rows), len(best.sites)
    state = "" if found.finished else f"The search goes on: {found.rung} of {found.rungs} rungs have ended. "
    lead = (
        f"{state}Of {count} candidates, {best.candidate.name} has the highest validation score, "
        f"{best.score or 0.0:.3f} over {sites} hospitals"
    )
    own = f"{reference.score or 0.0:.3f}"
    lead += "." if best is reference else f"; {reference.candidate.name} with its own values has {own}."
    words = "" if best is reference else note(found)
    lost = [f"{row.candidate.name} failed: {row.failed}." for row in found.rows if row.failed]
    sections = [
        Section("rungs", "Scores rung by rung", (_figure(found),)),
        Section(
            "candidates",
            "Candidates, best first",
            (replace(table(found), title="", note="" if words else note(found)),),
        ),
    ]
    page = layout(
        "Search for a method", lead, sections, version("polysite"), summary=[words] if words else [], remarks=lost
    )
    page.write(found.folder)
    return found.folder / "index.html"


def _figure(found: Tuned) -> Picture:
    """Draw the score of every candidate against the share of a whole training."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.subplots()
    for row in reversed(found.rows):
        colour, width, title = _look(row, found)
        points = [(100 * share, score) for share, score in row.path]
        axes.plot(*zip(*points, strict=True), color=colour, lw=width, marker="o", ms=3, label=title) if points else None
    shares = sorted({100 * share for row in found.rows for share, _ in row.path})
    axes.set_xscale("log")
    axes.set_xticks(shares, [f"{share:.0f} %" for share in shares])
    axes.minorticks_off()
    axes.set_xlabel("of a whole training", fontsize=9)
    axes.set_ylabel("validation score", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    caption = (
        "Mean score over the validation cases of all inner folds; a line per candidate. At every rung the better third "
        "goes on, and the reference in any case."
    )
    return Picture("", draw(figure), caption, name="rungs")


def _look(row: Row, found: Tuned) -> tuple[str, float, str]:
    """Return colour, width and label of a candidate's line."""
    if row is found.best:
        return BEST, 2.0, row.candidate.name
    if row is found.reference:
        return REFERENCE, 2.0, f"{row.candidate.name} (reference)"
    return OTHERS, 0.8, "_others"
