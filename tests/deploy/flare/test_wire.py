"""Requests as tasks: who is there, what comes back, what FLARE gives up."""

from types import SimpleNamespace

import pytest
from nvflare.apis.controller_spec import TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply
from nvflare.apis.signal import Signal

from flare_fake import Context, Engine
from polysite.deploy.flare import wire as wires
from polysite.deploy.flare.messages import BODY, pack
from polysite.deploy.flare.wire import FlareWire, Stopped
from polysite.errors import RunError


class Controller:
    """Keeps what it is asked to send."""

    def __init__(self):
        self.tasks, self.cancelled = {}, []
        self.cancel_task = self.cancelled.append

    def send(self, task, fl_ctx, targets):
        self.tasks[targets[0]] = task


@pytest.fixture
def engine(tmp_path):
    return Engine(tmp_path)


@pytest.fixture
def controller():
    return Controller()


@pytest.fixture
def wire(engine, controller):
    return FlareWire(controller, Context(engine), Signal())


@pytest.fixture
def clock(monkeypatch):
    """Seconds, which a test may add to."""
    found = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(wires.time, "monotonic", lambda: found.now)
    return found


def answer(task, result):
    task.result_received_cb(client_task=SimpleNamespace(task=task, result=result), fl_ctx=None)


def test_a_site_is_there_while_it_says_so(wire, engine, clock):
    assert wire.online() == {}
    assert engine.say_here("a").get_return_code() == ReturnCode.OK
    assert list(wire.online()) == ["a"]
    clock.now += wires.SILENCE + 1
    assert wire.online() == {}
    engine.say_here("a")
    assert list(wire.online()) == ["a"]


def test_a_request_goes_out_and_its_response_comes_back_once(wire, controller):
    body = b"model"
    ids = wire.send_all({"a": ({"kind": "train"}, body), "b": ({"kind": "train"}, body)}, 1.0, "study")
    assert controller.tasks["a"].data[BODY].obj is controller.tasks["b"].data[BODY].obj
    assert list(wire.collect(ids.values())) == []
    answer(controller.tasks["a"], pack({"seconds": 1.0}, b"reply"))
    (envelope,) = wire.collect(ids.values())
    assert (envelope.id, envelope.header, envelope.error) == (ids["a"], {"seconds": 1.0}, "")
    assert envelope.take() == b"reply" and envelope.take() == b""
    assert list(wire.collect(ids.values())) == []


def given_up(task):
    task.completion_status = TaskCompletionStatus.CLIENT_DEAD
    task.task_done_cb(task=task, fl_ctx=None)


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        (lambda task: answer(task, make_reply(ReturnCode.EXECUTION_EXCEPTION)), "FLARE reports EXECUTION_EXCEPTION"),
        (lambda task: answer(task, make_reply(ReturnCode.OK)), "has no header"),
        (given_up, "client_dead"),
    ],
)
def test_a_task_without_a_response_is_an_error_so_that_the_site_is_asked_again(wire, controller, ended, why):
    ids = wire.send_all({"a": ({}, b"")}, 1.0, "study")
    ended(controller.tasks["a"])
    (envelope,) = wire.collect(ids.values())
    assert why in envelope.error


def test_what_is_forgotten_is_cancelled_and_its_result_dropped(wire, controller):
    ids = wire.send_all({"a": ({}, b"")}, 1.0, "study")
    wire.forget(ids.values())
    assert controller.cancelled == [controller.tasks["a"]]
    answer(controller.tasks["a"], pack({}))
    assert list(wire.collect(ids.values())) == []


def test_a_job_with_too_few_sites_for_too_long_is_ended(engine, clock):
    wire = FlareWire(Controller(), Context(engine), Signal(), quorum=2, lost=100.0)
    for seconds, here in ((90, ""), (0, "ab"), (90, "a")):  # they have not come yet; both are there; one goes
        clock.now += seconds
        for name in here:
            engine.say_here(name)
        wire.wait(0.001)
    clock.now += 20
    engine.say_here("a")
    said = "only a could be reached for 100 s, and 2 sites are needed: submit the same job"
    with pytest.raises(RunError, match=said):
        wire.wait(0.001)


def test_the_end_of_a_job_ends_the_waiting(wire):
    wire.wait(0.001)
    wire._abort.trigger(True)
    with pytest.raises(Stopped, match="submit the same job again"):
        wire.wait(60.0)
