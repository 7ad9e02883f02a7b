"""What ``polysite site run`` does: carry questions to the worker and answers back, and show both.

The courier connects outwards, to one address; it knows Flower and neither torch nor the data. The worker is a process
of its own, which it starts, and finds again after a crash. What is on the screen is also in the ledger, which the
worker writes.
"""

import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from polysite.deploy.flower.client import Asked, Fleet, Lost
from polysite.deploy.project import SiteConfig
from polysite.deploy.site import ipc
from polysite.errors import PayloadError, RunError, shown

log = logging.getLogger("polysite")

DEATHS = 3  # of the worker over one question; then it is answered that it cannot be
MOST = 16  # incidents that are kept to be told
SOON, LATER = 0.02, 1.0  # seconds between two looks for a question: after the last one, and when none comes

Say = Callable[[str], None]


class Resident:
    """The worker, from the courier's side."""

    def __init__(self, site: SiteConfig, say: Say):
        self.site, self.say = site, say
        self.incidents: list[str] = []  # here, which the coordinator is told with the next answer
        self.words = ""  # what it said of its cases when it started
        self._study = ""  # in which they happened
        self._line: socket.socket | None = None
        self._pid = 0
        self._mourned = False  # its death was told

    def ask(self, header: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Its answer, however often it has to be started again; not more often than it makes sense."""
        study = shown(header.get("study"), 64)
        if self._study not in ("", study):
            self.incidents = []  # what happened between two studies concerns neither
        self._study = study
        for death in range(1, DEATHS + 1):
            try:
                line = self.line()
                ipc.send(line, {"request": dict(header), "incidents": self.incidents}, body)
                frame = ipc.receive(line)
            except (OSError, RunError) as problem:
                log.warning("%s", problem)
                frame = None
            if frame is not None:
                return frame
            self._drop()
            self._mourned = True
            kind = shown(header.get("kind"), 40)
            self.tell(f"the worker died over {kind!r} ({death} of {DEATHS}); it is started again")
        return {"error": f"its worker died {DEATHS} times over this; its own log says why"}, b""

    def tell(self, what: str) -> None:
        """Something happened here: for the screen, and for the coordinator's record."""
        self.say(what)
        self.incidents = [*self.incidents, what][-MOST:]

    def line(self) -> socket.socket:
        """The connection to a worker that runs with this configuration; one is started if there is none."""
        if self._line is None:
            self._line, self._mourned = self._find() or self._start(), False
        return self._line

    def stop(self) -> None:
        """The end of it, also in the midst of something: what it remembers is on disk."""
        self._drop()
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)
            self.site.socket.unlink(missing_ok=True)

    def _drop(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _find(self) -> socket.socket | None:
        """A worker that an earlier courier left behind, unless the configuration has changed since."""
        try:
            line = ipc.connect(self.site.socket)
            ipc.send(line, {"courier": "ping"})  # a key of our own: what the coordinator asks is below "request"
            frame = ipc.receive(line)  # one that is busy finishes first what it was asked
        except FileNotFoundError:
            return None
        except OSError:
            if not self._mourned:
                self.tell("the former worker was killed")
            return None
        if frame is not None and frame[0].get("config") == self.site.fingerprint:
            self._pid, self.words = int(frame[0]["pid"]), str(frame[0]["cases"])
            return line
        if frame is not None:
            ipc.send(line, {"courier": "stop"})
        line.close()
        return None

    def _start(self) -> socket.socket:
        written = self.site.state / "worker.log"
        said = written.open("ab")
        before = said.tell()
        command = [sys.executable, "-m", "polysite.deploy.site.process", str(self.site.path)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, start_new_session=True
        )
        said.close()
        with cast(BinaryIO, process.stdout) as out:
            first, _, self.words = out.readline().decode().strip().partition(" ")
        if first != "ready":
            code = process.wait()
            words = written.read_bytes()[before:].decode(errors="replace").strip().splitlines()
            killed = f"it was killed by {signal.Signals(-code).name}" if code < 0 else "it said nothing"
            reason = words[-1].removeprefix("polysite: ") if words else killed
            raise RunError(f"the worker did not start: {reason}")
        self._pid = process.pid
        return ipc.connect(self.site.socket)


def run(site: SiteConfig, say: Say) -> None:
    """Serve until interrupted."""
    site.state.mkdir(parents=True, exist_ok=True)
    site.state.chmod(0o700)
    with _alone(site.state) as killed:
        worker = Resident(site, say)
        if killed:
            worker.tell("the former courier was killed")
        worker.line()
        say(f"{site.name}: {worker.words}; {site.policy.name} read; connecting to {site.server}")
        try:
            while True:
                _serve(site, worker, say)
        finally:
            worker.stop()


def _serve(site: SiteConfig, worker: Resident, say: Say) -> None:
    """From one connection to its loss."""
    with Fleet(site.server, key=site.key, certificate=site.certificate, ca=site.ca) as fleet:
        _connect(fleet, say)
        say(f"connected to {site.server}; waiting to be asked")
        busy = time.monotonic()
        try:
            while True:
                if _turn(fleet, worker, say):
                    busy = time.monotonic()
                else:
                    time.sleep(min(SOON + (time.monotonic() - busy) / 20, LATER))
        except Lost as problem:
            worker.tell(f"the connection was lost: {problem}")


def _turn(fleet: Fleet, worker: Resident, say: Say) -> bool:
    """Answer a question, if there is one."""
    try:
        asked = fleet.receive()
        if asked is None:
            return False
        if fleet.answer(asked, *_answer(worker, asked, say)):
            worker.incidents = []
    except PayloadError as problem:  # no message, or an answer that is too large: the next one may be better
        worker.tell(str(problem))
    return True


def _connect(fleet: Fleet, say: Say) -> None:
    """Try until it works, or until it is clear that it never will."""
    said, pause = "", 0.5
    while True:
        try:
            return fleet.connect()
        except RunError as problem:
            if getattr(problem, "hopeless", False):
                raise
            if str(problem) != said:
                say(f"{problem}; trying again (it listens while a study runs)")
                said = str(problem)
            time.sleep(pause)
            pause = min(2 * pause, 5.0)


def _answer(worker: Resident, asked: Asked, say: Say) -> tuple[dict[str, Any], bytes]:
    header = asked.header
    number = header.get("round")
    where = f", round {number + 1}" if isinstance(number, int) else ""
    say(f"asked: {shown(header.get('kind'), 40)}{where}; {_size(len(asked.body))} came in")
    answer, body = worker.ask(header, asked.body)
    mine = answer.pop("local", "")  # words for this screen alone
    if answer.get("refused"):
        say(f"refused: {answer['refused']}")
    elif answer.get("error"):
        say(f"failed here: {mine or answer['error']}; the coordinator was told no more than: {answer['error']}")
    else:
        left = ", ".join(f"{name} ({what})" for name, what in json.loads(str(answer.get("left", "{}"))).items())
        size = len(body) + len(str(answer.get("scores", ""))) + len(str(answer.get("measures", "")))
        say(f"left: {left or 'nothing'}; {_size(size)} in all, after {float(answer.get('seconds', 0)):.1f} s")
    return answer, body


def _size(count: int) -> str:
    """
    >>> _size(90_300_000), _size(12)
    ('90.3 MB', '12 bytes')
    """
    return f"{count / 1e6:.1f} MB" if count > 99_999 else f"{count} bytes"


@contextmanager
def _alone(state: Path) -> Iterator[bool]:
    """One courier a site; true if the one before did not end by itself."""
    with (state / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            raise RunError(f"'polysite site run' is already running for {state}") from problem
        file.seek(0)
        killed = bool(file.read())
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield killed
        finally:
            file.truncate(0)
