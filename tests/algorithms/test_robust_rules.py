"""Robust rules around averaging algorithms: the aggregates on paper, around FedAvg and around SCAFFOLD."""

from dataclasses import replace

import numpy as np
import pytest

import polysite as ps
from polysite.algorithms.base import facts
from polysite.payload import Payload

POINTS = (0.0, 0.2, 0.3, 0.9, 100.0)
NAMES = [f"s{k}" for k in range(len(POINTS))]
RULES = {
    "median": (ps.Robust("median"), 0.3),
    "trimmed mean": (ps.Robust("trimmed_mean", beta=0.2), np.mean([0.2, 0.3, 0.9])),
    "krum": (ps.Robust("krum", f=1), 0.2),
    "multi-krum": (ps.Robust("krum", f=1, keep=3), 0.5 / 3),
    "geometric median": (ps.Robust("geometric_median"), 0.3),
    "centred clipping": (ps.Robust("centred_clipping", iterations=1), (0.0 + 0.2 + 0.3 + 0.3 + 0.3) / 5),
    "centred clipping, radius": (
        ps.Robust("centred_clipping", radius=0.5, iterations=1),
        (0.0 + 0.2 + 0.3 + 0.5 + 0.5) / 5,
    ),
}


def replies(control=False):
    made = {}
    for name, x in zip(NAMES, POINTS, strict=True):
        fields = {"model": {"w": np.array([x])}, "weight": 1.0}
        made[name] = Payload(**fields, **({"control": {"w": np.array([-x])}} if control else {}))
    return made


@pytest.mark.parametrize("rule", RULES)
def test_the_aggregate_around_fedavg_and_fedprox(rule):
    algorithm, point = RULES[rule]
    for inner in (ps.FedAvg(), ps.FedProx(), ps.FedAvg(uniform=True)):
        around = replace(algorithm, inner=inner)
        state = around.init({"w": np.array([0.0])}, NAMES)
        assert around.merge(state, replies()).model["w"] == pytest.approx(point, abs=2e-4)


@pytest.mark.parametrize("rule", RULES)
def test_model_and_control_of_scaffold_are_aggregated_alike(rule):
    algorithm, point = RULES[rule]
    around = replace(algorithm, inner=ps.Scaffold())
    state = around.merge(around.init({"w": np.array([0.0])}, NAMES), replies(control=True))
    assert state.model["w"] == pytest.approx(point, abs=2e-4)
    assert state.control["w"] == pytest.approx(-point, abs=2e-4)


def test_centred_clipping_forgets_a_far_reply():
    """After several steps the centre is among the four near points, however far the fifth is."""
    state = ps.Robust("centred_clipping", iterations=20).init({"w": np.array([0.0])}, NAMES)
    assert 0.2 < ps.Robust("centred_clipping", iterations=20).merge(state, replies()).model["w"].item() < 0.6


def test_a_round_with_too_few_replies_for_krum_takes_the_median():
    around = ps.Robust("krum", f=1)
    few = {i: p for i, p in replies().items() if i != "s4"}
    assert around.merge(around.init({"w": np.array([0.0])}, NAMES), few).model["w"] == pytest.approx(0.25)
    assert around.shares(None, few) == {} and sum(around.shares(None, replies()).values()) == 1


def test_groups_of_robust_means_need_each_reply():
    assert facts(ps.Clustered({"one": ("a", "b", "c", "d")}, ps.Robust("median"))).needs == "each"
