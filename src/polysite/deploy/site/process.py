"""The worker's process: reads the site's configuration, listens to the courier, answers one request at a time."""

import fcntl
import logging
import os
import socket
import sys
from pathlib import Path

from polysite.deploy.project import SiteConfig
from polysite.deploy.site import ipc
from polysite.deploy.site.policy import SitePolicy
from polysite.deploy.site.worker import Worker
from polysite.errors import PolysiteError, RunError

IDLE = 600.0  # seconds without a courier after which the process ends

log = logging.getLogger("polysite")


def main(folder: str) -> None:
    """Listen until the courier says stop, or until none has connected for a while."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    site = SiteConfig.load(Path(folder))
    try:
        worker = Worker(site, SitePolicy.load(site.policy))
        worker.describe_data()
    except PolysiteError as problem:
        print(f"polysite: {problem}", file=sys.stderr, flush=True)
        sys.exit(2)
    with (site.state / "worker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a worker whose courier was killed meanwhile ends when it reports ready
        _listen(worker)


def _listen(worker: Worker) -> None:
    door = ipc.listen(worker.site.socket)
    door.settimeout(IDLE)
    print(f"ready {worker.words}", flush=True)
    while True:
        try:
            courier, _ = door.accept()
        except TimeoutError:
            log.info("no courier for %d s: ending", IDLE)
            break
        with courier:
            courier.settimeout(None)
            if attend(worker, courier):
                break
    worker.site.socket.unlink(missing_ok=True)  # a socket that is left behind tells of a worker that was killed


def attend(worker: Worker, courier: socket.socket) -> bool:
    """Answer until the courier disconnects; return True if it says stop."""
    try:
        while (frame := ipc.receive(courier)) is not None:
            header, body = frame
            if header.get("courier") == "stop":
                return True
            if header.get("courier") == "ping":
                about = {"pid": os.getpid(), "config": worker.site.fingerprint, "cases": worker.words}
                ipc.send(courier, about)
                continue
            try:
                answer = worker.answer(header["request"], body, header["incidents"])
            except RunError as problem:
                log.error("%s", problem)
                words = "its audit log cannot be written, so nothing leaves"
                answer = {"error": words, "local": str(problem)}, b""
            ipc.send(courier, *answer)
    except OSError as problem:
        log.warning("the courier was lost: %s", problem)
    return False
