"""The plan of a benchmark: runs and hours on this machine's device, before anything is trained.

Steps and validated cases come from a rehearsal of every algorithm (``study/estimate.py``) with the sizes of the sites:
those of the data, or the published ones if the data are not here. Seconds come from a few real training steps and one
prediction on this machine (``pace.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from polysite import config, study
from polysite.benchmark.bench import Bench
from polysite.benchmark.budget import equalise
from polysite.benchmark.jobs import pooled_training, studies
from polysite.benchmark.pace import measure
from polysite.config import Study
from polysite.costs.model import total
from polysite.data.federation import Natural
from polysite.errors import ConfigError, PolysiteError
from polysite.report.costs import duration
from polysite.report.grid import Cell, Grid, Line, name, number
from polysite.report.published import sizes

ROUNDS = 3  # rehearsed of a phase; the others are like the last of these


def plan(bench: Bench, overrides: Mapping[str, str], absent: bool = False) -> Grid:
    """Return the table of all runs with their hours.

    Args:
        bench: The benchmark.
        overrides: Settings that override those of all studies.
        absent: The data are not here; sizes are the published ones.
    """
    cells = _cells(bench, overrides, absent)
    if not any(cells):
        raise ConfigError(f"{bench.name} trains nothing, so there is no plan: leave out --plan")
    first = next(iter(cells[0].values()))
    work = [{n: _Work.of(s) for n, s in cell.items()} for cell in cells]
    pace = measure(first, next(iter(work[0].values())).steps)
    places = len(bench.places)
    lines, hours, runs = [], 0.0, 0
    for title, each in cells[0].items():
        before = next((n for n, s in cells[0].items() if config.is_beginning(s, of=each)), None)
        mine = [done[title].after(done[before] if before else None) for done in work if title in done]
        count = places * len(mine)
        spent = places * sum(pace.seconds(m.steps, m.cases + m.tested) for m in mine) / 3600
        steps = places * sum(m.steps for m in mine)
        if bench.tuning and not before:
            times = bench.tuning.effort
            spent, steps = spent * times, round(steps * times)
        hours, runs = hours + spent, runs + count
        after = f"after {before}" if before else ""
        counts = (number(count, "d"), number(mine[0].rounds, "d"), _whole(steps), Cell(f"{spent:.1f}", spent))
        lines.append(Line((name(title), *counts, name(after))))
    cases = sum(len(refs) for refs in first.data.case_refs(first.seed).values())
    total = (number(runs, "d"), name(""), name(""), Cell(f"{hours:.1f}", hours), name(""))
    lines.append(Line((name("all"), *total), "total"))
    unit = "GPU hours" if pace.device.startswith("cuda") else "CPU hours"
    head = ("method", "runs", "rounds", "steps of all runs", unit, "")
    count = len(first.data.case_refs(0))
    whose = f"the published sizes of {_sites(count)}" if absent else "the data"
    note = (
        f"{pace.how} One run after the other on this device; with {whose}, {cases} cases. All together: "
        f"{duration(3600 * hours)}. Validated and tested cases are counted; not counted: scores that an algorithm "
        "takes within a round, and predictions of personal models for the cases of other hospitals."
    )
    return Grid("plan", f"Plan of {bench.name}", head, tuple(lines), note)


def _sites(count: int) -> str:
    return "its only site" if count == 1 else f"its {count} sites"


def _cells(bench: Bench, overrides: Mapping[str, str], absent: bool) -> list[dict[str, Study]]:
    """Return the studies of every federation; pooled training is listed once for federations of the same cases."""
    cells: list[dict[str, Study]] = []
    known: set[Any] = set()
    whole = _counted(bench) if absent else bench
    for federation in bench.dealt:
        cell = {}
        every = studies(whole, overrides, federation=federation)
        listed = {n: _dealable(s) if absent else s for n, s in every.items()}
        for title, here in equalise(listed, bench.reference, bench.budget).items():
            key = (title, pooled_training(here) if bench.federations else None)
            if key[1] is None or key not in known:
                known.add(key)
                cell[title] = here
        cells.append(cell)
    return cells


def _counted(bench: Bench) -> Bench:
    """Return the benchmark with a data source that counts the published numbers of cases."""
    files = bench.study.get("data", {})
    labels = files.get("classes") or list(files.get("labels", ()))
    counted = {
        "name": "counted",
        "sizes": sizes(bench.sizes),
        **({"modalities": files["modalities"]} if "modalities" in files else {}),
        **({"labels": labels} if labels else {}),
        **({"task": "classification"} if "classes" in files else {}),
    }
    shared = config.merge(bench.study, {"data": counted, "split": {"file": ""}})
    chosen = config.build(shared)
    dims = 3 if chosen.slices.axis else len(chosen.train.patch)
    return replace(bench, study=config.merge(shared, {"data": {"dims": dims}}))


def _dealable(chosen: Study) -> Study:
    """Return a study of counted cases; with natural sites if they lack what its federation needs, such as groups."""
    try:
        study.deal_cases(chosen)
    except PolysiteError:
        return replace(chosen, federation=Natural())
    return chosen


@dataclass(frozen=True)
class _Work:
    """Work of one run of a study."""

    rounds: int
    steps: int
    cases: int  # validated
    tested: int

    @classmethod
    def of(cls, chosen: Study) -> "_Work":
        """Rehearse a study."""
        loads = study.loads(chosen, most=ROUNDS)
        done = total(loads)
        tested = sum(len(splits["test"]) for splits in study.deal_cases(chosen).values())
        return cls(len(loads), done.steps, done.cases, tested)

    def after(self, before: "_Work | None") -> "_Work":
        """Return what is left to do after a run that did the first rounds."""
        if before is None:
            return self
        names = ("rounds", "steps", "cases")
        return replace(self, **{k: getattr(self, k) - getattr(before, k) for k in names})


def _whole(value: float) -> Cell:
    return Cell(f"{value:,.0f}".replace(",", " "), value)
