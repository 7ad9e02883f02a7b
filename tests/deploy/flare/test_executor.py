"""The hospital's half of a job, without FLARE's processes: what it answers, and what never ends a job."""

import threading
from contextlib import nullcontext

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from consortium import until
from flare_fake import Context, Engine, crossed
from polysite.deploy.flare import executor as executors
from polysite.deploy.flare.executor import FAILED, SiteExecutor
from polysite.deploy.flare.messages import HERE, TASK, pack, unpack
from polysite.deploy.site import worker_process
from polysite.deploy.site.worker_process import alone


class Worker:
    """In the place of the process: answers when the test says so."""

    def __init__(self, site, say):
        self.site, self.say, self.incidents, self.tell = site, say, [], print
        self.stopped, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()
        self.stop = self.stopped.set

    def ask(self, header, body):
        while not self.may_answer.wait(0.01):
            if self.stopped.is_set():
                return {"error": "its worker was stopped"}, b""
        return {"seconds": 1.0, "local": "secret path"}, b"body"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The executor of a site that has started."""
    monkeypatch.setattr(worker_process, "WorkerProcess", Worker)
    monkeypatch.setattr(executors, "BEAT", 0.01)
    executor, executor.context = SiteExecutor(), Context(Engine(tmp_path), "north")
    executor.handle_event(EventType.START_RUN, executor.context)
    yield executor
    executor.handle_event(EventType.END_RUN, executor.context)


def answer(site, message):
    """What arrives at the server."""
    return unpack(crossed(site.execute(TASK, message, site.context, Signal())))


def test_a_task_goes_to_the_worker_and_what_is_for_this_screen_stays(site):
    assert answer(site, pack({"kind": "train", "round": 0}, b"x")) == ({"seconds": 1.0}, b"body")


def test_a_site_says_that_it_is_there_until_the_job_ends(site):
    until(lambda: len(site.context.engine.sent) > 2)
    assert site.context.engine.sent[0][:2] == (None, HERE)
    answer(site, pack({"kind": "hello"}))
    site.handle_event(EventType.END_RUN, site.context)
    assert site._worker.stopped.is_set()


@pytest.mark.parametrize("why", ["faulty settings", "left", "another job is there"])
def test_a_site_that_cannot_work_does_not_end_the_job_and_does_not_say_why(site, tmp_path, why):
    settings, state = tmp_path / "local" / "polysite" / "site.toml", tmp_path / "polysite"
    for folder in (settings.parent, state):
        folder.mkdir(parents=True)
    if why == "faulty settings":
        settings.write_text('[data]\nname = "files"\npath = "/secret"\n')
    elif why == "left":
        (state / worker_process.LEFT).touch()
    with alone(state) if why == "another job is there" else nullcontext():
        assert answer(site, pack({"kind": "hello"})) == ({"error": FAILED}, b"")
    header, _ = answer(site, pack({"kind": "hello"}))
    assert header == ({"seconds": 1.0} if why == "another job is there" else {"error": FAILED})


def test_a_job_that_is_aborted_stops_the_worker(site):
    answer(site, pack({"kind": "hello"}))
    site._worker.may_answer.clear()
    abort = Signal()
    threading.Timer(0.1, abort.trigger, (True,)).start()
    reply = site.execute(TASK, pack({"kind": "train"}), site.context, abort)
    assert reply.get_return_code() == ReturnCode.TASK_ABORTED and site._worker.stopped.is_set()


def test_a_message_that_is_none_is_answered_by_a_sentence(site):
    assert "no header" in answer(site, Shareable())[0]["error"]
