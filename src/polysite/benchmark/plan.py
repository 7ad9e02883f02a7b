"""The plan of a benchmark: runs, hours on this machine's device, and disk, before anything is trained.

Steps and validated cases come from a rehearsal of every algorithm (``study/estimate.py``) with the sizes of the sites:
those of the data, or the published ones if the data are not here. Seconds come from a few real training steps and one
prediction on this machine (``pace.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from polysite import config, study
from polysite.algorithms.base import facts
from polysite.benchmark.bench import Bench
from polysite.benchmark.budget import equalise
from polysite.benchmark.jobs import pooled_training, studies
from polysite.benchmark.pace import measure, scan_size
from polysite.config import Study
from polysite.costs.model import total
from polysite.data.federation import Natural
from polysite.data.sources import Phantom
from polysite.errors import ConfigError, PolysiteError
from polysite.report.costs import duration
from polysite.report.grid import Cell, Grid, Line, name, number
from polysite.report.published import sizes
from polysite.study.estimate import case_bytes, folder_bytes, tree_bytes

ROUNDS = 3  # rehearsed of a phase; the others are like the last of these
PREDICTION, SCAN = 3e4, 3e6  # bytes on disk of a predicted case, and of one of the three per site kept to look at


def plan(bench: Bench, overrides: Mapping[str, str], absent: bool = False) -> Grid:
    """Return the table of all runs with their hours and disk.

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
    lines, hours, disk, runs = [], 0.0, 0.0, 0
    for title, each in cells[0].items():
        before = next((n for n, s in cells[0].items() if config.is_beginning(s, of=each)), None)
        mine = [done[title].after(done[before] if before else None) for done in work if title in done]
        count = places * len(mine)
        spent = places * sum(pace.seconds(m.steps, m.cases + m.tested) for m in mine) / 3600
        stored, steps = places * sum(m.stored for m in mine), places * sum(m.steps for m in mine)
        if bench.tuning and not before:
            times, trials = bench.tuning.effort, len(bench.tuning.trials(None))
            spent, steps, stored = spent * times, round(steps * times), stored * trials
        hours, disk, runs = hours + spent, disk + stored, runs + count
        after = f"after {before}" if before else ""
        counts = (number(count, "d"), number(mine[0].rounds, "d"), _whole(steps), Cell(f"{spent:.1f}", spent))
        lines.append(Line((name(title), *counts, _size(stored), name(after))))
    cases = sum(len(refs) for refs in first.data.case_refs(first.seed).values())
    total = (number(runs, "d"), name(""), name(""), Cell(f"{hours:.1f}", hours), _size(disk), name(""))
    lines.append(Line((name("all"), *total), "total"))
    unit = "GPU hours" if pace.device.startswith("cuda") else "CPU hours"
    head = ("method", "runs", "rounds", "steps of all runs", unit, "disk", "")
    count = len(first.data.case_refs(0))
    whose = f"the published sizes of {_sites(count)}" if absent else "the data"
    note = (
        f"{pace.how} One run after the other on this device; with {whose}, {cases} cases. All together: "
        f"{duration(3600 * hours)}. Disk: checkpoints, models, predictions and scans to look at"
        f"{_prepared(first, cases)}. Validated and tested cases are counted; not counted: scores that an algorithm "
        "takes within a round, and predictions of personal models for the cases of other hospitals."
    )
    return Grid("plan", f"Plan of {bench.name}", head, tuple(lines), note)


def _prepared(chosen: Study, cases: int) -> str:
    """Return the size of the cache of prepared cases, and of the scans that it assumes; empty for phantoms."""
    if isinstance(chosen.data, Phantom):
        return ""
    scans = chosen.data.task == "segmentation"
    size = scan_size(chosen) if scans else chosen.train.patch
    stored = cases * case_bytes(chosen, prod(size))
    assumed = f", if a scan has {' x '.join(map(str, size))} voxels" if scans else ""
    return f"; the cache of prepared cases takes about {_size(stored).text} more{assumed}"


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
    """Work and disk space of one run of a study."""

    rounds: int
    steps: int
    cases: int  # validated
    tested: int
    stored: float  # approximate bytes of the run folder

    @classmethod
    def of(cls, chosen: Study) -> "_Work":
        """Rehearse a study."""
        seen: list[Any] = []

        def look(*state: Any) -> None:
            seen[:] = [state]

        params = study.initial_params(chosen)
        loads = study.loads(chosen, look, params=params, most=ROUNDS)
        done, dealt = total(loads), study.deal_cases(chosen).values()
        tested = [len(splits["test"]) for splits in dealt]
        model = sum(v.nbytes for v in params.values())
        served = 1 if facts(config.phases(chosen)[-1].algorithm).shared_model else len(dealt)
        checkpoint = tree_bytes(seen, {k: prod(v.shape) for k, v in params.items()})
        stored = folder_bytes(chosen, served * model, checkpoint) + PREDICTION * sum(tested)
        return cls(len(loads), done.steps, done.cases, sum(tested), stored + SCAN * sum(min(3, n) for n in tested))

    def after(self, before: "_Work | None") -> "_Work":
        """Return what is left to do after a run that did the first rounds."""
        if before is None:
            return self
        names = ("rounds", "steps", "cases")
        return replace(self, **{k: getattr(self, k) - getattr(before, k) for k in names})


def _whole(value: float) -> Cell:
    return Cell(f"{value:,.0f}".replace(",", " "), value)


def _size(value: float) -> Cell:
    return Cell(f"{ceil(value / 1e9)} GB" if value >= 1e9 else f"{ceil(value / 1e6)} MB", value)
