"""The coordinator's end of the wire: requests as tasks of NVIDIA FLARE, in the server's process of a job.

FLARE hands a task to its site when the site asks for one, and hands it out again if the site asks before its result has
arrived. A site says every few seconds that it is there; a site that has been silent for a while counts as gone. FLARE
does not start the process of a site a second time in a job, and notices the loss of a site after ten minutes only. So a
job in which fewer sites than a quorum have been there for a while is ended here, to be submitted again.
"""

import math
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any
from uuid import uuid4

from polysite.buffers import Buffer
from polysite.deploy.coordinator.posted import Envelope
from polysite.deploy.flare.messages import HERE, TASK, pack, unpack
from polysite.errors import PayloadError, RunError, shown
from polysite.payload import SiteId

from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus  # isort: skip  # after the hint of messages.py
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

SILENCE = 30.0  # seconds without a word after which a site counts as gone
PRESENCE = "polysite.presence"  # of FLARE's context
TOKEN = "job"  # of every connection: FLARE starts the process of a site once in a job, so none is ever new


class Stopped(RunError):
    """FLARE ends the job: it was aborted, or too few sites are left."""


class Presence:
    """When each site was last heard. There is one in a job, also where it runs several studies one after the other."""

    def __init__(self) -> None:
        self._heard: dict[SiteId, float] = {}
        self._lock = threading.Lock()
        self.changed = threading.Event()

    @classmethod
    def of(cls, context: FLContext) -> "Presence":
        """Return that of the job; make it when it is asked for the first time."""
        found = context.get_prop(PRESENCE)
        if isinstance(found, cls):
            return found
        made = cls()
        context.set_prop(PRESENCE, made, private=True, sticky=True)
        context.get_engine().register_aux_message_handler(topic=HERE, message_handle_func=made.hear)
        return made

    def hear(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """Note that a site is there. It gives its name itself: so presence alone has no other effect."""
        peer = fl_ctx.get_peer_context()
        if peer is None:
            return make_reply(ReturnCode.MISSING_PEER_CONTEXT)
        with self._lock:
            self._heard[str(peer.get_identity_name())] = time.monotonic()
        self.changed.set()
        return make_reply(ReturnCode.OK)

    @property
    def sites(self) -> list[SiteId]:
        """The sites that were heard of late."""
        now = time.monotonic()
        with self._lock:
            return [site for site, heard in self._heard.items() if now - heard < SILENCE]


class FlareWire:
    """Carries requests and responses as tasks and results.

    Args:
        controller: The controller in whose name tasks are sent.
        context: FLARE's context of the controller's run.
        abort: FLARE's signal that the job ends.
        quorum: Number of sites without which the job is ended.
        lost: Seconds for which there may be fewer.
    """

    def __init__(
        self, controller: Controller, context: FLContext, abort: Signal, quorum: int = 0, lost: float = math.inf
    ):
        self._controller, self._context, self._abort = controller, context, abort
        self._quorum, self._lost, self._enough = quorum, lost, time.monotonic()
        self._presence, self._lock = Presence.of(context), threading.Lock()
        self._arrived = self._presence.changed
        self._tasks: dict[str, Task] = {}
        self._envelopes: dict[str, Envelope] = {}

    def online(self) -> dict[SiteId, str]:
        """Return the connected sites, each with a token."""
        return dict.fromkeys(self._presence.sites, TOKEN)

    def send_all(
        self, letters: Mapping[SiteId, tuple[Mapping[str, Any], Buffer]], ttl: float, group: str
    ) -> dict[SiteId, str]:
        """Make a task for each site; return their identifiers. Sites that get the same body share its bytes."""
        sent = {}
        for site, (header, body) in letters.items():
            sent[site] = name = uuid4().hex
            task = Task(
                TASK,
                pack(header, body),
                props={"polysite": name},
                result_received_cb=self._receive,
                task_done_cb=self._end,
            )
            with self._lock:
                self._tasks[name] = task
            self._controller.send(task=task, fl_ctx=self._context, targets=[site])
        return sent

    def collect(self, ids: Iterable[str]) -> Iterator[Envelope]:
        """Yield the responses that have arrived; each is yielded once and then forgotten."""
        for each in list(ids):
            with self._lock:
                envelope = self._envelopes.pop(each, None)
                if envelope is not None:
                    self._tasks.pop(each, None)
            if envelope is not None:
                yield envelope

    def wait(self, seconds: float) -> None:
        """Return when a response is complete or a site has connected, or else after so many seconds."""
        if self._abort.triggered:
            raise Stopped("FLARE ended the job; submit the same job again to go on from the last round")
        here, now = sorted(self.online()), time.monotonic()
        if len(here) >= self._quorum:
            self._enough = now
        elif now - self._enough > self._lost:
            raise RunError(
                f"only {', '.join(here) or 'no site'} could be reached for {self._lost:.0f} s, and {self._quorum} "
                "sites are needed: submit the same job again, when the others are there, to go on from the last round"
            )
        self._arrived.wait(seconds)
        self._arrived.clear()

    def forget(self, ids: Collection[str]) -> None:
        """Drop these tasks and their results; FLARE refuses a result that still comes."""
        for each in ids:
            with self._lock:
                task = self._tasks.pop(each, None)
                self._envelopes.pop(each, None)
            if task is not None and task.completion_status is None:
                self._controller.cancel_task(task)

    def incidents(self) -> list[dict[str, Any]]:
        """Return an empty list: FLARE writes what it refuses to its own log."""
        return []

    def _receive(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Keep the result of a task."""
        result, name = client_task.result, client_task.task.props["polysite"]
        client_task.result = None  # FLARE would keep its bytes until it looks at its tasks again
        code = result.get_return_code()
        try:
            if code != ReturnCode.OK:
                raise PayloadError(f"FLARE reports {shown(code, 80)} at this site; its own log says why")
            self._keep(name, Envelope(name, *unpack(result)))
        except PayloadError as problem:
            self._keep(name, Envelope(name, error=str(problem)))

    def _end(self, task: Task, fl_ctx: FLContext) -> None:
        """Report a task that FLARE ended without a result."""
        if task.completion_status != TaskCompletionStatus.OK:
            name = task.props["polysite"]
            self._keep(name, Envelope(name, error=f"FLARE gave up the request ({task.completion_status.value})"))

    def _keep(self, name: str, envelope: Envelope) -> None:
        with self._lock:
            if name in self._tasks:  # otherwise it was forgotten
                self._envelopes.setdefault(name, envelope)
        self._arrived.set()
