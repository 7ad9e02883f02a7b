"""Kill training, assessment, tuning, evaluation and report writing at random moments; check what is left on the disk.

Every command is the real one, in a process of its own: a fork of this one, which has imported the libraries, or with
``--interpreters`` a new Python; the workers of a search always are. First every command runs undisturbed, which gives
its duration, its number of file operations and its result. Then processes are killed with SIGKILL

* at a moment: after a part of the duration that is drawn;
* at an operation: before one of its file operations (open to write, rename, link, remove, make a folder, chmod);
* torn: there, after the file that is being written was cut short or a line was appended in part.

After every kill all files in the folder must be readable or absent (``kill_checks.py``), and the same command, with
``--resume`` for a run, goes on. Its end must be that of the undisturbed command bit for bit, and at most the round in
flight is repeated. The same seed draws the same kills; moments also depend on the load of the machine.

    python scripts/kills.py --kills 200 --seed 0
"""

import argparse
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # also keeps this process free of threads, so that it can be forked
sys.path.insert(0, str(Path(__file__).parent))

import kill_checks as checks
import nibabel
import numpy as np

from polysite import own_process

KINDS = ("moment", "operation", "torn")
IN_A_ROW = 6  # kills until a command may come to its end
LIMIT = 300.0  # seconds that a command may take
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
OPERATIONS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.chmod", "os.truncate", "os.symlink"}
STUDY = """
[data]
name = "files"
path = "{data}"
[model]
filters = [2, 4, 4]
[train]
patch = [16, 16, 16]
device = "cpu"
steps = 2
[assess]
permutations = 99
resamples = 100
[run]
rounds = {rounds}
checkpoint_every = 1
{more}
"""
TRAININGS = {  # what each keeps: memories of sites; the own best round of every site; two phases and heads of sites
    "scaffold": (6, '[algorithm]\nname = "scaffold"\n'),
    "own best": (6, 'best = "own"\n[algorithm]\nname = "ditto"\n'),
    "phases": (4, '[algorithm]\nname = "fedavg"\n[[then]]\nalgorithm.name = "fine_tune"\nrun.rounds = 2\n'),
}

COMPARED = ("train scaffold", "train own best")  # runs that the last commands read


@dataclass(frozen=True)
class Course:
    """A command that is killed and given again until it comes to its end.

    Args:
        name: What the table calls it.
        command: The words after ``polysite``, by what is in the folder.
        readable: Yields what cannot be read in the folder.
        differs: Yields what differs from an undisturbed folder.
        prepare: Makes what the command starts from.
        trains: The folder has a run in ``run``, whose rounds are counted.
        group: Kill the processes that it started, too; otherwise it alone, in half of the cases.
        made: A folder that appears as a whole; once it is there, the command is over and would refuse to overwrite it.
    """

    name: str
    command: Callable[[Path], list[str]]
    readable: Callable[[Path], Iterator[str]]
    differs: Callable[[Path, Path], Iterator[str]]
    prepare: Callable[[Path], object] = lambda folder: folder.mkdir()
    trains: bool = False
    group: bool = True
    made: str = ""

    def is_over(self, folder: Path) -> bool:
        """Whether the last thing that the command makes is there."""
        return bool(self.made) and (folder / self.made).exists()


@dataclass(frozen=True)
class Measured:
    """An undisturbed command."""

    folder: Path
    seconds: float
    operations: int


@dataclass
class Tally:
    """What came of the kills of one course."""

    kills: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    ends: int = 0
    repeated: list[int] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


# processes


class Process:
    """A polysite command in a process of its own, in a session of its own."""

    def __init__(self, words: list[str], folder: Path, interpreter: bool, fatal: "Fatal"):
        self.folder = folder
        if interpreter:
            with (folder / "screen.txt").open("ab") as out:
                command = [sys.executable, "-m", "polysite.cli", *words]
                self.pid = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=folder
                ).pid
            return
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            self._become(words, fatal)

    def _become(self, words: list[str], fatal: "Fatal") -> None:
        """Be the command line in a forked process."""
        code = 70
        try:
            os.setsid()
            os.chdir(self.folder)
            screen = os.open(self.folder / "screen.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(screen, stream)
            sys.argv = ["polysite", *words]
            sys.addaudithook(fatal)
            from polysite.cli import main

            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, negative for a signal; None if the process is still there after so many seconds."""
        end = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= end:
                return None
            time.sleep(0.002)

    def kill(self, group: bool) -> int:
        """Kill the process, or all of its session; return its exit code, which it may have had before."""
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, signal.SIGKILL)
        code = self.wait(LIMIT)
        assert code is not None
        return code

    def end_group(self) -> None:
        """End what is left of the session."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


@dataclass
class Fatal:
    """An audit hook that counts file operations below the folder, and kills the process before one of them.

    Args:
        folder: Where operations count: below it are the folder of the command and the cache.
        at: Number of the fatal operation; 0 for none.
        torn: Cut the file short that is written, or append half a line, before the kill.
        seed: Decides where it is cut.
    """

    folder: Path
    at: int = 0
    torn: bool = False
    seed: int = 0
    count: int = 0
    dying: bool = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count an operation; the last one is never carried out."""
        if self.dying or (event != "open" and event not in OPERATIONS) or not self._counts(event, arguments):
            return
        self.count += 1
        if self.at and self.count >= self.at and (not self.torn or self._tear(event, Path(str(arguments[0])))):
            os.kill(os.getpid(), signal.SIGKILL)

    def _counts(self, event: str, arguments: tuple[Any, ...]) -> bool:
        path, flags = arguments[0], arguments[2] if event == "open" else WRITES
        if not isinstance(path, str | Path) or not (isinstance(flags, int) and flags & WRITES):
            return False
        here = str(Path.cwd() / path)
        return here.startswith(str(self.folder)) and not here.endswith(("screen.txt", ".lock", "log.txt"))

    def _tear(self, event: str, path: Path) -> bool:
        """Leave a file half-written, as a kill in the middle of a write does; return whether this one was written."""
        self.dying = True
        chance = random.Random(self.seed)
        if event == "open" and path.name.endswith(".jsonl") and path.exists():
            line = path.read_bytes().splitlines()[-1:] or [b'{"round": 0, "phase": 0, "sites": {"north": {"loss": 1']
            with path.open("ab") as file:
                file.write(line[0][: chance.randrange(1, len(line[0]))])
            return True
        written = event in ("os.rename", "os.chmod") and path.is_file() and path.name.endswith(".partial")
        if written and path.stat().st_nlink == 1:  # no second name of a finished file
            os.truncate(path, chance.randrange(path.stat().st_size + 1))
            return True
        self.dying = False
        return False


# courses


def data(folder: Path) -> Path:
    """Write three small hospitals as NIfTI files."""
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(*[np.arange(24)] * 3, indexing="ij"), -1)
    for k, site in enumerate(("east", "north", "south")):
        for number in range(6):
            centre, home = rng.uniform(8, 16, 3), folder / site / f"c{number}"
            home.mkdir(parents=True)
            inside = np.linalg.norm(grid - centre, axis=-1) < rng.uniform(3, 6)
            image = 100 + 20 * k + (60 + 20 * k) * inside + rng.normal(0, 10, inside.shape)
            for name, array in (("t1", image.astype(np.float32)), ("seg", inside.astype(np.uint8))):
                nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), home / f"{name}.nii.gz")  # type: ignore[attr-defined]
    return folder


def courses(scans: Path, runs: Path) -> list[Course]:
    """Return what is killed; the later ones read the runs of the first, which are copied for them."""

    def start(text: str) -> Callable[[Path], None]:
        def make(folder: Path) -> None:
            folder.mkdir()
            (folder / "study.toml").write_text(text)

        return make

    def trained(folder: Path) -> list[str]:
        known = (folder / "run" / "config.toml").exists()
        return ["train", *(["--resume", "run"] if known else ["study.toml", "--out", "run"]), "--quiet"]

    def copied(folder: Path) -> None:
        folder.mkdir()
        shutil.copytree(runs / "scaffold" / "run", folder / "run")

    listed = [
        Course(
            f"train {name}", trained, lambda f: checks.run(f / "run"),
            lambda f, g: checks.different_runs(f / "run", g / "run"),
            start(STUDY.format(data=scans, rounds=rounds, more=more)), trains=True,
        )
        for name, (rounds, more) in TRAININGS.items()
    ]  # fmt: skip
    plain = start(STUDY.format(data=scans, rounds=4, more=""))
    search = ["--method", "fedavg", "--method", "fedprox", "--trainings", "6", "--inner", "2", "--jobs", "1", "--quiet"]
    pair = [str(runs / name.removeprefix("train ") / "run") for name in COMPARED]
    return [
        *listed,
        Course("assess", lambda f: ["assess", "study.toml", "--out", "found", "--quiet"],
               lambda f: checks.assessment(f / "found"), lambda f, g: checks.different_files(f / "found", g / "found"),
               plain, made="found"),
        # the workers of a search are processes of their own: in half of the cases it is killed without them
        Course("tune", lambda f: ["tune", "study.toml", *search, "--out", "found"],
               lambda f: checks.search(f / "found"),
               lambda f, g: checks.different_files(f / "found", g / "found", ("candidates.csv", "best.toml")),
               plain, group=False),
        Course("evaluate", lambda f: ["evaluate", "run", "--again", "--quiet"], lambda f: checks.evaluated(f / "run"),
               lambda f, g: checks.different_runs(f / "run", g / "run"), copied),
        Course("compare", lambda f: ["compare", *pair, "--out", "found", "--quiet"],
               lambda f: checks.comparison(f / "found"), lambda f, g: checks.different_files(f / "found", g / "found"),
               made="found"),
        Course("report", lambda f: ["report", "run"], lambda f: checks.run(f / "run"),
               lambda f, g: checks.different_files(f / "run", g / "run"), copied),
    ]  # fmt: skip


# kills


def undisturbed(course: Course, folder: Path, interpreter: bool) -> Measured:
    """Run a command to its end; return its folder, duration and number of file operations.

    The workers of a search count their own operations nowhere, so that it is killed at moments only.
    """
    course.prepare(folder)
    mine, its = os.pipe()
    began = time.monotonic()
    process = Process(course.command(folder), folder, interpreter, Counting(folder.parent, pipe=its))
    code = process.wait(LIMIT)
    seconds = time.monotonic() - began
    os.close(its)
    with os.fdopen(mine, "rb") as told:
        operations = len(told.read()) if course.group else 0
    if code != 0:
        process.end_group()
        raise SystemExit(f"{course.name} ended with {code} without a kill: {_last(folder / 'screen.txt')}")
    if found := list(course.readable(folder)):
        raise SystemExit(f"{course.name}, without a kill: {'; '.join(found)}")
    return Measured(folder, seconds, operations)


@dataclass
class Counting(Fatal):
    """An audit hook that writes a byte to a pipe for every operation."""

    pipe: int = -1

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Tell the pipe of an operation."""
        if (event == "open" or event in OPERATIONS) and self._counts(event, arguments):
            os.write(self.pipe, b".")


def kill(course: Course, known: Measured, folder: Path, kills: int, chance: random.Random, interpreter: bool,
         tally: Tally) -> None:  # fmt: skip
    """Start a command in a new folder, kill it up to so many times, let it end, and note what is wrong in the tally."""
    course.prepare(folder)
    killed, run, before = 0, folder / "run", (0, 0)
    while True:
        left = kills - killed
        kind = chance.choice(KINDS if known.operations and not interpreter else KINDS[:1]) if left > 0 else ""
        share = 1.0 if not course.trains else 0.7  # a run goes on where it was, so that later kills reach its end
        at = chance.randint(1, max(1, int(share * known.operations))) if kind in KINDS[1:] else 0
        fatal = Fatal(folder.parent, at, kind == "torn", chance.randrange(1 << 30))
        process = Process(course.command(folder), folder, interpreter, fatal)
        after = chance.uniform(0, share * known.seconds) if kind == "moment" else LIMIT
        group = course.group or chance.random() < 0.5
        code = process.wait(after)
        if code is None:
            code = process.kill(group)
        if course.trains:
            tally.repeated += checks.repeated(run, before)
            before = checks.rounds_done(run), checks.logged(run)
        found = list(course.readable(folder))
        if code == -signal.SIGKILL:
            killed += 1
            tally.kills[kind] += 1
            tally.phases[checks.phase(run) if course.trains else course.name] += 1
        if found or code != -signal.SIGKILL or course.is_over(folder):
            break
    process.end_group()
    if code != 0 and not found and not course.is_over(folder):
        found = [f"ended with {code}: {_last(folder / 'screen.txt')}"]
    if not found:
        tally.ends += 1
        found = [*course.differs(folder, known.folder), *checks.drafts(folder)]
    tally.complaints += [f"{folder}, after {killed} kills: {each}" for each in found]
    if not found:
        shutil.rmtree(folder)


def _last(path: Path) -> str:
    return " | ".join(path.read_text(errors="replace").strip().splitlines()[-3:]) if path.exists() else ""


def play(
    folder: Path, kills: int, seed: int, only: tuple[str, ...], interpreter: bool, seconds: float
) -> Mapping[str, Tally]:
    """Kill every course in turn until there were so many kills, or so many seconds have passed."""
    os.environ["POLYSITE_CACHE"] = str(folder / "cache")
    _import()
    every = courses(data(folder / "data"), folder)
    tallies = {c.name: Tally() for c in every if not only or c.name in only}
    known: dict[str, Measured] = {}
    for each in (c for c in every if c.name in tallies or c.name in COMPARED):
        known[each.name] = found = undisturbed(each, folder / each.name.removeprefix("train "), interpreter)
        print(f"{each.name}: {found.seconds:.1f} s, {found.operations} file operations, without a kill", flush=True)
    chosen, number = [c for c in every if c.name in tallies], 0
    end = time.monotonic() + seconds
    while (done := sum(t.kills.total() for t in tallies.values())) < kills and time.monotonic() < end:
        course, chance = chosen[number % len(chosen)], random.Random(f"{seed} {number}")
        most = min(IN_A_ROW if course.name != "tune" else 4, kills - done)
        tally = tallies[course.name]
        before = len(tally.complaints)
        kill(course, known[course.name], folder / f"{number:03d}", most, chance, interpreter, tally)
        for complaint in tally.complaints[before:]:
            print(f"    {course.name}: {complaint}", flush=True)
        number += 1
    for complaint in checks.cache(folder / "cache"):
        print(f"    {complaint}", flush=True)
        next(iter(tallies.values())).complaints.append(complaint)
    return tallies


def _import() -> None:
    """Import what the commands import, and start no threads."""
    own_process.begin()
    from polysite import assessment, cli, evaluation, study, tuning  # noqa: F401
    from polysite.report import publish, tables  # noqa: F401


def table(tallies: Mapping[str, Tally]) -> Iterator[str]:
    """Yield the lines of the result."""
    yield f"{'command':18} kills  moment operation torn  ends  failed  rounds repeated"
    for name, t in tallies.items():
        again = f"{Counter(t.repeated)[1]} of {len(t.repeated)} resumptions one" if t.repeated else ""
        again += f", {sum(n > 1 for n in t.repeated)} more than one" if any(n > 1 for n in t.repeated) else ""
        each = f"{t.kills['moment']:6} {t.kills['operation']:9} {t.kills['torn']:4}"
        yield f"{name:18} {t.kills.total():5} {each} {t.ends:5} {len(t.complaints):7}  {again}"
    phases = sum((t.phases for t in tallies.values()), Counter[str]())
    yield "killed while: " + ", ".join(f"{name} {count}" for name, count in phases.most_common())


def main() -> int:
    """Kill processes; return 1 if anything is wrong afterwards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], help="a command of the table; all by default")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no other course after this time")
    parser.add_argument("--interpreters", action="store_true", help="new interpreters; kills at moments only")
    parser.add_argument("--out", type=Path, help="a new folder; a temporary one by default, removed if all is well")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = (given.out or Path(mkdtemp(prefix="kills-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    tallies = play(folder, given.kills, given.seed, tuple(given.only), given.interpreters, given.seconds)
    print("\n".join(table(tallies)))
    repeated = any(n > 1 for t in tallies.values() for n in t.repeated)
    failed = repeated or any(t.complaints for t in tallies.values())
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    kills = sum(t.kills.total() for t in tallies.values())
    print(f"{kills} kills in {time.monotonic() - began:.0f} s, at most {peak:.0f} MiB a process: "
          f"{'FAILED' if failed else 'nothing unreadable, no difference'}")  # fmt: skip
    if not failed and not given.out:
        shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
