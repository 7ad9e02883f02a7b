"""A study over many real hospitals on one machine: 30 ``polysite site run`` processes with tiny networks, 20 rounds.

The project is a remote one: every hospital makes its own key, and its request is signed. Sites are started a few at a
time, since each imports torch. ``polysite deploy run`` then trains over Flower with TLS. The script prints the seconds,
the memory of all processes together (proportional set size: shared pages count once), and the incidents on record. It
ends with exit code 1 unless every site took part in every round. ``--simulate`` trains the same study in one process
and compares all checkpoints bit for bit.

    python bench/sites.py --sites 30 --rounds 20 --simulate
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from zipfile import ZipFile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the hospitals have it
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from consortium import Hospital, change, environment, free_port, same, states, until
from polysite import config, study
from polysite.deploy import enrolment, project
from polysite.engines.run_folder import RunFolder

STUDY = """
[data]
name = "phantom"
shape = [24, 24, 24]
{hospitals}
[train]
patch = [16, 16, 16]
batch = 4
device = "cpu"
[model]
name = "unet_small"
filters = [2, 4, 4]
[run]
rounds = {rounds}
validate_every = 5
guard.use = "on"
"""
LIMIT = 3600.0  # seconds


def main() -> int:
    given = options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave nothing running behind
    folder = given.out or Path(mkdtemp(prefix="sites-"))
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"s{k:02d}" for k in range(1, given.sites + 1)]
    text = STUDY.format(rounds=given.rounds, hospitals="\n".join(map(hospital, range(given.sites), names)))
    (folder / "study.toml").write_text(text)
    began = time.monotonic()
    enrolled(folder, names)
    print(f"{len(names)} hospitals enrolled in {time.monotonic() - began:.1f} s", flush=True)
    with Memory() as memory, opened(folder, names, given.at_once):
        print(f"started in {time.monotonic() - began:.0f} s; {memory}", flush=True)
        began = time.monotonic()
        code = deployed(folder, len(names))
        seconds = time.monotonic() - began
    print(f"the study took {seconds:.0f} s; {memory}", flush=True)
    failed = [f"'polysite deploy run' ended with {code}", *last(folder / "server.txt")] if code else []
    failed = failed or list(examined(folder / "run", names, given.rounds))
    if given.simulate and not failed:
        failed = list(compared(text, folder))
    for complaint in failed:
        print(f"FAILED: {complaint}")
    if not given.out and not failed:
        shutil.rmtree(folder)
    return int(bool(failed))


def hospital(number: int, name: str) -> str:
    """Return the section of a hospital with a scanner of its own."""
    return f"[data.sites.{name}]\ncases = {9 + number % 3}\nscanner = {number}\ncontrast = {0.1 * (number % 5):.1f}"


def enrolled(folder: Path, names: Sequence[str]) -> None:
    """Make a project; every hospital makes its key and gets its certificate."""
    project.init(folder / "project", names, f"localhost:{free_port()}", local=False)
    for name in names:
        with ZipFile(folder / "project" / "sites" / f"{name}.zip") as archive:
            archive.extractall(folder / name)
        request, _ = enrolment.enrol(folder / name)
        made = enrolment.sign(folder / "project", request)
        enrolment.install(folder / name, made.certificate)
        change(folder / name / "site.toml", 'device = "auto"', 'device = "cpu"')


@contextmanager
def opened(folder: Path, names: Sequence[str], at_once: int) -> Iterator[None]:
    """Start the hospitals, so many at once, and end them."""
    with ExitStack() as stack:
        for first in range(0, len(names), at_once):
            begun: list[Hospital] = []
            for name in names[first : first + at_once]:
                begun.append(Hospital(folder / name))
                stack.callback(begun[-1].kill)
            until(lambda begun=begun: all("connecting to" in each.screen for each in begun), LIMIT)
        yield


def deployed(folder: Path, quorum: int) -> int:
    """Run the study with all hospitals; return the exit code."""
    words = ["deploy", "run", str(folder / "study.toml"), "--project", str(folder / "project"), "--no-assess", "--json"]
    words += ["--out", str(folder / "run"), "--min-sites", str(quorum), "--wait", "600"]
    with (folder / "server.txt").open("wb") as out:
        return subprocess.run(
            [sys.executable, "-m", "polysite.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment(),
            timeout=LIMIT,
        ).returncode


def examined(run: Path, names: Sequence[str], rounds: int) -> Iterator[str]:
    """Print seconds and incidents of a finished run; yield what is missing."""
    folder = RunFolder(run)
    records, result = folder.records(), folder.result
    each = [b.elapsed - a.elapsed for a, b in pairwise(records)]
    print(f"{len(records)} rounds; seconds of a round after the first: {min(each):.1f} to {max(each):.1f}")
    incidents = [i for r in (*records, result) for i in r.incidents]
    print(f"{len(incidents)} incidents: {dict(Counter(i['what'] for i in incidents)) or 'none'}")
    if len(records) != rounds:
        yield f"{len(records)} of {rounds} rounds"
    for record in records:
        if absent := sorted(set(names) - record.sites.keys()):
            yield f"round {record.round + 1} was without {', '.join(absent)}"
    if unscored := sorted(name for name in names if not result.test.get(name)):
        yield f"no test scores of {', '.join(unscored)}"


def compared(text: str, folder: Path) -> Iterator[str]:
    """Yield the checkpoints that differ from those of the simulator."""
    began = time.monotonic()
    study.train(config.parse(text), folder / "simulated", evaluate=False, page=False)
    one, other = states(folder / "simulated"), states(folder / "run")
    print(f"simulated in {time.monotonic() - began:.0f} s: {len(one)} checkpoints compared")
    yield from (f"checkpoint {k} differs" for k in one.keys() | other.keys() if not same(one.get(k), other.get(k)))


class Memory:
    """The largest memory of all processes that this one started, and theirs, looked at every second."""

    def __init__(self) -> None:
        self.peak: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(1.0):
            now: dict[str, list[float]] = {}
            for pid, words in processes():
                now.setdefault(role(words), []).append(proportional(pid))
            now.pop("", None)
            for kind, sizes in now.items():
                self.peak[f"largest {kind}"] = max(self.peak.get(f"largest {kind}", 0.0), max(sizes))
            together = sum(map(sum, now.values()))
            self.peak["all together"] = max(self.peak.get("all together", 0.0), together)

    def __str__(self) -> str:
        return "peak memory " + ", ".join(f"{k} {v / 1e9:.2f} GB" for k, v in sorted(self.peak.items()))


def processes() -> Iterator[tuple[int, str]]:
    """Yield every process that has this one, or a hospital's courier, as its ancestor, with its command line."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    for pid in parents:
        above = pid
        while above not in (0, os.getpid()):
            above = parents.get(above, 0)
        if above and pid != os.getpid():
            try:
                yield pid, Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue


def role(words: str) -> str:
    """Return what a process is by its command line."""
    kinds = {"site.process": "worker", "site run": "courier", "deploy run": "server"}
    return next((kind for text, kind in kinds.items() if text in words), "")


def proportional(pid: int) -> float:
    """Return the bytes of a process, with its share of what it shares with others."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0.0)


def last(path: Path) -> list[str]:
    return path.read_text(errors="replace").strip().splitlines()[-3:]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=3, help="sites that start at the same time")
    parser.add_argument("--simulate", action="store_true", help="compare with the simulator")
    parser.add_argument("--out", type=Path, help="a new folder with a short path; a temporary one by default")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
