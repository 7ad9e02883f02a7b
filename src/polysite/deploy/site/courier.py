"""The implementation of ``polysite site run``: carries requests to the worker and responses back, and shows both.

The courier connects to one address, outwards; it loads Flower, but neither torch nor the data. It starts the worker as
a separate process, and finds it again after a crash. Everything on the screen is also in the ledger, which the worker
writes.
"""

import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

from polysite.buffers import Buffer
from polysite.deploy import certificates, enrolment
from polysite.deploy.flower.client import Fleet, Incoming
from polysite.deploy.flower.connection import Lost
from polysite.deploy.project import SiteConfig
from polysite.deploy.site import ipc
from polysite.deploy.site.withdrawn import LEFT
from polysite.errors import PayloadError, PolysiteError, RunError, shown
from polysite.own_process import worker_command
from polysite.storage import private_folder, write_file

log = logging.getLogger("polysite")

MAX_CRASHES = 3  # of the worker over one request, which then fails
MAX_INCIDENTS = 16  # that are kept for the coordinator
WAIT = 4  # seconds for which the coordinator holds a poll until there is a request
DAY = 86400.0  # seconds between two looks at the certificate
SOON, LATER = 0.02, 1.0  # seconds between two polls that are not held: after the last request, and when none comes
MAX_PAUSE = {False: 5.0, True: 60.0}  # seconds between two attempts to connect; longer where it is not the coordinator

Say = Callable[[str], None]


class WorkerProcess:
    """The worker, from the courier's side."""

    def __init__(self, site: SiteConfig, say: Say):
        self.site, self.say = site, say
        self.incidents: list[str] = []  # sent to the coordinator with the next response
        self.words = ""  # the worker's description of its cases
        self._study = ""  # of the incidents
        self._line: socket.socket | None = None
        self._pid = 0
        self._crash_reported = False

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
            self._crash_reported = True
            kind = shown(header.get("kind"), 40)
            self.tell(f"the worker died over {kind!r} ({crash} of {MAX_CRASHES}); it is started again")
        return {"error": f"its worker died {MAX_CRASHES} times over this; its own log says why"}, b""

    def tell(self, what: str) -> None:
        """Report an incident on the screen, and with the next response to the coordinator."""
        self.say(what)
        self.incidents = [*self.incidents, what][-MAX_INCIDENTS:]

    def line(self) -> socket.socket:
        """Return the connection to a worker with the current configuration; start one if there is none."""
        if self._line is None:
            self._line, self._crash_reported = self._find() or self._start(), False
        return self._line

    def stop(self) -> None:
        """Stop the worker, even while it works: its memory is on disk."""
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
        """Connect to a worker that an earlier courier left behind, unless the configuration has changed since."""
        try:
            line = ipc.connect(self.site.socket)
            ipc.send(line, {"courier": "ping"})  # requests of the coordinator are below "request"
            frame = ipc.receive(line)  # a busy worker finishes its request first
        except FileNotFoundError:
            return None
        except (OSError, PayloadError):
            if not self._crash_reported:
                self.tell("the former worker was killed")
            return None
        pid = frame[0].get("pid") if frame is not None else None
        if frame is not None and type(pid) is int and frame[0].get("config") == self.site.fingerprint:
            self._pid, self.words = pid, str(frame[0].get("cases", ""))
            return line
        if frame is not None:
            ipc.send(line, {"courier": "stop"})
        line.close()
        return None

    def _start(self) -> socket.socket:
        written = self.site.state / "worker.log"
        said = written.open("ab")
        before = said.tell()
        command = worker_command("polysite.deploy.site.process", str(self.site.path))
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
    """Serve requests until interrupted."""
    if (site.state / LEFT).exists():
        raise RunError(f"this hospital has left the federation; to take part again, delete {site.state / LEFT}")
    private_folder(site.state)
    with _alone(site.state) as killed:
        worker = WorkerProcess(site, say)
        if killed:
            worker.tell("the former courier was killed")
        worker.line()
        say(f"{site.name}: {worker.words}; {site.policy.name} read; connecting to {site.server}")
        try:
            _serve(site, worker, say)
        finally:
            worker.stop()


def _serve(site: SiteConfig, worker: WorkerProcess, say: Say) -> None:
    """Serve requests. After a lost connection the site connects again and goes on with what it was doing."""
    with Fleet(site.server, key=site.key, certificate=site.certificate, ca=site.ca, proxy=site.proxy) as fleet:
        _connect(fleet, say)
        say(f"connected to {site.server}; waiting to be asked")
        busy, checked = time.monotonic(), 0.0
        while True:
            try:
                if not checked or time.monotonic() > checked + DAY:
                    checked = time.monotonic()
                    _renew(site, fleet, say)
                asked = time.monotonic()
                if _turn(fleet, worker, say):
                    busy = time.monotonic()
                elif time.monotonic() - asked < WAIT / 2:
                    time.sleep(min(SOON + (time.monotonic() - busy) / 20, LATER))
            except Lost as problem:
                worker.tell(f"the connection was lost: {problem}")
                _connect(fleet, say)
                say(f"connected to {site.server} again")


def _renew(site: SiteConfig, fleet: Fleet, say: Say) -> None:
    """Warn before the certificate expires, and get a new one where the coordinator signs by itself."""
    try:
        end = certificates.expiry(site.certificate)
        if end - datetime.now(UTC) > certificates.SOON:
            return
        say(f"the certificate of this site expires on {end:%Y-%m-%d}; asking for a new one")
        made = fleet.renew(certificates.signing_request(site.name, certificates.read_key(site.key)))
        if made is None:
            say("the coordinator signs by hand: run 'polysite site renew' and send it the request")
            return
        fresh = site.state / "renewed.crt"
        write_file(fresh, lambda p: p.write_bytes(made))
        end = enrolment.install(site.path, fresh)
        fresh.unlink()
        fleet.use(site.certificate, site.key)
        say(f"the certificate was renewed; it expires on {end:%Y-%m-%d}")
    except Lost:
        raise
    except PolysiteError as problem:  # it is tried again tomorrow
        say(f"the certificate was not renewed: {problem}")


def _turn(fleet: Fleet, worker: WorkerProcess, say: Say) -> bool:
    """Answer a request, if there is one."""
    try:
        incoming = fleet.receive(WAIT)
        if incoming is None:
            return False
        if _upload(fleet, worker, say, incoming, *_answer(worker, incoming, say)):
            worker.incidents = []
    except PayloadError as problem:  # a malformed message, or a response that is too large
        worker.tell(str(problem))
    return True


def _upload(
    fleet: Fleet, worker: WorkerProcess, say: Say, incoming: Incoming, header: Mapping[str, Any], body: Buffer
) -> bool:
    """Upload a response, however often the connection is cut; return False if it is no longer wanted."""
    while True:
        try:
            return fleet.answer(incoming, header, body)
        except Lost as problem:
            worker.tell(f"the connection was lost: {problem}")
            _connect(fleet, say)
            say("connected again; the upload goes on")


def _connect(fleet: Fleet, say: Say) -> None:
    """Connect; try again until it works, with growing pauses. Nothing that answers at the address can end a site."""
    said, pause = "", 0.5
    while True:
        try:
            return fleet.connect()
        except RunError as problem:
            slowly = getattr(problem, "slowly", False)
            if str(problem) != said:
                say(f"{problem}; trying again{'' if slowly else ' (it listens while a study runs)'}")
                said = str(problem)
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE[slowly])


def _answer(worker: WorkerProcess, incoming: Incoming, say: Say) -> tuple[dict[str, Any], Buffer]:
    header = incoming.header
    number = header.get("round")
    where = f", round {number + 1}" if isinstance(number, int) else ""
    say(f"asked: {shown(header.get('kind'), 40)}{where}; {_size(len(incoming.body))} came in")
    answer, body = worker.ask(header, incoming.body)
    local = answer.pop("local", "")  # for this screen only
    if answer.get("refused"):
        say(f"refused: {answer['refused']}")
    elif answer.get("error"):
        say(f"failed here: {local or answer['error']}; the coordinator was told no more than: {answer['error']}")
    else:
        left = ", ".join(f"{name} ({what})" for name, what in json.loads(str(answer.get("left", "{}"))).items())
        size = len(body) + len(str(answer.get("scores", ""))) + len(str(answer.get("measures", "")))
        say(f"left: {left or 'nothing'}; {_size(size)} in all, after {float(answer.get('seconds', 0)):.1f} s")
    return answer, body


def _size(count: int) -> str:
    """Return a number of bytes in words.

    >>> _size(90_300_000), _size(12)
    ('90.3 MB', '12 bytes')
    """
    return f"{count / 1e6:.1f} MB" if count > 99_999 else f"{count} bytes"


@contextmanager
def _alone(state: Path) -> Iterator[bool]:
    """Lock the state folder for one courier; yield whether the last one was killed."""
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
