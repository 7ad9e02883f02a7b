"""Memories of simulated sites: on the device while they fit, then in main memory, then on disk; never other bits."""

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polysite import machine
from polysite.algorithms.ditto import Ditto
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.fine_tune import FineTune
from polysite.engines import memory_store
from polysite.engines.memory_store import MemoryStore
from polysite.engines.phases import Phase, find_progress, run_phases
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.run_folder import RunFolder
from polysite.engines.simulator import Simulator
from polysite.payload import Payload
from quadratic import Quadratic

SITES, ONE = 6, 8  # bytes of a model
START = {"w": np.array([3.0])}


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


def sites(kind=DeviceSite):
    made = {f"s{k}": kind(0.5 + k, np.full(2 + k, k - 2.0), start=START) for k in range(SITES)}
    return {i: replace(s, start=s.lift(START)) for i, s in made.items()}


def leaves(payload):
    return [x for tree in payload.values() if not isinstance(tree, float) for x in tree.values()]


def bits(payload):
    return Payload(
        **{k: v if isinstance(v, float) else {n: np.array(x) for n, x in v.items()} for k, v in payload.items()}
    )


def trained(engine, algorithm, rounds=3):
    *_, last = run_rounds(algorithm, engine, START, Plan(rounds=rounds), 0)
    return last, {i: bits(m) for i, m in engine.memories().items()}


@pytest.mark.parametrize(
    ("device", "host", "places"),
    [
        (10**9, 10**9, {"device"}),
        (2 * SITES * ONE, 10**9, {"device"}),  # the old and the new memories of a round
        (3 * ONE, 10**9, {"device", "host"}),
        (0, 10**9, {"host"}),
        (2 * ONE, 3 * ONE, {"device", "host", "disk"}),
        (0, 0, {"disk"}),
    ],
)
def test_memories_are_where_they_fit_and_have_the_same_bits_everywhere(device, host, places):
    algorithm = Ditto(lam=0.3)
    last, memories = trained(Simulator(algorithm, sites(), store=MemoryStore(10**9, 10**9)), algorithm)
    store = MemoryStore(device, host)
    engine = Simulator(algorithm, sites(), store=store)
    again, found = trained(engine, algorithm)
    assert found == memories and bits(Payload(w=again.state.model)) == bits(Payload(w=last.state.model))
    assert {s.where for s in engine._memory.values()} == places
    assert all(store.used[w] <= limit for w, limit in (("device", device), ("host", host)))
    kept = [x for s in engine._memory.values() if s.where == "device" for x in leaves(s.get())]
    assert all(isinstance(x, OnDevice) for x in kept)
    spilled = {f.params == {} for r in again.replies.values() for f in r.fits}
    assert spilled == {places != {"device"}}  # or the models of all fits would stay on the device
    assert engine.score(0, again.sent, "train").keys() == memories.keys()


def test_files_of_memories_that_nothing_refers_to_are_deleted():
    algorithm, store = Ditto(lam=0.3), MemoryStore(0, 0)
    engine = Simulator(algorithm, sites(), store=store)
    _, first = trained(engine, algorithm, 1)
    before = engine.memories()
    folder = store._folder
    trained(engine, algorithm, 2)
    gc.collect()
    assert len(list(folder.iterdir())) == 2 * SITES and store.used["disk"] == 2 * SITES * ONE
    assert {i: bits(m) for i, m in before.items()} == first  # those of an earlier round, while they are held
    del before
    gc.collect()
    assert len(list(folder.iterdir())) == SITES
    del engine, store, algorithm
    gc.collect()
    assert not folder.exists()


def test_models_that_a_phase_starts_from_leave_the_device_too():
    def served(store):
        engine = Simulator(Ditto(lam=0.3), sites(), store=store)
        last, _ = trained(engine, Ditto(lam=0.3), 2)
        tuning = Simulator(FineTune(lr=(0.01, 0.02)), sites(), store=store)
        tuning.begin(2, engine.serve(2, last.sent))
        _, found = trained(tuning, FineTune(lr=(0.01, 0.02)), 2)
        return found, {s.where for s in tuning._starts.values()}

    near, far = served(MemoryStore(10**9, 10**9)), served(MemoryStore(0, 4 * ONE))
    assert near[0] == far[0] and near[1] == {"device"} and "device" not in far[1] and "disk" in far[1]


def test_a_shared_start_is_kept_once():
    store = MemoryStore(10**9, 10**9)
    engine = Simulator(FedAvg(), sites(), store=store)
    last, _ = trained(engine, FedAvg(), 1)
    tuning = Simulator(FineTune(), sites(), store=store)
    tuning.begin(1, engine.serve(1, last.sent))
    assert store.used["device"] == ONE


def test_a_run_with_memories_on_disk_resumes_to_the_same_bits(tmp_path):
    def phase(store):
        algorithm = Ditto(lam=0.3)
        return [Phase(algorithm, Simulator(algorithm, sites(), store=store), Plan(rounds=4))]

    whole = RunFolder.create(tmp_path / "whole", "", 0)
    run_phases(phase(MemoryStore(10**9, 10**9)), START, 0, whole)
    half = RunFolder.create(tmp_path / "half", "", 0, after=None)
    short = phase(MemoryStore(0, 0))
    run_phases([replace(short[0], plan=Plan(rounds=2))], START, 0, half)
    (half.path / "result.json").unlink()
    again = phase(MemoryStore(ONE, ONE))
    at = find_progress(half, again)
    assert at.round == 1
    run_phases(again, START, 0, half, resume=at)
    for name in ("last.s0", "last.s5", "best.s3"):
        file = Path("models") / f"{name}.safetensors"
        assert (half.path / file).read_bytes() == (whole.path / file).read_bytes()


def test_shares_of_the_free_memory_are_the_limits(monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(100 * ONE, 4 * ONE))
    monkeypatch.setattr(memory_store, "_free_on", lambda payload: 6 * ONE)
    store = MemoryStore()
    payload = Payload(model={"w": np.zeros(1).view(OnDevice)})
    kept = [store.put(payload) for _ in range(6)]
    assert [s.where for s in kept] == ["device"] * 3 + ["host"] * 2 + ["disk"]  # half of 6, half of 4
    assert store.put(Payload()).where == "host" and store.put(Payload(n=1.0)).where == "disk"


def test_every_kind_of_leaf_survives_the_disk():
    payload = Payload(
        a={"x": np.arange(6, dtype=np.int64).reshape(2, 3), "none": np.zeros((0, 4), np.float32)},
        b={"flag": np.array(True), "half": np.ones(3, np.float16)},
        n=0.1,
    )
    assert MemoryStore(0, 0).put(payload).get() == payload
