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

    def send(self, task, fl_ctx, targets):
        self.tasks[targets[0]] = task

    def cancel_task(self, task):
        self.cancelled.append(task)


@pytest.fixture
def made(tmp_path):
    engine, controller, abort = Engine(tmp_path), Controller(), Signal()
    return FlareWire(controller, Context(engine), abort), controller, engine, abort


def answer(task, result):
    task.result_received_cb(client_task=SimpleNamespace(task=task, result=result), fl_ctx=None)


def test_a_site_is_there_while_it_says_so(made, monkeypatch):
    wire, _, engine, _ = made
    assert wire.online() == {}
    assert engine.say_here("a").get_return_code() == ReturnCode.OK
    assert list(wire.online()) == ["a"]
    now = wires.time.monotonic()
    monkeypatch.setattr(wires.time, "monotonic", lambda: now + wires.SILENCE + 1)
    assert wire.online() == {}
    engine.say_here("a")
    assert list(wire.online()) == ["a"]


def test_two_studies_of_a_job_share_who_is_there(tmp_path):
    context = Context(Engine(tmp_path))
    one, other = (FlareWire(Controller(), context, Signal()) for _ in range(2))
    context.engine.say_here("a")
    assert one.online() == other.online() != {}


def test_a_request_goes_out_and_its_response_comes_back_once(made):
    wire, controller, _, _ = made
    body = b"model"
    ids = wire.send_all({"a": ({"kind": "train"}, body), "b": ({"kind": "train"}, body)}, 1.0, "study")
    assert controller.tasks["a"].data[BODY][0] is controller.tasks["b"].data[BODY][0]
    assert list(wire.collect(ids.values())) == []
    answer(controller.tasks["a"], pack({"seconds": 1.0}, [b"reply"]))
    (envelope,) = wire.collect(ids.values())
    assert (envelope.id, envelope.header, envelope.error) == (ids["a"], {"seconds": 1.0}, "")
    assert envelope.take() == b"reply" and envelope.take() == b""
    assert list(wire.collect(ids.values())) == []


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (make_reply(ReturnCode.EXECUTION_EXCEPTION), "FLARE reports EXECUTION_EXCEPTION"),
        (make_reply(ReturnCode.OK), "has no header"),
    ],
)
def test_a_result_that_is_no_response_is_an_error_of_the_site(made, result, why):
    wire, controller, _, _ = made
    ids = wire.send_all({"a": ({}, b"")}, 1.0, "study")
    answer(controller.tasks["a"], result)
    (envelope,) = wire.collect(ids.values())
    assert why in envelope.error


def test_a_task_that_flare_gives_up_is_an_error_so_that_the_site_is_asked_again(made):
    wire, controller, _, _ = made
    ids = wire.send_all({"a": ({}, b"")}, 1.0, "study")
    controller.tasks["a"].completion_status = TaskCompletionStatus.CLIENT_DEAD
    controller.tasks["a"].task_done_cb(task=controller.tasks["a"], fl_ctx=None)
    (envelope,) = wire.collect(ids.values())
    assert "client_dead" in envelope.error


def test_what_is_forgotten_is_cancelled_and_its_result_dropped(made):
    wire, controller, _, _ = made
    ids = wire.send_all({"a": ({}, b"")}, 1.0, "study")
    wire.forget(ids.values())
    assert controller.cancelled == [controller.tasks["a"]]
    answer(controller.tasks["a"], pack({}))
    assert list(wire.collect(ids.values())) == []


def test_a_job_with_too_few_sites_for_too_long_is_ended(tmp_path, monkeypatch):
    engine, now = Engine(tmp_path), 1000.0
    monkeypatch.setattr(wires.time, "monotonic", lambda: now)
    wire = FlareWire(Controller(), Context(engine), Signal(), quorum=2, lost=100.0)
    now += 90  # they have not come yet
    wire.wait(0.001)
    engine.say_here("a")
    engine.say_here("b")
    wire.wait(0.001)
    now += 90
    engine.say_here("a")
    wire.wait(0.001)
    now += 20
    engine.say_here("a")
    with pytest.raises(
        RunError, match=r"only a could be reached for 100 s, and 2 sites are needed: submit the same job"
    ):
        wire.wait(0.001)


def test_the_end_of_a_job_ends_the_waiting(made):
    wire, _, _, abort = made
    wire.wait(0.001)
    abort.trigger(True)
    with pytest.raises(Stopped, match="submit the same job again"):
        wire.wait(60.0)
