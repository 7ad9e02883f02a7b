"""Tables of costs: steps, bytes, simulated time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil
from statistics import fmean
from typing import Any

from polysite import config
from polysite.algorithms.base import trials
from polysite.costs.model import Cost, Load, measured, without_grid
from polysite.costs.speeds import Speeds
from polysite.engines.record import RoundRecord
from polysite.errors import ConfigError
from polysite.payload import SiteId
from polysite.report.grid import Cell, Grid, Line, name, number
from polysite.report.runs import Method, Summary

HEAD = (
    "method", "rounds", "best round", "steps", "steps if pooled", "parallel steps", "to sites", "from sites",
    "busiest site", "simulated time", "of it network (%)",
)  # fmt: skip
MEASURED = "Bytes: all models, replies and scores that crossed, with the final evaluation; never images."
GRID = ", without its grid"
ALIKE = 1.05  # ratio up to which a note calls rounds, steps or bytes equal


def cost(run: Summary, speeds: Speeds, grid: bool = True) -> Cost:
    """Return the cost of a run, from its records; without ``grid`` as if sites trained only the candidate they keep."""
    pooled = run.settings["run"]["pooled"]
    loads = [_with_effort(run, record, load_of(record)) for record in run.records]
    exchanges = zip(loads if grid else without_grid(loads), run.records, strict=True)
    central = ((load, pooled or record.pooled) for load, record in exchanges)
    return measured(central, speeds, run.settings["train"]["batch"])


def load_of(record: RoundRecord) -> dict[SiteId, Load]:
    """Return the recorded load of every site in a round; a site that only validates has no steps."""

    def of(site: SiteId) -> Load:
        cases = record.validation[site].cases if site in record.validation else 0
        steps = record.sites[site].steps if site in record.sites else 0
        return Load(steps, cases, record.bytes_down.get(site, 0), record.bytes_up.get(site, 0))

    return {site: of(site) for site in dict.fromkeys([*record.sites, *record.validation, *record.bytes_down])}


def _with_effort(run: Summary, record: RoundRecord, loads: Mapping[SiteId, Load]) -> dict[SiteId, Load]:
    """Add the patches that every site trained on, where whole passes over its training cases explain its steps."""
    phases = _phases(run.config)
    if record.phase >= len(phases):
        return dict(loads)
    phase = phases[record.phase]
    size, batch, several = phase.train.patches, phase.train.batch, trials(phase.algorithm)
    pooled = sum(splits.get("train", 0) for splits in run.held.values())

    def patches(site: SiteId, steps: int) -> int | None:
        if phase.train.steps or _fixed_steps(phase.algorithm):
            return steps * batch
        cases = run.held[site].get("train", 0) if site in run.held else pooled
        once = ceil(cases * size / batch)
        return steps // once * cases * size if once and steps % once == 0 else None

    return {i: replace(x, patches=patches(i, x.steps), trials=several) for i, x in loads.items()}


@lru_cache
def _phases(text: str) -> Sequence[config.Study]:
    """Return the phases of a configuration; none if this release cannot read it."""
    try:
        return config.phases(config.parse(text))
    except ConfigError:
        return ()


def _fixed_steps(algorithm: Any) -> bool:
    """Return whether an algorithm, or the one inside, sets the number of local steps."""
    return bool(getattr(algorithm, "steps", None)) or (hasattr(algorithm, "inner") and _fixed_steps(algorithm.inner))


def table(methods: Sequence[Method], speeds: Speeds) -> Grid:
    """Return a table of what the methods cost, as means over their runs; fine-tuning also without its grid."""
    lines, grids = [], False
    for method in methods:
        chosen = fmean(r.best_round + 1 for r in method.runs) if method.first.finished else None
        lines.append(_line(method.name, chosen, [cost(run, speeds) for run in method.runs]))
        if any(trials(phase.algorithm) > 1 for phase in _phases(method.first.config)):
            grids = True
            lines.append(_line(method.name + GRID, chosen, [cost(run, speeds, False) for run in method.runs]))
    return Grid("cost", "Cost", HEAD, tuple(lines), f"{MEASURED} {_note(speeds, grids)}")


def with_effort(scores: Grid, methods: Sequence[Method]) -> Grid:
    """Add the steps and bytes of a run to a table of scores with a line per method."""
    costs = [[cost(run, Speeds()) for run in method.runs] for method in methods]
    if not any(c.steps for each in costs for c in each):
        return scores
    efforts = [(_whole(fmean(c.steps for c in each)), _bytes(fmean(map(_sent, each)))) for each in costs]
    lines = [replace(x, cells=(*x.cells, *effort)) for x, effort in zip(scores.lines, efforts, strict=True)]
    trained = [each for method, each in zip(methods, costs, strict=True) if not method.owner]
    note = f"{scores.note} Steps and bytes: of a run, at all sites and in both directions{_unequal(trained)}.".strip()
    return replace(scores, head=(*scores.head, "steps", "bytes"), lines=tuple(lines), note=note)


def _unequal(methods: Sequence[Sequence[Cost]]) -> str:
    """Return the ranges of rounds, steps and bytes that differ between methods, as the end of a sentence."""
    uneven = []
    means = [(fmean(c.rounds for c in x), fmean(c.steps for c in x), fmean(map(_sent, x))) for x in methods]
    kinds = (("rounds", _whole), ("steps", _whole), ("bytes", _bytes))
    for (what, text), values in zip(kinds, zip(*means, strict=True), strict=True):
        if max(values) > ALIKE * min(values):
            uneven.append(f"{what} {text(min(values)).text.replace('–', '0')} to {text(max(values)).text}")
    if len(methods) < 2:
        return ""
    if not uneven:
        return "; rounds, steps and bytes are equal for all methods"
    return f"; unequal between methods: {', '.join(uneven)}"


def _sent(run: Cost) -> int:
    return run.bytes_down + run.bytes_up


def forecast(title: str, estimate: Cost, speeds: Speeds, single: Cost | None = None) -> Grid:
    """Return a table of the estimated cost of a study; ``single`` is that without its grid, if it has one."""
    lines = [_line(title, None, [estimate])]
    lines += [_line(title + GRID, None, [single])] if single and single != estimate else []
    return Grid("cost", "Estimated cost", HEAD, tuple(lines), _note(speeds, len(lines) > 1))


def _line(title: str, chosen: float | None, costs: Sequence[Cost]) -> Line:
    simulated = fmean(c.seconds for c in costs)
    share = fmean(sum(c.communicating) for c in costs) / simulated if simulated else 0.0
    pooled = [c.pooled_steps for c in costs]
    cells = (
        number(fmean(c.rounds for c in costs), ".0f"),
        number(chosen, ".0f"),
        _whole(fmean(c.steps for c in costs)),
        Cell("–") if None in pooled else _whole(fmean(p for p in pooled if p is not None)),
        _whole(fmean(c.parallel_steps for c in costs)),
        _bytes(fmean(c.bytes_down for c in costs)),
        _bytes(fmean(c.bytes_up for c in costs)),
        _bytes(fmean(c.bytes_of_busiest for c in costs)),
        Cell(duration(simulated), simulated),
        number(100 * share, ".0f"),
    )
    return Line((name(title), *cells))


def _note(speeds: Speeds, grids: bool = False) -> str:
    one = (
        "Without its grid: as if every site trained only the learning rate and penalty that it keeps. " if grids else ""
    )
    return (
        "Steps: taken by all sites, each of which rounds its last batch up. Steps if pooled: as if the patches of a "
        "round formed one pool, as some papers count; a dash if not known. Parallel steps: in every round those of the "
        f"site with most. {one}Simulated time: a round lasts as long as its "
        f"slowest site, with {words(speeds)}."
    )


def words(speeds: Speeds) -> str:
    """Describe the speeds."""
    other = f", and other values at {', '.join(sorted(speeds.sites))}" if speeds.sites else ""
    return (
        f"{speeds.patch:.3g} s to train on a patch, {speeds.case:.3g} s to validate a case, {speeds.down:.3g} MB/s "
        f"down and {speeds.up:.3g} MB/s up{other}"
    )


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(68760), duration(95), duration(4.2)
    ('19.1 h', '1.6 min', '4.2 s')
    """
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _whole(value: float) -> Cell:
    return Cell(f"{value:,.0f}".replace(",", " "), value)


def _bytes(value: float) -> Cell:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return Cell(f"{value / size:.3g} {unit}", value)
    return Cell(f"{value:.0f} B" if value else "–", value)
