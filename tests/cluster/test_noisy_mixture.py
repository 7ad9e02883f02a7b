"""Clusters of cases under differential privacy: what one patient changes, and what the fit finds."""

from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from polysite.algorithms.cfft import Cfft
from polysite.cluster.noisy_mixture import NoisyClusters, answer, ask, begin, learn
from polysite.config import parse
from polysite.engines.noise import SumNoise, noise_steps
from polysite.engines.secure.member import Session
from polysite.errors import ConfigError, DataError
from polysite.payload import Payload
from polysite.privacy import Private, Release, epsilon

NAMES = ("size", "colour", "unused")
TWO = NoisyClusters(epsilon=10.0, features={"size": (0.0, 10.0), "colour": (-1.0, 1.0)})


def flat(sums):
    return np.concatenate([sums[k].ravel() for k in sorted(sums)])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("last", [False, True])
def test_one_patient_changes_the_sums_by_at_most_one(seed, last):
    rng = np.random.default_rng(seed)
    asked = {**ask(begin(TWO, 3, NAMES, seed)), "noisy_last": np.array([float(last)])}
    rows = rng.normal(0, 10.0 ** rng.integers(-1, 5), (8, 3))
    rows[rng.integers(8), rng.integers(3)] = rng.choice([1e300, -1e300])
    patients = np.array(["a", "a", "b", "c", "d", "d", "d", "e"])
    kept = patients != rng.choice(patients)
    whole, rest = (flat(answer(asked, rows[k], patients[k])) for k in (np.full(8, True), kept))
    assert np.linalg.norm(whole - rest) <= 1 + 1e-12
    reached = answer({**ask(begin(TWO, 2, NAMES, 0)), "noisy_last": np.ones(1)}, np.array([[99.0, 99.0, 0.0]]), ["a"])
    assert np.linalg.norm(flat(reached)) == pytest.approx(1)


def fitted(settings, sites, seed=0, noise=None, sharers=1):
    state = begin(settings, 2, NAMES, seed)
    while state.mixture is None:
        answers = []
        for k, rows in enumerate(sites):
            sums = answer(ask(state), rows, [f"{i}" for i in range(len(rows))])
            if noise is not None:
                step = SumNoise(Release(noise), np.random.default_rng([seed, k, state.left]), sharers)
                sums = step.apply({"sums": "statistics"}, Payload(), Payload(sums=sums))["sums"]
            answers.append(sums)
        state = learn(state, answers)
    return state


def planted(count, seed=0):
    """Two kinds of cases by size and colour; the third feature is large and does not count."""
    rng, kinds = np.random.default_rng(seed), np.repeat([0, 1], count)
    places = np.array([(3, -0.4), (7, 0.4)])[kinds]
    rows = np.column_stack([rng.normal(places, [0.8, 0.1]), rng.normal(0, 1e6, 2 * count)])
    order = rng.permutation(len(rows))
    return rows[order], kinds[order]


def test_without_noise_sites_together_find_what_one_finds_with_all_cases():
    rows, kinds = planted(40)
    apart, pooled = fitted(TWO, [rows[:30], rows[30:37], rows[37:]]), fitted(TWO, [rows])
    for name, array in pooled.mixture.arrays().items():
        np.testing.assert_allclose(apart.mixture.arrays()[name], array, atol=1e-12)
    assert adjusted_rand_score(kinds, pooled.mixture.assign(rows)) == 1.0
    assert pooled.cases == 80 and pooled.mixture.weights == pytest.approx(0.5)


def test_with_many_patients_noise_leaves_the_clusters_alone_and_with_few_it_does_not():
    rows, kinds = planted(250)
    for seed in range(3):
        found = fitted(TWO, np.array_split(rows, 4), seed, TWO.release.noise)
        assert adjusted_rand_score(kinds, found.mixture.assign(rows)) > 0.95
    few, _ = planted(5)
    start = begin(TWO, 2, NAMES, 1).means
    strict = NoisyClusters(epsilon=0.2, features=TWO.features)
    found = fitted(strict, [few], 1, strict.release.noise)
    np.testing.assert_array_equal(found.means, start)  # no cluster has more patients than the noise can tell


def test_all_exchanges_together_cost_epsilon():
    for exchanges in (2, 5):
        made = NoisyClusters(epsilon=3.0, features=TWO.features, exchanges=exchanges)
        assert 2.97 < epsilon([made.release] * exchanges, 1e-5) <= 3.0


def test_sites_share_the_noise_of_a_secure_sum_alone():
    site = SimpleNamespace(noise_rng=lambda: np.random.default_rng(0))
    bounded = NoisyClusters(epsilon=1.0, features={"glcm_Contrast": (0.0, 9.0)})
    made = Cfft(components=(2,), together=True, noisy=bounded)
    asked = Payload(sums={"noisy_means": np.zeros((2, 2))})
    session = Session(bytes(16), "a", 4, mask_keys=dict.fromkeys("abcde", b""))
    assert [s.sharers for s in noise_steps(made, Private("patient"), site, asked, session)] == [3]
    assert [s.sharers for s in noise_steps(made, Private("patient"), site, asked)] == [1]
    assert noise_steps(made, Private("patient"), site, Payload(mixture={"weights": np.ones(2)})) == ()


THEN = "[[then]]\nalgorithm.name = 'cfft'\nrun.rounds = 99\n"
NOISY = "algorithm.together = true\nalgorithm.noisy = { epsilon = 1.0, features = { glcm_Contrast = [0.0, 9.0] } }\n"


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda: NoisyClusters(epsilon=1.0), "must name the features"),
        (lambda: NoisyClusters(epsilon=-1.0), "at least 0"),
        (lambda: NoisyClusters(features={"size": (1.0, 1.0)}), "size = .* must be a range"),
        (lambda: NoisyClusters(exchanges=1), "two exchanges"),
        (lambda: begin(NoisyClusters(features={"age": (0.0, 1.0)}), 2, NAMES, 0), "'age' is no radiomic feature"),
        (lambda: Cfft(noisy=TWO), r"noisy\.epsilon needs together = true"),
        (lambda: Cfft(noisy=TWO, together=True, least=5), "least = 1"),
        (lambda: parse(THEN + NOISY), r"its training has none: set train\.private\.unit = 'patient'"),
        (lambda: parse("train.private.unit = 'patient'\n" + THEN), "cfft sends more of its patients"),
    ],
)
def test_what_bounds_nothing_or_has_no_noise_beside_it_is_refused(use, sentence):
    with pytest.raises(ConfigError, match=sentence):
        use()
    with pytest.raises(DataError, match="other sums than it was asked for"):
        learn(begin(TWO, 2, NAMES, 0), [{"counts": np.zeros(3), "sums": np.zeros((3, 2))}])
