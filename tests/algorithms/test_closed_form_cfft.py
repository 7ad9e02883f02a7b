"""CFFT against answers on paper: clusters of cases that are planted across sites, the first round, the limit."""

from dataclasses import replace

import numpy as np
import pytest

import polysite as ps
from polysite.algorithms.base import is_finished, serving_payloads
from polysite.algorithms.cfft import State
from polysite.engines.phases import Phase, run_phases
from polysite.engines.rounds import run_rounds
from polysite.engines.run_folder import RunFolder
from polysite.engines.simulator import Simulator
from polysite.engines.transport import Reply
from polysite.errors import ConfigError
from polysite.payload import Payload
from polysite.site import Budget, CaseScore
from quadratic import Quadratic

START, ETA, K = {"w": np.array([3.0])}, 0.1, 5
LOW, HIGH = -1.0, 2.0  # where the cases of the two kinds pull the model
N = {"a": (6, 2), "b": (3, 9), "c": (0, 7)}  # cases of both kinds at every site: shift within sites
A = {"a": 0.5, "b": 1.0, "c": 2.0}
TWO = ps.Cfft(components=(2,), fewest=0, dimensions=2, rounds=4)


class Shifted(Quadratic):
    """Validation cases of its own, named apart."""

    judges = None  # optimum of every validation case; None: as in training

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
        miss = np.abs(params["w"].item() - self._values(cases))
        return {n: CaseScore({"L": 1 / (1 + m)}, m) for n, m in zip(cases, miss, strict=True)}


def sites(judges=None):
    made = {}
    for i, (low, high) in N.items():
        made[i] = Shifted(A[i], np.array([LOW] * low + [HIGH] * high), lr=ETA, steps=K, start=START)
        made[i].judges = None if judges is None else np.array(judges.get(i, ()))
    return made


def played(algorithm, rounds=60, judges=None, share=1.0, start=START):
    engine, found = Simulator(algorithm, sites(judges)), []
    for r in run_rounds(algorithm, engine, start, ps.Plan(rounds=rounds, share=share), seed=0):
        found.append(r)
        assert not r.refused
        if is_finished(algorithm, r.state):
            break
    return engine, found


def kinds(state):
    """(Cluster of the low cases, cluster of the high ones)."""
    low = next(c for c in state.models if state.train["a"].get(c) == 6 and state.train["b"].get(c) == 3)
    return low, next(c for c in state.models if c != low)


def pulled(i, b, w):
    return b + (1 - ETA * A[i]) ** K * (w - b)


@pytest.mark.parametrize("fit", ["federated", "pooled"])
def test_first_round_and_limit(fit):
    """Every cluster is FedAvg over the cases of its kind, wherever they are; who has none sends nothing for it."""
    algorithm = replace(TWO, fit=fit, rounds=60)
    _, rounds = played(algorithm, 150)
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


def test_without_a_choice_only_the_last_models_are_scored_and_served():
    judges = {i: [9.0] for i in N}  # validation cases that prefer the first models
    (_, chosen), (_, rounds) = played(TWO, judges=judges), played(replace(TWO, choose=False), judges=judges)
    last, counted = rounds[-1], [{k for p in r.replies.values() for k in p.payload.get("counts", {})} for r in rounds]
    scored = [r.state.judged for r, words in zip(rounds, counted, strict=True) if any("judge" in k for k in words)]
    assert [n for n in scored if n] == [TWO.rounds + 1] and all(score > 0 for score in last.state.scores.values())
    for c, model in last.state.best.items():
        assert model["w"] == last.state.models[c]["w"] != chosen[-1].state.best[c]["w"]


@pytest.mark.parametrize(("fit", "fewest", "field"), [("federated", 5, "sums"), ("pooled", 0, "features")])
def test_no_feature_of_a_case_leaves_unless_the_fit_is_pooled(fit, fewest, field):
    own = np.concatenate([s.radiomics(s.cases("train"), 0.09) for s in sites().values()])
    _, rounds = played(replace(TWO, fit=fit, fewest=fewest))
    told = [reply.payload for r in rounds for reply in r.replies.values()]
    tables = [x for p in told for f, t in p.items() if f != "counts" for x in t.values()]
    rows = [row for x in tables if x.ndim == 2 and x.shape[1] == 2 for row in x]
    assert any(np.allclose(row, case, atol=1e-9) for row in rows for case in own) == (fit == "pooled")
    assert {f.split("_")[0] for p in told for f in p} <= {field, "counts", "cluster"}


def test_every_patient_is_served_by_its_own_cluster_and_so_is_a_stranger():
    engine, rounds = played(TWO)
    state = rounds[-1].state
    low, high = kinds(state)
    stranger = Shifted(1.0, np.array([LOW, HIGH, HIGH]), start=START)
    got = serving_payloads(TWO, state, ["new"])["new"]
    groups = dict(enumerate(TWO.serve(got, Payload(), stranger, stranger.cases("test"))))
    assert groups[int(low)] == (state.best[low], ("t0",)) and groups[int(high)] == (state.best[high], ("t1", "t2"))
    scores = engine.score(0, serving_payloads(TWO, state, ["a"]), "validation")
    assert len(scores["a"]) == 8


def test_the_model_before_is_served_until_there_are_clusters():
    state = TWO.init(START, list(N))
    site = sites()["a"]
    assert list(TWO.serve(serving_payloads(TWO, state, ["a"])["a"], Payload(), site, ("t0",))) == [(START, ("t0",))]


def test_a_cluster_keeps_its_best_round_and_may_keep_the_first():
    """Validation cases of the low kind lie where the model began, so tuning only leads away from them."""
    judges = {"a": [LOW, HIGH, HIGH], "b": [LOW], "c": [HIGH]}

    class Began(Shifted):
        def score(self, params, cases):
            wanted = np.where(self._values(cases) == LOW, 3.0, HIGH)
            miss = np.abs(params["w"].item() - wanted)
            return {n: CaseScore({"L": 1 / (1 + m)}, m) for n, m in zip(cases, miss, strict=True)}

    made = {i: Began(s.a, s.b, lr=ETA, steps=K, start=START) for i, s in sites().items()}
    for i, s in made.items():
        s.judges = np.array(judges[i])
    rounds = list(run_rounds(TWO, Simulator(TWO, made), START, ps.Plan(rounds=40), seed=0))
    ended = next(r.state for r in rounds if is_finished(TWO, r.state))
    low, high = kinds(ended)
    assert ended.best[low] == START and ended.models[low] != START
    assert ended.best[high] == ended.models[high] != START


def test_a_cluster_without_validation_cases_is_judged_by_all():
    _, rounds = played(TWO, judges={"a": [HIGH], "b": [HIGH, HIGH], "c": [HIGH]})
    low, _ = kinds(rounds[-1].state)
    asked = [r for r in rounds if r.state.judged > 0]
    assert all(list(p["all"]) == [low] for r in asked for p in r.sent.values())
    assert all(r.replies["c"].payload["counts"][f"judge {low}"] == [1.0] for r in asked)  # it has no case of that kind
    assert f"cluster_{low}" not in asked[0].replies["c"].payload  # and still does not train it
    nearest = [abs(r.sent["a"][f"cluster_{low}"]["w"].item() - HIGH) for r in asked]
    best = asked[int(np.argmin(nearest))].sent["a"][f"cluster_{low}"]
    assert rounds[-1].state.best[low] == best


def test_a_site_that_was_away_learns_the_clusters_when_it_comes_back():
    _, rounds = played(replace(TWO, rounds=12), rounds=200, share=0.67)
    known = [set(r.state.train) for r in rounds]
    assert any(len(k) == 2 for k in known) and known[-1] == set(N)
    late = next(r for r, k in zip(rounds[1:], known, strict=False) if len(k) == 2 and len(r.state.train) == 3)
    (new,) = (i for i, got in late.sent.items() if "mixture" in got)
    assert set(late.sent[new]) == {"mixture"} and set(late.replies[new].payload) == {"counts"}
    assert rounds[-1].state.judged == 13


def test_one_cluster_is_fedavg():
    one = ps.Cfft(components=(1,), rounds=5, fewest=0, dimensions=2)
    _, rounds = played(one)
    *_, other = run_rounds(ps.FedAvg(), Simulator(ps.FedAvg(), sites()), START, ps.Plan(rounds=5), seed=0)
    assert rounds[-1].state.models["0"]["w"] == pytest.approx(other.state.model["w"], rel=1e-12)


def test_a_phase_of_it_ends_by_itself_and_is_the_best_of_all(tmp_path):
    folder = RunFolder.create(tmp_path / "run", "", 0)
    phases = [
        Phase(ps.FedAvg(), Simulator(ps.FedAvg(), sites()), ps.Plan(rounds=10)),
        Phase(TWO, Simulator(TWO, sites()), ps.Plan(rounds=300, validate_every=7)),
    ]
    result = run_phases(phases, START, 0, folder)
    records = [r for r in folder.records() if r.phase]
    assert len(records) < 60 and result.best_phase == 1
    assert records[-1].diagnostics["clusters with cases"] == 2 and records[-1].measure
    assert sorted(p.stem for p in (folder.path / "models").glob("best*")) == ["best.group-0", "best.group-1"]
    assert records[0].sites["a"].steps == 0 < records[-2].sites["a"].steps


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
        ("federated", "sums", lambda p: {"sums": {k: x[..., :1] for k, x in p["sums"].items()}}, "other names"),
        ("pooled", "features", lambda p: {"features": {"more": p["features"]["cases"]}}, "other names or shapes"),
        ("pooled", "features", times(1e15), "far beyond all others"),
        ("pooled", "counts", lambda p: {"counts": {"train 7": np.ones(1)}}, "it counts 'train 7'"),
        ("pooled", "features", lambda p: {"features": {}}, "it has no features"),
        ("federated", "sums", lambda p: {"sums": {k: -x for k, x in p["sums"].items()}}, "below zero"),
        ("federated", "sums", lambda p: {"sums": {k: x[:1] for k, x in p["sums"].items()}}, "other names or shapes"),
        ("pooled", "counts", lambda p: {**p, "counts": {k: 0 * x for k, x in p["counts"].items()}}, "that are none"),
        ("pooled", "cluster_0", lambda p: {**p, "counts": {k: 9 * x for k, x in p["counts"].items()}}, "other cases"),
        ("pooled", "cluster_0", lambda p: {**p, "counts": {"judge 0": np.ones(1), "score 0": np.full(1, 5.0)}}, "abov"),
        ("pooled", "cluster_0", lambda p: {**p, "cluster_0": {"w": np.ones(3)}}, "'w' of shape"),
        ("pooled", "cluster_0", lambda p: {**p, "cluster_5": START}, "instead of"),
    ],
)  # fmt: skip
def test_a_lie_is_refused_and_does_not_end_the_study(fit, field, lie, reason):
    algorithm = replace(TWO, fit=fit)
    rounds = list(run_rounds(algorithm, Hostile(algorithm, field, lie), START, ps.Plan(rounds=45), seed=0))
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
    models = {} if tuned is None else {i: {"cluster_0": {"w": np.array([w])}} for i, w in tuned.items()}
    replies = {
        i: Payload(counts={"judge 0": np.array([float(n)]), "score 0": np.array([s])}, **models.get(i, {}))
        for i, (n, s) in told.items()
    }
    return TWO.merge(state, replies)


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
    _, rounds = played(TWO)
    first = next(r for r in rounds if r.state.judged == 1)
    low, high = kinds(first.state)
    counts = {k: x.item() for k, x in first.replies["b"].payload["counts"].items()}
    assert counts == pytest.approx({f"judge {low}": 3, f"score {low}": 3 / 5, f"judge {high}": 9, f"score {high}": 4.5})
    assert first.state.scores == pytest.approx({low: 1 / 5, high: 1 / 2})


@pytest.mark.parametrize(
    ("sums", "refused"),
    [
        ({"a": 1.0, "b": -1e15, "c": 2.0}, {"b"}),
        ({"a": 1.0, "b": 1e15, "c": 2.0}, {"b"}),
        ({"a": -1.0, "b": 100.0, "c": -2.0}, set()),
        ({"a": 0.0, "b": 0.9e12, "c": 0.0}, set()),  # beside one, where the others have nothing
        ({"a": 0.0, "b": 1.1e12, "c": 0.0}, {"b"}),
        ({"a": 1.0, "b": 1e4, "c": 1e4, "d": 1e4, "e": 1e15}, set()),  # beside most of them it is not absurd
    ],
)
def test_sums_are_refused_that_are_far_beyond_those_of_most_in_either_direction(sums, refused):
    state = TWO.init(START, list(sums))
    replies = {i: Payload(sums={"cases": np.full(1, 9.0), "sums": np.array([x])}) for i, x in sums.items()}
    found = TWO.objections(state, replies)
    assert set(found) == refused and all("far beyond all others" in why for why in found.values())


def test_the_number_of_exchanges_covers_fit_announcement_tuning_and_the_last_scores():
    """A federated fit takes 19 exchanges and its iterations, at most; a pooled one takes a single exchange."""
    assert ps.Cfft(iterations=30, rounds=50).facts.exchanges == 19 + 30 + 1 + 50 + 1
    assert ps.Cfft(iterations=30, rounds=50, fit="pooled").facts.exchanges == 1 + 1 + 50 + 1


class Scheduled(Shifted):
    """Notes the round of every budget that it is given."""

    def fit(self, params, objective=None, budget=Budget(), *, only=("*",), keep=None):
        self.rounds.append(budget.round)
        return super().fit(params, budget=budget, keep=keep)


@pytest.mark.parametrize("share", [1.0, 0.67])
def test_rounds_of_tuning_are_counted_from_zero_however_long_the_fit_took(share):
    schedules = []
    for fit in ("federated", "pooled"):
        made = {i: Scheduled(s.a, s.b, lr=ETA, steps=K, start=START) for i, s in sites().items()}
        for s in made.values():
            s.rounds = []  # shared by the copies of every round
        algorithm = replace(TWO, fit=fit)
        rounds = run_rounds(algorithm, Simulator(algorithm, made), START, ps.Plan(rounds=80, share=share), seed=0)
        next(r for r in rounds if is_finished(algorithm, r.state))
        schedules.append([sorted(set(s.rounds)) for s in made.values()])
        assert all(set(own) <= {0, 1, 2, 3} for own in schedules[-1])
    assert share < 1 or schedules == [[[0, 1, 2, 3]] * 3] * 2


@pytest.mark.parametrize(("cases", "count"), [("train", 27), ("train+validation", 27 + 5)])
def test_clusters_are_fitted_to_the_cases_that_were_named(cases, count):
    judges = {"a": [LOW, HIGH], "b": [LOW], "c": [HIGH, HIGH]}
    for fit, field in (("federated", "sums"), ("pooled", "features")):
        _, rounds = played(replace(TWO, fit=fit, cases=cases), judges=judges)
        told = [p.payload[field]["cases"] for p in rounds[0].replies.values()]
        assert sum(x.item() if fit == "federated" else len(x) for x in told) == count
    with pytest.raises(ConfigError, match="28 clusters, and the sites have 27 cases in all"):
        replace(TWO, components=(28,)).check_sites({"a": 8, "b": 12, "c": 7}, {"a": 5})
    replace(TWO, components=(28,), cases="train+validation").check_sites({"a": 8, "b": 12, "c": 7}, {"a": 5})


def test_what_is_odd_about_clusters_is_recorded_once(tmp_path):
    """Three clusters of two kinds of cases, with sums withheld."""
    algorithm = ps.Cfft(components=(3,), fewest=5, dimensions=2, rounds=2)
    folder = RunFolder.create(tmp_path / "run", "", 0)
    phases = [
        Phase(ps.FedAvg(), Simulator(ps.FedAvg(), sites()), ps.Plan(rounds=1)),
        Phase(algorithm, Simulator(algorithm, sites()), ps.Plan(rounds=300)),
    ]
    run_phases(phases, START, 0, folder)
    said = [i["what"] for r in folder.records() for i in r.incidents]
    assert len(said) == len(set(said)) and any("fewer than 5 cases of a hospital were withheld" in s for s in said)
    last = folder.records()[-1].diagnostics
    assert 0 < last["variance kept"] <= 1 and "agreement with hospitals" in last
