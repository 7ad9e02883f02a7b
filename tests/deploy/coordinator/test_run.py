"""A study over sites that remember for themselves gives what the simulator gives, whatever happens on the way.

The wire here is a handful of lines, the workers are real; over Flower itself, see test_deployment.py.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

import consortium
from consortium import BASE, FAST, NAMES, Envelope, Fragile, Inside, Stop, equal_states, go, wanted, worker, workers
from polysite import study, tree
from polysite.config import parse
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.site import courier
from polysite.deploy.site.ledger import check
from polysite.deploy.site.policy import SitePolicy
from polysite.deploy.site.worker import Worker
from polysite.engines.memory_store import MemoryStore
from polysite.engines.plan import Plan
from polysite.errors import ConfigError, RunError
from polysite.payload import Payload, decode, encode
from polysite.training.torch_site import TorchSite

TWO = replace(FAST, quorum=2, grace=0.0)  # a round goes on with two sites


def rounds(name, count):
    return replace(wanted(name), run=Plan(rounds=count, checkpoint_every=1))


def noted(run, site=None):
    """The incidents of a run, or of one site."""
    told = [i for r in (*run.folder.records(), run.result) for i in r.incidents]
    return [i["what"] for i in told if site in (None, i.get("site"))]


def stopped(tmp_path, chosen, at):
    """Run a study on a server that stops at a question, and on another one to its end."""
    hosts = workers(tmp_path)
    with pytest.raises(Stop):
        go(tmp_path, chosen, Fragile(hosts, at))
    return coordinator.resume(tmp_path / "deployed", Inside(hosts), deadlines=FAST)


def trains(round):
    return lambda header: header["kind"] == "train" and header["round"] == round


@pytest.mark.parametrize("stop", [2, 3, 5, 7])
def test_a_server_that_stops_anywhere_goes_on_to_the_same_end(stop, tmp_path, trained):
    """After every message that it might not survive; sites keep what they remember, and go back where it went back."""
    whole, left = trained(wanted("ditto")), iter(range(3 * stop))  # questions, of three sites each time
    done = stopped(tmp_path, wanted("ditto"), lambda header: next(left, None) is None)
    assert equal_states(whole, done) and consortium.values(done) == consortium.values(whole)
    assert any("started again" in what for what in noted(done))


@pytest.mark.parametrize("name", ["ditto", "fine_tune"])
def test_a_worker_that_is_killed_goes_on_from_its_files(name, tmp_path, trained):
    class Mortal(Inside):
        def answer(self, site, header, body):
            if site == "b":
                self.workers["b"] = worker(tmp_path, "b")  # another process, with nothing but its state folder
            return super().answer(site, header, body)

    assert equal_states(trained(wanted(name)), go(tmp_path, wanted(name), Mortal(workers(tmp_path))))


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
    wire = Away(workers(tmp_path))
    done = go(tmp_path, rounds("scaffold", 8), wire, deadlines=TWO, wait=0)
    records = done.folder.records()
    heard = ["c" in r.sites for r in records]
    assert heard == [True, True, False, False, False, True, True, True] and records[2].absent == ("c",)
    assert any("away" in what for what in noted(done, "c")) and "connected anew" in noted(done, "c")
    (again,) = (h for site, h, _ in wire.sent if site == "c" and trains(5)(h))
    assert again["version"] == 1  # what it remembered when it was last heard


def test_replies_that_are_summed_from_memory_or_from_disk_give_the_bits_of_held_ones(tmp_path, monkeypatch):
    runs, written, write = [], [], MemoryStore._write
    monkeypatch.setattr(MemoryStore, "_write", lambda *given: written.append(write(*given)) or written[-1])
    for how in ("memory", "disk", "held"):
        with monkeypatch.context() as patch:
            if how == "disk":
                patch.setattr("polysite.engines.memory_store.SHARE", 0.0)
            if how == "held":
                patch.setattr("polysite.engines.replies.is_summable", lambda algorithm: False)
            wire = Away(workers(tmp_path / how))
            runs.append(go(tmp_path / how, rounds("fedavg", 4), wire, deadlines=TWO, wait=0))
        assert ["c" in r.sites for r in runs[-1].folder.records()] == [True, True, False, False]
        assert len(written) == (0 if how == "memory" else 10) and not any(path.exists() for path in written)
    assert all(equal_states(runs[0], other) for other in runs[1:])


def test_what_a_policy_forbids_is_refused_there_with_the_reason(tmp_path):
    """Radiomics of every case do not leave a site that does not want it; sums do."""
    text = consortium.config_of("cfft").replace("algorithm.restarts", 'algorithm.fit = "pooled"\nalgorithm.restarts')
    hosts = {name: worker(tmp_path, name, case_vectors=name != "c") for name in NAMES}
    said = r"c: numbers of single cases \('features'\) may not leave.*case_vectors = false"
    with pytest.raises(RunError, match=said):
        go(tmp_path, parse(text), Inside(hosts))
    assert not (tmp_path / "deployed").exists()
    last = check(tmp_path / "sites" / "c" / "ledger.jsonl")[-1]
    assert last["bytes"] == 0 and "case_vectors" in last["refused"]
    assert go(tmp_path, wanted("cfft"), Inside(hosts), "sums").result.rounds > 2


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
    wire = consortium.Recording(workers(tmp_path))
    go(tmp_path, wanted("fedavg"), wire)
    left = [json.dumps(got) for *_, got, _ in wire.left]
    broken = replace(wire.workers["a"].hospital.site, data={"name": "files", "path": "/nowhere/Jane-Doe"})

    class Resident:
        def ask(self, header, body):
            return consortium.ask(Worker(broken, SitePolicy()), **header)

    said, files = [], '[data]\nname = "hospitals"\nmodalities = ["t1"]\nlabels = ["WT"]\n'
    answer, _ = courier.ask_and_show(Resident(), {"kind": "hello", "study": "x", "config": files}, b"", said.append)
    assert "nowhere/Jane-Doe" in said[-1]  # for the screen of the hospital alone
    left.append(json.dumps(answer))
    assert "refused" in answer or "error" in answer
    assert len(left) > 10 and not any(word in text for text in left for word in ("a-00", "b-00", "Jane", "nowhere"))


@pytest.mark.parametrize(("how", "share"), [("half", 0.51), ("int8", 0.26)])
def test_compressed_replies_are_what_the_simulator_makes_of_them(how, share, tmp_path, trained):
    chosen = parse(consortium.config_of("fedavg"), {"run.compress": f'"{how}"'})
    deployed = go(tmp_path, chosen, Inside(workers(tmp_path)))
    assert equal_states(trained(chosen), deployed)
    first, model = deployed.folder.records()[0], deployed.result.bytes_down["a"]
    assert first.bytes_down == dict.fromkeys(NAMES, model)
    assert all(up < share * model for up in first.bytes_up.values())


def test_a_late_answer_is_dropped_and_listed_and_its_site_asked_again_later(tmp_path):
    class Slow(Inside):
        """One site's training takes longer than the deadline, once."""

        kept = None

        def answer(self, site, header, body):
            got = super().answer(site, header, body)
            if site == "b" and trains(1)(header) and self.kept is None:
                self.kept = str(len(self.sent)), got
                return None
            if self.kept and trains(3)(header):
                id, late = self.kept
                self.waiting[id], self.kept = Envelope(id, *late), ()
            return got

    deadlines = replace(FAST, quorum=2, deadline=0.3)
    done = go(tmp_path, rounds("ditto", 6), Slow(workers(tmp_path)), deadlines=deadlines, wait=0)
    records = done.folder.records()
    assert "too late: no answer to train, round 2" in noted(done, "b")
    assert "its answer to train, round 2 came late and was dropped" in noted(done, "b")
    assert "b" not in records[1].sites and "b" in records[-1].sites


def test_the_memory_of_the_best_round_outlives_a_restart_of_the_server(tmp_path):
    chosen = rounds("ditto", 5)
    chosen = replace(chosen, train=replace(chosen.train, lr=1e-30))  # it learns nothing: the first round stays the best
    done = stopped(tmp_path, chosen, trains(3))
    assert done.result.best_round == 0 and done.result.rounds == 5


def test_what_a_phase_began_from_outlives_better_rounds_and_a_restart(tmp_path, trained):
    then = '[[then]]\nalgorithm.name = "fine_tune"\nrun.rounds = 5\n'
    chosen = parse(f"{BASE}\n{then}", {"algorithm.name": '"ditto"'})
    assert equal_states(trained(chosen), stopped(tmp_path, chosen, trains(6)))


def test_own_best_rounds_are_those_of_the_simulator_also_after_a_restart(tmp_path, monkeypatch):
    """One hospital likes what the others do not, so that its best round is another."""
    score = TorchSite.scores_of

    def contrary(self, predictions):
        found = score(self, predictions)
        turned = {n: replace(s, labels={k: 1 - v for k, v in s.labels.items()}) for n, s in found.items()}
        return turned if self.name == "c" else found

    def common(run):
        sites = [(split, i, scores) for split, each in run.result.common.items() for i, scores in each.items()]
        return {(split, i): sorted(map(str, scores.values())) for split, i, scores in sites}

    monkeypatch.setattr(TorchSite, "scores_of", contrary)
    often = {"run.rounds": "3", "run.validate_every": "1", "run.best": '"own"', "train.clean.largest": "true"}
    chosen = parse(BASE, {"algorithm.name": '"ditto"', "train.lr": "0.5", "model.filters": "[2, 2, 2]"} | often)
    alone = study.train(chosen, tmp_path / "simulated")
    done = stopped(tmp_path, chosen, trains(alone.result.rounds - 1))
    assert done.result.best_rounds == alone.result.best_rounds and done.result.best_round == alone.result.best_round
    assert consortium.values(done) == consortium.values(alone) and common(done) == common(alone)
    assert alone.result.best_rounds["a"] != alone.result.best_rounds["c"]


@pytest.mark.parametrize("value", [None, np.nan, 1e300])
def test_a_lie_in_the_assessment_is_left_out_of_it(value, tmp_path):
    def lie(fields):
        told = {k: v if isinstance(v, float) else tree.map(lambda x: x * 0 + value, v) for k, v in fields.items()}
        return encode(Payload(**told))

    class Lying(Inside):
        def answer(self, site, header, body):
            got, out = super().answer(site, header, body)
            return (got, lie(decode(out) if value else {})) if (site, header["kind"]) == ("c", "assess") else (got, out)

    done = go(tmp_path, wanted("fedavg"), Lying(workers(tmp_path)), assess=True)
    assert "c" in json.loads((done.folder.path / "assessment" / "assessment.json").read_text())["refused"]
