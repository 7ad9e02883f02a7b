"""The jury: balanced halves, contrasts and ballots in closed form, and what a juror cannot derive."""

from itertools import combinations

import numpy as np
import pytest

from polysite.engines.jury import Ballot, cast, contrast, draw, moved
from polysite.payload import Payload
from polysite.site import CaseScore


def test_halves_are_balanced():
    """Of five sites, any two that three jurors judge share a half once and are in different halves twice."""
    for secret in range(20):
        drawn = draw(["abcde"], "abcde", 7, (secret, 0))
        assert drawn.keys() == set("abcde")
        for i, j in combinations("abcde", 2):
            assert sum(np.sign(s[i] * s[j]) for s in drawn.values() if i in s and j in s) == -1
    assert draw(["abcde"], "abcde", 7, (0, 0)) != draw(["abcde"], "abcde", 7, (1, 0))


def test_new_halves_complete_those_of_earlier_rounds():
    sites, before = [f"s{k}" for k in range(12)], []
    for k in range(8):
        before += draw([sites], sites, 7, (3, k), before).values()
    rows = np.array([[np.sign(s.get(i, 0.0)) for i in sites] for s in before])
    drawn = [draw([sites], sites, 7, (4, k)).values() for k in range(8)]
    alone = np.array([[np.sign(s.get(i, 0.0)) for i in sites] for cast in drawn for s in cast])
    assert _overlap(rows) < _overlap(alone) and np.linalg.matrix_rank(rows) >= 11


def _overlap(rows):
    return float(np.square(np.triu(rows.T @ rows, 1)).sum())


def test_juries_are_limited_and_need_five_sites_and_voters():
    assert len(draw(["abcdef"], "abcdef", 3, (0, 0))) == 3
    assert not draw(["abcd"], "abcd", 7, (0, 0)) and not draw(["abcdef"], "abcdef", 0, (0, 0))
    assert draw(["abcdef"], "bd", 7, (0, 0)).keys() == {"b", "d"}
    assert draw(["abcde", "vwxyz", "pq"], "abcdepqvwxyz", 12, (0, 0)).keys() == set("abcdevwxyz")


@pytest.mark.parametrize("count", [5, 6, 7, 12])
def test_a_juror_cannot_derive_the_change_of_a_single_other_site(count):
    """It sees the merged model (one site counts by 0.05) and two contrasts, and knows its own change."""
    sites, random, closest = [f"s{k:02}" for k in range(count)], np.random.default_rng(0), []
    for secret in range(10):
        first = draw([sites], sites, count, (secret, 0))
        second = draw([sites], sites, count, (secret, 1), first.values(), first)
        assert first.keys() == second.keys() == set(sites)
        for juror in sites:
            others = [i for i in sites if i != juror]
            votes = [[signs[juror][i] for i in others] for signs in (first, second)]
            assert [sum(signs) for signs in votes] == pytest.approx([0, 0]) and juror not in first[juror]
            assert {(a > 0, b > 0) for a, b in zip(*votes, strict=True)} == {(x, y) for x in (0, 1) for y in (0, 1)}
            shares = random.uniform(0.5, 1, len(others))
            shares[random.integers(len(others))] *= 0.05
            seen = np.stack([shares, *votes])
            for row in np.eye(len(others)):
                nearest = seen.T @ np.linalg.lstsq(seen.T, row, rcond=None)[0]
                closest.append(np.linalg.norm(nearest - row))
    assert min(closest) > 0.1


def test_contrasts_are_differences_of_means():
    models = {i: {"w": np.full(2, float(k)), "bn.running_var": np.ones(1)} for k, i in enumerate("abcdef")}
    for signs in draw(["abcdef"], "abcdef", 7, (0, 0)).values():
        halves = [[models[i]["w"] for i, s in signs.items() if s * side > 0] for side in (1, -1)]
        found = contrast(models, signs)
        assert found.keys() == {"w"} and found["w"] == pytest.approx(np.mean(halves[0], 0) - np.mean(halves[1], 0))
    assert contrast({**models, "b": {"v": np.ones(2)}}, {"a": 0.5, "b": -0.5}) == {}
    assert moved({"w": 1.0, "v": 1.0}, {"w": 4.0}, 0.5) == {"w": 3.0, "v": 1.0}
    assert moved({"w": 1.0, "v": 1.0}, {"w": 4.0}, None) == {"w": 0.0, "v": 1.0}


class Parabolas:
    """Jurors whose loss is the squared distance from their own aim."""

    def __init__(self, aims):
        self.aims, self.seen = aims, []

    def score(self, round, sent, split):
        assert split == "validation"
        self.seen += [(h, p["model"]["w"]) for h, p in sent.items()]
        return {h: {"n": CaseScore({}, float(np.sum((p["model"]["w"] - self.aims[h]) ** 2)))} for h, p in sent.items()}


def test_ballots_are_what_a_contrast_does_to_the_own_model():
    random = np.random.default_rng(0)
    aims, models = ({i: random.standard_normal(3) for i in "abcde"} for _ in range(2))
    signs, transport = draw(["abcde"], "abcde", 7, (0, 0)), Parabolas(aims)
    served = {i: Payload(model={"w": np.zeros(3), "own": np.ones(1)}) for i in "abcd"}  # none for e: it cannot vote
    ballots, naive = cast(transport, 3, served, {i: {"w": w} for i, w in models.items()}, signs, {"a": 9.0})
    assert [b.juror for b in ballots] == list("abcd")
    for ballot in ballots:
        h, step = ballot.juror, sum(s * models[i] for i, s in ballot.signs.items())
        apart, zero = models[h] - aims[h], 9.0 if h == "a" else float(aims[h] @ aims[h])
        assert ballot.difference == pytest.approx(2 * apart @ step) and naive[h] == pytest.approx(zero)
        assert ballot.learnt == pytest.approx(zero - apart @ apart - step @ step / 4)
        shown = [w for site, w in transport.seen if site == h and w.any()]
        assert np.allclose(sum(shown) / 2, models[h])  # nothing but its own model and the contrast
    assert isinstance(ballots[0], Ballot) and len(transport.seen) == 3 + 2 * 4
