import math
from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
from scipy import stats

from polysite.errors import ConfigError, DataError
from polysite.metrics.shrinkage import MODERATE, Prior, Tally, relative_noise, shrink

BENCH = run_path(str(Path(__file__).parents[2] / "bench" / "shrinkage.py"))
PRIOR = Prior(mean=0.05, spread=0.03, noise=0.04)


def joint(gains, prior, points=24):
    """Integrate the model as written, over m, tau and sigma by brute force: (mean, sd, P > 0) of every hospital."""
    ratio, noise = relative_noise([Tally.of(values) for values in gains], prior)
    spread = max(0.1, max(abs(np.mean(values)) for values in gains))
    ms = np.linspace(-4 * spread, 4 * spread, 8 * points)
    taus = prior.spread * np.tan(np.pi / 2 * (np.arange(6 * points) + 0.5) / (6 * points))
    sigmas = noise * np.exp(np.linspace(-3, 5, 4 * points))
    m, tau, sigma = np.meshgrid(ms, taus, sigmas, indexing="ij", sparse=True)
    # sigma^2 = noise^2 / chi^2_1, in log sigma; the quantiles of tau have equal weights
    log = -0.5 * (m / prior.mean) ** 2 - np.log(sigma) - 0.5 * prior.noise**2 / sigma**2
    for values, r in zip(gains, ratio, strict=True):
        y, n = np.asarray(values, float), len(values)
        within = ((y - y.mean()) ** 2).sum() / r
        log = log - (n - 1) * np.log(sigma) - 0.5 * within / sigma**2
        v = r * sigma**2 / n + tau**2
        log = log - 0.5 * np.log(v) - 0.5 * (y.mean() - m) ** 2 / v
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    for values, r in zip(gains, ratio, strict=True):
        error = r * sigma**2 / len(values)
        keep = tau**2 / (tau**2 + error)
        mean, sd = keep * np.mean(values) + (1 - keep) * m, np.sqrt(keep * error) + 0 * m
        centre = (weight * mean).sum()
        whole = math.sqrt((weight * (sd**2 + (mean - centre) ** 2)).sum())
        yield centre, whole, (weight * stats.norm.cdf(mean / sd)).sum()


@pytest.mark.parametrize(
    "gains",
    [
        [[0.03, 0.08, 0.05], [-0.02, 0.01], [0.11, 0.02, 0.04, 0.09]],
        [[0.06]],
        [[0.02, 0.02, 0.02], [-0.3, 0.05, 0.04, 0.06, 0.05]],
    ],
)
def test_brute_force(gains):
    found = shrink({str(k): values for k, values in enumerate(gains)}, PRIOR).sites.values()
    for gain, (mean, sd, positive) in zip(found, joint(gains, PRIOR), strict=True):
        assert gain.mean == pytest.approx(mean, rel=0.02, abs=2e-4)
        assert gain.sd == pytest.approx(sd, rel=0.02)
        assert gain.positive == pytest.approx(positive, abs=0.004)


def test_a_hospital_without_data_has_the_prior():
    gain = shrink({"a": []}, PRIOR).overall
    assert (gain.mean, gain.positive, gain.cases) == (0, pytest.approx(0.5), 0)
    assert gain.sd == pytest.approx(PRIOR.mean)


def test_no_spread_between_hospitals_gives_the_pooled_mean():
    rng = np.random.default_rng(1)
    gains = {str(k): rng.normal(0.03, 0.1, n) for k, n in enumerate((5, 20, 60))}
    tallies = [Tally.of(values) for values in gains.values()]
    found = shrink(gains, Prior(mean=100.0, spread=1e-9))
    weight = [t.cases / r for t, r in zip(tallies, relative_noise(tallies)[0], strict=True)]
    pooled = np.average([t.mean for t in tallies], weights=weight)
    for gain in (*found.sites.values(), found.overall):
        assert gain.mean == pytest.approx(pooled, rel=1e-3)


def test_equal_gains_are_no_division_by_zero():
    none = shrink({"a": [0.0] * 6, "b": [0.0] * 3})
    assert [g.positive for g in none.sites.values()] == pytest.approx([0.5, 0.5])
    assert all(gain.positive > 0.95 for gain in shrink({"a": [0.05] * 10, "b": [0.05] * 10}).sites.values())


def test_a_hospital_without_cases_is_predicted_from_the_others():
    gains = {str(k): [0.05 + 0.001 * k] * 8 for k in range(10)}
    found = shrink({**gains, "new": []}).sites
    assert found["new"].mean == pytest.approx(0.055, abs=0.005)
    assert found["new"].positive > 0.95
    assert {s: g for s, g in found.items() if s != "new"} == dict(shrink(gains).sites)


def test_failures_elsewhere_do_not_hide_a_steady_gain():
    """One hospital with failures raises the noise of its own mean, and that of the others much less."""
    steady = [0.020, 0.025, 0.018, 0.022, 0.021, 0.024, 0.019, 0.023] * 2
    wild = [0.02, -0.6, 0.03, 0.02, 0.5, 0.02, 0.02, 0.03] * 2
    tallies = [Tally.of(values) for values in (steady, steady, wild)]
    ratio, noise = relative_noise(tallies, PRIOR)
    pooled = math.sqrt(sum(t.deviation for t in tallies) / 45)
    assert noise * math.sqrt(ratio[0]) < 0.5 * pooled
    assert noise * math.sqrt(ratio[2]) > 1.2 * pooled
    # the fixed point that the docstring defines
    free, within = np.array([15.0] * 3), np.array([t.deviation for t in tallies])
    assert ratio == pytest.approx((MODERATE + within / noise**2) / (MODERATE + free), rel=1e-6)


@pytest.mark.parametrize("noise", [0.01, 4.0])
def test_luck_of_a_training_remains_however_many_cases_there_are(noise):
    """If hospitals are alike, y ~ N(mu, t^2 + v) with v of all cases: mu ~ N((1 - k) y, k p^2), k = (t^2 + v) / sum."""
    prior = Prior(mean=0.04, spread=1e-9, training=0.03)
    found = shrink({str(k): np.full(5000, 0.05) + noise * (-1) ** np.arange(5000) for k in range(3)}, prior)
    error = 0.03**2 + noise**2 / 15000
    k = error / (error + 0.04**2)
    for gain in (*found.sites.values(), found.overall):
        assert gain.mean == pytest.approx((1 - k) * 0.05, rel=1e-3)
        assert gain.sd == pytest.approx(math.sqrt(k) * 0.04, rel=1e-3)


@pytest.mark.parametrize("kind", BENCH["KINDS"])
def test_nothing_is_claimed_where_no_hospital_gains(kind):
    assert BENCH["claims"](kind, 4, 8, 0.05, repeats=25, limit=0.95).mean() <= 0.05


def test_refusals():
    with pytest.raises(DataError, match="1 of 2 gains"):
        shrink({"a": [0.1, math.nan]})
    with pytest.raises(ConfigError, match="spread = 0"):
        Prior(spread=0)
