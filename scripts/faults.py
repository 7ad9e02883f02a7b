"""Studies over five hospitals to which accidents happen: a site or the server is killed, a link is cut.

Every schedule is drawn from the seed. Processes are real: ``polysite deploy run`` for every study, and for every
hospital a ``polysite site run`` that stays, in a network namespace of its own where that is permitted. Otherwise they
are plain processes, and a cut link is a courier that stands still.

Where all sites are needed, a study must come to exactly what the simulator comes to, whatever happened. Where three of
five are enough, a site stays away for some rounds and must be taken in again with what it remembered.

    python scripts/faults.py --schedules 20 --seed 0
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from tempfile import mkdtemp
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the hospitals have it
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from consortium import TRAINING, Hospital, consortium, environment, open_hospitals, same, states, until
from polysite import config, study
from polysite.deploy.site import ledger
from polysite.engines import checkpoint
from polysite.engines.record import RoundRecord
from polysite.engines.run_folder import RunFolder
from polysite.errors import PolysiteError

NAMES = ("a", "b", "c", "d", "e")
KINDS = ("courier", "worker", "site", "server", "cut")
LIMIT = 600.0  # seconds that a study may take
TUNING = 3  # rounds of the second phase, where there is one
BASE = """
[data]
name = "phantom"
shape = [24, 24, 24]
[data.sites.a]
cases = 6
[data.sites.b]
cases = 7
gamma = 1.2
[data.sites.c]
cases = 6
noise = 0.2
[data.sites.d]
cases = 6
gamma = 0.8
[data.sites.e]
cases = 7
{training}
[run]
rounds = {rounds}
checkpoint_every = {every}
guard.use = "off"
[algorithm]
name = "{name}"
"""
STUDIES = {  # every one has sites that remember something
    "ditto": (1, "ditto", ""),
    "scaffold": (2, "scaffold", ""),
    "fedper": (1, "fedper", 'private = ["head.*"]\n'),
    "phases": (2, "ditto", f'[[then]]\nalgorithm.name = "fine_tune"\nrun.rounds = {TUNING}\n'),
}


@dataclass(frozen=True)
class Event:
    """Something breaks when so many rounds are on record, ``delay`` seconds later, and is mended after ``seconds``;
    a site that is "away" comes back when ``seconds`` more rounds are on record."""

    round: int
    delay: float
    what: str
    site: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.what} {self.site}".strip() + f" (round {self.round} + {self.delay:.1f} s, {self.seconds:.0f})"


@dataclass(frozen=True)
class Schedule:
    name: str
    text: str  # of the study
    events: tuple[Event, ...]
    quorum: int = len(NAMES)
    deadline: float = 3600.0

    @property
    def exact(self) -> bool:
        """No round may go on without anybody."""
        return self.quorum == len(NAMES)


def draw(seed: int, index: int, rounds: int, cut: float, events: int = 4) -> Schedule:
    """One in five has a site that stays away; the others have accidents of any kind, at different sites."""
    chance = random.Random(f"{seed} {index}")
    if index % 5 == 4:
        name = ("ditto", "scaffold")[index // 5 % 2]
        away = Event(chance.randint(1, 3), chance.uniform(0, 3), "away", chance.choice(NAMES), 2)
        return Schedule(f"{index} {name}, one away", _text(name, 6 * rounds), (away,), 3, 15.0)
    name = list(STUDIES)[index % 4]
    whats = [KINDS[(index + index // 5) % len(KINDS)], *chance.choices(KINDS, k=events - 1)]
    last = rounds + TUNING * (name == "phases")
    found = []
    for what, site in zip(whats, chance.sample(NAMES, len(whats)), strict=True):
        seconds = cut if what == "cut" else chance.uniform(0.5, 6)
        at = chance.randint(0, last), chance.uniform(0, 3)
        found.append(Event(*at, what, "" if what == "server" else site, seconds))
    return Schedule(f"{index} {name}", _text(name, rounds), tuple(sorted(found, key=lambda e: e.round)))


def _text(name: str, rounds: int) -> str:
    every, algorithm, more = STUDIES[name]
    return BASE.format(training=TRAINING, rounds=rounds, every=every, name=algorithm) + more


# networks


class Namespaces:
    """A bridge, and for every site a namespace with a cable to it."""

    def __init__(self, names: Sequence[str] = NAMES) -> None:
        self.names = names
        self.tag = f"ps{token_hex(3)}"
        self.net = f"10.{random.SystemRandom().randint(64, 250)}.{random.SystemRandom().randint(0, 250)}"
        self.host = f"{self.net}.1"

    def __enter__(self) -> "Namespaces":
        _ip(f"link add {self.tag} type bridge", f"addr add {self.host}/24 dev {self.tag}", f"link set {self.tag} up")
        for k, name in enumerate(self.names):
            space, here, there = f"{self.tag}{name}", f"{self.tag}{name}0", f"{self.tag}{name}1"
            _ip(f"netns add {space}", f"link add {here} type veth peer name {there}", f"link set {there} netns {space}")
            _ip(f"link set {here} master {self.tag}", f"link set {here} up")
            _ip(f"-n {space} addr add {self.net}.{10 + k}/24 dev {there}", f"-n {space} link set {there} up")
            _ip(f"-n {space} link set lo up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            with suppress(subprocess.CalledProcessError):
                _ip(f"netns del {self.tag}{name}")
        _ip(f"link del {self.tag}")

    def inside(self, site: str) -> Sequence[str]:
        return ("ip", "netns", "exec", f"{self.tag}{site}")

    def cut(self, hospital: Hospital) -> None:
        _ip(f"link set {self.tag}{hospital.folder.name}0 down")

    def mend(self, hospital: Hospital) -> None:
        _ip(f"link set {self.tag}{hospital.folder.name}0 up")


class Processes:
    """All in one network: a link that is cut is a courier that stands still."""

    host = "localhost"

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None: ...

    def inside(self, site: str) -> Sequence[str]:
        return ()

    def cut(self, hospital: Hospital) -> None:
        with suppress(ProcessLookupError):
            os.kill(hospital.process.pid, signal.SIGSTOP)

    def mend(self, hospital: Hospital) -> None:
        with suppress(ProcessLookupError):
            os.kill(hospital.process.pid, signal.SIGCONT)


Network = Namespaces | Processes


def network(plain: bool = False, names: Sequence[str] = NAMES) -> Network:
    """Namespaces where they are permitted."""
    try:
        if not plain:
            _ip(f"netns add {(name := f'ps{token_hex(3)}')}", f"netns del {name}")
            return Namespaces(names)
    except (OSError, subprocess.CalledProcessError):
        pass
    return Processes()


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True, stdin=subprocess.DEVNULL)


# what happens


class Coordinator:
    """``polysite deploy run``, which goes on where it was killed."""

    def __init__(self, folder: Path, project: Path, schedule: Schedule):
        self.folder, self.project, self.schedule = folder, project, schedule
        self.run, self.resumed = folder / "run", 0
        self.lock = threading.Lock()
        (folder / "study.toml").write_text(schedule.text)
        self.start()

    def start(self) -> None:
        known = (self.run / "deployment.json").exists()
        self.resumed += known
        what = ["--resume", str(self.run)] if known else [str(self.folder / "study.toml"), "--out", str(self.run)]
        terms = ["--min-sites", str(self.schedule.quorum), "--deadline", str(self.schedule.deadline)]
        command = ["-m", "polysite.cli", "deploy", "run", *what, "--project", str(self.project), *terms]
        with (self.folder / "server.txt").open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--no-assess", "--json"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=environment(),
            )

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill_for(self, seconds: float) -> None:
        with self.lock:
            self.kill()
            time.sleep(seconds)
            self.start()

    def poll(self) -> int | None:
        """The exit code of one that was not killed."""
        with self.lock:
            return self.process.poll()

    @property
    def records(self) -> list[RoundRecord]:
        return RunFolder(self.run).records() if (self.run / "rounds.jsonl").exists() else []


@dataclass(frozen=True)
class Stage:
    """The hospitals, running."""

    folder: Path
    hospitals: Mapping[str, Hospital]
    wires: Network


@contextmanager
def staged(folder: Path, plain: bool = False) -> Iterator[Stage]:
    with network(plain) as wires:
        consortium(folder, NAMES, host=wires.host)
        with open_hospitals(folder, NAMES, wires.inside) as hospitals:
            yield Stage(folder, hospitals, wires)


class Play:
    """A schedule as it happens."""

    def __init__(self, stage: Stage, server: Coordinator):
        self.stage, self.server = stage, server
        self.over = threading.Event()
        self.happened: list[tuple[Event, float]] = []
        self.complaints: list[str] = []

    def go(self, events: Sequence[Event]) -> None:
        """From when the study has begun until it has ended; what has not happened by then does not."""
        sites, server = self.stage.hospitals.values(), self.server
        until(lambda: server.poll() is not None or (server.run.exists() and all(s.ready for s in sites)), LIMIT)
        threads = [threading.Thread(target=self._happen, args=(event,)) for event in events]
        for thread in threads:
            thread.start()
        try:
            until(lambda: self.server.poll() is not None, LIMIT)
        except AssertionError:
            self.complaints.append(f"the study did not end within {LIMIT:.0f} s")
        self.over.set()
        for thread in threads:
            thread.join()

    def _happen(self, event: Event) -> None:
        if not self._await(lambda: len(self.server.records) >= event.round) or self.over.wait(event.delay):
            return
        self.happened.append((event, time.time()))
        if event.what == "server":
            self.server.kill_for(event.seconds)
            return
        hospital, wires = self.stage.hospitals[event.site], self.stage.wires
        if event.what == "cut":
            wires.cut(hospital)
            self.over.wait(event.seconds)
            wires.mend(hospital)
            return
        hospital.kill(courier=event.what != "worker", worker=event.what != "courier")
        if event.what == "away":
            there = len(self.server.records) + event.seconds
            self._await(lambda: len(self.server.records) >= there)
            self.complaints += remembers(hospital.folder, self.server.run)
        elif event.what != "worker":  # which is started again by the courier
            self.over.wait(event.seconds)
        if event.what != "worker":
            hospital.start()

    def _await(self, true: Callable[[], bool]) -> bool:
        while not true():
            if self.over.wait(0.1):
                return False
        return True


def play(schedule: Schedule, stage: Stage, folder: Path, simulated: Path | None) -> list[str]:
    """What is wrong afterwards; nothing, if all is well. ``simulated``: the same study, undisturbed."""
    folder.mkdir(parents=True)
    server = Coordinator(folder, stage.folder / "project", schedule)
    play = Play(stage, server)
    try:
        play.go(schedule.events)
        code, run = server.poll(), server.run
    finally:
        server.kill()
    (folder / "happened.txt").write_text("".join(f"{datetime.fromtimestamp(t)} {e}\n" for e, t in play.happened))
    if code != 0 or not (run / "result.json").exists():
        return [*play.complaints, f"the server ended with {code}: {_last(folder / 'server.txt')}"]
    found = [*play.complaints, *whole(stage.folder, run), *recorded(stage.folder, run, play.happened, server.resumed)]
    if simulated is not None:
        return [*found, *equal(stage.folder, run, simulated)]
    return [*found, *(c for e, _ in play.happened for c in returned(run, e))]


# what is checked


def whole(folder: Path, run: Path) -> Iterator[str]:
    """Ledgers are whole; memories are what their names say, and those that the study would go on from are there."""
    for name in NAMES:
        try:
            entries = ledger.check(folder / name / "state" / "ledger.jsonl")
        except PolysiteError as problem:
            yield str(problem)
            continue
        failed = (e for e in entries if "error" in e and e["study"] == _id(run))
        yield from (f"{name} failed: {e['kind']}: {e['error']}" for e in failed)
        yield from remembers(folder / name, run)


def remembers(hospital: Path, run: Path) -> Iterator[str]:
    """A site has the version of its memory with which it was last heard."""
    name, records = hospital.name, RunFolder(run).records()
    memories = _state(hospital, run) / "memory"
    for path in memories.glob("round-*.safetensors"):
        try:
            found = checkpoint.load(path)
        except PolysiteError as problem:
            yield str(problem)
            continue
        if (found.site, f"round-{found.version:06d}") != (name, path.stem):
            yield f"{path} is the memory of {found.site}, version {found.version}"
    last = max((r.round for r in records if name in r.sites), default=-1)
    if last >= 0 and not (memories / f"round-{last:06d}.safetensors").exists():
        yield f"{name} was last heard in round {last}, of which it remembers nothing"


def recorded(folder: Path, run: Path, happened: Sequence[tuple[Event, float]], resumed: int) -> Iterator[str]:
    """The record has every incident; seconds are whole there. Where a site was asked nothing more, nobody noticed."""
    found = [i for r in (*RunFolder(run).records(), RunFolder(run).result) for i in r.incidents]
    again = sum("started again" in i["what"] and not i.get("site") for i in found)
    if again < resumed:
        yield f"the server was started again {resumed} times, the record knows of {again}"
    for event, at in happened:
        if not event.site or not any(_seconds(e) > at for e in _asked(folder / event.site, run)):
            continue
        of_site = [i["what"] for i in found if i.get("site") == event.site and _seconds(i) >= int(at)]
        words = "worker" if event.what == "worker" else ""
        if not any(words in what for what in of_site):
            yield f"the record does not know of: {event}; it has {of_site}"


def equal(folder: Path, run: Path, simulated: Path) -> Iterator[str]:
    """Checkpoints, memories and models are those of an undisturbed simulation, bit for bit."""
    one, other = states(simulated), states(run)
    if one.keys() != other.keys():
        yield f"the simulator has the checkpoints {sorted(one)}, the server {sorted(other)}"
    yield from (f"{k} differs" for k in one.keys() & other.keys() if not same(one[k], other[k]))
    for path in (simulated / "sites").glob("*/*.safetensors"):
        mine = checkpoint.load(path)
        there = _state(folder / path.parent.name, run) / "memory" / f"round-{mine.version:06d}.safetensors"
        if not there.exists():
            yield f"{path.parent.name} has no memory of round {mine.version}, which {path.name} goes on from"
        elif not same(mine.content, checkpoint.load(there).content):
            yield f"what {path.parent.name} remembers of round {mine.version} differs"
    for path in (simulated / "models").glob("*.safetensors"):
        kind, _, site = path.stem.partition(".")
        here = run / "models" / path.name
        there = here if here.exists() else _state(folder / (site or NAMES[0]), run) / "models" / f"{kind}.safetensors"
        if not there.exists() or not same(_arrays(path), _arrays(there)):
            yield f"the model {path.name} differs from {there}"
    mine, its = (json.loads((p / "result.json").read_text()) for p in (simulated, run))
    for key in ("best_round", "best_phase", "rounds"):
        if mine[key] != its[key]:
            yield f"{key} is {its[key]}, of the simulator {mine[key]}"
    for part in ("validation", "test"):
        for site, scores in mine[part].items():  # under other names there
            if sorted(map(str, scores.values())) != sorted(map(str, its[part].get(site, {}).values())):
                yield f"the {part} scores of {site} differ"


def returned(run: Path, event: Event) -> Iterator[str]:
    """A site that was away is listed as such, and took part again."""
    there = [event.site in r.sites for r in RunFolder(run).records()]
    absent = [event.site in r.absent for r in RunFolder(run).records()]
    if True not in absent:
        yield f"{event.site} was away, and no record says so"
    elif True not in there[absent.index(True) :]:
        yield f"{event.site} came back, and did not take part again"
    if any(a == b for a, b in zip(there, absent, strict=True)):
        yield f"{event.site} is neither listed as heard nor as absent in some round"


def _id(run: Path) -> str:
    """By which sites know the study."""
    return str(json.loads((run / "deployment.json").read_text())["study"])


def _state(hospital: Path, run: Path) -> Path:
    return hospital / "state" / "runs" / _id(run)


def _asked(hospital: Path, run: Path) -> list[dict[str, Any]]:
    return [e for e in ledger.check(hospital / "state" / "ledger.jsonl") if e.get("study") == _id(run)]


def _arrays(path: Path) -> Mapping[str, Any]:
    from safetensors.numpy import load_file

    return load_file(path)


def _seconds(incident: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(incident["time"]).timestamp()


def _last(path: Path) -> str:
    return " | ".join(path.read_text(errors="replace").strip().splitlines()[-3:])


def simulate(text: str, folder: Path) -> Path:
    """The same study without a network, once."""
    chosen = config.parse(text)
    if not folder.exists():
        study.train(chosen, folder, page=False)
    return folder


def main() -> None:
    given = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave nothing running behind
    folder = given.out or Path(mkdtemp(prefix="faults-"))
    print(f"{type(network(given.no_netns)).__name__.lower()}; below {folder}", flush=True)
    failed = 0
    with staged(folder / "consortium", given.no_netns) as stage:
        for index in range(given.first, given.first + given.schedules):
            schedule = draw(given.seed, index, given.rounds, given.cut)
            reference = simulate(schedule.text, folder / f"simulated-{index % 4}") if schedule.exact else None
            began = time.monotonic()
            found = play(schedule, stage, folder / str(index), reference)
            failed += bool(found)
            how = f"{'FAILED' if found else 'passed'} in {time.monotonic() - began:.0f} s"
            print(f"{schedule.name}: {how}: {'; '.join(map(str, schedule.events))}", flush=True)
            for complaint in found:
                print(f"    {complaint}", flush=True)
    print(f"{given.schedules - failed} of {given.schedules} schedules passed")
    sys.exit(bool(failed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cut", type=float, default=20.0, help="seconds that a link is cut")
    parser.add_argument("--no-netns", action="store_true", help="plain processes")
    parser.add_argument("--out", type=Path, help="a new folder; a temporary one by default")
    return parser.parse_args()


if __name__ == "__main__":
    main()
