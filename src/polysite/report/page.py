"""One self-contained HTML page about a run, finished or in progress, or about a comparison.

It is built from the run folders alone: results, tests, example cases, training curves, costs, configuration.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
from markupsafe import Markup

from polysite.costs.speeds import Speeds
from polysite.metrics.measures import EmptyMaskPolicy
from polysite.metrics.statistics import Tail
from polysite.report import costs, example_cases, figures, guarding, hospital_figures, protections, published, viewer
from polysite.report.axes import FederationResult
from polysite.report.compare import Comparison, compare, summary, tables
from polysite.report.figure_files import Picture as Picture
from polysite.report.figure_files import write_figures
from polysite.report.grid import Grid, Line, name, narrowed, number
from polysite.report.published import Paper
from polysite.report.runs import Method, Summary
from polysite.report.template import render
from polysite.storage import write_file


class Page(str):
    """HTML of a page with its figures, which can also be written to files."""

    pictures: tuple[Picture, ...]
    __slots__ = ("pictures",)

    def __new__(cls, html: str, pictures: Iterable[Picture]) -> Self:
        """Keep the figures with the page."""
        text = super().__new__(cls, html)
        text.pictures = tuple(pictures)
        return text

    def write(self, folder: Path) -> None:
        """Write ``index.html`` and the folder ``figures/``."""
        write_file(folder / "index.html", lambda path: path.write_text(self, encoding="utf-8"))
        write_figures(folder / "figures", self.pictures)


@dataclass(frozen=True)
class Folded:
    """Text that is collapsed until a reader opens it."""

    title: str
    text: str


MAX_INCIDENTS = 60  # on a page
FEW_PLATES = 6  # hospitals whose example slices are not collapsed
FEW_PANELS = 9  # hospitals whose curves are not collapsed


@dataclass(frozen=True)
class Section:
    """A section of a page; its id is the anchor of the link to it."""

    id: str
    title: str
    blocks: tuple[Any, ...]  # Grid, Picture, Folded, Markup or a paragraph


@dataclass(frozen=True)
class Options:
    """Options of a page.

    Args:
        reference: Method that the others are tested against; fedavg, or else the first, if None.
        policy: Rule for distances of empty masks.
        tail: Alternative of the tests: ``two-sided``, ``greater`` (better than the reference) or ``less``.
        speeds: Speeds of the sites, for simulated time.
        assessment: Folder of an assessment, whose distances stand beside published ones.
        scans: Show slices of patients.
        remarks: Remarks at the top of the page.
        figures: Figures to add, by the names in ``PAPER_FIGURES``.
        cases: Names of cases to show with every prediction; the end of a name is enough if only one case fits.
        questions: Additional tests, as in ``scaffold > fedavg @ 12,13 / TC``.
        published: Published tables that are shown with the measured values beside them.
        federations: Results of several federations, which the figures ``distance`` and ``sweep`` show.
    """

    reference: str | None = None
    policy: EmptyMaskPolicy = EmptyMaskPolicy()
    tail: Tail = "two-sided"
    speeds: Speeds = Speeds()
    assessment: Path | None = None
    scans: bool = True
    remarks: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    published: Paper = Paper()
    federations: tuple[FederationResult, ...] = ()

    def compare(self, methods: Sequence[Method]) -> Comparison:
        """Compare methods with these options."""
        return compare(methods, self.reference, self.policy, self.tail, self.questions)


KINDS = {Grid: "grid", Picture: "picture", Folded: "folded", Markup: "html", str: "words"}  # as page.html calls them


def layout(
    title: str,
    lead: str,
    sections: Iterable[Section],
    version: str,
    *,
    summary: Sequence[str] = (),
    remarks: Sequence[str] = (),
    live: bool = False,
    methods: Sequence[str] = (),
    reference: str = "",
) -> Page:
    """Return a page as HTML, with its figures.

    Args:
        title: The heading.
        lead: The first paragraph.
        sections: The sections, in order.
        version: Version of polysite that made the results.
        summary: Paragraphs after the lead.
        remarks: Warnings before the sections.
        live: Reload the page now and then: its run goes on.
        methods: Names of the methods; of more than five, a reader can choose which are shown.
        reference: The method that is shown beside a single chosen one.
    """
    parts = list(sections)
    shown = [
        (section, [(KINDS[type(b)], narrowed(b) if isinstance(b, Grid) else b) for b in section.blocks])
        for section in parts
    ]
    about = {"version": version, "summary": summary, "remarks": remarks, "live": live}
    about |= {"methods": list(methods), "reference": reference}
    return Page(render("page.html", title=title, lead=lead, sections=shown, **about), pictures(parts))


def pictures(sections: Iterable[Section]) -> list[Picture]:
    """Return the figures of sections; a figure without a name of its own is named by its section and title."""
    drawn = [(section.id, block) for section in sections for block in section.blocks if isinstance(block, Picture)]
    return [replace(p, name=p.name or f"{where} {p.title}") for where, p in drawn]


def build(title: str, methods: Sequence[Method], options: Options = Options(), lead: str = "") -> Page:
    """Return the page of methods; without a lead, the summary of the results is the lead."""
    finished = all(run.finished for m in methods for run in m.runs)
    if finished:
        comparison = options.compare(methods)
        sentences, sections = summary(comparison), list(_results(comparison, options))
        remarks = [*guarding.alarms(methods), *options.remarks, *comparison.remarks]
    else:
        sentences, sections, remarks = list(_state(methods)), [], guarding.alarms(methods)
    names = [m.name for m in methods]
    reference = options.reference or ("fedavg" if "fedavg" in names else names[0])
    made = [f"{m.name}: {', '.join(each['name'] for each in m.first.ensemble)}." for m in methods if m.first.ensemble]
    sections += [Section("members", "Members of the ensemble", tuple(made))] if made else []
    sections += [*_training(methods, options), *_provenance(methods)]
    version = methods[0].first.versions["polysite"]
    first, rest = (lead, sentences) if lead else (" ".join(sentences), [])
    shown: dict[str, Any] = {"summary": rest, "remarks": remarks, "live": not finished, "methods": names}
    shown["reference"] = reference
    return layout(title, first, sections, version, **shown)


def _results(comparison: Comparison, options: Options) -> Iterator[Section]:
    grids = {g.name: g for g in tables(comparison)}
    several = len(comparison.trained) > 1
    every = [grids.pop("overview"), grids.pop(f"hospitals_{comparison.main}")]
    drawn = Picture("", *hospital_figures.hospitals(comparison, comparison.main))
    yield Section("gets", "What every hospital gets", (*every[: 1 + (len(comparison.sites) > 1)], drawn))
    beside = published.tables(comparison, options.published, options.speeds, options.assessment)
    if beside:
        yield Section("published", "Published and measured", tuple(beside))
    from polysite.report.paper_figures import paper_figures  # imports this module

    chosen = replace(options, figures=tuple(n for n in options.figures if n != "clusters"))  # shown below anyway
    asked = paper_figures(comparison, chosen)
    if asked:
        yield Section("figures", "Figures", tuple(asked))
    shown = example_cases.cases(comparison.trained, comparison.reference) if options.scans else []
    if shown:
        about = (
            "The worst, the median and the best case of every hospital by the mean Dice of "
            f"{next(iter(shown[0].predicted), comparison.reference)}. These are images of patients; --no-scans makes a "
            "page without them."
        )
        few, every_one = len(shown[0].predicted), len(comparison.trained)
        if few < every_one:
            about += f" {few} of {every_one} methods are shown: {comparison.reference} and the highest mean Dice."
        plate = Markup(viewer.plate(shown))
        if len(comparison.sites) > FEW_PLATES:
            plate = Markup(
                "<details class=figure><summary>A slice of every hospital, to print</summary>{}</details>"
            ).format(plate)
        yield Section("look", "Example cases", (about, Markup(viewer.viewer(shown)), plate))
    tests = [g for n, g in grids.items() if n.startswith("tests_")]
    if several:
        yield Section("sure", "Are the differences statistically significant?", tuple(tests))
    even = [("fair", "fairness")] if len(comparison.sites) > 1 else []
    rest = [("asked", "asked"), ("averages", "averages"), *even]
    for place, key in rest:
        if key in grids:
            yield Section(place, grids[key].title, (replace(grids[key], title=""),))
    by_group = [g for n, g in grids.items() if n.startswith("subgroups_")]
    if by_group:
        yield Section("subgroups", "Results by subgroup", tuple(by_group))
    far = [grids[n] for n in ("hospitals_hd95", "measures", "empty_masks") if n in grids]
    if far:
        bars = Picture("", *hospital_figures.hospitals(comparison, "hd95"))
        yield Section("distances", "Surface distances and other measures", (far[0], bars, *far[1:]))
    owned = {m.name: v for m in comparison.methods if (v := m.matrix())}
    every_dice = np.array([list(row.values()) for table in owned.values() for row in table.values()]) if owned else None
    ends = None if every_dice is None else hospital_figures.limits(every_dice, "dice")
    matrices = [Picture(title, figures.matrix(v, ends), "", True) for title, v in owned.items()]
    if matrices:
        caption = "Mean Dice of each hospital's own model (rows) on the cases of every hospital (columns)."
        yield Section("whose", "Every hospital's model on all hospitals' cases", (caption, *matrices))


def _training(methods: Sequence[Method], options: Options) -> Iterator[Section]:
    seen = [m for m in methods if m.first.curve[0]]
    if seen:
        several = any(len(m.runs) > 1 for m in seen)
        chosen = any(m.first.best_round + 1 in m.first.curve[0] for m in seen)  # not while the run goes on
        mark = "The marker is the best round on the validation cases, which was chosen." if chosen else ""
        words = ["Means over the runs of a method." if several else mark]
        words += ["A dotted line is the start of a phase."] if any(m.first.begins for m in seen) else []
        pictures = [Picture("", figures.curves(seen), " ".join(words).strip())]
        if any(len(m.sites) > 1 for m in seen):
            many = len({s for m in seen for s in m.sites}) > FEW_PANELS
            pictures.append(Picture("Hospital by hospital", figures.site_curves(seen), "", folded=many))
        yield Section("training", "Training curves", tuple(pictures))
    worked = [m for m in methods if any(s.steps for r in m.first.records for s in r.sites.values())]
    if worked:
        caption = "Training loss (mean of the hospitals) and learning rate by round"
        caption += ", of the first run of every method." if any(len(m.runs) > 1 for m in worked) else "."
        progress = [Picture("", figures.progress(worked), caption)]
        losses = figures.site_losses(worked[0]) if len(worked) == 1 else None
        progress += [Picture("Training loss of every hospital", losses, "")] if losses else []
        yield Section("progress", "Losses and learning rate", tuple(progress))
    weights, diagnostics = figures.shares(methods), figures.diagnostics(methods)
    caption = (
        "Weight of every hospital's update in the aggregate of a round; in a clustered method, in that of its group. "
        "Methods with the same weights share a panel."
    )
    inside = [Picture("", weights, caption)] if weights else []
    inside += [Picture("Diagnostics of the algorithms", diagnostics, "")] if diagnostics else []
    if inside:
        yield Section("weights", "Weights over rounds", tuple(inside))
    for k, method in enumerate(methods):
        yield from _clusters(method, f"_{k}" if len(methods) > 1 else "")
    grouped = [m for m in methods if m.first.groups]
    if grouped:
        yield Section("groups", "Groups of hospitals", tuple(_groups(m) for m in grouped))
    yield Section("cost", "Cost", (replace(costs.table(methods, options.speeds), title=""),))
    privacy = tuple(g for g in (protections.table(methods), protections.audience(methods)) if g.lines)
    if privacy:
        yield Section("privacy", "Privacy", privacy)
    trouble = [grid for grid in (_trouble(methods), _incidents(methods)) if grid.lines]
    if trouble:
        yield Section("trouble", "Absent sites, refused replies, incidents", tuple(trouble))


def cluster_pictures(methods: Sequence[Method]) -> list[Picture]:
    """Return the figures of clusters of cases, of every method that has such clusters."""
    found = [list(_clusters(m, "")) for m in methods]
    several = sum(map(bool, found)) > 1
    return [
        replace(p, title=f"{m.name}: {p.title}" if several else p.title, name=p.name + f" {m.name}" * several)
        for m, sections in zip(methods, found, strict=True)
        for p in pictures(sections)
    ]


def _clusters(method: Method, mark: str) -> Iterator[Section]:
    """Yield the clusters of cases in the first run of a method, if it has any."""
    from polysite.report import clusters  # imports this module

    evaluation = method.first.evaluation
    if evaluation is None or not evaluation.clusters:
        return
    rows = evaluation.clusters
    places, shares = ([k for k in rows[0] if k.startswith(word)] for word in ("component ", "share "))
    shown = clusters.Shown(
        [r["site"] for r in rows],
        [str(int(r["cluster"]) + 1) for r in rows],
        np.array([[float(r[k]) for k in places] for r in rows]),
        [k.removeprefix("share ") for k in shares],
        np.array([[float(r[k]) for k in shares] for r in rows]),
    )
    fitted = evaluation.about["clusters"]
    alike = f"{fitted['rand']:.2f} (adjusted Rand index: 1 is identical, 0 is chance)"
    fit = (
        f"Fitted from sums, so that no case's features left its hospital; agreement with clusters fitted to the pooled "
        f"features: {alike}."
        if fitted["fit"] == "federated"
        else "Fitted to the pooled features of all cases."
    )
    prefix = f"{method.name}: " if mark else ""
    for k, section in enumerate(clusters.sections(shown)):
        named = (
            replace(b, name=b.name or f"clusters {b.title or section.id}") if isinstance(b, Picture) else b
            for b in section.blocks
        )
        yield Section(section.id + mark, prefix + section.title, (*([fit] if k == 0 else []), *named))


def _groups(method: Method) -> str:
    groups = method.first.groups
    return f"{method.name}: " + "; ".join(f"{n}: {', '.join(members)}" for n, members in groups.items()) + "."


def _trouble(methods: Sequence[Method]) -> Grid:
    """Return a table of absent sites and refused replies."""
    lines = []
    for method, run in ((m, run) for m in methods for run in m.runs):
        absent = [site for r in run.records for site in r.absent]
        refused = [(site, f"{why} (round {r.round + 1})") for r in run.records for site, why in r.refused.items()]
        for site in sorted({*absent, *(s for s, _ in refused)}):
            reasons = [why for s, why in refused if s == site]
            counts = number(absent.count(site), "d"), number(len(reasons), "d")
            lines.append(Line((name(method.name), name(site), *counts, name(reasons[0] if reasons else ""))))
    head = ("method", "hospital", "rounds absent", "replies refused", "first reason")
    return Grid("trouble", "", head, tuple(lines))


def _incidents(methods: Sequence[Method]) -> Grid:
    """Return a table of the last incidents between real hospitals and the server."""
    lines = [
        Line((name(m.name), name(i["time"]), number(r.round + 1, "d"), name(i.get("site", "")), name(i["what"])))
        for m in methods
        for run in m.runs
        for r in run.records
        for i in r.incidents
    ]
    head = ("method", "time (UTC)", "round", "hospital", "what")
    note = f"The last {MAX_INCIDENTS} of {len(lines)}; rounds.jsonl has all." if len(lines) > MAX_INCIDENTS else ""
    return Grid("incidents", "Incidents", head, tuple(lines[-MAX_INCIDENTS:]), note)


def _state(methods: Sequence[Method]) -> Iterator[str]:
    """Yield a sentence on the progress of every run."""
    for run in (run for m in methods for run in m.runs):
        planned = run.settings["run"]["rounds"]
        rounds, scores = run.curve
        best = f", best {run.measure} {max(scores):.3f} (round {rounds[scores.index(max(scores))]})" if scores else ""
        done = "finished" if run.finished else f"round {len(run.records)} of {planned}{_left(run, planned)}"
        yield f"{run.name}: {done}{best}."


def _left(run: Summary, planned: int) -> str:
    """Return the time that is left of the first phase, by the median of its last ten rounds."""
    if not run.records or run.records[-1].phase or len(run.records) >= planned:
        return ""
    seconds = (planned - len(run.records)) * median(run.round_seconds[-10:])
    return f", about {costs.duration(seconds)} left"


def _provenance(methods: Sequence[Method]) -> Iterator[Section]:
    first = methods[0].first
    versions = "\n".join(f"{k}: {v}" for k, v in first.versions.items())
    blocks = [Folded(f"Configuration of {m.name}", m.first.config) for m in methods]
    where = "\n".join(str(run.path) for m in methods for run in m.runs)
    blocks += [Folded("Versions", versions), Folded("Run folders", where)]
    yield Section("made", "Configuration and versions", tuple(blocks))
