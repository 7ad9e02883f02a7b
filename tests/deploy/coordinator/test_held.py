"""A model crosses once: a site that holds it is asked by its digest, over Flower and over FLARE."""

from types import SimpleNamespace

import numpy as np
import pytest
from nvflare.apis.signal import Signal

from consortium import BASE, NAMES, Inside, equal_states, go, values, worker, workers
from flare_fake import Context, Engine, crossed
from polysite.config import parse
from polysite.deploy.coordinator import posted
from polysite.deploy.flare.messages import pack, unpack
from polysite.deploy.flare.wire import FlareWire
from polysite.deploy.protocol import NAME
from polysite.engines.messages import Train
from polysite.payload import Payload


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The networks of tests are small: here they have names, too."""
    monkeypatch.setattr(posted, "NAMED", 1000)


@pytest.fixture
def chosen():
    return parse(BASE, {"run.validate_every": "1", "run.rounds": "3"})


class Tasks:
    """FLARE's controller; its tasks are done at once by workers, after FLARE's own serialisation."""

    def __init__(self, hosts):
        self.hosts, self.sent = hosts, []

    def send(self, task, fl_ctx, targets):
        header, body = unpack(crossed(task.data))
        self.sent.append((targets[0], header, len(body)))
        answer, out = self.hosts[targets[0]].answer(header, body)
        result = crossed(pack(answer, out))
        task.result_received_cb(client_task=SimpleNamespace(task=task, result=result), fl_ctx=None)


def over_flare(hosts, folder):
    controller = Tasks(hosts)
    return FlareWire(controller, Context(Engine(folder, NAMES)), Signal()), controller.sent


def over_flower(hosts, folder):
    """Flower's port carries bodies as they are; here without a network."""
    wire = Inside(hosts)
    return wire, wire.sent


@pytest.mark.parametrize("over", [over_flower, over_flare])
def test_scoring_a_model_and_training_from_it_is_one_download(chosen, tmp_path, over):
    wire, sent = over(workers(tmp_path), tmp_path)
    go(tmp_path, chosen, wire)
    for site in NAMES:
        named = [(header["kind"], header[NAME], size) for name, header, size in sent if name == site and NAME in header]
        kinds, names, sizes = zip(*named[:6], strict=True)
        assert kinds == ("train", "score") * 3
        assert len(set(names)) == 4  # the first model and three means
        whole = sizes[0]
        assert whole > 1000 and sizes == (whole, whole, 0, whole, 0, whole)


class Restarting(Inside):
    """Restarts a site's worker before it is asked by a name alone."""

    def __init__(self, folder):
        super().__init__(workers(folder))
        self.folder, self.restarted = folder, []

    def answer(self, site, header, body):
        if NAME in header and not len(body) and len(self.restarted) < 4:
            self.restarted.append(site)
            self.workers[site] = worker(self.folder, site)
        return super().answer(site, header, body)


def test_a_site_that_was_restarted_gets_the_model_again(chosen, tmp_path):
    wire = Restarting(tmp_path / "restarted")
    run = go(tmp_path, chosen, wire, "one")
    other = go(tmp_path, chosen, Inside(workers(tmp_path / "plain")), "two")
    assert len(wire.restarted) == 4 and equal_states(run, other) and values(run) == values(other)
    assert not [i for record in run.folder.records() for i in record.incidents]


class Liar(Inside):
    """Says that it holds a body, and then that it does not, whatever it is sent."""

    def answer(self, site, header, body):
        return {"holds": header.get(NAME, ""), "missing": True}, b""


def test_a_site_that_never_holds_what_it_said_fails_and_is_not_asked_without_end():
    wire = Liar(dict.fromkeys(NAMES))
    post = posted.Posted(wire, "s", {})
    request = Train(round=0, payload=Payload(model={"w": np.zeros(1000, np.float32)}))
    for _ in range(3):
        ((_, _, response),) = post.ask({"a": request}, 0.0)
        assert type(response).__name__ == "Unreadable"
    assert len(wire.sent) <= 6
