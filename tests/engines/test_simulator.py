"""Memories of simulated sites: on the device while they fit, then in main memory, then on disk; never other bits."""

import gc
from dataclasses import replace

import numpy as np
import pytest

import polysite as ps
from phased import START, phases, play
from polysite import machine
from polysite.engines import memory_store
from polysite.engines.memory_store import MemoryStore
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.simulator import Simulator
from polysite.engines.sites import Sites
from polysite.engines.wire import InProcess
from polysite.payload import Payload
from quadratic import Quadratic

SITES, ONE = 6, 8  # bytes of a model


class OnDevice(np.ndarray):
    """An array on a device that is not there; results of arithmetic stay on it."""

    is_cuda, device = True, "cuda:0"

    def detach(self):
        return self

    def cpu(self):
        return np.array(self)  # plain, in main memory


class DeviceSite(Quadratic):
    """A site whose models are on the device; it refuses others."""

    def lift(self, params):
        return {k: np.array(v).view(OnDevice) for k, v in params.items()}

    def fit(self, params, *args, **more):
        assert all(isinstance(v, OnDevice) for v in params.values())
        fit = super().fit(params, *args, **more)
        self.fits[-1] = replace(fit, params=self.lift(fit.params))
        return self.fits[-1]


def sites():
    start = {k: v.view(OnDevice) for k, v in START.items()}
    return {f"s{k}": DeviceSite(0.5 + k, np.full(2 + k, k - 2.0), start=start) for k in range(SITES)}


def bits(payload):
    """In main memory, wherever it was."""
    trees = {k: {n: np.array(x) for n, x in v.items()} for k, v in payload.items() if not isinstance(v, float)}
    return Payload(**{**payload, **trees})


DITTO = ps.Ditto(lam=0.3)
AMPLE = 10**9


def trained(engine, algorithm=DITTO, rounds=3):
    *_, last = run_rounds(algorithm, engine, START, Plan(rounds=rounds), 0)
    return last, {i: bits(m) for i, m in engine.memories().items()}


@pytest.mark.parametrize(
    ("device", "host", "places"),
    [
        (2 * SITES * ONE, AMPLE, {"device"}),  # the old and the new memories of a round
        (3 * ONE, AMPLE, {"device", "host"}),
        (2 * ONE, 3 * ONE, {"device", "host", "disk"}),
        (0, 0, {"disk"}),
    ],
)
def test_memories_are_where_they_fit_and_have_the_same_bits_everywhere(device, host, places):
    last, memories = trained(Simulator(DITTO, sites(), store=MemoryStore(AMPLE, AMPLE)))
    store = MemoryStore(device, host)
    engine = Simulator(DITTO, sites(), store=store)
    again, found = trained(engine)
    assert found == memories and bits(Payload(w=again.state.model)) == bits(Payload(w=last.state.model))
    assert {s.where for s in engine._memory.values()} == places
    assert all(store.used[w] <= limit for w, limit in (("device", device), ("host", host)))
    kept = [s.get()["model"]["w"] for s in engine._memory.values() if s.where == "device"]
    assert all(isinstance(x, OnDevice) for x in kept)
    spilled = {f.params == {} for r in again.replies.values() for f in r.fits}
    assert spilled == {places != {"device"}}  # or the models of all fits would stay on the device
    assert engine.score(0, again.sent, "train").keys() == memories.keys()


def test_files_of_memories_that_nothing_refers_to_are_deleted():
    store = MemoryStore(0, 0)
    engine = Simulator(DITTO, sites(), store=store)
    _, first = trained(engine, rounds=1)
    before = engine.memories()
    folder = store._folder
    trained(engine, rounds=2)
    gc.collect()
    assert len(list(folder.iterdir())) == 2 * SITES and store.used["disk"] == 2 * SITES * ONE
    assert {i: bits(m) for i, m in before.items()} == first  # those of an earlier round, while they are held
    del before
    gc.collect()
    assert len(list(folder.iterdir())) == SITES
    del engine, store
    gc.collect()
    assert not folder.exists()


def test_models_that_a_phase_starts_from_leave_the_device_too():
    def served(store):
        engine = Simulator(DITTO, sites(), store=store)
        last, _ = trained(engine, rounds=2)
        tuning = Simulator(ps.FineTune(lr=(0.01, 0.02)), sites(), store=store)
        tuning.begin(2, engine.serve(2, last.sent))
        _, found = trained(tuning, tuning.algorithm, 2)
        return found, {start.where for host in tuning.sites.wire.hosts.values() for _, start in host._starts.values()}

    near, far = served(MemoryStore(AMPLE, AMPLE)), served(MemoryStore(0, 4 * ONE))
    assert near[0] == far[0] and near[1] == {"device"} and "device" not in far[1] and "disk" in far[1]


def test_a_run_with_memories_on_disk_resumes_to_the_same_bits(tmp_path):
    def models(name, store, rounds):
        made = phases([(DITTO, {"rounds": rounds})], sites, store=store)
        _, folder = play(tmp_path / name, made)
        return {p.name: p.read_bytes() for p in (folder.path / "models").iterdir()}

    whole = models("whole", MemoryStore(AMPLE, AMPLE), 4)
    models("half", MemoryStore(0, 0), 2)
    (tmp_path / "half" / "result.json").unlink()
    assert models("half", MemoryStore(ONE, ONE), 4) == whole


def test_shares_of_the_free_memory_are_the_limits(monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(100 * ONE, 4 * ONE))
    monkeypatch.setattr(memory_store, "_free_on", lambda payload: 6 * ONE)
    store = MemoryStore()
    payload = Payload(model={"w": np.zeros(1).view(OnDevice)})
    kept = [store.put(payload) for _ in range(6)]
    assert [s.where for s in kept] == ["device"] * 3 + ["host"] * 2 + ["disk"]  # half of 6, half of 4
    assert store.put(Payload()).where == "host" and store.put(Payload(n=1.0)).where == "disk"


def test_every_kind_of_leaf_survives_the_disk():
    arrays = np.arange(6, dtype=np.int64).reshape(2, 3), np.zeros((0, 4), np.float32), np.array(True), np.float16([1])
    payload = Payload(a={str(k): x for k, x in enumerate(arrays)}, n=0.1)
    assert MemoryStore(0, 0).put(payload).get() == payload


def test_a_reply_that_does_not_count_leaves_the_memory_as_it_was():
    engine = Simulator(ps.Ditto(), {"a": Quadratic(1.0, np.zeros(2)), "b": Quadratic(2.0, np.ones(2))})
    sent = dict.fromkeys(engine.names, Payload(model={"w": np.array([3.0])}))
    for _ in engine.train(0, sent):
        ...
    engine.settle(["a"])
    assert set(engine.memories()) == {"a"}


def test_a_site_that_connects_anew_gets_its_payload_again():
    """What it kept of the last request may be gone."""

    class Anew(InProcess):
        token = "1"

        def online(self):
            return dict.fromkeys(self.hosts, self.token)

    engine = Simulator(ps.FedAvg(), {"a": Quadratic(1.0, np.zeros(2))})
    wire, sent = Anew(engine.wire.hosts), {"a": Payload(model={"w": np.array([3.0])})}
    engine.sites = Sites(wire, ["a"])
    moved = []
    for wire.token in ("1", "1", "2"):
        engine.score(0, sent, "validation")
        moved.append(engine.sites.traffic()[0]["a"])
    assert moved == [8, 0, 8]
