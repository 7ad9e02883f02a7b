"""An assessment under differential privacy: what one patient changes, the noise, what is compared, and honest words."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from hospitals import Host, ask, host
from polysite.engines.noise import SumNoise, noise_steps
from polysite.engines.site_turn import take_turn
from polysite.errors import ConfigError, DataError
from polysite.heterogeneity.analysis import analyse
from polysite.heterogeneity.bounds import EMBEDDING, PrivateSums, bounded_sums, largest
from polysite.heterogeneity.exchange import Assess
from polysite.heterogeneity.noisy import tail
from polysite.heterogeneity.verdict import differ, judge
from polysite.payload import Payload
from polysite.privacy import Private, Release, epsilon, noise_for

WIDE = PrivateSums(epsilon=8.0, intensity=(0.0, 400.0), volume=(0.0, 50.0), length=12.0)
NOISY = Assess(private=WIDE, resamples=100, projections=4, permutations=99)
EXACT = replace(NOISY, private=replace(WIDE, epsilon=9e8))  # as good as none


def under_noise(hosts, settings=NOISY):
    return analyse(ask(hosts, settings), settings)


def verdict_under_noise(hosts, settings=NOISY):
    return judge(under_noise(hosts, settings))


def flat(sums):
    return np.concatenate([sums[name].ravel() for name in sorted(sums)])


def drawn(rng, cases):
    """Cases with values anywhere, most of them outside of all ranges."""
    quantities = {f"intensity {k}": rng.normal(0, 10.0 ** rng.integers(0, 6), cases) for k in range(3)}
    quantities |= {"volume WT": rng.lognormal(0, 4, cases), "class b": rng.integers(0, 2, cases).astype(float)}
    absent = {name: rng.random(cases) < 0.5 for name in quantities}
    return quantities, absent, rng.normal(0, 10.0 ** rng.integers(-2, 4), (cases, 20))


@pytest.mark.parametrize("seed", range(12))
def test_one_patient_changes_the_sums_by_at_most_one(seed):
    rng = np.random.default_rng(seed)
    quantities, absent, vectors = drawn(rng, 9)
    patients = np.array([0, 1, 2, 2, 2, 3, 4, 4, 5])
    who = rng.integers(6)
    kept = patients != who

    def some(named):
        return {name: values[kept] for name, values in named.items()}

    for embedded in (True, False):
        whole = bounded_sums(WIDE, quantities, absent, patients, vectors if embedded else None)
        rest = bounded_sums(WIDE, some(quantities), some(absent), patients[kept], vectors[kept] if embedded else None)
        assert np.linalg.norm(flat(whole) - flat(rest)) <= 1 + 1e-12


def test_the_limit_of_one_is_reached():
    """A patient at the end of every range, absent everywhere, with a long vector: nothing is given away."""
    sums = bounded_sums(WIDE, {"volume WT": [1e9]}, {"volume WT": [True]}, [0], np.full((1, 3), 1e9))
    assert np.linalg.norm(flat(sums)) == pytest.approx(1)
    assert largest(1, True) == pytest.approx(np.sqrt(1.5 + 1.25))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_broken_value_of_one_patient_does_not_show(value):
    whole = bounded_sums(WIDE, {"volume WT": [3.0, value]}, {"volume WT": [False, False]}, [0, 1])
    rest = bounded_sums(WIDE, {"volume WT": [3.0]}, {"volume WT": [False]}, [0])
    assert np.linalg.norm(flat(whole) - flat(rest)) <= 1


@pytest.mark.parametrize(("target", "sharers"), [(1.0, 1), (8.0, 1), (2.0, 4)])
def test_the_noise_has_the_stated_deviation_and_cost(target, sharers):
    """Kolmogorov and Smirnov against N(0, noise^2 / sharers); a tenth more or less is rejected."""
    noise = noise_for(target, 1e-5)
    assert 0.99 * target < epsilon([Release(noise)], 1e-5) <= target
    reply = Payload(cases=9, sums={"volume WT": np.zeros(3), EMBEDDING: np.full(20_000, 2.0)})
    step = SumNoise(Release(noise), np.random.default_rng(4), sharers)
    left = step.apply({"cases": "number", "sums": "statistics"}, Payload(), reply)
    assert left["cases"] == 9 and left["sums"]["volume WT"].any()
    measured, spread = left["sums"][EMBEDDING] - 2.0, noise / np.sqrt(sharers)
    assert stats.kstest(measured, "norm", (0, spread)).pvalue > 0.01
    assert stats.kstest(measured, "norm", (0, 1.1 * spread)).pvalue < 1e-4
    assert abs(np.corrcoef(measured[:-1], measured[1:])[0, 1]) < 0.03


def test_a_turn_of_a_site_has_noise_and_its_cost():
    site = host(20)
    turn = take_turn(NOISY, Payload(), Payload(), site, noise_steps(NOISY, Private(), site))
    plain = take_turn(NOISY, Payload(), Payload(), site).reply
    assert turn.releases == (WIDE.release,) and epsilon(turn.releases, 1e-5) <= 8
    gap = flat(turn.reply["sums"]) - flat(plain["sums"])
    assert stats.kstest(gap, "norm", (0, WIDE.release.noise)).pvalue > 0.01
    assert set(turn.reply) == {"cases", "patients", "encoder", "sums"}
    assert noise_steps(Assess(), Private(), site) == ()


def test_without_noise_the_distances_are_those_of_the_open_assessment():
    """The shift is the difference of the means over the pooled deviation, the centre the Euclidean distance: of lists
    of all values, which leave without privacy, both follow."""
    hosts = {name: host(12 + k, k, brightness=100 + 20 * k, look=k / 3) for k, name in enumerate("abc")}
    noisy = analyse({i: EXACT.local(Payload(), Payload(), each)[0] for i, each in hosts.items()}, EXACT)
    lists = replace(EXACT, private=PrivateSums())
    openly = analyse(ask(hosts, lists), lists)
    for name, quantity in openly.quantities.items():
        means = np.array([quantity.values[s].mean() for s in openly.sites])
        shift = np.abs(means[:, None] - means[None]) / quantity.divisors["a"]
        np.testing.assert_allclose(noisy.quantities[name].matrix, shift, atol=1e-5)
        assert noisy.quantities[name].divisors["a"] == pytest.approx(quantity.divisors["a"], rel=1e-5)
        assert noisy.quantities[name].absent == quantity.absent
        for site in openly.sites:
            assert noisy.quantities[name].values[site][0] == pytest.approx(quantity.values[site].mean(), abs=1e-6)
    here = openly.distances["euclidean"].matrix
    np.testing.assert_allclose(noisy.distances["centre"].matrix, here, atol=1e-5)
    np.testing.assert_allclose(under_noise(hosts, EXACT).distances["centre"].matrix, here, atol=1e-2)


def test_the_error_by_noise_is_the_spread_of_repeated_assessments():
    """The stated standard error against 100 draws of the noise on the same cases."""
    rng = np.random.default_rng(2)
    hosts = {
        name: Host({"volume WT": rng.normal(20 + 8 * k, 6, 80)}, rng.normal(0.4 * k, 1, (80, 1, 30, 2)))
        for k, name in enumerate("ab")
    }
    seen = {"shift": [], "centre": []}
    for seed in range(100):
        for k, each in enumerate(hosts.values()):
            each.seed = 2 * seed + k
        found = under_noise(hosts)
        for name, values in seen.items():
            values.append(found.distances[name].matrix[0, 1])
    for name, values in seen.items():
        assert found.distances[name].error[0, 1] == pytest.approx(np.std(values), rel=0.3), name


def test_tests_keep_their_level_and_find_what_is_large():
    """Ten federations of equal hospitals, and as many with one that differs by two deviations."""
    wrong = right = 0
    for seed in range(10):
        hosts = {name: host(150, 100 * seed + k) for k, name in enumerate("abcd")}
        wrong += bool(differ(under_noise(hosts)))
        right += set(differ(under_noise({**hosts, "d": host(150, 100 * seed + 9, brightness=120)}))) == {"d"}
    assert wrong <= 2 and right >= 8


def test_the_tail_is_that_of_chance_and_noise():
    rng = np.random.default_rng(0)
    for chance, noise, width in ((1.0, 0.0, 5), (1.0, 0.02, 50), (0.0, 0.5, 8), (0.3, 0.01, 1)):
        rest = rng.chisquare(width - 1, 200_000) if width > 1 else 0
        values = (chance + noise) * rng.chisquare(1, 200_000) + noise * rest
        for q in (0.5, 0.9, 0.99):
            at = np.quantile(values, q)
            assert tail(float(at), chance, noise, width) == pytest.approx(1 - q, abs=0.004)
    assert tail(0.0, 1.0, 1.0, 3) == 1.0


def test_where_noise_dominates_the_lead_says_so():
    strict = replace(NOISY, private=replace(WIDE, epsilon=1.0), projections=0)
    rng = np.random.default_rng(3)
    few = {name: Host({"volume WT": rng.uniform(0, 50, 30)}, seed=k) for k, name in enumerate("abcdefgh")}
    verdict = verdict_under_noise(few, strict)
    assert verdict.summary.startswith("Too few cases to tell under this privacy: 8 hospitals with 240 cases")
    assert "noise for epsilon = 1 adds a standard error of 0." in verdict.summary
    many = verdict_under_noise({name: host(800, k) for k, name in enumerate("abc")})
    assert "none was shown to differ" in many.summary


def test_absent_modalities_are_found_and_noise_does_not_invent_any():
    found = under_noise({name: host(100, k, unseen=100 * (k == 0)) for k, name in enumerate("abc")})
    assert found.quantities["intensity t2"].absent == {"a": 100, "b": 0, "c": 0}
    assert [f.text for f in judge(found).findings if f.about == "missing"] == ["t2 was never acquired at a"]
    assert found.table().splitlines()[0].endswith(",p_holm,noise")


def test_a_patient_with_many_scans_counts_once():
    one = Host({"volume WT": np.array([10.0, 30.0, 30.0, 30.0])}, patients=np.array([0, 1, 1, 1]))
    reply, _ = replace(EXACT, projections=0).local(Payload(), Payload(), one)
    assert reply["cases"] == 4 and reply["patients"] == 2
    assert reply["sums"]["volume WT"][0] * largest(1, False) == pytest.approx((10 + 30) / 25 - 2)


def test_hospitals_with_few_cases_or_odd_replies_are_left_out():
    hosts = {"a": host(30, 1), "b": host(30, 2), "c": host(2, 3)}
    replies = ask(hosts, NOISY)
    assert not replies["c"]["sums"] and analyse(replies, NOISY).silent == ("c",)
    replies["d"] = Payload(**{**replies["a"], "encoder": 5.0})
    replies["e"] = Payload(**{**replies["a"], "patients": 31.0})
    assert set(analyse(replies, NOISY).refused) == {"d", "e"}
    with pytest.raises(DataError, match="1 of 2 can be described"):
        analyse({"a": replies["a"], "c": replies["c"]}, NOISY)


def test_settings_that_bound_nothing_are_refused():
    for wrong, sentence in (
        ({"epsilon": -1.0}, "assess.private.epsilon = -1.0 must be at least 0"),
        ({"epsilon": 1e-6}, "so small that no noise"),
        ({"delta": 0.5}, "assess.private.delta = 0.5"),
        ({"intensity": (5.0, 5.0)}, r"assess.private.intensity = \[5, 5\] must be a range"),
        ({"length": 0.0}, "assess.private.length"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            _ = PrivateSums(**wrong).release
