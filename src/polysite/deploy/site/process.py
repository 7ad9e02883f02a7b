"""The worker's process: reads the site's configuration, and answers one request of the courier at a time.

It ends with the courier's process. What it computes then is lost; its memory is on disk.
"""

import fcntl
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polysite.buffers import Buffer
from polysite.deploy.project import SiteConfig
from polysite.deploy.site import ipc
from polysite.deploy.site.policy import SitePolicy
from polysite.deploy.site.worker import Worker
from polysite.errors import PayloadError, PolysiteError, RunError

log = logging.getLogger("polysite")


def main(folder: str, handle: str) -> None:
    """Answer until the courier disconnects; ``handle`` is the number of the socket that was inherited from it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    courier = socket.socket(fileno=int(handle))
    threading.Thread(target=_end_with, args=(courier,), daemon=True).start()
    try:
        site = SiteConfig.load(Path(folder))
        worker = Worker(site, SitePolicy.load(site.policy))
        words = worker.hospital.describe_data()
    except PolysiteError as problem:
        print(f"polysite: {problem}", file=sys.stderr, flush=True)
        sys.exit(2)
    with (site.state / "worker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the worker of a former courier ends at this moment
        print(f"ready {words}", flush=True)
        attend(worker, courier)


def _end_with(courier: socket.socket) -> None:
    """End this process when the courier disconnects, whatever it computes."""
    watch = select.poll()
    watch.register(courier, 0)  # that the other side has hung up is always reported
    watch.poll()
    os._exit(1)


def attend(worker: Worker, courier: socket.socket) -> None:
    """Answer until the courier disconnects."""
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
                return
            ipc.send(courier, *_answer(worker, *frame))
    except (OSError, ipc.TooLarge) as problem:
        log.warning("the courier was lost: %s", problem)


def _answer(worker: Worker, header: Mapping[str, Any], body: Buffer) -> tuple[dict[str, Any], Buffer]:
    """Return the answer to a frame of the courier."""
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
