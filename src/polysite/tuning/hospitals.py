"""A search over real hospitals: its runs are deployed studies, one after the other over one wire.

Every candidate and inner fold is a study of its own, in which no hospital uses a test case. Before anything is trained,
the hospitals are asked about each of them, so that policies refuse first. What leaves a hospital is what leaves it in
any deployed study: what its algorithm sends, and scores of validation cases under pseudonyms; no evaluation, no
assessment. ``hospitals.json`` in the folder of the search has the hospitals and the studies that they agreed to, so
that a coordinator that was stopped finds both again.
"""

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polysite import config
from polysite.benchmark.jobs import Job, Step, refuse_too_large
from polysite.config import Study
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.coordinator.roster import Deadlines, Wire
from polysite.deploy.protocol import Greeting
from polysite.engines.record import RoundRecord
from polysite.engines.rounds import Watch
from polysite.engines.run_folder import RunFolder
from polysite.errors import ConfigError, Paused, PolysiteError, RunError
from polysite.foreign import parse_json
from polysite.storage import write_file
from polysite.study import Sizes

FILE = "hospitals.json"
log = logging.getLogger("polysite")


class Hospitals:
    """Runs a search over the sites that connect.

    The sites that take part in the first greeting are those of all runs: a round waits for all of them, so that
    candidates are compared on the same hospitals.

    Args:
        wire: Carries the messages.
        names: The sites of the project.
        deadlines: How long to wait for sites; the quorum counts for the first greeting.
        wait: Seconds to wait for all sites in the first greeting, once there is a quorum.
        all_sites: Every round waits for all sites that take part; False: for the quorum.
    """

    def __init__(
        self,
        wire: Wire,
        names: Sequence[str],
        deadlines: Deadlines = Deadlines(),
        wait: float = coordinator.WAIT,
        all_sites: bool = True,
    ):
        self.wire, self.names, self.deadlines = wire, tuple(names), deadlines
        self.wait, self.all_sites = wait, all_sites
        self._left: dict[str, int] = {}  # new studies that every site allows now
        self._search = ""
        self._agreed: set[str] = set()  # names of studies
        self._sizes: dict[str, dict[str, int]] = {}
        self._file = Path(FILE)

    def meet(self, base: Study, out: Path, step: Step) -> Sizes:
        """Greet the hospitals with the study itself; return their training and validation cases in its own split.

        These are the numbers that a simulation of the search counts, so that both give candidates equal steps by the
        same rounds. The inner folds divide the same cases anew.
        """
        self._file = out / FILE
        known = self._read()
        names = tuple(known["cases"]) or self.names
        self._search, self._agreed = known["search"], set(known["agreed"])
        deadlines = self._together(len(names)) if known["cases"] else self.deadlines
        watch = _Told("the study itself", step)
        found = coordinator.greet(base, self.wire, names, self._id(base), watch, deadlines=deadlines, wait=self.wait)
        reported = {name: dict(greeting.cases) for name, greeting in found.items()}
        for name, cases in known["cases"].items():
            if reported.get(name, cases) != cases:
                raise RunError(
                    f"{name} has other cases ({_listed(reported[name])}) than when the search in {out} began "
                    f"({_listed(cases)}): choose another --out"
                )
        self._sizes = known["cases"] or reported  # with all_sites = False, one of them may be away now
        self.names = tuple(self._sizes)
        self._note(found)
        _refuse_hidden(self._sizes)
        return self._sizes

    def check(self, jobs: Sequence[Job], out: Path, step: Step) -> Mapping[str, str]:
        """Ask the hospitals about every study of the search; return those that one of them refuses, with its reason.

        The number of studies is compared with what the policies still allow within 24 hours before the first is asked.
        All hospitals of the search are waited for, since one that is away could refuse later.
        """
        for job in jobs:
            try:
                coordinator.check(job.study)
            except ConfigError as problem:
                raise ConfigError(f"{job.method} cannot run over real hospitals: {problem}") from problem
            _refuse_other(job)
        refuse_too_large(jobs, out, elsewhere=True)
        new = [job for job in jobs if not job.run.exists() and self._id(job.study) not in self._agreed]
        self._refuse_many(len(new))
        refused: dict[str, str] = {}
        deadlines = replace(self.deadlines, quorum=len(self.names))
        for number, job in enumerate(new, start=1):
            id, watch = self._id(job.study), _Told(f"study {number} of {len(new)}", step)
            try:
                found = coordinator.greet(job.study, self.wire, self.names, id, watch, deadlines=deadlines)
            except PolysiteError as problem:
                refused[job.title] = str(problem)
                continue
            self._agreed.add(id)
            self._note(found)
        if refused:
            lost = dict.fromkeys(job.method for job in new if job.title in refused)
            log.warning("left out, because a hospital refuses: %s", ", ".join(lost))
        return refused

    def work(self, jobs: Sequence[Job], step: Step) -> Mapping[str, str]:
        """Train jobs one after the other at all hospitals; return the failed ones with the reason."""
        failed: dict[str, str] = {}
        for job in jobs:
            if job.done:
                continue
            step(job.title, 0, [job.method])
            try:
                self._train(job, step)
            except Paused:
                pass
            except PolysiteError as problem:
                failed[job.title] = str(problem)
            step(f"{job.title}: {'failed' if job.title in failed else 'done'}")
        return failed

    def _train(self, job: Job, step: Step) -> None:
        watch, given = _Told(job.title, step), {"deadlines": self._together(len(self.names)), "wait": self.wait}
        shared: dict[str, Any] = {**given, "evaluate": False, "until": job.until}
        if job.run.exists():
            folder = RunFolder(job.run)
            paused = folder.reached(len(folder.records()))  # otherwise it was stopped between two checkpoints
            coordinator.resume(job.run, self.wire, watch, paused=paused, **shared)
            return
        job.run.parent.mkdir(parents=True, exist_ok=True)
        id = self._id(job.study)
        coordinator.run(job.study, self.wire, self.names, job.run, watch, assess=False, id=id, **shared)

    def _together(self, sites: int) -> Deadlines:
        """Return the deadlines of a round of the search."""
        return replace(self.deadlines, quorum=sites if self.all_sites else min(sites, self.deadlines.quorum))

    def _id(self, chosen: Study) -> str:
        """Return the name by which hospitals know a study of this search; another study has another name."""
        return f"tune-{self._search}-{hashlib.sha256(config.dump(chosen).encode()).hexdigest()[:16]}"

    def _refuse_many(self, new: int) -> None:
        few = [name for name, left in self._left.items() if 0 <= left < new]
        if few:
            name = min(few, key=lambda each: self._left[each])
            raise RunError(
                f"the search has {new} more studies for every hospital, and {name} allows {self._left[name]} more "
                "within 24 hours (studies in its policy.toml): choose a smaller budget, or ask it to allow more"
            )

    def _read(self) -> dict[str, Any]:
        if not self._file.exists():
            return {"search": secrets.token_hex(4), "cases": {}, "agreed": []}
        try:
            found: dict[str, Any] = parse_json(self._file.read_text(encoding="utf-8"))
            return {"search": str(found["search"]), "cases": dict(found["cases"]), "agreed": list(found["agreed"])}
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise RunError(f"{self._file} cannot be read: {problem}; choose another --out") from problem

    def _note(self, found: Mapping[str, Greeting]) -> None:
        """Keep what hospitals report, and write what a restart needs."""
        self._left = {name: greeting.studies for name, greeting in found.items()}
        kept = {"search": self._search, "cases": self._sizes, "agreed": sorted(self._agreed)}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_file(self._file, lambda path: path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8"))


class _Told(Watch):
    """Reports what hospitals do, and the scores of rounds, as notes of the search."""

    def __init__(self, title: str, step: Step):
        self.title, self.step = title, step

    def doing(self, site: str, what: str, done: bool) -> None:
        """Report what a hospital is doing."""
        self.step(f"{self.title} · {site}: {what}", 0)

    def round(self, record: RoundRecord) -> None:
        """Report the score after a round."""
        if record.mean_score is not None:
            self.step(f"{self.title} · round {record.round + 1}: {record.measure} {record.mean_score:.3f}", 0)


def _refuse_hidden(sizes: Sizes) -> None:
    """Refuse hospitals whose policy hides how many cases they have: equal steps depend on it."""
    for name, cases in sizes.items():
        if cases["train"] == 1:
            raise RunError(
                f"{name} reports one training case, or hides the number (no 'count' in kinds of its policy.toml): a "
                "search with equal steps needs the numbers of cases"
            )


def _refuse_other(job: Job) -> None:
    """Refuse an existing run folder with another configuration."""
    fitting = [config.parse(config.dump(study)) for study in (job.study, coordinator.guarded(job.study))]
    if job.run.exists() and config.parse(RunFolder.open(job.run).config) not in fitting:
        raise RunError(f"{job.run} was trained with another configuration; choose another --out, or remove it")


def _listed(cases: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {split}" for split, count in cases.items())
