"""Differential privacy: what releases cost, compared with a published table, and what is refused."""

import math

import numpy as np
import pytest

from polysite.config import parse
from polysite.errors import ConfigError
from polysite.privacy import Release, accountant, epsilon


# tensorflow/privacy, tutorials/README.md, "Select Parameters": MNIST (60 000 images), batches of 256, delta 1e-5;
# noise multiplier, epochs, epsilon
@pytest.mark.parametrize(("noise", "epochs", "published"), [(1.12, 60, 2.92), (0.6, 30, 9.74), (1.2, 10, 1.20)])
def test_the_accountant_agrees_with_a_published_table(noise, epochs, published):
    """The table was computed by Mironov's conversion, min over orders of rdp + log(1/delta) / (order - 1); ours is the
    tighter one of the same Renyi divergences (Canonne et al. 2020), so it is less, and not by much."""
    use = Release(noise, 256 / 60_000, epochs * 60_000 // 256)
    renyi = accountant([((use.noise, use.rate), use.steps)])
    classic = min(renyi._rdp + math.log(1e5) / (renyi._orders - 1))
    assert classic == pytest.approx(published, abs=0.021)  # the table has more orders: 9.74 where these give 9.76
    assert 0.7 * published < epsilon([use], 1e-5) < published


def test_without_sampling_it_is_the_gaussian_mechanism():
    """For one release of noise z, epsilon at delta follows from the normal distribution (Balle and Wang 2018); the
    accountant's is not less, and little more."""

    def delta(eps, z):
        cdf = lambda x: 0.5 * math.erfc(-x / math.sqrt(2))  # noqa: E731
        return cdf(0.5 / z - eps * z) - math.exp(eps) * cdf(-0.5 / z - eps * z)

    for z in (1.0, 4.0):
        low, high = 0.0, 50.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if delta(middle, z) > 1e-5 else (low, middle)
        assert high <= epsilon([Release(z)], 1e-5) < 1.12 * high


def test_releases_add_up_whatever_their_order_and_grouping():
    a, b = Release(1.5, 0.2, 30), Release(2.0)
    assert epsilon([], 1e-5) == 0
    assert epsilon([a, b], 1e-5) == epsilon([b, a], 1e-5) > max(epsilon([a], 1e-5), epsilon([b], 1e-5))
    assert epsilon([Release(1.5, 0.2, 10)] * 3, 1e-5) == epsilon([a], 1e-5)
    assert epsilon([a], 1e-7) > epsilon([a], 1e-5)
    assert epsilon([Release(1.5, 0.1, 30)], 1e-5) < epsilon([a], 1e-5)
    assert not math.isnan(epsilon([Release(0.1, 1.0, 1000)], 1e-5))


@pytest.mark.parametrize("wrong", [(0.0,), (np.nan,), (1.0, 0.0), (1.0, 1.5), (1.0, 1.0, -1)])
def test_what_is_no_release_is_refused(wrong):
    with pytest.raises(ValueError, match="no release"):
        Release(*wrong)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("train.private.noise = 0.0", "must lie between 0.1 and 1000"),
        ("train.private.clip = 0.0", "must be more than 0"),
        ("train.private.delta = 0.5", "less than 0.1"),
        ('train.private.unit = "hospital"\nalgorithm.name = "scaffold"', "scaffold replies .*does not cover"),
        ('train.private.unit = "hospital"\nalgorithm.name = "fedcostwavg"', "does not cover"),
        ('train.private.unit = "patient"\nalgorithm.name = "moon"', "moon sends more of its patients"),
        ('train.private.unit = "patient"\nalgorithm.name = "qfedavg"', "choose fedavg"),
        ('train.private.unit = "hospital"\nassess.private.epsilon = 1.0', "assess.private protects patients"),
        ('train.private.unit = "patient"\nrun.pooled = true', "leave out train.private"),
        ('train.private.unit = "patient"\n[[then]]\nalgorithm.name = "fine_tune"', "fine_tune sends more"),
    ],
)
def test_what_noise_does_not_cover_is_refused_when_the_study_is_read(text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse(text)


@pytest.mark.parametrize("unit", ["patient", "hospital"])
def test_what_noise_covers_is_accepted(unit):
    for name in ("fedavg", "fedadam", "fedprox", "fedper", "lg_fedavg", "fedrep", "ditto", "local"):
        assert parse(f'train.private.unit = "{unit}"\nalgorithm.name = "{name}"').train.private.on


@pytest.mark.parametrize("rate", [0.04, 0.06, 0.2, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("noise", [0.3, 1.0, 4.0])
def test_no_rate_and_no_noise_makes_the_accountant_complain(rate, noise, caplog):
    assert 0 < epsilon([Release(noise, rate, 50)], 1e-5) < math.inf
    assert not caplog.records
