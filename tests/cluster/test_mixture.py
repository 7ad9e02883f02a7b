"""Clusters of cases: assigned as by scikit-learn, and fitted by sums as they would be with all cases in one place."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import adjusted_rand_score
from sklearn.mixture import GaussianMixture

from polysite.cluster import federated_mixture as fed
from polysite.cluster import quantiles
from polysite.cluster.mixture import Mixture, Settings, agreement, agreement_of, rand_index, scaled
from polysite.cluster.pooled_mixture import pooled as pooled_fit
from polysite.cluster.variability import variability
from polysite.errors import ConfigError, DataError
from polysite.payload import Payload, decode, encode
from table import same


def pooled(vectors, settings=Settings()):
    """The mixture of the pooled fit."""
    return fed.mixture_of(pooled_fit(vectors, settings))


def federated(vectors, settings):
    """The mixture of the federated fit of two sites."""
    return fed.federated({"a": vectors[::2], "b": vectors[1::2]}, settings).mixture


SIZES = (240, 160, 100, 70, 50, 40)


def planted(seed=0, sizes=SIZES, features=93, apart=12.0, latent=10, sites=5):
    """Cases of some clusters with the features that radiomics have, dealt unevenly: (vectors, clusters, by site).

    Features on all scales, some log-normal, one value in a hundred far out; two constant, two collinear.
    """
    rng = np.random.default_rng(seed)
    truth = np.repeat(np.arange(len(sizes)), sizes)
    centres = rng.normal(size=(len(sizes), latent)) * apart / np.sqrt(2 * latent)
    hidden = centres[truth] + rng.normal(size=(len(truth), latent))
    x = hidden @ rng.normal(size=(latent, features)) / np.sqrt(latent) + 0.15 * rng.normal(size=(len(truth), features))
    x[:, ::3] = np.exp(0.5 * x[:, ::3])
    x = np.where(rng.random(x.shape) < 0.01, x * rng.uniform(10, 100, x.shape), x)
    x[:, 0], x[:, 1], x[:, 2] = 7.3, 0.0, 3 * x[:, 3] - 1
    x *= 10.0 ** rng.integers(-3, 6, features)
    share = rng.dirichlet(np.full(sites, 0.4), len(sizes))
    home = np.array([rng.choice(sites, p=share[k]) for k in truth])
    return x, truth, {f"site {i}": x[home == i] for i in range(sites)}


def exchanged(state, sites, times=1):
    for _ in range(times):
        asked = fed.ask(state)
        state = fed.learn(state, {name: fed.answer(asked, found) for name, found in sites.items()})
    return state


def until(stage, sites, given_settings):
    state = fed.State(given_settings)
    while state.stage != stage:
        state = exchanged(state, sites)
    return state


@pytest.mark.parametrize("fit", [pooled, federated])
def test_cases_are_assigned_as_scikit_learn_assigns_them(fit):
    x, *_ = planted(1, apart=5.0)
    mixture, (strangers, *_) = fit(x, Settings(components=7)), planted(2, apart=5.0)
    pca = PCA(len(mixture.axes))
    pca.mean_, pca.components_, pca.whiten = mixture.centre, mixture.axes, False
    gaussians = GaussianMixture(len(mixture.weights), covariance_type="tied")
    gaussians.weights_, gaussians.means_, gaussians.covariances_ = mixture.weights, mixture.means, mixture.covariance
    gaussians.precisions_cholesky_ = np.linalg.inv(np.linalg.cholesky(mixture.covariance)).T
    points = pca.transform(scaled(strangers, mixture.low, mixture.high))
    assert np.allclose(mixture.transform(strangers), points, rtol=0, atol=1e-12)
    assert np.array_equal(mixture.assign(strangers), gaussians.predict(points))
    assert np.allclose(mixture.probabilities(strangers), gaussians.predict_proba(points), atol=1e-9)
    assert mixture.likelihood(strangers) == pytest.approx(gaussians.score(points) * len(points), rel=1e-9)
    assert mixture.bic(strangers) == pytest.approx(gaussians.bic(points), rel=1e-9)


def test_pooled_is_percentiles_then_components_then_gaussians():
    x, *_ = planted(3, apart=6.0)
    low, high = np.percentile(x, [2, 98], axis=0)
    with np.errstate(invalid="ignore"):
        table = np.nan_to_num(np.clip((x - low) / (high - low), 0, 1))
    points = PCA(30, svd_solver="full").fit_transform(table)
    expected = GaussianMixture(10, covariance_type="tied", n_init=5, random_state=4).fit(points)
    mixture = pooled(x, Settings(seed=4, starts="kmeans"))
    assert mixture.axes.shape == (30, 93) and mixture.means.shape == (10, 30)
    assert np.allclose(mixture.transform(x), points, atol=1e-9)
    assert np.array_equal(mixture.assign(x), expected.predict(points))


def test_a_mixture_travels_as_plain_arrays():
    x, *_ = planted(4, (30, 20), 6)
    mixture = pooled(x, Settings(components=2))
    arrays = mixture.arrays()
    assert all(a.dtype == np.float64 and a.ndim <= 2 for a in arrays.values())
    assert same(Mixture.of(decode(encode(Payload(mixture=arrays)))["mixture"]), mixture)
    for broken, sentence in [
        ({k: v for k, v in arrays.items() if k != "low"}, "made of axes, .*low.*; these are"),
        ({**arrays, "low": arrays["low"][1:]}, "do not fit together"),
        ({**arrays, "weights": arrays["weights"] * np.nan}, "finite numbers"),
    ]:
        with pytest.raises(DataError, match=sentence):
            Mixture.of(broken)


@pytest.mark.parametrize("fit", [pooled, federated])
def test_features_that_are_constant_or_only_round_play_no_part(fit):
    x, *_ = planted(5, (180, 120), 8)
    rng = np.random.default_rng(0)
    flat = np.stack([np.full(300, 7.0), np.zeros(300), 1 + 1e-12 * rng.normal(size=300), np.eye(300)[0] * 1e6], 1)
    plain, wider = (fit(v, Settings(components=2)) for v in (x, np.hstack([x, flat])))
    assert np.array_equal(wider.low[-4:], wider.high[-4:]) and not wider.centre[-4:].any()
    assert np.array_equal(wider.assign(np.hstack([x, flat + 5])), plain.assign(x))
    collinear = rng.normal(size=(60, 3)) @ rng.normal(size=(3, 9))  # no more dimensions than cases differ in
    collinear /= 100 * abs(collinear).max()  # not clipped at the middle
    assert fit(collinear, Settings(components=2, percentiles=(0, 100))).axes.shape == (3, 9)


X = np.random.default_rng(0).normal(size=(12, 3))
HOLE = np.where(np.arange(36).reshape(12, 3) == 4, np.nan, X)
PAIR, FLAT = Settings(components=2), np.ones((12, 3))


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda: pooled(X, Settings(components=13)), "12 cases cannot be 13 clusters; have more cases"),
        (lambda: pooled(X, Settings(components=(2, 20))), "12 cases cannot be 20 clusters"),
        (lambda: federated(X, Settings(components=13)), "12 cases cannot be 13 clusters"),
        (lambda: pooled(HOLE, PAIR), "^1 of 12 cases have a feature that is not a finite number"),
        (lambda: fed.answer(fed.ask(fed.State()), HOLE), "^1 of 12 cases have a feature that is not a finite number"),
        (lambda: pooled(X[0]), r"a row for each case; this is of shape \(3,\)"),
        (lambda: pooled([["a"]]), "a table of numbers"),
        (lambda: pooled(FLAT, PAIR), "no feature differs"),
        (lambda: federated(FLAT, PAIR), "no feature differs"),
        (lambda: pooled(X, PAIR).assign(X[:, 1:]), "2 features, and the clusters are made of 3"),
        (lambda: fed.learn(fed.State(), {"a": {}, "b": {}}), "none of 2 sites has a case"),
    ],
)
def test_what_cannot_be_clustered_is_refused(use, sentence):
    with pytest.raises(DataError, match=sentence):
        use()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("percentiles", (98, 2)), ("components", 0), ("components", ()), ("components", (3, 0)), ("restarts", 0),
     ("dimensions", 0), ("reg", 0.0), ("tolerance", 0.0), ("iterations", 0)],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(name, wrong):
    with pytest.raises(ConfigError, match=name):
        Settings(**{name: wrong})


_rng = np.random.default_rng(7)
LAWS = {
    "normal": _rng.normal(size=900),
    "log-normal": np.exp(2 * _rng.normal(size=900)),
    "Cauchy": _rng.standard_cauchy(900),
    "one far out": np.append(_rng.normal(size=899), 1e6),
    "far from zero": 1e6 + _rng.normal(size=900),
    "whole numbers": _rng.poisson(3, 900).astype(float),
    "mostly zero": np.where(_rng.random(900) < 0.9, 0.0, _rng.random(900)),
    "seven cases": _rng.normal(size=7),
    "two heaps": np.append(_rng.normal(size=440), 1e3 + _rng.normal(size=460)),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("wanted", [(2.0, 98.0), (0.0, 100.0), (25.0, 50.0)], ids=str)
def test_percentiles_by_counting(law, wanted):
    x = LAWS[law][:, None]
    low, high = quantiles.brackets(len(x), x.sum(0), np.square(x).sum(0), wanted)
    expected = np.percentile(x, wanted, axis=0)
    spread, countings, fine = np.ptp(expected), 0, False
    while not fine and countings < 6:
        counted = sum(quantiles.counts(part, low, high) for part in (x[::3], x[1::3], x[2::3]))
        low, high, found = quantiles.narrowed(low, high, counted, len(x), wanted)
        countings, fine = countings + 1, quantiles.resolved(low, high, found, 1e-7).all()
    assert abs(found - expected).max() <= 1e-4 * spread + 1e-12
    assert countings <= (3 if law in ("normal", "seven cases", "far from zero", "two heaps") else 4) or spread == 0


@pytest.mark.parametrize("first", [slice(None, 500), slice(400, None)], ids=["the least", "the largest"])
def test_a_bracket_that_lost_its_number_finds_it_again(first):
    x, wanted = np.sort(LAWS["normal"])[:, None], (2.0, 98.0)
    some = x[first]
    low, high = quantiles.brackets(len(some), some.sum(0), np.square(some).sum(0), wanted)
    for part in (some, some, x, x, x, x, x, x):  # not all sites answer at first
        low, high, found = quantiles.narrowed(low, high, quantiles.counts(part, low, high), len(part), wanted)
    assert abs(found - np.percentile(x, wanted, axis=0)).max() < 1e-4
    far = 1e12 + x  # the first bracket holds percentiles even where the variance is lost to rounding
    low, high = quantiles.brackets(len(x), far.sum(0), np.square(far).sum(0), wanted)
    assert (low < np.percentile(far, 2)).all() and (high > np.percentile(far, 98)).all()


def test_nothing_is_counted_more_finely_than_asked_for():
    _, _, sites = planted(1)
    state, asked = fed.State(), []
    while state.stage in ("moments", "counts"):
        state = exchanged(state, sites)
        asked.append(state.known)
    spread = state.known["high"] - state.known["low"]
    assert len(asked) > 3  # some features need more countings than others
    for brackets in asked[:-1]:
        assert ((brackets["high"] - brackets["low"])[:, spread > 0] > 0.9 * quantiles.FINE * spread[spread > 0]).all()


def test_federated_is_pooled_on_planted_clusters():
    x, truth, sites = planted(0)
    state, reference = fed.federated(sites, Settings(components=6)), pooled(x, Settings(components=6))
    told = agreement(state.mixture, reference, x)
    assert told["rand"] >= 0.99 and adjusted_rand_score(truth, state.mixture.assign(x)) >= 0.99
    assert 0 < told["percentiles"] < 1e-4 and state.exchanges <= 30
    assert told["explained"] == pytest.approx(told["other_explained"], abs=1e-4) and told["explained"] > 0.9
    assert agreement(reference, reference, x)["rand"] == 1 and agreement(reference, reference, x)["percentiles"] == 0
    flat = replace(reference, high=np.where(np.arange(93) == 9, reference.low, reference.high))
    assert agreement(flat, reference, x)["percentiles"] == agreement(reference, flat, x)["percentiles"] == 1


def test_an_exchange_is_an_iteration_of_scikit_learn():
    """Of every restart, which differ, as seeds do; it ends after the iterations or by the tolerance."""
    x, _, sites = planted(2, apart=5.0)
    chosen = Settings(components=(4, 7), restarts=2)
    before, again, other = (until("mixtures", sites, replace(chosen, seed=seed)) for seed in (0, 0, 9))
    after, known = exchanged(before, sites), before.known
    points = (scaled(x, known["low"], known["high"]) - known["centre"]) @ known["axes"].T
    assert known["sizes"].tolist() == [4, 4, 7, 7]
    pairs = zip(fed._fits(known), fed._fits(after.known), after.likelihoods, strict=True)
    for (weights, means, covariance), found, likelihood in pairs:
        start = {"weights_init": weights, "means_init": means, "precisions_init": np.linalg.inv(covariance)}
        one = GaussianMixture(len(weights), covariance_type="tied", max_iter=1, **start)
        with pytest.warns(ConvergenceWarning):
            one.fit(points)
        for mine, theirs in zip(found, (one.weights_, one.means_, one.covariances_), strict=True):
            assert np.allclose(mine, theirs, rtol=0, atol=1e-9)
        assert likelihood == pytest.approx(one.lower_bound_, rel=1e-9)
    assert same(again, before) and not np.array_equal(known["means"], other.known["means"])
    assert not np.array_equal(known["means"][:4], known["means"][4:8])
    lengths = []
    for end in ({"iterations": 1}, {"iterations": 4}, {"tolerance": 1.0}, {"tolerance": 1e-2}, {"tolerance": 1e-4}):
        begun = until("mixtures", sites, Settings(**end))
        done = fed.federated(sites, begun.settings)
        lengths.append(done.exchanges - begun.exchanges - 1)  # the last compares restarts
        assert "iterations" in end or (done.converged > 0).any()
    assert lengths[:2] == [1, 4] and lengths[2] < lengths[3] < lengths[4]


def test_the_planted_number_has_the_least_bic():
    """Of clusters that are Gaussian, and not clipped; of others more components are likelier, pooled as well."""
    rng = np.random.default_rng(1)
    truth = np.repeat(range(6), SIZES)
    x = rng.normal(size=(6, 12))[truth] * 4 + rng.normal(size=(len(truth), 12))
    sites = {name: x[i::5] for i, name in enumerate("abcde")}
    chosen = Settings(components=range(3, 10), percentiles=(0, 100), restarts=2)
    state = fed.federated(sites, chosen)
    assert len(state.mixture.weights) == 6 == len(pooled(x, chosen).weights)
    assert min(state.bic, key=lambda entry: entry[1])[0] == 6 and [k for k, _ in state.bic] == list(range(3, 10))
    assert dict(state.bic)[6] == pytest.approx(state.mixture.bic(x), rel=1e-9)
    assert adjusted_rand_score(truth, state.mixture.assign(x)) >= 0.99


def gone(vectors, given_settings, sites):
    """Every answer of one site: by stage, with what it was asked."""
    state = fed.State(given_settings)
    while state.mixture is None:
        asked = fed.ask(state)
        yield state.stage, asked, fed.answer(asked, vectors)
        state = exchanged(state, sites)


def test_answers_have_the_same_form_whatever_the_number_of_cases():
    _, _, sites = planted(5, sizes=(60, 60, 60), features=12)
    small, large = sites["site 0"][:7], np.concatenate(list(sites.values()))
    for _, asked, one in gone(small, Settings(components=3), sites):
        assert {k: v.shape for k, v in one.items()} == {k: v.shape for k, v in fed.answer(asked, large).items()}
        assert all(array.dtype == np.float64 and array.ndim <= 2 for array in (*one.values(), *asked.values()))
        assert same(decode(encode(Payload(x=one)))["x"] | {}, one)
        assert fed.answer(asked, small[:0]) == {}  # a site without a case says nothing


def test_the_sum_of_all_answers_is_all_that_the_server_needs():
    _, _, sites = planted(5, sizes=(60, 60, 60), features=12)
    state = fed.State(Settings(components=3))
    while state.mixture is None:
        asked = fed.ask(state)
        said = [a for name in sorted(sites) if (a := fed.answer(asked, sites[name]))]
        secure = {"sum": {name: np.sum([a[name] for a in said], axis=0) for name in said[0]}}
        before, state = state, fed.learn(state, secure)
        assert same(exchanged(before, sites), state)


def test_an_exchange_without_a_site_is_one_of_the_others():
    """If nobody answers, all are asked again."""
    x, truth, sites = planted(1)
    state, rng, names = fed.State(Settings(components=6, iterations=15)), np.random.default_rng(0), sorted(sites)
    while state.mixture is None:
        absent = names[rng.integers(len(names))] if rng.random() < 0.3 else None
        asked, before = fed.ask(state), state
        said = {n: fed.answer(asked, v) for n, v in sites.items() if n != absent}
        state = fed.learn(before, said)
        assert same(fed.learn(before, {**{key: {} for key in names}, **said}), state)
        nobody = fed.learn(before, {})
        assert nobody.exchanges == before.exchanges + 1 and same(replace(nobody, exchanges=before.exchanges), before)
    assert adjusted_rand_score(truth, state.mixture.assign(x)) >= 0.95
    assert fed.learn(state, {}) is state


def test_components_without_a_case_do_no_harm():
    x = np.repeat(np.random.default_rng(0).normal(size=(3, 6)), 20, axis=0)  # three places, twenty cases in each
    mixture = federated(x, Settings(components=8, percentiles=(0, 100)))
    assert mixture.weights.sum() == pytest.approx(1) and (mixture.weights < 1e-9).sum() == 5
    assert adjusted_rand_score(np.repeat(range(3), 20), mixture.assign(x)) == 1
    assert np.isfinite(mixture.probabilities(x)).all()
    begun = until("mixtures", {"a": x}, Settings(components=3, restarts=1))
    lost = {**begun.known, "means": begun.known["means"] + np.array([[0.0], [0.0], [1e3]])}
    after = exchanged(replace(begun, known=lost), {"a": x}).known
    assert np.array_equal(after["means"][2], lost["means"][2]) and 0 < after["weights"][2] < 1e-9


def test_answers_that_do_not_go_together_are_refused():
    _, _, sites = planted(2, (60, 40), 10)
    state = fed.State(Settings(components=2))
    good, late = fed.answer(fed.ask(state), sites["site 0"]), until("products", sites, Settings(components=2))
    for bad, sentence in [
        (fed.answer(fed.ask(state), sites["site 1"][:, 1:]), r"'site 1' answers with sums of shape \(9,\)"),
        (fed.answer(fed.ask(late), sites["site 1"]), r"'site 1' answers \['cases', 'products', 'sums'\]"),
        (fed.answer(fed.ask(state), sites["site 1"] * 1e200), "'site 1' answers with squares that are not finite"),
    ]:
        with pytest.raises(DataError, match=sentence):
            fed.learn(state, {"site 0": good, "site 1": bad})


@pytest.mark.parametrize(
    ("found", "enough"), [((5.0, 5.0), 5e-7), ((-5.0, -5.0), 5e-7), ((-1.0, 1.0), 2e-4), ((1.0, 3.0), 2e-4)]
)
def test_a_bracket_is_short_enough_beside_the_range_of_its_feature_or_else_beside_its_size(found, enough):
    """A ten-thousandth of the range; where there is none, a tenth of the millionth that is taken for constant."""
    low = np.full((4, 1), found[0])
    for width, short in ((0.9 * enough, True), (1.1 * enough, False)):
        assert quantiles.resolved(low, low + width, np.array(found)[:, None], 1e-6) == [short]


@pytest.mark.parametrize(
    ("counts", "want"),
    [
        ((2, 1, 0), [[0.0, 0.0], [19.6, 0.0], [20.4, 0.0]]),  # b has the larger scatter: 0.25 beside 2 x 0.05
        ((2, 0, 0), [[0.0, -0.16], [0.0, 0.16], [9.0, 9.0]]),  # the second empty group finds nothing to share
        ((2, 1, 4), [[0.0, 0.0], [20.0, 0.0], [10.0, 0.0]]),
    ],
)
def test_an_empty_group_takes_half_of_the_widest(counts, want):
    """Groups a, b, c: variances (0.01, 0.04), (0.25, 0) and none; halves are 0.8 deviations from the middle."""
    n, means = np.array(counts, float), np.array([[0.0, 0.0], [20.0, 0.0], [10.0, 0.0]])
    variances = np.array([[0.01, 0.04], [0.25, 0.0], [0.0, 0.0]])
    before = np.full((3, 2), 9.0)
    moved = fed._moved(before, n, n[:, None] * means, n[:, None] * (variances + means**2))
    assert np.allclose(sorted(moved.tolist()), sorted(want))


def test_means_are_drawn_by_their_cases_and_far_from_each_other():
    """A mean without cases is never drawn, one at the place of another only if there is no other."""
    means, counts = np.array([[0.0], [0.0], [50.0], [1e6]]), np.array([3.0, 3.0, 1.0, 0.0])
    drawn = [sorted(fed._drawn(2, means, counts, np.random.default_rng(k)).ravel()) for k in range(40)]
    assert all(each == [0.0, 50.0] for each in drawn)
    first = [fed._drawn(1, means, counts, np.random.default_rng(k)).item() for k in range(300)]
    assert 0.06 < np.mean(np.array(first) == 50.0) < 0.25  # one case in seven
    assert len(fed._drawn(6, means, counts, np.random.default_rng(0))) == 6


def test_the_adjusted_rand_index_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    one, other = rng.integers(4, size=50), rng.integers(3, size=50)
    other = np.where(rng.random(50) < 0.6, one % 3, other)
    assert agreement_of(one, other) == pytest.approx(adjusted_rand_score(one, other), abs=1e-12)
    assert rand_index(np.full((1, 1), 9.0)) == 1 == adjusted_rand_score(np.zeros(9), np.zeros(9))


@pytest.mark.parametrize("apart", [5.0, 8.0])
def test_federated_is_pooled_where_clusters_overlap_and_as_likely_as_those_of_scikit_learn(apart):
    """The starts are shared, so both take the same way; 0.3 is what scikit-learn's seeds differ by on such cases."""
    gaps = []
    for seed in range(3):
        x, _, sites = planted(seed, (120, 80, 50, 30), apart=apart)
        chosen = Settings(components=5, seed=seed, dimensions=12)
        found, whole, other = (
            fed.federated(sites, chosen),
            pooled_fit(x, chosen),
            pooled(x, replace(chosen, starts="kmeans")),
        )
        assert agreement_of(found.mixture.assign(x), whole.mixture.assign(x)) >= 0.98
        assert found.bic[0][1] == pytest.approx(whole.bic[0][1], rel=0.01)
        assert found.kept == pytest.approx(whole.kept, abs=1e-4) and 0.5 < found.kept < 1
        assert found.agreement == pytest.approx(whole.agreement, abs=0.1)
        gaps.append((found.mixture.likelihood(x) - other.likelihood(x)) / len(x))
    assert np.mean(gaps) > -0.3 and min(gaps) > -1


def test_how_much_a_clustering_varies():
    """Also from restart to restart, where there are no clusters."""
    x, _, sites = planted(0, (60, 60, 60), 20)
    noise, many = np.random.default_rng(0).normal(size=(90, 20)), Settings(components=6, dimensions=5, restarts=10)
    clear, vague = variability(x, Settings(components=3), 3), variability(noise[:60, :10], many, 3)
    assert len(clear.seeds) == len(clear.bootstraps) == 3
    assert min(clear.seeds + clear.bootstraps) > 0.9 > np.mean(vague.bootstraps)
    assert fed.federated(sites, Settings(components=3, restarts=10)).agreement > 0.95
    assert fed.federated({"a": noise[:40], "b": noise[40:]}, many).agreement < 0.7
    assert pooled_fit(noise, replace(many, starts="kmeans")).agreement < 0.9
    assert pooled_fit(noise, Settings(components=1)).agreement == 1  # nothing to disagree about
