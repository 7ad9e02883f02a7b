"""Noise on what leaves a hospital: the limit, the distribution, the cost of a study."""

import numpy as np
import pytest
from scipy import stats

from phased import START, phases, play
from polysite import tree
from polysite.algorithms.fedavg import FedAvg
from polysite.engines.noise import HospitalNoise
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.secure.settings import Secure
from polysite.engines.simulator import Simulator
from polysite.errors import Paused, PayloadError
from polysite.payload import Payload
from polysite.privacy import Private, Release, epsilon
from quadratic import Quadratic

WIDE = {"w": np.zeros(1000), "v": np.zeros(10)}
KINDS = {"model": "model", "weight": "count"}


def step(clip=2.0, noise=0.5, seed=0):
    return HospitalNoise(Private("hospital", clip, noise), np.random.default_rng(seed))


def noisy(change, **settings):
    """What was added to a change of the model, beyond its shortened self."""
    reply = Payload(model={"w": change, "v": np.zeros(10)}, weight=7)
    out = step(**settings).apply(KINDS, Payload(model=WIDE), reply)
    assert out["weight"] == 7
    return out["model"]


def test_noise_leaves_no_variance_below_zero():
    base = {"norm.running_var": np.full(50, 0.01), "norm.running_mean": np.zeros(50)}
    reply = Payload(model={k: x + 0.001 for k, x in base.items()}, weight=7)
    out = step(noise=5.0).apply(KINDS, Payload(model=base), reply)["model"]
    assert out["norm.running_var"].min() == 0 and (out["norm.running_mean"] < 0).any()


def test_a_long_change_is_shortened_to_the_limit_and_a_short_one_is_not():
    for length, left in ((10.0, 2.0), (0.5, 0.5), (0.0, 0.0)):
        change = np.full(1000, length / np.sqrt(1000))
        many = np.mean([tree.dot({"w": noisy(change, seed=s)["w"]}, {"w": change}) for s in range(300)])
        expected = left * length  # the inner product with the change itself; noise is independent of it
        assert many == pytest.approx(expected, abs=4 * length / np.sqrt(300) + 1e-12)


def test_the_noise_is_normal_with_the_stated_spread():
    model = noisy(np.zeros(1000), clip=2.0, noise=0.5)
    values = np.concatenate([model["w"], model["v"]])
    assert stats.kstest(values, "norm", args=(0, 1.0)).pvalue > 1e-4
    assert stats.kstest(values, "norm", args=(0, 1.2)).pvalue < 1e-2  # another spread would be noticed
    other = noisy(np.zeros(1000), clip=2.0, noise=0.5, seed=1)
    assert abs(np.corrcoef(model["w"], other["w"])[0, 1]) < 0.15


def test_what_has_no_limit_is_refused():
    with pytest.raises(PayloadError, match="not finite"):
        noisy(np.full(1000, np.nan))
    with pytest.raises(PayloadError, match="was not sent"):
        step().apply(KINDS, Payload(model={}), Payload(model=WIDE, weight=1))
    with pytest.raises(PayloadError, match="covers one model"):
        step().apply({**KINDS, "cost": "cost"}, Payload(model=WIDE), Payload(model=WIDE, weight=1, cost=3.0))


def four():
    return {i: Quadratic(k + 1.0, np.full(4 + k, float(k)), start=START) for k, i in enumerate("abcd")}


PRIVATE = Private("hospital", clip=0.1, noise=2.0)


def test_epsilon_of_every_site_is_in_the_record_and_survives_a_pause(tmp_path, caplog):
    """The expected one is that of as many Gaussian mechanisms as there were rounds."""

    def go(**until):
        made = phases([(FedAvg(), {"rounds": 4, "checkpoint_every": 1})], four, private=PRIVATE)
        return play(tmp_path / "run", made, **until)

    with caplog.at_level("INFO"), pytest.raises(Paused):
        go(until=2)
    assert "round 2: epsilon spent so far: a " in caplog.text
    _, folder = go()
    for r in folder.records():
        expected = epsilon([Release(2.0)] * (r.round + 1), 1e-5)
        assert {s.epsilon for s in r.sites.values()} == {expected} and r.sites["a"].releases == (Release(2.0),)
    assert len(folder.records()) == 4


def test_noise_comes_before_masks():
    """Under secure sums the sum has the noise of all sites: the result is that of open noisy replies."""
    results = []
    for secure in (Secure(), Secure("on")):
        engine = Simulator(FedAvg(), four(), private=PRIVATE, secure=secure)
        *_, last = run_rounds(FedAvg(), engine, START, Plan(rounds=3, secure=secure), 0)
        assert all(r.releases == (Release(2.0),) for r in last.replies.values())
        results.append(last.state.model["w"])
    assert results[0] == pytest.approx(results[1], abs=1e-8)
    *_, plain = run_rounds(FedAvg(), Simulator(FedAvg(), four()), START, Plan(rounds=3), 0)
    assert abs(plain.state.model["w"] - results[0]) > 1e-3
    assert not any(s.releases for s in plain.record(0, False).sites.values())  # without noise there is no epsilon
