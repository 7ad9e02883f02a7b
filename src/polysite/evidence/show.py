"""Tables of the evidence bank for the terminal, and the same as values for JSON."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict
from textwrap import shorten
from typing import Any

from polysite.evidence.federations import Federation, Gain
from polysite.evidence.lines import DistanceLine, RunLine
from polysite.evidence.similar import Match
from polysite.report.grid import Cell, Grid, Line, mark_best, name, number

HEAD = (
    "federation",
    "hospitals",
    "training cases",
    "EMD",
    "energy",
    "differ",
    "methods",
    "FedAvg",
    "best method",
    "gain",
)
METHODS = ("method", "score", "− FedAvg", "runs", "rounds", "steps", "steps / FedAvg's", "bytes", "split", "settings")
WIDEST = 60  # characters of the settings; --json has all
GAIN = (
    "− FedAvg: mean difference of the score (Dice, or accuracy in a classification) to FedAvg on the same training and "
    "test cases. Settings and budgets are those of the run: methods were seldom tuned equally, and a small gain over "
    "few cases may be chance."
)
NOTE = (
    "EMD and energy: mean distance between hospitals, in brackets as a multiple of what chance alone would give. "
    "Differ: hospitals that differ significantly from the others. Gain: of the best method without pooled cases, over "
    "FedAvg with the same cases; the best of many is too good. 'polysite evidence NAME' lists all methods of a "
    "federation."
)


def overview(found: Sequence[Federation]) -> Grid:
    """Return a table with a line per federation."""
    return Grid("evidence", "Federations of the evidence bank", HEAD, tuple(map(_federation, found)), NOTE)


def _federation(federation: Federation) -> Line:
    gains = federation.gains()
    best = next((g for g in gains if g.gain is not None and not g.pooled), None)
    base = [g.score for g in gains if g.method == "fedavg" and not g.line.settings]
    far = federation.distances
    cells = (
        name(
            f"{federation.data}: {federation.title}"
            if federation.source
            else f"{federation.data[:8]}: {federation.title}"
        ),
        number(len(federation.sizes), "d"),
        _range(federation.sizes),
        _distance(far, "emd"),
        _distance(far, "energy"),
        number(None if far is None else far.differing, "d"),
        number(len({g.method for g in gains}), "d"),
        number(max(base, default=None)),
        name(best.method if best else ""),
        number(best.gain if best else None, "+.3f"),
    )
    return Line(cells)


def _range(sizes: Sequence[int]) -> Cell:
    least, most = min(sizes), max(sizes)
    return Cell(f"{least}" if least == most else f"{least} to {most}", sum(sizes))


def _distance(line: DistanceLine | None, which: str) -> Cell:
    if line is None or which not in line.distances:
        return number(None)
    found = line.distances[which]
    times = f" ({found.mean / found.chance:.1f})" if found.chance else ""
    return Cell(f"{found.mean:.2f}{times}", found.mean)


def methods(
    federation: Federation, title: str = "", gains: Sequence[Gain] | None = None, most: int | None = None
) -> Grid:
    """Return a table with a line per method of a federation, the best gain first; at most some of them."""
    gains = federation.gains() if gains is None else gains
    shown = gains if most is None else gains[:most]
    varied = _varied(gains)
    lines = mark_best([_method(g, varied) for g in shown], (0, 0, 1, *[0] * (len(METHODS) - 3)))
    left = len(gains) - len(shown)
    more = f"{left} more: polysite evidence {federation.data[:12]}. " if left else ""
    notes = dict.fromkeys(g.line.note for g in gains if g.line.note)
    sources = ", ".join(dict.fromkeys(g.line.source for g in gains if g.line.source))
    source = f"Source: {sources}. " if sources else ""
    note = f"{more}{source}{''.join(f'{n}. ' for n in notes)}".strip()
    return Grid("methods", title or federation.title, METHODS, lines, note)


def _varied(gains: Sequence[Gain]) -> set[str]:
    """Return the settings of local training that are not the same for all methods."""
    keys = {key for g in gains for key in g.line.training}
    return {key for key in keys if len({str(g.line.training.get(key)) for g in gains}) > 1}


def _method(gain: Gain, varied: Set[str]) -> Line:
    line = gain.line
    cells = (
        name(line.method),
        number(gain.score),
        number(gain.gain, "+.3f"),
        number(gain.runs, "d"),
        number(line.rounds, "d"),
        number(gain.steps, ",.0f"),
        number(gain.steps_ratio, ".2f"),
        Cell("–") if gain.bytes is None else Cell(_size(gain.bytes), gain.bytes),
        name(line.split),
        name(shorten(", ".join(_settings(line, varied)), WIDEST, placeholder=" ...")),
    )
    return Line(cells)


def _size(value: float) -> str:
    """Return a number of bytes as text.

    >>> _size(165e6), _size(0)
    ('165 MB', '0 B')
    """
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def _settings(line: RunLine, varied: Set[str]) -> Iterator[str]:
    for key, value in line.settings.items():
        yield f"{key} {value}"
    for key in sorted(varied & line.training.keys()):
        yield f"train.{key} {line.training[key]}"


def matches(found: Sequence[Match], most: int | None = 8) -> Iterator[Grid]:
    """Yield a table for every similar federation: its best methods."""
    for match in found:
        known = match.federation
        span = f"{len(known.sizes)} hospitals, {_range(known.sizes).text} training cases"
        title = f"{known.title}; {span}" if known.first.title else span
        which = "this federation itself" if match.same else f"distance {match.distance:.2f}"
        yield methods(known, f"{title} ({which})", _one_each(match.gains), most)


def _one_each(gains: Sequence[Gain]) -> list[Gain]:
    """Return one line per method: that with the fewest changed settings and, of these, the most runs."""
    found: dict[str, Gain] = {}
    for each in sorted(gains, key=lambda g: (g.gain is None, len(g.line.settings), -g.runs)):
        found.setdefault(each.method, each)
    return [g for g in gains if found[g.method] is g]


def plain(federation: Federation) -> dict[str, Any]:
    """Return a federation with its methods as values for JSON."""
    return {
        "data": federation.data,
        "title": federation.title,
        "source": federation.source,
        "task": federation.first.task,
        "sizes": list(federation.sizes),
        "distances": asdict(federation.distances) if federation.distances else None,
        "methods": [_plain_gain(g) for g in federation.gains()],
    }


def _plain_gain(gain: Gain) -> dict[str, Any]:
    line = gain.line
    kept = ("method", "split", "measure", "network", "parameters", "rounds", "note")
    found = {**{k: getattr(line, k) for k in kept}, "settings": dict(line.settings), "training": dict(line.training)}
    values = {k: getattr(gain, k) for k in ("score", "gain", "pairs", "runs", "steps", "bytes", "steps_ratio")}
    return {**found, **values}


def plain_match(match: Match) -> dict[str, Any]:
    """Return a similar federation as values for JSON."""
    return {"distance": match.distance, "parts": dict(match.parts), "same": match.same, **plain(match.federation)}
