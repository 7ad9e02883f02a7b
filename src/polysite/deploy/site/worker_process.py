"""The worker as the process sees it that carries requests to it: start, ask, stop.

Nothing here knows which engine brings the requests: the courier of Flower (``courier.py``) and the executor of NVIDIA
FLARE (``deploy/flare/executor.py``) both hold a ``WorkerProcess``.
"""

import fcntl
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from polysite.buffers import Buffer
from polysite.deploy.project import SiteConfig
from polysite.deploy.site import ipc
from polysite.deploy.site.withdrawn import LEFT
from polysite.errors import PayloadError, RunError, shown
from polysite.own_process import worker_command
from polysite.storage import private_folder

log = logging.getLogger("polysite")

MAX_CRASHES = 3  # of the worker over one request, which then fails
MAX_INCIDENTS = 16  # that are kept for the coordinator

Say = Callable[[str], None]


class WorkerProcess:
    """The worker, from the courier's side."""

    def __init__(self, site: SiteConfig, say: Say):
        self.site, self.say = site, say
        self.incidents: list[str] = []  # sent to the coordinator with the next response
        self.words = ""  # the worker's description of its cases
        self._study = ""  # of the incidents
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def ask(self, header: Mapping[str, Any], body: Buffer) -> tuple[dict[str, Any], Buffer]:
        """Return the worker's response; a worker that crashes is started again, at most MAX_CRASHES times."""
        study = shown(header.get("study"), 64)
        if self._study not in ("", study):
            self.incidents = []  # those of another study
        self._study = study
        for crash in range(1, MAX_CRASHES + 1):
            try:
                line = self.line()
                ipc.send(line, {"request": dict(header), "incidents": self.incidents}, body)
                frame = ipc.receive(line)
            except (OSError, RunError, PayloadError) as problem:
                log.warning("%s", problem)
                frame = None
            if frame is not None:
                noted = frame[0].get("incidents", self.incidents)  # the worker may have added some of its own
                self.incidents = list(noted)[-MAX_INCIDENTS:] if isinstance(noted, list) else self.incidents
                return frame
            self._drop()
            if self._stopped:
                return {"error": "its worker was stopped"}, b""
            kind = shown(header.get("kind"), 40)
            self.tell(f"the worker died over {kind!r} ({crash} of {MAX_CRASHES}); it is started again")
        return {"error": f"its worker died {MAX_CRASHES} times over this; its own log says why"}, b""

    def tell(self, what: str) -> None:
        """Report an incident on the screen, and with the next response to the coordinator."""
        self.say(what)
        self.incidents = [*self.incidents, what][-MAX_INCIDENTS:]

    def line(self) -> socket.socket:
        """Return the connection to the worker; start it if there is none."""
        if self._line is None:
            self._line = self._start()
        return self._line

    def stop(self) -> None:
        """Stop the worker, even while it works: its memory is on disk."""
        self._stopped = True
        self._drop()
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _drop(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _start(self) -> socket.socket:
        written = self.site.state / "worker.log"
        said = written.open("ab")
        before = said.tell()
        here, there = socket.socketpair()
        handle = there.fileno()
        command = worker_command("polysite.deploy.site.process", str(self.site.path), str(handle))
        self._process = process = subprocess.Popen(
            [*shlex.split(self.site.worker), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            pass_fds=[handle],
            start_new_session=True,
        )
        there.close()
        said.close()
        with cast(BinaryIO, process.stdout) as out:
            first, _, self.words = out.readline().decode().strip().partition(" ")
        if first != "ready":
            code = process.wait()
            words = written.read_bytes()[before:].decode(errors="replace").strip().splitlines()
            killed = f"it was killed by {signal.Signals(-code).name}" if code < 0 else "it said nothing"
            reason = words[-1].removeprefix("polysite: ") if words else killed
            here.close()
            raise RunError(f"the worker did not start: {reason}")
        return here


def ask_and_show(
    worker: WorkerProcess, header: Mapping[str, Any], body: Buffer, say: Say
) -> tuple[dict[str, Any], Buffer]:
    """Return the worker's response, and say what was asked and what leaves."""
    number = header.get("round")
    where = f", round {number + 1}" if isinstance(number, int) else ""
    say(f"asked: {shown(header.get('kind'), 40)}{where}; {_size(len(body))} came in")
    answer, out = worker.ask(header, body)
    local = answer.pop("local", "")  # for this screen only
    if answer.get("refused"):
        say(f"refused: {answer['refused']}")
    elif answer.get("error"):
        say(f"failed here: {local or answer['error']}; the coordinator was told no more than: {answer['error']}")
    else:
        left = ", ".join(f"{name} ({what})" for name, what in json.loads(str(answer.get("left", "{}"))).items())
        size = len(out) + len(str(answer.get("scores", ""))) + len(str(answer.get("measures", "")))
        say(f"left: {left or 'nothing'}; {_size(size)} in all, after {float(answer.get('seconds', 0)):.1f} s")
    return answer, out


def _size(count: int) -> str:
    """Return a number of bytes in words.

    >>> _size(90_300_000), _size(12)
    ('90.3 MB', '12 bytes')
    """
    return f"{count / 1e6:.1f} MB" if count > 99_999 else f"{count} bytes"


@contextmanager
def opened(site: SiteConfig, say: Say, what: str) -> Iterator[WorkerProcess]:
    """Yield the worker of a site that has not left, and stop it at the end. ``what`` names this process, for the report
    that the former one was killed."""
    if (site.state / LEFT).exists():
        raise RunError(f"this hospital has left the federation; to take part again, delete {site.state / LEFT}")
    private_folder(site.state)
    with alone(site.state) as killed:
        worker = WorkerProcess(site, say)
        if killed:
            worker.tell(f"the former {what} was killed")
        try:
            yield worker
        finally:
            worker.stop()


@contextmanager
def alone(state: Path) -> Iterator[bool]:
    """Lock the state folder for one courier; yield whether the last one was killed."""
    with (state / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            raise RunError(f"'polysite site run' or a FLARE job is already running for {state}") from problem
        file.seek(0)
        killed = bool(file.read())
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield killed
        finally:
            file.truncate(0)
