"""Tables of costs: steps, bytes, simulated time, energy."""

from collections.abc import Sequence
from statistics import fmean

from polysite.costs.model import Cost, Load, measured
from polysite.costs.speeds import Speeds
from polysite.engines.record import RoundRecord
from polysite.payload import SiteId
from polysite.report.grid import Cell, Grid, Line, name, number
from polysite.report.runs import Method, Summary

HEAD = (
    "method", "rounds", "best round", "steps", "parallel steps", "to sites", "from sites", "busiest site",
    "simulated time", "of it network (%)", "energy (kWh, estimate)",
)  # fmt: skip
MEASURED = "Bytes: measured payloads of the training rounds, which never contain images."


def cost(run: Summary, speeds: Speeds) -> Cost:
    """Return the cost of a run, from its records."""
    pooled = run.settings["run"]["pooled"]
    exchanges = ((load_of(record), pooled or record.pooled) for record in run.records)
    return measured(exchanges, speeds, run.settings["train"]["batch"])


def load_of(record: RoundRecord) -> dict[SiteId, Load]:
    """Return the recorded load of every site in a round; a site that only validates has no steps and no bytes."""

    def of(site: SiteId) -> Load:
        cases = record.validation[site].cases if site in record.validation else 0
        handed, did = record.handed.get(site, 0), record.sites.get(site)
        return Load(did.steps, cases, did.bytes_down + handed, did.bytes_up) if did else Load(0, cases, handed, 0)

    return {site: of(site) for site in dict.fromkeys([*record.sites, *record.validation, *record.handed])}


def hours(run: Summary, speeds: Speeds) -> list[float]:
    """Return the simulated hours at the end of every round."""
    return [seconds / 3600 for seconds in cost(run, speeds).seconds_by_round]


def table(methods: Sequence[Method], speeds: Speeds) -> Grid:
    """Return a table of what the methods cost, as means over their runs."""
    lines = []
    for method in methods:
        chosen = fmean(r.best_round + 1 for r in method.runs) if method.first.finished else None
        lines.append(_line(method.name, chosen, [cost(run, speeds) for run in method.runs]))
    return Grid("cost", "Cost", HEAD, tuple(lines), f"{MEASURED} {_note(speeds)}")


def forecast(title: str, estimate: Cost, speeds: Speeds) -> Grid:
    """Return a table of the estimated cost of a study."""
    return Grid("cost", "Estimated cost", HEAD, (_line(title, None, [estimate]),), _note(speeds))


def _line(title: str, chosen: float | None, costs: Sequence[Cost]) -> Line:
    simulated = fmean(c.seconds for c in costs)
    share = fmean(sum(c.communicating) for c in costs) / simulated if simulated else 0.0
    energy = fmean(c.estimated_kwh for c in costs)
    cells = (
        number(fmean(c.rounds for c in costs), ".0f"),
        number(chosen, ".0f"),
        _whole(fmean(c.steps for c in costs)),
        _whole(fmean(c.parallel_steps for c in costs)),
        _bytes(fmean(c.bytes_down for c in costs)),
        _bytes(fmean(c.bytes_up for c in costs)),
        _bytes(fmean(c.bytes_of_busiest for c in costs)),
        Cell(duration(simulated), simulated),
        number(100 * share, ".0f"),
        Cell(f"{energy:.3g}", energy),
    )
    return Line((name(title), *cells))


def _note(speeds: Speeds) -> str:
    return (
        "Parallel steps: in every round those of the site with most. Simulated time: a round lasts as long as its "
        f"slowest site, with {words(speeds)}. Energy is a rough estimate: {speeds.watts:g} W while a site computes and "
        f"{speeds.kwh_per_gb:g} kWh per GB sent, without idle time, server and cooling."
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
