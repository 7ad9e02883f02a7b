"""CFFT against answers on paper: clusters of cases that are planted across sites, the first round, the limit."""

from dataclasses import replace

import numpy as np
import pytest

import polysite as ps
from polysite.algorithms.base import is_finished, serving_payloads
from polysite.algorithms.cfft import State
from polysite.engines.phase_sites import Reply
from polysite.engines.phases import Phase, run_phases
from polysite.engines.rounds import run_rounds
from polysite.engines.run_folder import RunFolder
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError
from polysite.payload import Payload
from polysite.site import CaseScore
from quadratic import ETA, K, Quadratic

START = {"w": np.array([3.0])}
LOW, HIGH = -1.0, 2.0  # where the cases of the two kinds pull the model
N = {"a": (6, 2), "b": (3, 9), "c": (0, 7)}  # cases of both kinds at every site: shift within sites
A = {"a": 0.5, "b": 1.0, "c": 2.0}
TWO = ps.Cfft(components=(2,), dimensions=2, rounds=4)


class Shifted(Quadratic):
    """Validation cases of its own, named apart."""

    judges = None  # optimum of every validation case; None: as in training
    best_low = LOW  # the model that scores best on cases of the low kind

    def cases(self, split):
        count = len(self.b) if split != "validation" or self.judges is None else len(self.judges)
        return tuple(f"{split[0]}{k}" for k in range(count))

    def _values(self, cases):
        judges = self.b if self.judges is None else self.judges
        return np.array([(judges if n[0] == "v" else self.b)[int(n[1:])] for n in cases])

    def radiomics(self, cases, bin_width):
        b = self._values(cases)
        jitter = 0.05 * np.sin(np.arange(len(b)) * 7.0 + self.a)
        return np.stack([b + jitter, b**2 - jitter], axis=1)

    def score(self, params, cases):
        b = self._values(cases)
        miss = np.abs(params["w"].item() - np.where(b == LOW, self.best_low, b))
        return {n: CaseScore({"L": 1 / (1 + m)}, m) for n, m in zip(cases, miss, strict=True)}


class Began(Shifted):
    """The model does best on cases of the low kind where it began, so tuning only leads away from there."""

    best_low = 3.0


def sites(judges=None, kind=Shifted):
    made = {}
    for i, (low, high) in N.items():
        made[i] = kind(A[i], np.array([LOW] * low + [HIGH] * high), lr=ETA, steps=K, start=START)
        made[i].judges = None if judges is None else np.array(judges.get(i, ()))
    return made


def played(algorithm, rounds=60, share=1.0, made=None, engine=None, **how):
    """Its rounds, until it has finished by itself."""
    engine, found = engine or Simulator(algorithm, made or sites(**how)), []
    for r in run_rounds(algorithm, engine, START, ps.Plan(rounds=rounds, share=share), seed=0):
        found.append(r)
        if is_finished(algorithm, r.state):
            break
    return found


def after_fedavg(algorithm, place):
    """The result of a study that fine-tunes FedAvg's model by clusters, and its folder."""
    folder = RunFolder.create(place, "", 0)
    plans = (ps.FedAvg(), ps.Plan(rounds=10)), (algorithm, ps.Plan(rounds=300, validate_every=7))
    return run_phases([Phase(a, Simulator(a, sites()), plan) for a, plan in plans], START, 0, folder), folder


def kinds(state):
    """(Cluster of the low cases, cluster of the high ones)."""
    low = next(c for c in state.models if state.train["a"].get(c) == 6 and state.train["b"].get(c) == 3)
    return low, next(c for c in state.models if c != low)


def pulled(i, b, w):
    return b + (1 - ETA * A[i]) ** K * (w - b)


@pytest.mark.parametrize("fit", ["federated", "pooled"])
def test_first_round_and_limit(fit):
    """Every cluster is FedAvg over the cases of its kind, wherever they are; who has none sends nothing for it."""
    rounds = played(replace(TWO, fit=fit, rounds=60), 150)
    first = next(r for r in rounds if r.state.judged == 1)
    low, high = kinds(first.state)
    for c, b, k in ((low, LOW, 0), (high, HIGH, 1)):
        n = {i: counts[k] for i, counts in N.items() if counts[k]}
        mean = sum(n[i] * pulled(i, b, 3.0) for i in n) / sum(n.values())
        assert first.state.models[c]["w"] == pytest.approx(mean)
        assert rounds[-1].state.best[c]["w"] == pytest.approx(b, abs=1e-6)
    assert f"cluster_{low}" not in first.sent["c"] and f"cluster_{low}" not in first.replies["c"].payload
    assert first.replies["c"].payload.nbytes < first.replies["a"].payload.nbytes
    assert sum(len(r.replies[i].fits) for r in rounds for i in N) == 60 * 5  # the last exchange only judges
    assert not any(r.refused for r in rounds)


def test_without_a_choice_only_the_last_models_are_scored_and_served():
    judges = {i: [9.0] for i in N}  # validation cases that prefer the first models
    chosen, rounds = (played(replace(TWO, choose=choose), judges=judges) for choose in (True, False))
    last, counted = rounds[-1], [{k for p in r.replies.values() for k in p.payload.get("counts", {})} for r in rounds]
    scored = [r.state.judged for r, words in zip(rounds, counted, strict=True) if any("judge" in k for k in words)]
    assert [n for n in scored if n] == [TWO.rounds + 1] and all(score > 0 for score in last.state.scores.values())
    for c, model in last.state.best.items():
        assert model["w"] == last.state.models[c]["w"] != chosen[-1].state.best[c]["w"]


@pytest.mark.parametrize(("fit", "field"), [("federated", "sums"), ("pooled", "features")])
def test_no_feature_of_a_case_leaves_unless_the_fit_is_pooled(fit, field):
    own = np.concatenate([s.radiomics(s.cases("train"), 0.09) for s in sites().values()])
    rounds = played(replace(TWO, fit=fit))
    told = [reply.payload for r in rounds for reply in r.replies.values()]
    tables = [x for p in told for f, t in p.items() if f != "counts" for x in t.values()]
    rows = [row for x in tables if x.ndim == 2 and x.shape[1] == 2 for row in x]
    assert any(np.allclose(row, case, atol=1e-9) for row in rows for case in own) == (fit == "pooled")
    assert {f.split("_")[0] for p in told for f in p} <= {field, "counts", "cluster"}


def test_every_patient_is_served_by_its_own_cluster_and_so_is_a_stranger():
    engine = Simulator(TWO, sites())
    state = played(TWO, engine=engine)[-1].state
    low, high = kinds(state)
    stranger = Shifted(1.0, np.array([LOW, HIGH, HIGH]), start=START)
    got = serving_payloads(TWO, state, ["new"])["new"]
    groups = dict(enumerate(TWO.serve(got, Payload(), stranger, stranger.cases("test"))))
    assert groups[int(low)] == (state.best[low], ("t0",)) and groups[int(high)] == (state.best[high], ("t1", "t2"))
    assert len(engine.score(0, serving_payloads(TWO, state, ["a"]), "validation")["a"]) == 8
    begun = serving_payloads(TWO, TWO.init(START, list(N)), ["new"])["new"]  # until there are clusters
    assert list(TWO.serve(begun, Payload(), stranger, ("t0",))) == [(START, ("t0",))]


def test_a_cluster_keeps_its_best_round_and_may_keep_the_first():
    ended = played(TWO, judges={"a": [LOW, HIGH, HIGH], "b": [LOW], "c": [HIGH]}, kind=Began)[-1].state
    low, high = kinds(ended)
    assert ended.best[low] == START and ended.models[low] != START
    assert ended.best[high] == ended.models[high] != START


def test_a_cluster_without_validation_cases_is_judged_by_all():
    rounds = played(TWO, judges={"a": [HIGH], "b": [HIGH, HIGH], "c": [HIGH]})
    low, _ = kinds(rounds[-1].state)
    asked = [r for r in rounds if r.state.judged > 0]
    assert all(list(p["all"]) == [low] for r in asked for p in r.sent.values())
    assert all(r.replies["c"].payload["counts"][f"judge {low}"] == [1.0] for r in asked)  # it has no case of that kind
    assert f"cluster_{low}" not in asked[0].replies["c"].payload  # and still does not train it
    nearest = [abs(r.sent["a"][f"cluster_{low}"]["w"].item() - HIGH) for r in asked]
    best = asked[int(np.argmin(nearest))].sent["a"][f"cluster_{low}"]
    assert rounds[-1].state.best[low] == best


def test_a_site_that_was_away_learns_the_clusters_when_it_comes_back():
    rounds = played(replace(TWO, rounds=12), rounds=200, share=0.67)
    known = [set(r.state.train) for r in rounds]
    assert any(len(k) == 2 for k in known) and known[-1] == set(N)
    late = next(r for r, k in zip(rounds[1:], known, strict=False) if len(k) == 2 and len(r.state.train) == 3)
    (new,) = (i for i, got in late.sent.items() if "mixture" in got)
    assert set(late.sent[new]) == {"mixture"} and set(late.replies[new].payload) == {"counts"}
    assert rounds[-1].state.judged == 13


def test_a_phase_of_it_ends_by_itself_and_is_the_best_of_all(tmp_path):
    result, folder = after_fedavg(TWO, tmp_path / "run")
    records = [r for r in folder.records() if r.phase]
    assert len(records) < 60 and result.best_phase == 1
    assert records[-1].diagnostics["clusters with cases"] == 2 and records[-1].measure
    assert sorted(p.stem for p in (folder.path / "models").glob("best*")) == ["best.group-0", "best.group-1"]
    assert records[0].sites["a"].steps == 0 < records[-2].sites["a"].steps


def test_what_is_odd_about_clusters_is_recorded_once(tmp_path, monkeypatch):
    """Three clusters of two kinds of cases, of whose restarts more agreement is asked than there can be."""
    monkeypatch.setattr("polysite.cluster.remarks.UNSTABLE", 1.1)
    _, folder = after_fedavg(ps.Cfft(components=(3,), dimensions=2, rounds=2), tmp_path / "run")
    said = [i["what"] for r in folder.records() for i in r.incidents]
    assert len(said) == len(set(said)) and any("the best restarts end in different clusters" in s for s in said)
    last = folder.records()[-1].diagnostics
    assert 0 < last["variance kept"] <= 1 and "agreement with hospitals" in last


class Hostile(Simulator):
    """Site b tells something else from the first exchange of a stage on."""

    def __init__(self, algorithm, field, lie):
        super().__init__(algorithm, sites())
        self.field, self.lie = field, lie

    def train(self, round, sent):
        for site, reply in super().train(round, sent):
            if site == "b" and self.field in reply.payload:
                reply = Reply(Payload(**self.lie(dict(reply.payload))), reply.fits, reply.seconds, reply.nbytes)
            yield site, reply


def times(factor):
    return lambda p: {f: {k: x * factor for k, x in t.items()} for f, t in p.items()}


@pytest.mark.parametrize(
    ("fit", "field", "lie", "reason"),
    [
        ("federated", "sums", times(1e15), "far beyond all others"),
        ("federated", "sums", times(np.nan), "'sums' is not finite"),
        ("federated", "sums", lambda p: {}, "does not answer what it was asked, 'sums'"),
        ("federated", "sums", lambda p: {"sums": {k: -x for k, x in p["sums"].items()}}, "below zero"),
        ("federated", "sums", lambda p: {"sums": {k: x[:1] for k, x in p["sums"].items()}}, "other names or shapes"),
        ("pooled", "features", lambda p: {"features": {}}, "it has no features"),
        ("pooled", "counts", lambda p: {"counts": {"train 7": np.ones(1)}}, "it counts 'train 7'"),
        ("pooled", "counts", lambda p: {**p, "counts": {k: 0 * x for k, x in p["counts"].items()}}, "that are none"),
        ("pooled", "cluster_0", lambda p: {**p, "counts": {k: 9 * x for k, x in p["counts"].items()}}, "other cases"),
        ("pooled", "cluster_0", lambda p: {**p, "counts": {"judge 0": np.ones(1), "score 0": np.full(1, 5.0)}}, "abov"),
        ("pooled", "cluster_0", lambda p: {**p, "cluster_0": {"w": np.ones(3)}}, "'w' of shape"),
        ("pooled", "cluster_0", lambda p: {**p, "cluster_5": START}, "instead of"),
    ],
)  # fmt: skip
def test_a_lie_is_refused_and_does_not_end_the_study(fit, field, lie, reason):
    algorithm = replace(TWO, fit=fit)
    rounds = played(algorithm, engine=Hostile(algorithm, field, lie))
    said = [r.refused["b"] for r in rounds if r.refused]
    assert said and all(set(r.refused) <= {"b"} for r in rounds) and reason in said[0]
    assert is_finished(algorithm, rounds[-1].state)  # the others went on to the end
    honest = [x for model in rounds[-1].state.best.values() for x in model["w"]]
    assert np.isfinite(honest).all() and all(LOW - 0.1 <= x <= 3.1 for x in honest)


def judged(before, told, tuned=None):
    """One cluster whose model is 1 and whose best so far is 3, after some sites judge it: (cases, their scores)."""
    state = State(
        START, mixture={"weights": np.ones(1)}, models={"0": {"w": np.ones(1)}}, best={"0": START},
        scores={} if before is None else {"0": before}, train={"a": {"0": 1.0}, "b": {"0": 3.0}},
        judges={i: {"0": float(n)} for i, (n, _) in told.items()},
    )  # fmt: skip
    counts = {i: {"judge 0": np.array([float(n)]), "score 0": np.array([x])} for i, (n, x) in told.items()}
    models = {i: {"cluster_0": {"w": np.array([w])}} for i, w in (tuned or {}).items()}
    return TWO.merge(state, {i: Payload(counts=counts[i], **models.get(i, {})) for i in told})


def test_a_model_is_judged_by_its_mean_over_all_cases_and_has_to_be_better_than_the_best():
    """Scores that add up to 1 over one case and to 1/2 over three others: a mean of 3/8."""
    told = {"a": (1, 1.0), "b": (3, 0.5)}
    for before, taken in ((None, True), (0.25, True), (0.375, False), (0.5, False)):
        state = judged(before, told)
        assert state.best["0"]["w"].item() == (1.0 if taken else 3.0)
        assert state.scores == {"0": 0.375 if taken else before}
        assert state.models["0"]["w"].item() == 1.0 and state.judged == 1
    assert judged(None, told, {"a": 4.0, "b": 0.0}).models["0"]["w"].item() == 1.0  # by training cases: (1*4 + 3*0)/4


def test_a_site_tells_how_many_cases_judge_and_the_sum_of_their_scores():
    """The model begins at 3: low cases miss by 4 and score 1/5, high ones miss by 1 and score 1/2."""
    first = next(r for r in played(TWO) if r.state.judged == 1)
    low, high = kinds(first.state)
    counts = {k: x.item() for k, x in first.replies["b"].payload["counts"].items()}
    assert counts == pytest.approx({f"judge {low}": 3, f"score {low}": 3 / 5, f"judge {high}": 9, f"score {high}": 4.5})
    assert first.state.scores == pytest.approx({low: 1 / 5, high: 1 / 2})


@pytest.mark.parametrize(
    ("sums", "refused"),
    [
        ((1.0, -1e15, 2.0), {"b"}),
        ((-1.0, 100.0, -2.0), set()),
        ((0.0, 0.9e12, 0.0), set()),  # beside one, where the others have nothing
        ((0.0, 1.1e12, 0.0), {"b"}),
        ((1.0, 1e4, 1e4, 1e4, 1e15), set()),  # beside most of them it is not absurd
    ],
)
def test_sums_are_refused_that_are_far_beyond_those_of_most_in_either_direction(sums, refused):
    found = {i: {"cases": np.full(1, 9.0), "sums": np.array([x])} for i, x in zip("abcde", sums, strict=False)}
    said = TWO.objections(TWO.init(START, list(found)), {i: Payload(sums=x) for i, x in found.items()})
    assert set(said) == refused and all("far beyond all others" in why for why in said.values())


def test_the_number_of_exchanges_covers_fit_announcement_tuning_and_the_last_scores():
    """A federated fit takes 19 exchanges and its iterations, at most; a pooled one takes a single exchange."""
    assert ps.Cfft(iterations=30, rounds=50).facts.exchanges == 19 + 30 + 1 + 50 + 1
    assert ps.Cfft(iterations=30, rounds=50, fit="pooled").facts.exchanges == 1 + 1 + 50 + 1


@pytest.mark.parametrize("share", [1.0, 0.67])
@pytest.mark.parametrize("fit", ["federated", "pooled"])
def test_rounds_of_tuning_are_counted_from_zero_however_long_the_fit_took(fit, share):
    made = sites()
    assert is_finished(TWO, played(replace(TWO, fit=fit), 80, share, made)[-1].state)
    rounds = [sorted({budget.round for _, _, budget, _ in s.asked}) for s in made.values()]
    assert rounds == [[0, 1, 2, 3]] * 3 if share == 1 else all(set(own) <= {0, 1, 2, 3} for own in rounds)


@pytest.mark.parametrize(("cases", "count"), [("train", 27), ("train+validation", 27 + 5)])
def test_clusters_are_fitted_to_the_cases_that_were_named(cases, count):
    judges, numbers = {"a": [LOW, HIGH], "b": [LOW], "c": [HIGH, HIGH]}, ({"a": 8, "b": 12, "c": 7}, {"a": 5})
    for fit, field in (("federated", "sums"), ("pooled", "features")):
        rounds = played(replace(TWO, fit=fit, cases=cases), judges=judges)
        told = [p.payload[field]["cases"] for p in rounds[0].replies.values()]
        assert sum(x.item() if fit == "federated" else len(x) for x in told) == count
    replace(TWO, components=(count,), cases=cases).check_sites(*numbers)
    with pytest.raises(ConfigError, match=f"{count + 1} clusters, and the sites have {count} cases in all"):
        replace(TWO, components=(count + 1,), cases=cases).check_sites(*numbers)
