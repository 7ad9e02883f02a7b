"""A study over sites that remember for themselves gives what the simulator gives, whatever happens on the way.

The wire here is a handful of lines, the workers are real; over Flower itself, see test_deployment.py.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from consortium import (
    BASE,
    FAST,
    NAMES,
    Envelope,
    Fragile,
    Inside,
    Stop,
    config_of,
    equal_states,
    go,
    same,
    site_of,
    states,
    values,
    wanted,
    worker,
    workers,
)
from polysite import study, tree
from polysite.config import parse
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.identity import identity
from polysite.deploy.protocol import PROTOCOL
from polysite.deploy.site import courier
from polysite.deploy.site.ledger import check
from polysite.deploy.site.policy import SitePolicy
from polysite.deploy.site.worker import Worker
from polysite.engines.memory_store import MemoryStore
from polysite.engines.plan import Plan
from polysite.errors import ConfigError, RunError
from polysite.payload import Payload, decode, encode
from polysite.training.torch_site import TorchSite


def test_a_server_that_stops_anywhere_goes_on_to_the_same_end(tmp_path, trained):
    """After every message that it might not survive; sites keep what they remember, and go back where it went back."""
    chosen = wanted("ditto")
    whole = trained(chosen)
    for stop in (2, 3, 5, 7):
        hosts = workers(tmp_path / str(stop))
        left = iter(range(3 * stop))  # questions, of three sites each time
        with pytest.raises(Stop):
            go(tmp_path, chosen, Fragile(hosts, lambda header, left=left: next(left, None) is None), f"run{stop}")
        done = coordinator.resume(tmp_path / f"run{stop}", Inside(hosts), deadlines=FAST)
        assert equal_states(whole, done)
        assert values(done) == values(whole)
        told = [i for r in (*done.folder.records(), done.result) for i in r.incidents]
        assert any("started again" in i["what"] for i in told)


@pytest.mark.parametrize("name", ["ditto", "fine_tune"])
def test_a_worker_that_is_killed_goes_on_from_its_files(name, tmp_path, trained):
    chosen = wanted(name)

    class Mortal(Inside):
        def answer(self, site, header, body):
            if site == "b":
                self.workers["b"] = worker(tmp_path, "b")  # another process, with nothing but its state folder
            return super().answer(site, header, body)

    assert equal_states(trained(chosen), go(tmp_path, chosen, Mortal(workers(tmp_path))))


class Away(Inside):
    """One site is not there for some rounds, and then connects anew."""

    def online(self):
        last = next((header for _, header, _ in reversed(self.sent) if header["kind"] in ("train", "score")), {})
        at = last.get("round", 0), last.get("kind") == "score"
        if at >= (4, True):
            self.tokens["c"] = "2"
        gone = (1, True) <= at < (4, True)
        return {k: v for k, v in self.tokens.items() if not (gone and k == "c")}


def test_a_round_goes_on_without_a_site_and_takes_it_in_again(tmp_path):
    chosen = replace(wanted("scaffold"), run=Plan(rounds=8, checkpoint_every=1))
    wire, deadlines = Away(workers(tmp_path)), replace(FAST, quorum=2, grace=0.0)
    done = coordinator.run(chosen, wire, NAMES, tmp_path / "run", deadlines=deadlines, assess=False, wait=0)
    records = done.folder.records()
    heard = ["c" in r.sites for r in records]
    assert heard == [True, True, False, False, False, True, True, True] and records[2].absent == ("c",)
    what = [i["what"] for r in records for i in r.incidents if i.get("site") == "c"]
    assert any("away" in w for w in what) and "connected anew" in what
    (again,) = (h for site, h, _ in wire.sent if site == "c" and h["kind"] == "train" and h["round"] == 5)
    assert again["version"] == 1  # what it remembered when it was last heard


def test_replies_that_are_summed_from_memory_or_from_disk_give_the_bits_of_held_ones(tmp_path, monkeypatch):
    chosen, found, written = replace(wanted("fedavg"), run=Plan(rounds=4, checkpoint_every=1)), [], []
    write = MemoryStore._write
    monkeypatch.setattr(
        MemoryStore, "_write", lambda store, payload: written.append(write(store, payload)) or written[-1]
    )
    for how in ("memory", "disk", "held"):
        with monkeypatch.context() as patch:
            if how == "disk":
                patch.setattr("polysite.engines.memory_store.SHARE", 0.0)
            if how == "held":
                patch.setattr("polysite.engines.replies.is_summable", lambda algorithm: False)
            wire, deadlines = Away(workers(tmp_path / how)), replace(FAST, quorum=2, grace=0.0)
            out = tmp_path / how / "run"
            done = coordinator.run(chosen, wire, NAMES, out, deadlines=deadlines, assess=False, wait=0)
        found.append(states(out))
        assert ["c" in r.sites for r in done.folder.records()] == [True, True, False, False]
        assert len(written) == (0 if how == "memory" else 10) and not any(path.exists() for path in written)
    assert all(same(found[0][k], other[k]) for other in found[1:] for k in found[0])


def test_what_a_policy_forbids_is_refused_there_with_the_reason(tmp_path):
    """Radiomics of every case do not leave a site that does not want it; sums do."""
    pooled = parse(config_of("cfft").replace("algorithm.fewest", 'algorithm.fit = "pooled"\nalgorithm.fewest'))
    hosts = workers(tmp_path)
    hosts["c"] = worker(tmp_path, "c", case_vectors=False)
    for name in "ab":
        hosts[name] = worker(tmp_path, name, case_vectors=True)
    with pytest.raises(
        RunError, match=r"c: numbers of single cases \('features'\) may not leave.*case_vectors = false"
    ):
        go(tmp_path, pooled, Inside(hosts))
    assert not (tmp_path / "deployed").exists()
    last = check(tmp_path / "sites" / "c" / "ledger.jsonl")[-1]
    assert last["bytes"] == 0 and "case_vectors" in last["refused"]
    assert go(tmp_path, wanted("cfft"), Inside(hosts), "sums").result.rounds > 2


@pytest.mark.parametrize(
    "policy, said",
    [
        ({"algorithms": ("scaffold",)}, "'fedavg' may not train here"),
        ({"kinds": ("count",)}, "'model' is of the kind 'model' and may not leave"),
        ({"rounds": 1}, "rounds = 1"),
    ],
)
def test_a_policy_is_asked_before_anything_is_computed(policy, said, tmp_path):
    with pytest.raises(RunError, match=said):
        go(tmp_path, wanted("fedavg"), Inside(workers(tmp_path, **policy)))


def test_versions_are_compared_when_sites_are_greeted(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator, "identity", lambda: {**identity(), "code": "other"})
    with pytest.raises(RunError, match=r"this site runs polysite .* \(code .*\), the coordinator .* \(code other\)"):
        go(tmp_path, wanted("fedavg"), Inside(workers(tmp_path)))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"run.pooled": "true"}, "scans would have to leave"),
        ({"model": '{ name = "ensemble", members = ["unet", "unet"] }'}, "an ensemble is not trained"),
        ({"federation.name": '"iid"'}, r"leave out \[federation\]"),
        ({"split.file": '"x.csv"'}, "stay at the hospitals"),
        ({"algorithm.name": '"fine_tune"'}, "goes on from a model"),
    ],
)
def test_what_only_a_simulation_can_do_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        coordinator.check(parse(BASE, change))


def test_names_of_cases_and_what_is_wrong_with_them_stay_at_the_hospital(tmp_path):
    """Everything that leaves a site in a study and in a failure, as text."""
    left = []

    class Listening(Inside):
        def answer(self, site, header, body):
            got, out = super().answer(site, header, body)
            left.append(json.dumps(got))
            return got, out

    hosts = workers(tmp_path)
    go(tmp_path, wanted("fedavg"), Listening(hosts))
    broken = replace(hosts["a"].site, data={"name": "files", "path": "/nowhere/Jane-Doe"})
    files = '[data]\nname = "hospitals"\nmodalities = ["t1"]\nlabels = ["WT"]\n'
    header = {"kind": "hello", "protocol": PROTOCOL, "study": "x", "config": files, **identity()}

    class Resident:
        def ask(self, header, body):
            return Worker(broken, SitePolicy()).answer(header, body)

    said = []
    answer, _ = courier.ask_and_show(Resident(), header, b"", said.append)
    assert "nowhere/Jane-Doe" in said[-1]  # for the screen of the hospital alone
    left.append(json.dumps(answer))
    assert "refused" in answer or "error" in answer
    assert len(left) > 10 and not any(word in text for text in left for word in ("a-00", "b-00", "Jane", "nowhere"))


def test_compressed_replies_are_what_the_simulator_makes_of_them(tmp_path, trained):
    for how, share in (("half", 0.51), ("int8", 0.26)):
        chosen = parse(config_of("fedavg"), {"run.compress": f'"{how}"'})
        deployed = go(tmp_path, chosen, Inside(workers(tmp_path / how)), f"deployed {how}")
        assert equal_states(trained(chosen), deployed)
        sites = deployed.folder.records()[0].sites.values()
        assert all(s.bytes_up < share * s.bytes_down for s in sites)


def test_a_late_answer_is_dropped_and_listed_and_its_site_asked_again_later(tmp_path):
    class Slow(Inside):
        """One site's training takes longer than the deadline, once."""

        kept = None

        def answer(self, site, header, body):
            got = super().answer(site, header, body)
            if site == "b" and header["kind"] == "train" and header["round"] == 1 and self.kept is None:
                self.kept = str(self.count), got
                return None
            if self.kept and header["kind"] == "train" and header["round"] == 3:
                id, late = self.kept
                self.waiting[id], self.kept = Envelope(id, *late), ()
            return got

    chosen = replace(wanted("ditto"), run=Plan(rounds=6, checkpoint_every=1))
    deadlines = replace(FAST, quorum=2, deadline=0.3)
    done = coordinator.run(
        chosen, Slow(workers(tmp_path)), NAMES, tmp_path / "run", deadlines=deadlines, assess=False, wait=0
    )
    records = done.folder.records()
    what = [i["what"] for r in records for i in r.incidents if i.get("site") == "b"]
    assert "too late: no answer to train, round 2" in what
    assert "its answer to train, round 2 came late and was dropped" in what
    assert "b" not in records[1].sites and "b" in records[-1].sites


def test_a_site_whose_data_are_mended_joins_later(tmp_path):
    class Broken(Inside):
        tries = 0

        def answer(self, site, header, body):
            if site == "c" and header["kind"] == "hello" and self.tries < 2:
                self.tries += 1
                return {"error": "its data or its disk are not in order; its own log says why"}, b""
            return super().answer(site, header, body)

    wire = Broken(workers(tmp_path))
    deadlines = replace(FAST, quorum=2)
    done = coordinator.run(wanted("fedavg"), wire, NAMES, tmp_path / "run", deadlines=deadlines, assess=False, wait=5)
    assert wire.tries == 2 and "c" in done.folder.records()[-1].sites
    noted = [i for r in done.folder.records() for i in r.incidents if "greeted" in i["what"]]
    assert len(noted) == 1


def test_a_model_of_too_few_cases_does_not_leave_though_its_hospital_has_more(tmp_path):
    """A cluster of patients may be smaller than the hospital."""
    hosts = {name: Worker(site_of(tmp_path, name), SitePolicy(fewest=5)) for name in NAMES}
    header = {"kind": "hello", "protocol": PROTOCOL, "study": "x", "config": config_of("fedavg"), **identity()}
    assert "refused" not in hosts["a"].answer(header, b"")[0]
    agreed = hosts["a"].agreed
    algorithm, site = agreed.phases[0]

    class Part(type(algorithm)):
        def local(self, got, memory, site):
            return Payload(model=site.fit(got["model"], keep=site.cases("train")[:2]).params, weight=5), memory

    sent = encode(Payload(model=site.start))
    asked = {**header, "kind": "train", "phase": 0, "round": 0, "version": -1, "keep": []}
    assert "refused" not in hosts["a"].answer(asked, sent)[0]
    agreed.phases[0] = Part(), site
    answer, left = hosts["a"].answer({**asked, "round": 1}, sent)
    assert "too few cases are behind 'model'" in answer["refused"] and not left


def stalled(name, rounds_):
    """A study whose first round stays the best: it learns next to nothing."""
    chosen = wanted(name)
    plan = Plan(rounds=rounds_, checkpoint_every=1)
    return replace(chosen, train=replace(chosen.train, lr=1e-30), run=plan)


def test_the_memory_of_the_best_round_outlives_a_restart_of_the_server(tmp_path):
    hosts = workers(tmp_path)
    with pytest.raises(Stop):
        go(tmp_path, stalled("ditto", 5), Fragile(hosts, lambda h: h["kind"] == "train" and h["round"] == 3))
    done = coordinator.resume(tmp_path / "deployed", Fragile(hosts), deadlines=FAST)
    assert done.result.best_round == 0 and done.result.rounds == 5


def test_what_a_phase_began_from_outlives_better_rounds_and_a_restart(tmp_path, trained):
    then = '[[then]]\nalgorithm.name = "fine_tune"\nrun.rounds = 5\n'
    chosen = parse(f"{BASE}\n{then}", {"algorithm.name": '"ditto"'})
    hosts = workers(tmp_path)
    with pytest.raises(Stop):
        go(tmp_path, chosen, Fragile(hosts, lambda h: h["kind"] == "train" and h["round"] == 6))
    done = coordinator.resume(tmp_path / "deployed", Fragile(hosts), deadlines=FAST)
    assert equal_states(trained(chosen), done)


OWN = """
[[then]]
algorithm = { name = "clustered", groups = { one = ["a", "b"], two = ["c"] } }
run.rounds = 2
"""


@pytest.mark.parametrize("algorithm, then", [("ditto", ""), ("fedavg", OWN)], ids=["personal", "groups"])
def test_own_best_rounds_are_those_of_the_simulator_also_after_a_restart(algorithm, then, tmp_path, monkeypatch):
    """One hospital likes what the others do not, so that its best round is another."""
    score = TorchSite.score_of

    def contrary(self, case, logits, truth):
        found = score(self, case, logits, truth)
        return found if self.name != "c" else replace(found, labels={k: 1 - v for k, v in found.labels.items()})

    monkeypatch.setattr(TorchSite, "score_of", contrary)
    keys = {
        "train.clean.largest": "true",
        "run.rounds": "3",
        "run.validate_every": "1",
        "run.best": '"own"',
        "model.filters": "[2, 2, 2]",
    }
    chosen = parse(BASE + then, {"algorithm.name": f'"{algorithm}"', "train.lr": "0.5", **keys})
    alone = study.train(chosen, tmp_path / "simulated")
    hosts = workers(tmp_path)
    last = alone.result.rounds - 1
    with pytest.raises(Stop):
        go(tmp_path, chosen, Fragile(hosts, lambda h: h["kind"] == "train" and h["round"] == last))
    done = coordinator.resume(tmp_path / "deployed", Fragile(hosts), deadlines=FAST)
    assert done.result.best_rounds == alone.result.best_rounds and done.result.best_round == alone.result.best_round
    assert values(done) == values(alone)
    for split, sites in alone.result.common.items():
        assert {i: sorted(map(str, s.values())) for i, s in sites.items()} == {
            i: sorted(map(str, s.values())) for i, s in done.result.common[split].items()
        }
    assert alone.result.best_rounds["a"] != alone.result.best_rounds["c"]


class Anew(Inside):
    """Site a connects anew when it has trained, and is slow to say who it is; c trains as long as that."""

    def collect(self, ids):
        found = super().collect(ids)
        trained = [x for x in found if x.header.get("fit_loss")]
        if trained and self.tokens["a"] == "1":
            late = [x for x in trained if self.whose(x) == "c"]
            self.tokens["a"] = "2"
            self.waiting.update({x.id: x for x in late})
            return [x for x in found if x not in late]
        hello = [x for x in found if x.header.get("train") and self.tokens["a"] == "2" and self.slow > 0]
        if hello:
            self.slow -= 1
            self.waiting.update({x.id: x for x in hello})
        return [x for x in found if x not in hello]

    slow = 3

    def whose(self, answer):
        return self.sent[int(answer.id) - 1][0]


def test_a_site_that_connects_anew_between_two_questions_is_asked_the_next(tmp_path):
    chosen = replace(wanted("ditto"), run=Plan(rounds=2, checkpoint_every=1))
    done = go(tmp_path, chosen, Anew(workers(tmp_path)))
    assert all(sorted(r.sites) == sorted(r.validation) == list(NAMES) for r in done.folder.records())


def test_incidents_outlive_the_server_that_noted_them(tmp_path):
    class Odd(Fragile):
        def answer(self, site, header, body):
            got, out = super().answer(site, header, body)
            return ({**got, "incidents": ["the worker died"]} if header["kind"] == "hello" else got), out

    hosts = workers(tmp_path)
    with pytest.raises(Stop):
        go(tmp_path, wanted("ditto"), Fragile(hosts, lambda h: h["kind"] == "train" and h["round"] == 1))
    with pytest.raises(Stop):
        coordinator.resume(tmp_path / "deployed", Odd(hosts, lambda h: h["kind"] == "train"), deadlines=FAST)
    done = coordinator.resume(tmp_path / "deployed", Inside(hosts), deadlines=FAST)
    noted = [i["what"] for r in done.folder.records() for i in r.incidents]
    assert noted.count("the worker died") == 3 and noted.count("the server was started again") == 2


@pytest.mark.parametrize("value", [None, np.nan, 1e300])
def test_a_lie_in_the_assessment_is_left_out_of_it(value, tmp_path):
    def told(fields):
        if value is None:
            return Payload()
        return Payload(**{k: v if isinstance(v, float) else tree.map(lambda x: x * 0 + value, v) for k, v in fields})

    class Lying(Inside):
        def answer(self, site, header, body):
            got, out = super().answer(site, header, body)
            return (got, encode(told(decode(out).items()))) if (site, header["kind"]) == ("c", "assess") else (got, out)

    done = coordinator.run(wanted("fedavg"), Lying(workers(tmp_path)), NAMES, tmp_path / "run", deadlines=FAST)
    assert "c" in json.loads((done.folder.path / "assessment" / "assessment.json").read_text())["refused"]
