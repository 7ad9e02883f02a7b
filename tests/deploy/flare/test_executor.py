"""The hospital's half of a job, without FLARE's processes: what it answers, and what never ends a job."""

import threading

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
    """In the place of the process: answers what the test says, when it says so."""

    def __init__(self, site, say):
        self.site, self.say, self.incidents, self.told = site, say, [], []
        self.stopped, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()
        self.answer = {"seconds": 1.0, "local": "secret path"}, b"body"

    def tell(self, what):
        self.told.append(what)

    def ask(self, header, body):
        while not self.may_answer.wait(0.01):
            if self.stopped.is_set():
                return {"error": "its worker was stopped"}, b""
        return self.answer

    def stop(self):
        self.stopped.set()


def answer(executor, context, message):
    """What arrives at the server."""
    return unpack(crossed(executor.execute(TASK, message, context, Signal())))


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A function that starts an executor at a site."""
    monkeypatch.setattr(worker_process, "WorkerProcess", Worker)
    started = []

    def begin():
        executor, context = SiteExecutor(), Context(Engine(tmp_path), "north")
        executor.handle_event(EventType.START_RUN, context)
        started.append((executor, context))
        return executor, context

    yield begin
    for executor, context in started:
        executor.handle_event(EventType.END_RUN, context)


def test_a_task_goes_to_the_worker_and_what_is_for_this_screen_stays(begun):
    executor, context = begun()
    header, body = answer(executor, context, pack({"kind": "train", "round": 0}, [b"x"]))
    assert header == {"seconds": 1.0} and body == b"body"


def test_a_site_says_that_it_is_there_until_the_job_ends(begun, monkeypatch):
    monkeypatch.setattr(executors, "BEAT", 0.01)
    executor, context = begun()
    until(lambda: len(context.engine.sent) > 2)
    assert context.engine.sent[0][:2] == (None, HERE)
    answer(executor, context, pack({"kind": "hello"}))
    executor.handle_event(EventType.END_RUN, context)
    assert executor._worker.stopped.is_set()


def test_faulty_settings_do_not_end_the_job_and_do_not_leave(begun, tmp_path):
    (tmp_path / "local" / "polysite").mkdir(parents=True)
    (tmp_path / "local" / "polysite" / "site.toml").write_text('[data]\nname = "files"\npath = "/secret"\n')
    executor, context = begun()
    header, body = answer(executor, context, pack({"kind": "hello"}))
    assert header == {"error": FAILED} and not body


def test_two_jobs_do_not_use_one_state_folder(begun, tmp_path):
    (tmp_path / "polysite").mkdir()
    with alone(tmp_path / "polysite"):
        executor, context = begun()
        header, _ = answer(executor, context, pack({"kind": "hello"}))
        assert header == {"error": FAILED}
    header, _ = answer(executor, context, pack({"kind": "hello"}))  # the former job has ended
    assert header == {"seconds": 1.0}


def test_a_job_that_is_aborted_stops_the_worker(begun):
    executor, context = begun()
    answer(executor, context, pack({"kind": "hello"}))
    executor._worker.may_answer.clear()
    abort = Signal()
    threading.Timer(0.1, abort.trigger, (True,)).start()
    reply = executor.execute(TASK, pack({"kind": "train"}), context, abort)
    assert reply.get_return_code() == ReturnCode.TASK_ABORTED and executor._worker.stopped.is_set()


def test_a_message_that_is_none_is_answered_by_a_sentence(begun):
    executor, context = begun()
    header, _ = answer(executor, context, Shareable())
    assert "no header" in header["error"]


def test_a_site_that_has_left_takes_no_part(begun, tmp_path):
    (tmp_path / "polysite").mkdir()
    (tmp_path / "polysite" / worker_process.LEFT).touch()
    executor, context = begun()
    assert answer(executor, context, pack({}))[0] == {"error": FAILED}
