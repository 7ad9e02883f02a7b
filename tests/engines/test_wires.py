"""One contract for all wires: the same requests bring the same responses, whatever carries them.

Two quadratic sites answer: here, through the codec, in the workers of a Ray cluster, behind messages as hospitals get
them, over Flower's port on this machine, and as tasks of FLARE. The answers on paper are those of ``quadratic.py``.
"""

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from nvflare.apis.signal import Signal

import polysite as ps
from flare_fake import Context, Engine, crossed
from polysite.deploy import protocol
from polysite.deploy.coordinator.posted import Envelope, Posted
from polysite.deploy.flare.messages import pack, unpack
from polysite.deploy.flare.wire import FlareWire
from polysite.engines.guard_state import Guard
from polysite.engines.messages import (
    Begin,
    Begun,
    Examine,
    ExamineModel,
    Failed,
    MaskTaken,
    MaskTurn,
    Measured,
    Models,
    Refused,
    Score,
    Scored,
    Serve,
    Train,
    Trained,
)
from polysite.engines.phase_sites import PhaseSites
from polysite.engines.ray import cluster
from polysite.engines.ray.wire import RayWire
from polysite.engines.rounds import run_rounds
from polysite.engines.secure.member import packed
from polysite.engines.simulator import Simulator
from polysite.engines.sites import Deadlines, Sites
from polysite.engines.wire import InProcess
from polysite.payload import Payload, encode, model_digest
from quadratic import Quadratic
from ray_fake import FakeRay
from wire_ends import Consortium
from wire_hosts import CLEANED, NAMES, SENT, START, UNCLEANED, host, network, sites


class Hospital:
    """A host behind messages, without policy: its memory stays with it."""

    def __init__(self, name):
        self.host, self.memory = host(name), {}

    def answer(self, header, body):
        _, request = protocol.parse_request(header, body)
        key = request.phase, request.version
        response = self.host.answer(replace(request, memory=self.memory.get(key)))
        match response:
            case Refused(reason):
                return {"refused": reason}, b""
            case Trained(payload=reply, turn=turn):
                self.memory[request.phase, request.round] = turn.memory
                return {**protocol.effort_header(response), "seconds": 0.0}, encode(reply)
            case Scored():
                return protocol.scores_header(response), b""
            case Measured():
                return protocol.measures_header(response), b""
            case Models(models=models):
                return {"digests": list(map(model_digest, models))}, b""
            case MaskTaken(payload=answer):
                return {}, encode(answer)
        return {}, b""


class Here:
    """A post without a network."""

    def __init__(self):
        self.hospitals, self.found, self.numbers = {name: Hospital(name) for name in NAMES}, {}, count()

    def online(self):
        return dict.fromkeys(NAMES, "1")

    def send_all(self, letters, ttl, group):
        sent = {}
        for site, (header, body) in letters.items():
            sent[site] = str(len(self.found))
            text = json.dumps(self.hospitals[site].answer(json.loads(json.dumps(header)), body)[0])
            self.found[sent[site]] = Envelope(
                sent[site], json.loads(text), self.hospitals[site].answer(header, body)[1]
            )
        return sent

    def collect(self, ids):
        return [self.found.pop(i) for i in list(ids) if i in self.found]

    def wait(self, seconds): ...

    def forget(self, ids): ...

    def incidents(self):
        return []


class Tasks:
    """FLARE's controller, whose tasks are answered at once by hospitals."""

    def __init__(self):
        self.hospitals = {name: Hospital(name) for name in NAMES}

    def send(self, task, fl_ctx, targets):
        header, body = unpack(crossed(task.data))
        answer, out = self.hospitals[targets[0]].answer(header, body)
        result = crossed(pack(answer, out))
        task.result_received_cb(client_task=SimpleNamespace(task=task, result=result), fl_ctx=None)


@contextmanager
def over_flower(folder):
    """Both ends of the port on this machine, with a thread for every hospital."""
    folder.mkdir()
    made, over = Consortium(folder), threading.Event()

    def serve(fleet, hospital):
        fleet.connect()
        while not over.is_set():
            if incoming := fleet.receive(0.2):
                fleet.answer(incoming, *hospital.answer(incoming.header, incoming.body))

    with made.link() as link, made.fleet(link, "north") as north, made.fleet(link, "south") as south:
        threads = [
            threading.Thread(target=serve, args=(fleet, Hospital(name)), daemon=True)
            for name, fleet in zip(NAMES, (north, south), strict=True)
        ]
        for thread in threads:
            thread.start()
        yield link
        over.set()
        for thread in threads:
            thread.join()


WIRES = ("here", "coded", "ray", "posted", "flower", "flare")


@pytest.fixture(params=WIRES)
def wire(request, tmp_path, monkeypatch):
    hosts, subject = {name: host(name) for name in NAMES}, protocol.Subject(("L",))
    if request.param in ("here", "coded"):
        yield InProcess(hosts, request.param == "coded")
    elif request.param == "ray":
        ray = FakeRay({"a": (2, 0)})
        monkeypatch.setattr(cluster, "_ray", lambda: ray)
        monkeypatch.setattr("polysite.own_process.begin", lambda: None)
        monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
        yield RayWire(cluster.Workers("wire_hosts:Hosts", "", dict.fromkeys(NAMES, 1), device="cpu", threads=1))
    else:
        with over_flower(tmp_path / "keys") if request.param == "flower" else _post(request.param, tmp_path) as post:
            posted = Posted(post, "study", {}, subject)
            posted.cases_of = lambda site: dict.fromkeys(("train", "validation", "test"), 9)
            yield posted


@contextmanager
def _post(kind, folder):
    if kind == "posted":
        yield Here()
        return
    engine = Engine(folder, NAMES)
    yield FlareWire(Tasks(), Context(engine), Signal())


def wait_for(wire, names):
    """Wait until sites are connected; return when a test that waits for more has failed."""
    end = time.monotonic() + 20
    while not wire.online().keys() >= {*names}:
        assert time.monotonic() < end, "a site has not connected"
    return end


def asked(wire, **requests):
    """The responses of the sites that are named, which may come late."""
    end = wait_for(wire, requests)
    found = {site: response for site, _, response in wire.ask(requests, 0.01)}
    while found.keys() != requests.keys():
        assert time.monotonic() < end, "a site does not answer"
        found |= {site: response for site, _, response in wire.ask({}, 0.01)}
    return found


def test_a_turn_is_the_one_on_paper(wire):
    found = asked(wire, **dict.fromkeys(NAMES, Train(round=0, payload=SENT)))
    for name, site in sites().items():
        aim = site.b[0]
        assert found[name].payload["model"]["w"].item() == pytest.approx(3.0 + site.pull * (aim - 3.0), rel=1e-12)
        assert found[name].payload["weight"] == site.size
        (fit,) = found[name].fits
        assert (fit.steps, fit.lr_sum) == (5, pytest.approx(0.25))


def trained(wire, request, memory=None):
    """A reply, and the memory to go on with: the server's in a simulation, the hospital's own elsewhere."""
    reply = asked(wire, north=request)["north"]
    return reply, (reply.turn.memory if reply.turn else None)


def test_a_memory_goes_on_where_the_reply_was_merged(wire):
    """The second turn of Ditto begins from its own model, of round 0, and not from that of a round that was refused."""
    first, memory = trained(wire, Train(phase=1, round=0, payload=SENT))
    trained(wire, Train(phase=1, round=1, payload=SENT, version=0, keep=(0,), memory=memory))  # not merged
    again, _ = trained(wire, Train(phase=1, round=2, payload=SENT, version=0, keep=(0,), memory=memory))
    scores = asked(wire, north=Score(phase=1, round=2, payload=SENT, version=0, split="test", memory=memory))["north"]
    expected = InProcess({"north": host("north")})
    there, kept = trained(expected, Train(phase=1, round=0, payload=SENT))
    second, _ = trained(expected, Train(phase=1, round=2, payload=SENT, version=0, memory=kept))
    judged = asked(expected, north=Score(phase=1, round=2, payload=SENT, split="test", memory=kept))["north"]
    assert first.payload == there.payload and again.payload == second.payload and scores.scores == judged.scores


def test_noise_is_that_of_the_site_and_is_accounted_for(wire):
    request = Train(phase=2, round=0, payload=SENT)
    found, plain = asked(wire, south=request)["south"], asked(wire, south=Train(round=0, payload=SENT))["south"]
    expected = asked(InProcess({"south": host("south")}), south=request)["south"]
    assert found.payload == expected.payload and found.payload != plain.payload
    assert found.releases == expected.releases != ()


def test_masks_begin_with_keys_and_a_reply_without_them_is_refused(wire):
    keys = MaskTurn(phase=3, round=0, payload=Payload(session=packed({"id": b"i" * 16})), step="keys")
    assert set(asked(wire, north=keys)["north"].payload) == {"keys"}
    found = asked(wire, south=Train(phase=3, round=0, payload=SENT))["south"]
    assert isinstance(found, Refused) and "cannot be masked" in found.reason


def test_models_are_served_as_trees_or_as_their_digests(wire):
    (model,) = asked(wire, north=Serve(round=0, payload=SENT))["north"].models
    assert model_digest(START) == (model if isinstance(model, str) else model_digest(model))


def test_a_phase_begins_from_the_model_that_the_site_was_served(wire):
    simulated = not isinstance(wire, Posted)
    start = {"start": {"w": np.array([1.5])}} if simulated else {"payload": Payload(model={"w": np.array([1.5])})}
    assert isinstance(asked(wire, north=Begin(phase=4, begins=3, round=2, **start))["north"], Begun)
    found = asked(wire, north=Score(phase=4, round=3, payload=Payload(), split="validation"))["north"].scores
    assert found["0"].loss == pytest.approx(0.5 * (1.5 + 1.0) ** 2)


def measures(wire, request):
    """All measures of the north's cases."""
    return {e.case: (e.score.labels, e.measures) for e in asked(wire, north=request)["north"].cases}


def test_masks_are_cleaned_where_the_scans_are(wire):
    payload, here = Payload(model=network(CLEANED).start), InProcess({"north": host("north")})
    found, uncleaned = (Examine(phase=k, round=0, payload=payload, split="validation") for k in (CLEANED, UNCLEANED))
    assert measures(wire, found) == measures(here, found) != measures(here, uncleaned)


def test_a_model_of_another_site_is_examined_in_a_simulation_and_by_no_hospital(wire):
    """A hospital scores only models that it trains from: any other could be made to tell what its scans look like."""
    payload, cases = Payload(model=network(CLEANED).start), network(CLEANED).cases("validation")
    request = ExamineModel(phase=CLEANED, round=0, payload=payload, cases=cases)
    if isinstance(wire, Posted):
        with pytest.raises(KeyError):
            asked(wire, north=request)
        assert isinstance(protocol.parse_response(request, {}, bytes, {}, protocol.Subject()), Failed)
    else:
        own = Examine(phase=CLEANED, round=0, payload=payload, split="validation")
        assert measures(wire, request) == measures(wire, own)


def guarded(wire):
    """Three rounds in which the longer change is shortened: the model, and what the guard saw."""
    engine = PhaseSites(ps.FedAvg(), Sites(wire, NAMES), known=sites(), names=NAMES, audience=NAMES)
    plan = ps.Plan(rounds=3, guard=Guard(use="on", clip=1.0))
    rounds = run_rounds(ps.FedAvg(), engine, START, plan, seed=0, keep_replies=False)
    return [(r.state.model["w"].item(), r.guard, r.traffic) for r in rounds]


def test_the_guard_sees_and_does_the_same(wire):
    wait_for(wire, NAMES)
    found, expected = guarded(wire), guarded(InProcess({name: host(name) for name in NAMES}))
    assert found == expected and any(seen.clipped for _, guard, _ in expected for seen in guard.values())


class Faulty(InProcess):
    """Sites in this process, of which some are away in some rounds, and some answer late."""

    def __init__(self, hosts, away=(), late=()):
        super().__init__(hosts)
        self.away, self.late, self.kept = set(away), set(late), []

    def online(self):
        return {site: "here" for site in self.hosts if site not in self.away}

    def ask(self, requests, wait):
        yield from self.kept
        self.kept = []
        for answer in super().ask(requests, wait):
            if answer[0] in self.late:
                self.kept.append(answer)
            else:
                yield answer
        self.kept = [a for a in self.kept if a[0] in self.late]


def rehearsed(quorum, **faults):
    """A round of four sites in this process as a server of real hospitals would wait for them."""
    engine = Simulator(ps.FedAvg(), {f"s{k}": Quadratic(1.0, np.full(2, float(k))) for k in range(4)})
    wire = Faulty(engine.sites.wire.hosts, **faults)
    engine.sites = Sites(wire, engine.names, Deadlines(quorum, deadline=0.05, grace=0.0, again=0.01, poll=0.001))
    replies = dict(engine.train(0, dict.fromkeys(engine.names, SENT)))
    return sorted(replies), " ".join(i["what"] for i in engine.sites.incidents())


def test_a_simulation_rehearses_a_quorum():
    assert rehearsed(3) == (["s0", "s1", "s2", "s3"], "")
    heard, noted = rehearsed(3, away=["s1"])
    assert heard == ["s0", "s2", "s3"] and "away: no answer to train, round 1" in noted
