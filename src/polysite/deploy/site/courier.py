"""The implementation of ``polysite site run``: carries requests to the worker and responses back, and shows both.

The courier connects to one address, outwards; it loads neither Flower nor torch nor the data. It starts the worker as
a separate process, and finds it again after a crash. Everything on the screen is also in the ledger, which the worker
writes.
"""

import time
from collections.abc import Mapping
from typing import Any

from polysite.buffers import Buffer
from polysite.deploy.flower.client import Fleet, Incoming
from polysite.deploy.flower.connection import Lost
from polysite.deploy.project import SiteConfig
from polysite.deploy.site.worker_process import Say, WorkerProcess, ask_and_show, opened
from polysite.errors import PayloadError, RunError

WAIT = 4  # seconds for which the coordinator holds a poll until there is a request
SOON, LATER = 0.02, 1.0  # seconds between two polls that are not held: after the last request, and when none comes
MAX_PAUSE = {False: 5.0, True: 60.0}  # seconds between two attempts to connect; longer where it is not the coordinator


def run(site: SiteConfig, say: Say) -> None:
    """Serve requests until interrupted."""
    with opened(site, say, "courier") as worker:
        worker.line()
        say(f"{site.name}: {worker.words}; {site.policy.name} read; connecting to {site.server}")
        _serve(site, worker, say)


def _serve(site: SiteConfig, worker: WorkerProcess, say: Say) -> None:
    """Serve requests. After a lost connection the site connects again and goes on with what it was doing."""
    with Fleet(site.server, key=site.key, certificate=site.certificate, ca=site.ca, proxy=site.proxy) as fleet:
        _connect(fleet, say)
        say(f"connected to {site.server}; waiting to be asked")
        busy = time.monotonic()
        while True:
            try:
                asked = time.monotonic()
                if _turn(fleet, worker, say):
                    busy = time.monotonic()
                elif time.monotonic() - asked < WAIT / 2:
                    time.sleep(min(SOON + (time.monotonic() - busy) / 20, LATER))
            except Lost as problem:
                worker.tell(f"the connection was lost: {problem}")
                _connect(fleet, say)
                say(f"connected to {site.server} again")


def _turn(fleet: Fleet, worker: WorkerProcess, say: Say) -> bool:
    """Answer a request, if there is one."""
    try:
        incoming = fleet.receive(WAIT)
        if incoming is None:
            return False
        if _upload(fleet, worker, say, incoming, *ask_and_show(worker, incoming.header, incoming.body, say)):
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
            fleet.connect()
            return
        except RunError as problem:
            slowly = getattr(problem, "slowly", False)
            if str(problem) != said:
                say(f"{problem}; trying again{'' if slowly else ' (it listens while a study runs)'}")
                said = str(problem)
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE[slowly])
