"""The page of an advice: the decision, what every hospital gets, the evidence, the costs."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure

from polysite.advice.decide import Gain
from polysite.advice.result import Advice, plain
from polysite.advice.tables import against_given, by_hospital, costs, decision, hospitals, models, strategies, tested
from polysite.report.drawing import unformatted
from polysite.report.figure_files import Picture, draw
from polysite.report.grid import Grid
from polysite.report.names import cut
from polysite.report.page import Section, layout

BETTER, OTHER = "#1f5fa8", "#7b8794"
MAX_ROWS = 40  # of a figure


def write(found: Advice) -> Path:
    """Write ``index.html`` and ``figures/`` into the folder of an advice; return the page."""
    sections = [
        Section("hospitals", "What every hospital gets", (_sites(found), _untitled(hospitals(found)))),
        Section("strategies", "Strategies", _strategies(found)),
        Section("how", "How the decision was made", (_how(found),)),
        Section("costs", "Costs", (_untitled(costs(found)),)),
    ]
    page = layout(
        "Advice for these hospitals",
        decision(found),
        sections,
        version("polysite"),
        summary=[against_given(found), found.verdict.summary],
    )
    page.write(found.folder)
    return found.folder / "index.html"


def _untitled(grid: Grid) -> Grid:
    return replace(grid, title="")


def _strategies(found: Advice) -> tuple[object, ...]:
    if not found.compared:
        return ("The assessment proposed no strategy beside one model for all.",)
    return _compared(found), _untitled(strategies(found)), by_hospital(found)


def _how(found: Advice) -> Markup:
    """Return the stages with their results and links to their pages."""
    items = [
        Markup('<a href="assessment/index.html">Assessment</a>: {}').format(found.verdict.summary),
        Markup("Strategies: {} compared with one model for all, on {} cases").format(
            len(found.compared), found.gain.cases
        ),
    ]
    reasons = [*found.chosen.reasons] if found.chosen.family != "one model" else []
    items += [Markup("Why this strategy was tried: {}").format(reason) for reason in reasons]
    listed = Markup("").join(Markup("<li>{}</li>").format(item) for item in items)
    files = Markup(
        "<code>study.toml</code> is the advised study, ready to train; <code>advice.json</code> has all numbers."
    )
    for recipe in found.exceptions:
        sites = ", ".join(site for site, used in found.strategies.items() if used.name == recipe.name)
        files += Markup(" <code>{}.toml</code> is for {} alone.").format(recipe.file("study"), sites)
    if found.models:
        link = Markup(' <a href="{}/">{}</a> is a run folder: ').format(*[plain(found)["models"]] * 2)
        files += link + " ".join(filter(None, (models(found), tested(found))))
    return Markup("<ul>{}</ul><p>{}</p>").format(listed, files)


def _sites(found: Advice) -> Picture:
    rows = [(site, gain, gain.low > 0) for site, gain in found.sites.items()]
    caption = (
        "Gain of the advised study over FedAvg as given, with 95 % intervals, on cases that the models had not seen."
    )
    return Picture("", draw(_forest([*rows, ("all", found.gain, found.gain.low > 0)])), caption, name="hospitals")


def _compared(found: Advice) -> Picture:
    rows = [(c.contender.title, c.gain, c.better) for c in found.compared]
    caption = "Gain over one model for all with the same settings, with 95 % intervals. Blue: shown to be better."
    return Picture("", draw(_forest(rows)), caption, name="strategies")


def _forest(rows: Sequence[tuple[str, Gain, bool]]) -> Figure:
    """Draw gains with their intervals, one row each."""
    shown = rows[:MAX_ROWS]
    figure = Figure(figsize=(7.2, 0.9 + 0.28 * max(1, len(shown))), layout="constrained")
    axes = figure.subplots()
    for k, (_, gain, better) in enumerate(shown):
        colour = BETTER if better else OTHER
        axes.plot([gain.low, gain.high], [k, k], color=colour, lw=1.6, solid_capstyle="butt")
        axes.plot([gain.mean], [k], "o", color=colour, ms=5)
    axes.axvline(0, color="#c5cbd3", lw=1, zorder=0)
    axes.set_yticks(range(len(shown)), [unformatted(cut(title, 44)) for title, _, _ in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel("gain of the score", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure
