"""Interpolated models against answers on paper: the first round, the limit, and when a site stays with what it had."""

import numpy as np
import pytest

import polysite as ps
from polysite.engines.phase_sites import Served
from polysite.engines.phases import Phase, run_phases
from polysite.engines.run_folder import RunFolder
from polysite.engines.simulator import Simulator
from polysite.metrics.shrinkage import shrink
from polysite.payload import Payload
from polysite.site import CaseScore
from quadratic import ETA, Aims, K, Quadratic, play, served_models


class Even(Quadratic):
    """A site where every other case loses what the case before it gains."""

    def score(self, params, cases):
        moved = 0.05 * (params["w"].item() - W)
        return {n: CaseScore({"L": 0.5 + (-1) ** k * moved}, 1.0) for k, n in enumerate(cases)}


W, START = 3.0, {"w": np.array([3.0])}
A, B, N = {"a": 0.5, "b": 1.0, "c": 2.0}, {"a": -1.0, "b": 0.3, "c": 2.0}, {"a": 12, "b": 9, "c": 15}


def sites(kind=Quadratic, goals=None):
    made = {i: kind(A[i], np.full(N[i], B[i]), lr=ETA, steps=K, start=START) for i in A}
    for i in goals or {}:
        made[i].goal = goals[i]
    return made


def go(algorithm, made, rounds=1):
    """(rounds, the parameter that every site uses)"""
    engine = Simulator(algorithm, made)
    engine.begin(0, Served(dict.fromkeys(made, (START,))))
    run = play(algorithm, made, rounds, engine=engine)
    served = engine.serve(rounds, algorithm.send(run.state, sorted(made))).models
    return run.rounds, {i: model["w"].item() for i, (model, *_) in served.items()}


def own(i, lam, steps):
    """Descent on a/2 (v - b)^2 + lam/2 (v - w)^2 from w."""
    rest = (A[i] * B[i] + lam * W) / (A[i] + lam)
    return rest + (1 - ETA * (A[i] + lam)) ** steps * (W - rest)


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_first_round(lam):
    """All cases of a site are alike, so sums are n g and n g^2; every site gains most with all of its own model."""
    alphas = (0.5, 1.0)
    (first,), served = go(ps.Interpolated(alphas, lam=lam), sites())
    gains = {}
    for i in A:
        v = own(i, lam, K)
        score = [1 / (1 + A[i] / 2 * (W + alpha * (v - W) - B[i]) ** 2) for alpha in (0.0, *alphas)]
        gains[i] = [s - score[0] for s in score[1:]]
        sent = first.replies[i].payload["gains"]
        assert sent["cases"] == N[i] and first.sent[i]["alpha"] == 0
        assert sent["total"] == pytest.approx([N[i] * g for g in gains[i]])
        assert sent["squares"] == pytest.approx([N[i] * g**2 for g in gains[i]])
        assert served[i] == pytest.approx(v)
    for i, expected in shrink({i: [gains[i][1]] * N[i] for i in A}).sites.items():
        choice = first.state.choices[i]
        assert (choice.positive, choice.gain) == pytest.approx((expected.positive, expected.mean), rel=1e-6)


def test_limit_between_the_models():
    """v_k goes to (a b + lam w) / (a + lam); the model that is needed lies halfway, a quarter of the way, or at w."""
    lam, ends = 0.6, {i: own(i, 0.6, 10**6) for i in A}
    needed = {"a": 0.5, "b": 0.25, "c": 0.0}
    goals = {i: W + x * (ends[i] - W) for i, x in needed.items()}
    done, served = go(ps.Interpolated(lam=lam), sites(Aims, goals), rounds=40)
    assert served == pytest.approx(goals, rel=1e-6)
    assert {i: c.alpha for i, c in done[-1].state.choices.items()} == needed
    said = done[-1].diagnostics
    assert said["alpha, a"] == 0.5 and said["P(gain > 0), a"] > 0.95
    assert said["hospitals with a model of their own"] == 2


def test_validation_that_shows_nothing_or_too_little_keeps_the_model():
    done, served = go(ps.Interpolated(), sites(Even))
    assert served == dict.fromkeys(A, W)
    assert all(c.positive < 0.8 for c in done[-1].state.choices.values())
    for count, sure in ((1, False), (12, True)):  # the same gain of every case
        site = Quadratic(0.1, np.full(count, 1.5), lr=ETA, steps=K, start=START)
        assert (go(ps.Interpolated(), {"a": site})[1]["a"] != W) == sure


def test_a_site_without_validation_cases_keeps_the_model_whatever_others_gain():
    mute = Quadratic(1.0, np.full(8, -1.0), lr=ETA, steps=K, start=START, splits={"validation": ()})
    done, served = go(ps.Interpolated(sure=0.7), {**sites(), "d": mute})
    assert served["d"] == W and all(served[i] != W for i in A)
    assert done[0].state.choices["d"].positive > 0.7  # what the others let expect


def test_a_clusters_model_is_the_start(tmp_path):
    """ "a" is far from what its cluster found and moves; "b" is near it, and "c" is its cluster."""
    made, clusters = sites(Aims, B), ps.Clustered({"one": ("a", "b"), "two": ("c",)})
    plans = ((ps.FedAvg(), 1), (clusters, 30), (ps.Interpolated((0.5,), steps=1), 1))
    phases = [Phase(a, Simulator(a, made), ps.Plan(rounds=rounds)) for a, rounds in plans]
    folders = [RunFolder.create(tmp_path / name, "", 0) for name in ("before", "run")]
    run_phases(phases[:2], START, 0, folders[0])
    result = run_phases(phases, START, 0, folders[1])
    start, end = (served_models(folder, tuple(A)) for folder in folders)
    assert result.best_phase == 2 and start["a"] == start["b"] != start["c"]
    assert end["a"] == pytest.approx(start["a"] - 0.5 * ETA * A["a"] * (start["a"] - B["a"]))
    assert (end["b"], end["c"]) == (start["b"], start["c"])


def test_sums_that_no_gains_have_are_refused():
    algorithm = ps.Interpolated((0.5, 1.0))
    good = {"cases": np.array([4.0]), "total": np.array([0.4, -0.1]), "squares": np.array([0.1, 0.1])}
    odd = [
        {"total": np.array([3.0, 0.0])},  # more than the squares allow
        {"squares": np.array([5.0, 0.1])},  # more than one a case
        {"squares": np.array([-1.0, 0.1])},
        {"cases": np.array([1.5])},
        {"cases": np.array([-1.0])},
        {"total": np.array([0.1])},
        {"more": np.array([0.1])},
    ]
    replies = {"good": Payload(gains=good)} | {str(k): Payload(gains={**good, **x}) for k, x in enumerate(odd)}
    assert algorithm.objections(algorithm.init(START, []), replies).keys() == {str(k) for k in range(len(odd))}
