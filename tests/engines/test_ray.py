"""The Ray engine on a cluster that is not there: placement, lost workers and nodes, and the simulator's bits."""

import random
import sys

import pytest

from phased import phases
from polysite import study
from polysite.config import parse
from polysite.engines.messages import Models
from polysite.engines.phases import Phase, run_phases
from polysite.engines.plan import Plan
from polysite.engines.ray import cluster
from polysite.engines.ray.placement import Node, Place, find_room, place
from polysite.engines.rounds import run_rounds
from polysite.engines.run_folder import RunFolder
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError, RunError
from quadratic import Quadratic
from ray_fake import FakeRay, transports
from table import CASES, START, one_of_each_kind, same, sites

HOSPITALS = {f"site {k:02d}": 3 * k + 2 for k in range(23)}


def nodes(**resources):
    return [Node(name, *given) for name, given in resources.items()]


def test_every_gpu_of_every_node_has_a_worker_and_about_as_many_cases():
    machines = nodes(a=(64, 8), b=(64, 8), login=(8,))
    places = place(machines, HOSPITALS, threads=4)
    assert sorted(p.node for p in places) == ["a"] * 8 + ["b"] * 8
    assert {(p.cpus, p.gpus) for p in places} == {(4, 1.0)}
    assert sorted(i for p in places for i in p.sites) == sorted(HOSPITALS)
    most = max(sum(HOSPITALS[i] for i in p.sites) for p in places)
    assert most <= max(HOSPITALS.values()) + min(HOSPITALS.values())
    assert places == place(machines, dict(reversed(HOSPITALS.items())), threads=4)
    few = place(machines, {"north": 3, "south": 4}, threads=4)
    assert [(p.node, p.sites) for p in few] == [("a", ("south",)), ("b", ("north",))]  # spread over the nodes


def test_more_workers_than_gpus_share_them():
    places = place(nodes(a=(8, 2), b=(4, 1)), HOSPITALS, threads=4, workers=7)
    assert [p.node for p in places] == ["a", "b", "a", "a", "b", "a", "a"]
    assert {p.gpus for p in places} == {0.3333}
    for node, cpus, gpus in (("a", 8, 2), ("b", 4, 1)):
        mine = [p for p in places if p.node == node]
        assert sum(p.cpus for p in mine) <= cpus and sum(p.gpus for p in mine) <= gpus


def test_on_cpus_a_worker_takes_as_many_as_it_has_threads():
    assert [p.node for p in place(nodes(a=(5,), b=(2,)), HOSPITALS, threads=2)] == ["a", "b", "a"]
    assert len(place(nodes(a=(64, 8)), HOSPITALS, threads=16, gpus=False)) == 4
    (only,) = place(nodes(a=(2,)), HOSPITALS, threads=8)
    assert only.cpus == 2 and len(only.sites) == 23
    assert [p.cpus for p in place(nodes(a=(2,)), HOSPITALS, threads=1, workers=4)] == [0.5] * 4
    with pytest.raises(ConfigError, match="no node"):
        place([], HOSPITALS, threads=1)


def test_room_for_a_lost_worker_is_sought_on_its_node_first():
    lost, other = Place("a", 2, 1.0), Place("b", 2, 1.0)
    assert find_room(nodes(a=(4, 1), b=(4, 4)), [other], lost) == "a"
    assert find_room(nodes(b=(4, 2), c=(64, 0)), [other], lost) == "b"
    assert find_room(nodes(b=(4, 1), c=(64, 0)), [other], lost) is None


@pytest.mark.parametrize("case", one_of_each_kind())
def test_every_algorithm_ends_in_the_simulators_bits_whatever_is_lost(case, monkeypatch):
    """Three nodes, of which two end; the workers of the third are killed again and again."""
    clock = random.Random(case)

    def lose(ray, k):
        if k in (6, 12):
            ray.lose_node(clock.choice(sorted(ray.alive)[:-1]))
        elif k > 6 and clock.random() < 0.15:
            clock.choice(ray.actors).dead = True

    ray = FakeRay({"a": (1, 0), "b": (1, 0), "c": (2, 0)}, lose)
    workers, (engine,) = transports(monkeypatch, ray, case)
    simulator, plan = Simulator(CASES[case], sites()), Plan(rounds=6, share=0.75)
    *_, last = run_rounds(CASES[case], engine, START, plan, 0)
    *_, there = run_rounds(CASES[case], simulator, START, plan, 0)
    assert same(last.state, there.state) and same(engine.memories(), simulator.memories())
    assert len(workers.incidents()) >= 2


@pytest.mark.parametrize("case", ["fine-tuning", "ditto", "local"])
def test_phases_end_in_the_simulators_files(case, monkeypatch, tmp_path):
    """The second phase begins from models that only its workers know; one of them is lost after it began."""
    ray, cases = FakeRay({"a": (3, 0)}, lambda ray, k: k == 60 and ray.kill(ray.actors[0])), ("scaffold", case)
    _, remote = transports(monkeypatch, ray, *cases)

    def files(name, engines):
        folder, plan = RunFolder.create(tmp_path / name, "", 0), Plan(rounds=4, checkpoint_every=2)
        run_phases([Phase(CASES[c], e, plan) for c, e in zip(cases, engines, strict=True)], START, 0, folder)
        kept = [*folder.path.rglob("*.safetensors"), folder.path / "result.json"]
        return {f.relative_to(folder.path): f.read_bytes() for f in kept}, folder

    found, folder = files("ray", remote)
    expected, _ = files("simulator", [p.transport for p in phases([(CASES[c], {}) for c in cases], sites)])
    assert found == expected and len(found) > 5
    assert sum(len(r.incidents) for r in folder.records()) == 1


def test_a_model_that_many_sites_receive_is_stored_once_and_not_sent_back(monkeypatch):
    ray = FakeRay({"a": (2, 0)})
    _, (engine,) = transports(monkeypatch, ray, "fedavg, uniform")
    stored, answers = [], []
    put, get = ray.put, ray.get
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or put(value))
    monkeypatch.setattr(ray, "get", lambda job: answers.append(get(job)) or answers[-1])
    sent = CASES["fedavg, uniform"].send(CASES["fedavg, uniform"].init(START, engine.names), engine.names)
    served = engine.serve(0, sent)
    assert len(stored) == 1 and served.shared is not None
    cases = [site.cases("validation") for site in sites().values()]
    assert answers == [Models(("model",), (names,)) for names in cases]


def test_gpus_are_given_to_workers_and_named_to_their_sites(monkeypatch):
    ray = FakeRay({"a": (16, 2), "b": (16, 1)})
    workers, _ = transports(monkeypatch, ray, "scaffold", device="auto", threads=8)
    given = [(a.node, a.options["num_gpus"], a.options["num_cpus"]) for a in ray.actors]
    assert given == [("a", 1.0, 8), ("b", 1.0, 8), ("a", 1.0, 8)]
    assert {f["device"] for f in workers.facts.values()} == {"cuda"}
    with pytest.raises(ConfigError, match="no node of the Ray cluster has a GPU"):
        transports(monkeypatch, FakeRay({"a": (16, 0)}), "scaffold", device="cuda:1")


def diverge(*_, **__):
    raise RunError("training diverged at site 'c'")


@pytest.mark.parametrize(
    ("lose", "fit", "sentence"),
    [
        (lambda ray, k: k > 4 and [ray.kill(actor) for actor in ray.actors], Quadratic.fit, "lost 5 times"),
        (lambda ray, k: k == 5 and ray.lose_node("a"), Quadratic.fit, "no node of the Ray cluster is left"),
        (lambda ray, k: None, diverge, "diverged at site 'c'"),
    ],
    ids=["turn", "node", "site"],
)
def test_what_cannot_go_on_ends_the_run_with_a_sentence(lose, fit, sentence, monkeypatch):
    monkeypatch.setattr(Quadratic, "fit", fit)
    with pytest.raises(RunError, match=sentence):
        _, (engine,) = transports(monkeypatch, FakeRay({"a": (2, 0)}, lose), "scaffold")
        list(run_rounds(CASES["scaffold"], engine, START, Plan(rounds=3), 0))


def test_without_ray_one_sentence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'polysite\[cluster\]'"), cluster.connected():
        pass


@pytest.mark.parametrize("given, what", [(("rai",), "did you mean 'ray'"), (("simulator", "auto"), "--engine ray")])
def test_an_engine_that_cannot_be_is_refused(given, what, tmp_path):
    with pytest.raises(ConfigError, match=what):
        study.train(parse(""), tmp_path / "run", engine=study.Engine(*given))
