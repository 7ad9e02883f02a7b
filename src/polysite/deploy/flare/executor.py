"""A hospital's half of a FLARE job: an executor that carries tasks to polysite's worker, and says that it is there.

The worker is the process that answers requests of Flower, too: with the hospital's cases, policy, ledger and memories.
FLARE's process loads neither torch nor the data. A worker that dies is started again, without harm to the job.
"""

import logging
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from polysite.buffers import Buffer
from polysite.deploy.flare.messages import HERE, pack, unpack
from polysite.deploy.flare.site_folder import prepare
from polysite.deploy.site.worker_process import WorkerProcess, ask_and_show, opened
from polysite.errors import PayloadError, PolysiteError

from nvflare.apis.event_type import EventType  # isort: skip  # after the hint of messages.py
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

BEAT = 5.0  # seconds between two messages that the site is there
PROMPT = 5.0  # seconds in which such a message is answered
FAILED = "its settings or its disk are not in order; its own log says why"  # may name files and cases, which stay here

log = logging.getLogger("polysite")


class SiteExecutor(Executor):  # type: ignore[misc]  # nvflare has no types
    """Carries tasks to the hospital's worker and its responses back."""

    def __init__(self) -> None:
        super().__init__()
        self._open = ExitStack()
        self._over = threading.Event()
        self._worker: WorkerProcess | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Begin and end with the run."""
        if event_type == EventType.START_RUN:
            self._begin(fl_ctx)
        elif event_type == EventType.END_RUN:
            self._over.set()
            self._open.close()

    def _begin(self, fl_ctx: FLContext) -> None:
        engine = fl_ctx.get_engine()
        workspace = engine.get_workspace()
        self._place = Path(workspace.get_root_dir()), Path(workspace.get_site_config_dir()), fl_ctx.get_identity_name()
        threading.Thread(target=self._beat, args=(engine,), name="polysite-here", daemon=True).start()

    def _ready(self) -> WorkerProcess | None:
        """Return the worker; None if the settings are not in order, or the process of a former job has not ended yet.
        Then it is tried again at the next task."""
        if self._worker is None:
            try:
                site = prepare(*self._place)
                for remark in site.remarks:
                    log.warning("%s", remark)
                worker = opened(site, lambda what: log.info("%s", what), "FLARE process of this site")
                self._worker = self._open.enter_context(worker)
            except (PolysiteError, OSError) as problem:
                log.error("polysite cannot work at this site: %s", problem)
        return self._worker

    def _beat(self, engine: Any) -> None:
        """Say every few seconds that this site is there."""
        while not self._over.is_set():
            try:
                with engine.new_context() as context:
                    engine.send_aux_request(None, HERE, Shareable(), PROMPT, context, optional=True)
            except Exception as problem:  # the link is cut, or FLARE ends: it is tried again
                log.debug("the server was not reached: %s", problem)
            self._over.wait(BEAT)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Return the worker's response to a request; FLARE's return code is OK also where it says why there is none."""
        try:
            header, body = unpack(shareable)
        except PayloadError as problem:
            return pack({"error": str(problem)})
        worker = self._ready()
        if worker is None:
            return pack({"error": FAILED})
        answers: list[tuple[dict[str, Any], Buffer]] = []
        thread = threading.Thread(
            target=lambda: answers.append(ask_and_show(worker, header, body, worker.say)), daemon=True
        )
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            if abort_signal.triggered:
                worker.stop()
                return make_reply(ReturnCode.TASK_ABORTED)
        if not answers:
            return pack({"error": FAILED})
        worker.incidents = []
        answer, out = answers[0]
        return pack(answer, out)
