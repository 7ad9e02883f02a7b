"""The worker's process: reads the site's configuration, listens to the courier, answers one request at a time."""

import fcntl
import logging
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polysite.buffers import Buffer
from polysite.deploy.project import SiteConfig
from polysite.deploy.site import ipc
from polysite.deploy.site.policy import SitePolicy
from polysite.deploy.site.worker import Worker
from polysite.errors import PayloadError, PolysiteError, RunError

IDLE = 600.0  # seconds without a courier after which the process ends

log = logging.getLogger("polysite")


def main(folder: str) -> None:
    """Listen until the courier says stop, or until none has connected for a while."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    site = SiteConfig.load(Path(folder))
    try:
        worker = Worker(site, SitePolicy.load(site.policy))
        worker.words = worker.hospital.describe_data()
    except PolysiteError as problem:
        print(f"polysite: {problem}", file=sys.stderr, flush=True)
        sys.exit(2)
    with (site.state / "worker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a worker whose courier was killed meanwhile ends when it reports ready
        _listen(worker)


def _listen(worker: Worker) -> None:
    place = worker.hospital.site.socket
    door = ipc.listen(place)
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
    place.unlink(missing_ok=True)  # a socket that is left behind tells of a worker that was killed


def attend(worker: Worker, courier: socket.socket) -> bool:
    """Answer until the courier disconnects; return True if it says stop."""
    try:
        while True:
            try:
                frame = ipc.receive(courier)
            except ipc.TooLarge:
                raise
            except PayloadError as problem:  # the next frame may be sound
                log.warning("the courier sent what is no request: %s", problem)
                ipc.send(courier, {"error": str(problem)})
                continue
            if frame is None:
                return False
            if frame[0].get("courier") == "stop":
                return True
            ipc.send(courier, *_answer(worker, *frame))
    except (OSError, ipc.TooLarge) as problem:
        log.warning("the courier was lost: %s", problem)
    return False


def _answer(worker: Worker, header: Mapping[str, Any], body: Buffer) -> tuple[dict[str, Any], Buffer]:
    """Return the answer to a frame of the courier."""
    if header.get("courier") == "ping":
        return {"pid": os.getpid(), "config": worker.hospital.site.fingerprint, "cases": worker.words}, b""
    request, incidents = header.get("request"), header.get("incidents", [])
    if not isinstance(request, dict) or not isinstance(incidents, list):
        log.warning("the courier sent a frame without a request")
        return {"error": "the frame of the courier holds no request"}, b""
    try:
        return worker.answer(request, body, incidents)
    except RecursionError:
        log.warning("the courier sent a request that is nested too deeply")
        return {"error": "the request is nested too deeply"}, b""
    except RunError as problem:
        log.error("%s", problem)
        return {"error": "its audit log cannot be written, so nothing leaves", "local": str(problem)}, b""
