"""One self-contained HTML page about a run, finished or under way, or about a comparison. It is built from the run
folders alone: results first, then how sure they are, what they look like, how they came about and what they cost."""

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from polysite.costs.speeds import Speeds
from polysite.errors import RunError
from polysite.metrics.measures import EmptyMaskPolicy
from polysite.metrics.statistics import Tail
from polysite.report import costs, example_cases, figures, viewer
from polysite.report.compare import Comparison, compare, summary, tables
from polysite.report.grid import Grid, Line, name, number
from polysite.report.runs import Method
from polysite.report.template import render


@dataclass(frozen=True)
class Picture:
    """A figure with its words."""

    title: str
    svg: str
    caption: str
    narrow: bool = False


@dataclass(frozen=True)
class Folded:
    """Text that a reader may open."""

    title: str
    text: str


SHOWN = 60  # incidents on a page


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    blocks: tuple[Any, ...]  # Grid, Picture, Folded, Markup or a paragraph


@dataclass(frozen=True)
class Options:
    """How a page counts and what it shows."""

    reference: str | None = None
    policy: EmptyMaskPolicy = EmptyMaskPolicy()
    tail: Tail = "two-sided"
    speeds: Speeds = Speeds()
    assessment: Path | None = None
    scans: bool = True  # pictures of patients
    remarks: tuple[str, ...] = ()  # to be said first


def build(title: str, methods: Sequence[Method], options: Options = Options(), lead: str = "", live: str = "") -> str:
    """The page as text. ``live`` is a mark of the state it was built from; a page that has one renews itself."""
    if all(run.finished for m in methods for run in m.runs):
        found = compare(methods, options.reference, options.policy, options.tail)
        said, sections = summary(found), list(_results(found, options))
        remarks = [*options.remarks, *found.remarks]
    else:
        said, sections, remarks = list(_state(methods)), [], []
    sections += [*_training(methods, options), *_provenance(methods)]
    kind = {Grid: "grid", Picture: "picture", Folded: "folded", Markup: "html", str: "words"}
    return render(
        "page.html",
        title=title,
        lead=lead or " ".join(said),
        said=said if lead else [],
        remarks=remarks,
        sections=[(s, [(kind[type(b)], b) for b in s.blocks]) for s in sections],
        version=methods[0].first.versions["polysite"],
        live=live,
    )


def _results(found: Comparison, options: Options) -> Iterator[Section]:
    grids = {g.name: g for g in tables(found)}
    several = len(found.methods) > 1
    every = [grids.pop("overview"), grids.pop(f"hospitals_{found.main}")]
    error = "Error bars: standard error over patients."
    bars = Picture("", figures.hospitals(found, found.main), error)
    yield Section("gets", "What every hospital gets", (*every[: 1 + (len(found.sites) > 1)], bars))
    shown = example_cases.cases(found.methods, found.reference) if options.scans else []
    if shown:
        words = (
            "The worst, the median and the best case of every hospital by the mean Dice of "
            f"{next(iter(shown[0].predicted), found.reference)}. These are pictures of patients; --no-scans makes a "
            "page without them."
        )
        yield Section("look", "What it looks like", (words, Markup(viewer.viewer(shown)), Markup(viewer.plate(shown))))
    tests = [g for n, g in grids.items() if n.startswith("tests_")]
    if several:
        yield Section("sure", "Is the difference more than chance?", tuple(tests))
    if "best_mean" in grids:
        yield Section("peeked", "What papers would report", (replace(grids["best_mean"], title=""),))
    if "fairness" in grids and len(found.sites) > 1:
        yield Section("fair", "How evenly are the hospitals served?", (replace(grids["fairness"], title=""),))
    far = [grids[n] for n in ("hospitals_hd95", "measures", "empty_masks") if n in grids]
    if far:
        bars = Picture("", figures.hospitals(found, "hd95"), error)
        yield Section("distances", "Surfaces and other measures", (far[0], bars, *far[1:]))
    drawn = [Picture(m.name, figures.matrix(v), "", True) for m in found.methods if (v := m.matrix())]
    if drawn:
        said = "Mean Dice of the model that each hospital uses (rows), on the patients of every hospital (columns)."
        yield Section("whose", "Whose model works on whose patients?", (said, *drawn))


def _training(methods: Sequence[Method], options: Options) -> Iterator[Section]:
    seen = [m for m in methods if m.first.curve[0]]
    if seen:
        mark = "The mark is the round that was chosen on the validation patients."
        mean = "Means over the runs of a method."
        said = mean if any(len(m.runs) > 1 for m in seen) else mark
        said += " A dotted line is where a phase begins." if any(m.first.begins for m in seen) else ""
        pictures = [Picture("", figures.curves(seen), said)]
        if any(len(m.sites) > 1 for m in seen):
            pictures.append(Picture("Hospital by hospital", figures.site_curves(seen), ""))
        yield Section("training", "How training went", tuple(pictures))
    weights, told = figures.shares(methods), figures.diagnostics(methods)
    counted = (
        "How much the model of every hospital counted in the mean of a round; in a clustered method, in that of its "
        "group. Methods that weigh alike share a panel."
    )
    inside = [Picture("", weights, counted)] if weights else []
    inside += [Picture("What the algorithms say of themselves", told, "")] if told else []
    if inside:
        yield Section("weights", "Weights over rounds", tuple(inside))
    if options.assessment:
        yield _assessed(options.assessment)
    for k, method in enumerate(methods):
        yield from _clusters(method, f"_{k}" if len(methods) > 1 else "")
    grouped = [m for m in methods if m.first.groups]
    if grouped:
        yield Section("groups", "Groups of hospitals", tuple(_groups(m) for m in grouped))
    blocks: list[Any] = [replace(costs.table(methods, options.speeds), title="")]
    if seen:
        picture = figures.times(seen, lambda run: costs.hours(run, options.speeds))
        blocks.append(Picture("What is reached by when", picture, "In simulated time, as above."))
    yield Section("cost", "What it cost", tuple(blocks))
    trouble = [grid for grid in (_trouble(methods), _incidents(methods)) if grid.lines]
    if trouble:
        yield Section("trouble", "What went wrong", tuple(trouble))


def _clusters(method: Method, mark: str) -> Iterator[Section]:
    """Which patients a method with clusters takes to be alike, in its first run."""
    from polysite.report import clusters  # which needs what is here

    found = method.first.evaluation
    if found is None or not found.clusters:
        return
    rows = found.clusters
    places, shares = ([k for k in rows[0] if k.startswith(word)] for word in ("component ", "share "))
    shown = clusters.Shown(
        [r["site"] for r in rows],
        [str(int(r["cluster"]) + 1) for r in rows],
        np.array([[float(r[k]) for k in places] for r in rows]),
        [k.removeprefix("share ") for k in shares],
        np.array([[float(r[k]) for k in shares] for r in rows]),
    )
    told = found.about["clusters"]
    alike = f"{told['rand']:.2f} (adjusted Rand index: 1 is the same, 0 as by chance)"
    fit = (
        f"Fitted from sums, so that no patient's features left its hospital; agreement with the clusters that all "
        f"features in one place would give: {alike}."
        if told["fit"] == "federated"
        else "Fitted from the features of all patients in one place."
    )
    whose = f"{method.name}: " if mark else ""
    for k, section in enumerate(clusters.sections(shown)):
        blocks = (fit, *section.blocks) if k == 0 else section.blocks
        yield Section(section.id + mark, whose + section.title, blocks)


def _groups(method: Method) -> str:
    groups = method.first.groups
    return f"{method.name}: " + "; ".join(f"{n}: {', '.join(members)}" for n, members in groups.items()) + "."


def _trouble(methods: Sequence[Method]) -> Grid:
    """Sites that were not heard, and why."""
    lines = []
    for method in methods:
        for run in method.runs:
            absent = [(r.round, s) for r in run.records for s in r.absent]
            refused = [(r.round, s, why) for r in run.records for s, why in r.refused.items()]
            for site in sorted({s for _, s in absent} | {s for _, s, _ in refused}):
                gone = sum(s == site for _, s in absent)
                reasons = [(t, why) for t, s, why in refused if s == site]
                told = f"{reasons[0][1]} (round {reasons[0][0] + 1})" if reasons else ""
                cells = (name(method.name), name(site), number(gone, "d"), number(len(reasons), "d"), name(told))
                lines.append(Line(cells))
    head = ("method", "hospital", "rounds absent", "replies refused", "first reason")
    return Grid("trouble", "", head, tuple(lines))


def _incidents(methods: Sequence[Method]) -> Grid:
    """What happened between real hospitals and the server; the last of them, if they are many."""
    lines = [
        Line((name(m.name), name(i["time"]), number(r.round + 1, "d"), name(i.get("site", "")), name(i["what"])))
        for m in methods
        for run in m.runs
        for r in run.records
        for i in r.incidents
    ]
    head = ("method", "time (UTC)", "round", "hospital", "what")
    note = f"The last {SHOWN} of {len(lines)}; all are in rounds.jsonl." if len(lines) > SHOWN else ""
    return Grid("incidents", "Incidents", head, tuple(lines[-SHOWN:]), note)


def _assessed(folder: Path) -> Section:
    """The distances and clusters of an assessment that was made before."""
    try:
        told = json.loads((folder / "assessment.json").read_text(encoding="utf-8"))
        drawn = {n: (folder / "figures" / f"{n}.svg") for n in ("distances-emd", "distances-euclidean", "tree-emd")}
        pictures = [
            Picture(title, _inline(drawn[n].read_bytes()), "", narrow=True)
            for n, title in zip(drawn, ("Earth Mover's distances", "Distances of embeddings", "Tree"), strict=True)
            if drawn[n].is_file()
        ]
        return Section("assessed", "How the hospitals differ", (told["verdict"]["summary"], *pictures))
    except (OSError, ValueError, KeyError) as problem:
        raise RunError(f"{folder} is no assessment that can be read: {problem}") from problem


def _inline(svg: bytes) -> str:
    """An SVG file as a picture, in which no script runs."""
    return f'<img alt="" src="data:image/svg+xml;base64,{b64encode(svg).decode()}">'


def _state(methods: Sequence[Method]) -> Iterator[str]:
    """How far runs are that have not finished."""
    for run in (run for m in methods for run in m.runs):
        planned = run.settings["run"]["rounds"]
        rounds, scores = run.curve
        best = f", best {run.measure} {max(scores):.3f} (round {rounds[scores.index(max(scores))]})" if scores else ""
        done = "finished" if run.finished else f"round {len(run.records)} of {planned}"
        yield f"{run.name}: {done}{best}."


def _provenance(methods: Sequence[Method]) -> Iterator[Section]:
    first = methods[0].first
    versions = "\n".join(f"{k}: {v}" for k, v in first.versions.items())
    blocks = [Folded(f"Configuration of {m.name}", m.first.config) for m in methods]
    others = [run.path for m in methods for run in m.runs]
    where = "\n".join(str(p) for p in others)
    yield Section("made", "How it was made", (*blocks, Folded("Versions", versions), Folded("Run folders", where)))
