"""Studies over NVIDIA FLARE to which accidents happen, and what became of each: a table.

A provisioned federation (keys, mutual TLS) of a server and three sites, in network namespaces where that is permitted.
The script is also the administrator: it starts again what was killed, and submits the same job again when FLARE has
ended the job, or when nothing moves any more. A study that needs all sites must then come to exactly what polysite's
own simulator comes to.

    python scripts/flare_faults.py                      all ten schedules
    python scripts/flare_faults.py --only "job killed"  those with these words in their names
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import psutil
from faults import Network, network

from consortium import NAMES, config_of, same, states, until
from flare_federation import Federation
from polysite import config, study
from polysite.config import Study
from polysite.deploy.flare.job import export
from polysite.deploy.site import ledger
from polysite.engines.record import RoundRecord
from polysite.engines.run_folder import RunFolder

LIMIT = 1500.0  # seconds that a schedule may take
LINGER = 60.0  # seconds after the last round in which FLARE should end a job whose study is complete
STUCK = 400.0  # seconds without a new round after which the administrator aborts a job
GRACE = 10.0  # seconds in which a site may come back
LOST = 30.0  # seconds after which a job without a quorum is ended
ROUNDS = 8


@dataclass(frozen=True)
class Event:
    """Something breaks when so many rounds are on record, and is mended after ``seconds``."""

    what: str  # worker, process, site, server, job, cut
    site: str = ""
    round: int = 2
    seconds: float = 0.0


@dataclass(frozen=True)
class Schedule:
    name: str
    events: tuple[Event, ...]
    quorum: int = len(NAMES)

    @property
    def exact(self) -> bool:
        """No round may go on without a site."""
        return self.quorum == len(NAMES)


SCHEDULES = (
    Schedule("a site's worker killed", (Event("worker", "b"),)),
    Schedule("a site's job process killed", (Event("process", "b"),)),
    Schedule("a site killed, back after 5 s", (Event("site", "c", seconds=5),)),
    Schedule("a site killed for good, two of three are enough", (Event("site", "c", seconds=LIMIT),), quorum=2),
    Schedule("the server killed, back after 5 s", (Event("server", seconds=5),)),
    Schedule("the server's job process killed", (Event("job"),)),
    Schedule("a link cut for 10 s", (Event("cut", "a", seconds=10),)),
    Schedule("a link cut for 45 s", (Event("cut", "a", seconds=45),)),
    Schedule("a link cut for 90 s, two of three are enough", (Event("cut", "a", seconds=90),), quorum=2),
    Schedule("a worker, a link and the server", (
        Event("worker", "a", 1), Event("cut", "b", 3, 10), Event("server", "", 5, 5))),
)  # fmt: skip


@dataclass
class Outcome:
    jobs: list[str] = field(default_factory=list)  # what FLARE said of each job, in the end
    seconds: float = 0.0
    rounds: int = 0
    absent: int = 0  # rounds without some site
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        how = "FAILED: " + "; ".join(self.wrong) if self.wrong else "passed"
        again = f"submitted {len(self.jobs)} times" if len(self.jobs) > 1 else "one job"
        gone = f", {self.absent} of {self.rounds} rounds without a site" if self.absent else ""
        return f"{how} in {self.seconds:.0f} s: {again} ({', then '.join(self.jobs)}){gone}"


class Play:
    """A schedule as it happens, with the administrator's part."""

    def __init__(self, federation: Federation, wires: Network, schedule: Schedule, job: Path):
        self.federation, self.wires, self.schedule, self.job = federation, wires, schedule, job
        self.run = federation.run_of(job)
        self.over, self.server_up = threading.Event(), threading.Event()
        self.server_up.set()
        self.killed_server = 0

    @property
    def records(self) -> list[RoundRecord]:
        return RunFolder(self.run).records() if (self.run / "rounds.jsonl").exists() else []

    @property
    def done(self) -> bool:
        return (self.run / "result.json").exists()

    def go(self) -> Outcome:
        outcome, began = Outcome(), time.monotonic()
        threads = [threading.Thread(target=self._happen, args=(event,)) for event in self.schedule.events]
        for thread in threads:
            thread.start()
        try:
            while not self.done and time.monotonic() - began < LIMIT:
                outcome.jobs.append(self._administer(began + LIMIT))
        finally:
            outcome.seconds = time.monotonic() - began
            self.over.set()
            for thread in threads:
                thread.join()
        return outcome

    def _administer(self, end: float) -> str:
        """Submit the job once the federation is there; return what became of it."""
        until(lambda: self.server_up.is_set() and len(self.federation.connected()) >= self.schedule.quorum, LIMIT)
        killed, number = self.killed_server, self.federation.submit(self.job)
        moved, known = time.monotonic(), len(self.records)
        while time.monotonic() < end:
            time.sleep(1.0)
            if self.killed_server > killed and self.server_up.is_set():
                return "lost with the server"
            status = self.federation.status(number)
            if status.startswith("FINISHED"):
                return status.removeprefix("FINISHED:").lower()
            if len(self.records) != known:
                moved, known = time.monotonic(), len(self.records)
            if self.done and time.monotonic() - moved > LINGER:
                return "completed, but still listed as running"
            if time.monotonic() - moved > STUCK:
                with suppress(Exception), self.federation.session() as session:
                    session.abort_job(number)
                time.sleep(5.0)
                return "stuck, aborted by hand"
        return "not ended"

    def _happen(self, event: Event) -> None:
        if not self._await(lambda: len(self.records) >= event.round):
            return
        fed, site = self.federation, event.site
        match event.what:
            case "worker":
                _kill(self.federation.worker(site))
            case "process":
                _kill(fed.of_job(site))
            case "job":
                _kill(fed.of_job("server"))
            case "site":
                fed.kill(site)
                self.over.wait(event.seconds)
                fed.start(site)
            case "server":
                self.server_up.clear()
                self.killed_server += 1
                fed.kill("server")
                time.sleep(event.seconds)
                fed.start("server")
                self.server_up.set()
            case "cut":
                self._cut(site, event.seconds)

    def _cut(self, site: str, seconds: float) -> None:
        """Cut the link of a site; without namespaces, its processes stand still."""
        held = SimpleNamespace(folder=Path(site), process=self.federation.processes[site])
        others = self.federation.tree(site)[1:] if type(self.wires).__name__ == "Processes" else []
        for each in others:
            each.send_signal(signal.SIGSTOP)
        self.wires.cut(held)  # type: ignore[arg-type]
        self.over.wait(seconds)
        self.wires.mend(held)  # type: ignore[arg-type]
        for each in others:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGCONT)

    def _await(self, true: Callable[[], bool]) -> bool:
        while not true():
            if self.over.wait(0.05):
                return False
        return True


def _kill(process: psutil.Process | None) -> None:
    if process is None:
        raise RuntimeError("the process that was to be killed is not there")
    process.send_signal(signal.SIGKILL)


def wanted() -> Study:
    """A study in which sites remember something from round to round."""
    return config.vary(config.parse(config_of("ditto")), {"run": {"rounds": ROUNDS, "validate_every": 1}})


def judge(outcome: Outcome, play: Play, simulated: Path) -> None:
    """Add what is wrong, and what the record says."""
    if not play.done:
        outcome.wrong.append("the study did not end")
        return
    records = play.records
    outcome.rounds, outcome.absent = len(records), sum(bool(r.absent) for r in records)
    if len(records) != ROUNDS:
        outcome.wrong.append(f"{len(records)} rounds are on record instead of {ROUNDS}")
    one, other = states(simulated), states(play.run)
    if play.schedule.exact and not (one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)):
        outcome.wrong.append("the states are not those of the simulator")
    for name in NAMES:
        try:
            ledger.check(play.federation.folder / name / "polysite" / "ledger.jsonl")
        except Exception as problem:
            outcome.wrong.append(str(problem))


def staged(folder: Path, wires: Network) -> Federation:
    """The federation, in the namespaces of these wires."""
    return Federation(folder, NAMES, host=wires.host, inside=wires.inside)


def play(schedule: Schedule, federation: Federation, wires: Network, folder: Path, simulated: Path) -> Outcome:
    """Play a schedule; return what became of it."""
    until(lambda: federation.connected() == set(NAMES), 120)
    job = export(
        wanted(),
        folder / "job",
        sites=NAMES,
        quorum=schedule.quorum,
        grace=GRACE,
        lost=LOST,
        deadline=240,
        wait=30,
        assess=False,
    )
    play = Play(federation, wires, schedule, job)
    outcome = play.go()
    judge(outcome, play, simulated)
    return outcome


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words in the names of the schedules to play")
    parser.add_argument("--first", type=int, default=1, help="number of the first schedule")
    parser.add_argument("--no-netns", action="store_true", help="plain processes")
    parser.add_argument("--out", type=Path, help="a new folder; a temporary one by default")
    given = parser.parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave nothing running behind
    folder = given.out or Path(mkdtemp(prefix="ff-"))  # short: a worker's socket lies below it
    chosen = [each for each in SCHEDULES[given.first - 1 :] if given.only in each.name]
    simulated = study.train(wanted(), folder / "simulated", page=False).folder.path
    failed = 0
    with network(given.no_netns, NAMES) as wires, staged(folder / "fed", wires) as federation:
        print(f"{type(wires).__name__.lower()}; below {folder}", flush=True)
        for index, schedule in enumerate(chosen):
            outcome = play(schedule, federation, wires, folder / str(index), simulated)
            failed += bool(outcome.wrong)
            print(f"{schedule.name}: {outcome}", flush=True)
            for name in NAMES:  # as after a night: all are there again
                if federation.processes[name].poll() is not None:
                    federation.start(name)
    print(f"{len(chosen) - failed} of {len(chosen)} schedules passed", flush=True)
    os._exit(bool(failed))  # sessions of FLARE whose server was killed leave threads behind


if __name__ == "__main__":
    main()
