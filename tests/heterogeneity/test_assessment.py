"""One exchange, and what it tells: the paper's numbers, what must not change it, and what a site may not send."""

from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
from scipy import stats
from scipy.spatial.distance import cdist
from scipy.special import gammaln

from hospitals import FAST, Host, ask, assess, host, spread_out
from polysite.cluster import distance as cluster
from polysite.engines import checkpoint
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError, DataError
from polysite.heterogeneity import significance
from polysite.heterogeneity.assessment import (
    TESTED,
    _together,
    analyse,
    combined,
    random_case_angles,
    remoteness,
    set_apart,
)
from polysite.heterogeneity.distances import Weights, angle, energy, merged, slices
from polysite.heterogeneity.exchange import Assess, directions, left
from polysite.heterogeneity.verdict import judge
from polysite.payload import Payload, decode, encode

THREE = {"a": host(9, 1), "b": host(12, 2), "c": host(7, 3, brightness=150, look=2)}


@cache
def three(**settings):
    return assess(THREE, replace(FAST, **settings))


@cache
def asked_three():
    return ask(THREE)


def same(one, other, order=None):
    """Two assessments, number by number; ``order`` renames the sites of the first."""
    for name, d in one.distances.items():
        e = other.distances[name]
        pick = [other.index(order[s] if order else s) for s in one.sites]
        np.testing.assert_allclose(d.matrix, e.matrix[np.ix_(pick, pick)], rtol=1e-9, atol=1e-9)


def test_paper_a_table_6_to_7():
    """FLAIR and ET, the quantities with the largest distance of their kind, averaged: Table 7, and its outlier."""
    upper = np.triu_indices(4, 1)

    def matrix(*pairs):
        square = np.zeros((4, 4))
        square[upper] = pairs
        return square + square.T

    printed = {  # of the other modalities and labels, the paper prints the mean over the pairs
        **{f"intensity {m}": matrix(*[v] * 6) for m, v in {"T2": 0.393, "T1": 0.247, "T1C+": 0.290}.items()},
        "intensity FLAIR": matrix(0.33, 0.32, 0.27, 0.34, 1.45, 0.86),
        "volume WT": matrix(*[0.935] * 6),
        "volume ET": matrix(6.87, 15.42, 27.55, 3.07, 7.40, 5.18),
        "volume TC": matrix(*[0.561] * 6),
    }
    chosen, distance = combined(printed)
    assert chosen == ["intensity FLAIR", "volume ET"]
    np.testing.assert_allclose(distance[upper], (3.60, 7.87, 13.91, 1.70, 4.43, 3.02), atol=0.006)
    assert cluster.outlier(distance) == 0 and cluster.around_outlier(distance) == ((0, 1), (2, 3))


def test_the_metadata_distance_is_the_mean_of_the_largest_of_either_kind():
    found = three(scale="none")
    raw = {n: {s: h.quantities[n] for s, h in THREE.items()} for n in THREE["a"].quantities}
    emd = {n: {p: stats.wasserstein_distance(v[p[0]], v[p[1]]) for p in combinations("abc", 2)} for n, v in raw.items()}
    mean = {n: np.mean(list(d.values())) for n, d in emd.items()}
    assert {n: q.mean for n, q in found.quantities.items()} == pytest.approx(mean)
    brightest, largest = (max((n for n in mean if n.startswith(k)), key=mean.__getitem__) for k in ("int", "vol"))
    assert (found.largest("intensity").name, found.largest("volume").name) == (brightest, largest)
    for i, j in combinations(range(3), 2):
        pair = ("abc"[i], "abc"[j])
        expected = (emd[brightest][pair] + emd[largest][pair]) / 2
        assert found.distances["emd"].matrix[i, j] == pytest.approx(expected)
    assert found.distances["emd"].outlier == "c"


def test_scaling_divides_by_the_deviation_over_all_cases():
    scaled, raw = three(), three(scale="none")
    for name, q in scaled.quantities.items():
        spread = np.concatenate([h.quantities[name] for h in THREE.values()]).std()
        assert dict(q.divisors) == pytest.approx(dict.fromkeys("abc", spread))
        np.testing.assert_allclose(q.matrix * spread, raw.quantities[name].matrix, rtol=1e-9)


def test_the_paper_divides_by_the_deviation_of_the_first_site():
    """W1 / sigma_i of the site i that comes first by name; tests, chance and intervals follow, p does not change."""
    first, raw = three(scale="first"), three(scale="none")
    for name, q in first.quantities.items():
        own = {s: h.quantities[name].std() for s, h in THREE.items()}
        assert dict(q.divisors) == pytest.approx(own)
        for i, j in combinations(range(3), 2):
            expected = raw.quantities[name].matrix[i, j] / own["abc"[i]]
            assert q.matrix[i, j] == q.matrix[j, i] == pytest.approx(expected)
        np.testing.assert_array_equal(q.p, raw.quantities[name].p)
    d, e = first.distances["emd"], raw.distances["emd"]
    np.testing.assert_array_equal(d.adjusted, e.adjusted)
    assert (d.low <= d.matrix).all() and (d.matrix <= d.high).all()
    chosen = [first.largest("intensity"), first.largest("volume")]
    np.testing.assert_allclose(d.matrix, np.mean([q.matrix for q in chosen], 0))
    assert (d.chance[np.triu_indices(3, 1)] < 5).all()  # in deviations, not in units of intensity


def test_a_quantity_that_is_constant_at_the_first_site_is_divided_by_the_pooled_deviation():
    hosts = {"a": host(9, 1, unseen=9), "b": host(12, 2), "c": host(7, 3)}
    found = assess(hosts, replace(FAST, scale="first")).quantities["intensity t2"]
    pooled = assess(hosts).quantities["intensity t2"]
    assert found.divisors["a"] == pooled.divisors["a"] and np.isfinite(found.matrix).all()
    np.testing.assert_allclose(found.matrix[0], pooled.matrix[0])


def test_the_deviation_of_a_site_comes_from_the_quantiles_that_it_sends():
    """Nothing more leaves for ``first``: of 3000 cases in 256 quantiles the deviation is known to a percent."""
    large = host(3000, 1)
    found = assess({"a": large, "b": host(9, 2)}, replace(FAST, scale="first", permutations=99))
    for name, q in found.quantities.items():
        assert q.divisors["a"] == pytest.approx(large.quantities[name].std(), rel=0.01)
    assert FAST.reply == replace(FAST, scale="first", combine="mean").reply


def test_all_quantities_may_count():
    found = three(combine="mean")
    every = [q.matrix for q in found.quantities.values()]
    np.testing.assert_allclose(found.distances["emd"].matrix, np.mean(every, 0))
    assert found.alternatives["emd"].keys() == {
        'assess.scale = "first"', 'assess.scale = "none"', 'assess.combine = "max"'
    }  # fmt: skip


def test_numbers_in_names_are_ordered_by_value():
    hosts = {name: host(7, k) for k, name in enumerate(("13", "6", "21", "20"))}
    found = assess(hosts, replace(FAST, scale="first"))
    assert found.sites == tuple(found.cases) == tuple(found.left) == ("6", "13", "20", "21")
    assert list(FAST.merge(FAST.init({}, []), ask(hosts)).replies) == ["6", "13", "20", "21"]
    volume = [hosts[s].quantities["volume WT"] for s in ("6", "13")]
    expected = stats.wasserstein_distance(*volume) / volume[0].std()
    assert found.quantities["volume WT"].matrix[0, 1] == pytest.approx(expected)


def test_the_outlier_may_depend_on_the_scale():
    pooled, first = (assess(spread_out(), replace(FAST, projections=0, scale=s)) for s in ("pooled", "first"))
    assert (pooled.distances["emd"].outlier, first.distances["emd"].outlier) == ("d", "a")
    assert pooled.alternatives == {
        "emd": {'assess.scale = "first"': "a", 'assess.scale = "none"': "d", 'assess.combine = "mean"': "d"}
    }
    assert first.alternatives["emd"]['assess.scale = "pooled"'] == "d"


@cache
def kits(by_size):
    """The kidney and tumour volumes of Fed-KiTS2019, all cases, with the deviation of the first site as the unit."""
    bench = run_path(str(Path(__file__).parents[2] / "bench" / "assess.py"))
    return bench["kits"](by_size, Assess(projections=0, scale="first", permutations=99, resamples=100), labels="apart")


@pytest.mark.usefixtures("shared")
def test_the_paper_s_distances_of_real_kidneys():
    """EMD_maxL in Table 1: 0.87 in the natural federation, 11.62 in the sorted one."""
    natural, by_size = (kits(sort).largest("volume") for sort in (False, True))
    assert (natural.of, round(natural.mean, 3)) == ("kidney", 0.870)
    assert (by_size.of, round(by_size.mean, 3)) == ("tumour", 11.625)


@pytest.mark.usefixtures("shared")
def test_the_paper_s_table_of_kidneys_is_a_mean_of_three():
    """Of intensity, kidney and tumour. What intensity must be is a distance for all ten pairs; the paper has 0.51."""
    upper = np.triu_indices(5, 1)
    table_2 = np.array([0.92, 1.45, 2.46, 13.86, 1.03, 2.37, 12.55, 1.15, 11.03, 4.89])
    kidney, tumour = (kits(True).quantities[f"volume {label}"].matrix for label in ("kidney", "tumour"))
    intensity = np.zeros((5, 5))
    intensity[upper] = 3 * table_2 - kidney[upper] - tumour[upper]
    intensity += intensity.T
    assert intensity[upper].min() > 0 and intensity[upper].mean() == pytest.approx(0.51, abs=0.01)
    assert (2 * table_2 - tumour[upper]).min() < 0  # the mean of the largest two would need a negative distance
    printed = {"intensity CT": intensity, "volume kidney": kidney, "volume tumour": tumour}
    chosen, distance = combined(printed, "mean")
    assert chosen == list(printed)
    np.testing.assert_allclose(distance[upper], table_2)
    assert cluster.outlier(distance) == 4 and cluster.around_outlier(distance) == ((0, 1, 2), (3, 4))


def test_paper_a_table_7_names_client_1():
    """As printed, asymmetric in one cell; its mean with the way back is a distance."""
    printed = np.array([[0, 3.60, 7.87, 13.91], [3.60, 0, 1.70, 4.43], [7.87, 1.75, 0, 3.02], [13.91, 4.43, 3.02, 0]])
    matrix = (printed + printed.T) / 2
    assert cluster.outlier(matrix) == 0
    assert cluster.sums(matrix) == pytest.approx([25.38, 9.755, 12.615, 21.36])


def test_sums_and_grades_of_every_distance():
    found = three()
    for d in found.distances.values():
        assert dict(d.sums) == pytest.approx(dict(zip(found.sites, d.matrix.sum(0), strict=True)))
        assert max(d.sums, key=d.sums.__getitem__) == d.outlier
        assert dict(d.graded) == dict(zip(found.sites, cluster.graded(d.matrix), strict=True))


def test_angles_between_random_cases():
    """One case of each of two sites, anew for every pair, by the seed; a site of one case leaves no choice."""
    rng = np.random.default_rng(0)
    cases = {"a": rng.normal(size=(1, 8, 2)), "b": rng.normal(size=(1, 8, 2)), "c": rng.normal(size=(20, 8, 2))}
    found = random_case_angles(cases, 3)
    assert list(found) == ["component 1", "component 2"]
    for k, matrix in enumerate(found.values()):
        assert (matrix == matrix.T).all() and not matrix.diagonal().any()
        assert matrix[0, 1] == pytest.approx(angle(cases["a"][0, :, k], cases["b"][0, :, k]))
        possible = [angle(cases["a"][0, :, k], case[:, k]) for case in cases["c"]]
        assert np.isclose(possible, matrix[0, 2]).sum() == 1
    assert all((random_case_angles(cases, 3)[n] == m).all() for n, m in found.items())
    drawn = {random_case_angles(cases, seed)["component 1"][0, 2].item() for seed in range(20)}
    assert len(drawn) > 5


def test_the_embedding_distance_is_that_of_the_means():
    found = three()
    means = [h.embedding.mean(0).reshape(-1) for h in THREE.values()]
    averaged = three(modalities="mean").distances["euclidean"].matrix
    for i, j in combinations(range(3), 2):
        assert found.distances["euclidean"].matrix[i, j] == pytest.approx(np.linalg.norm(means[i] - means[j]))
        two = [h.embedding.mean((0, 1)).reshape(-1) for h in THREE.values()]
        assert averaged[i, j] == pytest.approx(np.linalg.norm(two[i] - two[j]))
        u, v = (means[k].reshape(-1, 2)[:, 1] for k in (i, j))  # the second component
        expected = np.degrees(np.arccos(u @ v / np.linalg.norm(u) / np.linalg.norm(v)))
        assert found.angles["component 2"][i, j] == pytest.approx(expected)


def test_energy_along_many_directions_is_the_energy_distance_of_vectors():
    """Up to a constant of the dimension, c_d = sqrt(pi) Gamma((d + 1) / 2) / Gamma(d / 2) / sqrt(d)."""
    x, y = (h.embedding.reshape(h.size, -1) for h in (THREE["a"], THREE["c"]))
    whole = 2 * cdist(x, y).mean() - cdist(x, x).mean() - cdist(y, y).mean()
    d = x.shape[1]
    constant = np.exp(0.5 * np.log(np.pi) + gammaln((d + 1) / 2) - gammaln(d / 2)) / np.sqrt(d)
    along = directions(d, 4000)
    z, weights, _ = merged(np.sort(along @ x.T), np.sort(along @ y.T))
    assert energy(z, Weights(weights[:, None]), np.ones(4000)).mean() * constant == pytest.approx(whole, rel=0.05)


def test_order_of_cases_and_of_sites_is_irrelevant():
    rng = np.random.default_rng(0)
    shuffled = {}
    for site, h in reversed(THREE.items()):
        deal = rng.permutation(h.size)
        shuffled[site] = Host({n: v[deal] for n, v in h.quantities.items()}, h.embedding[deal])
    one, other = three(), assess(shuffled)
    same(one, other)
    assert {n: d.outlier for n, d in one.distances.items()} == {n: d.outlier for n, d in other.distances.items()}
    renamed = {"z" + s if s == "a" else s: h for s, h in THREE.items()}
    same(one, assess(renamed), {"a": "za", "b": "b", "c": "c"})


def test_duplicating_all_cases_changes_no_distance():
    def twice(h):
        return Host({n: np.tile(v, 2) for n, v in h.quantities.items()}, np.tile(h.embedding, (2, 1, 1, 1)))

    same(three(), assess({s: twice(h) for s, h in THREE.items()}))


def test_equal_sites_are_at_distance_zero_and_never_told_apart():
    found = assess({"a": host(9, 1), "b": host(9, 1), "c": host(9, 1)})
    for d in found.distances.values():
        np.testing.assert_allclose(d.matrix, 0, atol=1e-9)
        assert (d.p == 1).all() and (d.adjusted == 1).all()
        assert d.linked == (("a", "b", "c"),)
    assert all(q.mean == pytest.approx(0, abs=1e-9) for q in found.quantities.values())


def test_a_site_with_one_case_is_compared_if_asked_and_no_test_claims_anything():
    found = assess({**THREE, "d": host(1, 4, brightness=500, look=9)}, replace(FAST, fewest=1))
    assert {d.outlier for d in found.distances.values()} == {"d"}
    i = found.index("d")
    assert all(d.p[i].min() > 0.05 for d in found.distances.values())
    assert set(found.unable()) == {("a", "d"), ("b", "d"), ("c", "d")}


def test_few_cases_stay_at_home():
    """Below ``fewest`` a site tells a number of cases and nothing else; it is not even opened."""
    small = host(2, 4)
    replies = ask({**THREE, "d": small})
    nothing = {field: {} if kind == "statistics" else 0.0 for field, kind in FAST.reply.items()}
    assert replies["d"] == Payload(**{**nothing, "cases": 2.0})
    assert small.asked == []
    found = analyse(replies, FAST)
    assert found.silent == ("d",) and found.sites == ("a", "b", "c") and found.cases["d"] == 2


def test_no_number_of_a_single_case_leaves_with_what_belongs_to_it():
    """Lists are ascending, each by itself; of an embedding there is a mean; nothing else is in a reply."""
    for site, reply in asked_three().items():
        size = THREE[site].size
        assert reply.keys() == FAST.reply.keys()
        lists = [*reply["quantiles"].values(), *reply["directions"]["embedding"], *reply["angles"].values()]
        assert all(len(v) == size and (np.diff(v) >= 0).all() for v in lists)
        assert {v.shape for v in reply["mean"].values()} == {(16,)}
        cases = THREE[site].embedding.reshape(size, -1, 2)
        assert not any(np.allclose(reply["mean"]["component 1"], case[:, 0]) for case in cases)


def test_more_cases_than_levels_are_averaged():
    found = ask({"a": host(30, 1), "b": host(9, 2)}, replace(FAST, levels=10))
    assert {len(v) for v in found["a"]["quantiles"].values()} == {10}
    assert found["a"]["directions"]["embedding"].shape == (8, 10)
    assert {len(v) for v in found["b"]["quantiles"].values()} == {9}
    assert max(found["a"]["quantiles"]["intensity t1"]) < host(30, 1).quantities["intensity t1"].max()


def test_what_left_is_told_in_words_and_bytes():
    found = three()
    size, words = found.left["b"]
    assert size == asked_three()["b"].nbytes == 8 * (4 + 4 * 12 + 4 + 32 + 8 * 12 + 2 * 12)
    assert words == (
        "the number of its cases; 12 sorted values, one for each case, of 4 quantities; counts of what is absent; if "
        "voxel sizes are known; the mean of an embedding (32 numbers), and 12 sorted values, one for each case, along "
        "8 directions; 12 sorted values, one for each case, of 2 angles; a checksum of the encoder"
    )
    assert left(Payload(cases=2, quantiles={})) == "the number of its cases"


def test_it_is_an_algorithm_like_any_other():
    """Inputs are not changed, the wire changes nothing, order and absence of replies are fine, the state is kept."""
    hosts = {s: Host({n: v.copy() for n, v in h.quantities.items()}, h.embedding.copy()) for s, h in THREE.items()}
    for h in hosts.values():
        for v in (*h.quantities.values(), h.embedding):
            v.flags.writeable = False
    plain, wired = ask(hosts), ask(hosts, wire=True)
    assert plain == wired == {s: decode(encode(p)) for s, p in plain.items()}
    backwards = FAST.merge(FAST.init({}, list(THREE)), dict(reversed(plain.items())))
    assert list(backwards.replies) == ["a", "b", "c"]
    same(analyse({s: plain[s] for s in "bca"}, FAST), analyse(plain, FAST))
    assert analyse({s: plain[s] for s in "ab"}, FAST).sites == ("a", "b")
    assert list(FAST.serve(Payload(), Payload(), hosts["a"], ())) == []


def test_the_state_survives_a_checkpoint(tmp_path):
    state = FAST.merge(FAST.init({}, []), asked_three())
    checkpoint.save(tmp_path / "x", state)
    assert checkpoint.load(tmp_path / "x") == state


def test_an_averaged_embedding_is_of_the_modalities_that_were_acquired():
    few = host(9, 1)
    few.embedding[:, 1] = 0
    sent = ask({"a": few, "b": host(9, 2)}, replace(FAST, modalities="mean"))["a"]["mean"]["component 2"]
    np.testing.assert_allclose(sent, few.embedding[:, 0, :, 1].mean(0))


def test_without_embeddings():
    bare = {s: Host(h.quantities) for s, h in THREE.items()}
    found = assess(bare, replace(FAST, projections=0))
    assert list(found.distances) == ["emd"] and found.angles == {} and found.encoder == ""
    assert {k for h in bare.values() for k in h.asked} == {"metadata", "absent"}


def spoilt(change):
    """The reply of c, changed."""
    replies = asked_three()
    fields = {k: dict(v) if not isinstance(v, float) else v for k, v in replies["c"].items()}
    change(fields)
    return {**replies, "c": Payload(**fields)}


DAMAGE = {
    "not ascending": (lambda f: f["quantiles"].update({"volume WT": f["quantiles"]["volume WT"][::-1].copy()}), "asc"),
    "too long": (lambda f: f["quantiles"].update({"volume WT": np.arange(99.0)}), "not 7 ascending"),
    "negative volume": (lambda f: f["quantiles"].update({"volume WT": f["quantiles"]["volume WT"] - 99}), "negative"),
    "unknown quantity": (lambda f: f["quantiles"].update({"age": np.arange(7.0)}), "no quantity called 'age'"),
    "lacking quantity": (lambda f: [f[k].pop("volume ET") for k in ("quantiles", "absent")], "other quantities"),
    "too few cases": (lambda f: f.update(cases=2.0), "at least assess.fewest = 3"),
    "half a case": (lambda f: f.update(cases=7.5), "describes 7.5 cases"),
    "more unlabelled than cases": (lambda f: f.update(unlabelled=8.0), "8 of them unlabelled"),
    "nothing absent": (lambda f: f.update(absent={}), "how often it is absent"),
    "absent too often": (lambda f: f["absent"].update({"volume WT": np.array([8.0])}), "more cases than there are"),
    "another encoder": (lambda f: f.update(encoder=2.0), "other encoder weights"),
    "another unit": (lambda f: f.update(metric=0.0), "other units"),
    "another size": (lambda f: f["mean"].update({"component 1": np.zeros(9)}), "other embedding"),
    "no mean": (lambda f: f.update(mean={}), "mean of the embedding"),
    "no directions": (lambda f: f.update(directions={}), "8 directions"),
    "odd directions": (lambda f: f["directions"].update(embedding=np.zeros((3, 7))), "8 directions"),
    "odd angles": (lambda f: f["angles"].update({"component 1": np.zeros(2)}), "angles"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_reply_that_no_honest_site_sends_is_left_out(kind):
    change, reason = DAMAGE[kind]
    found = analyse(spoilt(change), FAST)
    assert reason in found.refused["c"]
    assert found.sites == ("a", "b")


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f["quantiles"].update({"volume WT": np.full(7, np.nan)}),
        lambda f: f["mean"].update({"component 1": np.full(6, np.inf)}),
        lambda f: f["directions"].update(embedding=np.zeros((8, 7), np.float32)),
        lambda f: f["directions"].update(embedding=np.zeros((2, 2, 2))),
        lambda f: f.update(cases=float("nan")),
        lambda f: f.update(metric=-1.0),
        lambda f: f.pop("angles"),
        lambda f: f.update(image={"scan": np.zeros((4, 4))}),
    ],
)
def test_the_engine_refuses_what_is_no_statistic(change):
    """Not finite, another type or shape, another field: refused before anything is computed with it."""
    bad = spoilt(change)["c"]

    class Lies(Assess):
        def local(self, got, memory, site):
            reply, kept = super().local(got, memory, site)
            return (bad if site is THREE["c"] else reply), kept

    settings = Lies(permutations=499, resamples=100, projections=8)
    (only,) = run_rounds(settings, Simulator(settings, THREE), {}, Plan(rounds=1), 0)
    assert list(only.refused) == ["c"] and list(only.state.replies) == ["a", "b"]


def test_one_hospital_alone_is_refused():
    with pytest.raises(DataError, match=r"1 of 2 can be described: a site needs 3 cases"):
        analyse(ask({"a": host(9), "b": host(2)}), FAST)
    with pytest.raises(DataError, match=r"there is only one"):
        analyse(ask({"a": host(9)}), FAST)


def test_a_quantity_that_never_varies_tells_nothing():
    """Scans of 8 bits whose largest value is 255: the rounding of long lists must not become a distance."""

    def saturated(cases, seed):
        one = host(cases, seed)
        return Host({**one.quantities, "intensity t2": np.full(cases, 255.1)}, one.embedding)

    found = assess({"a": saturated(300, 1), "b": saturated(40, 2), "c": saturated(40, 3)})
    constant = found.quantities["intensity t2"]
    assert not constant.matrix.any() and set(constant.divisors.values()) == {1}


def test_a_large_site_counts_by_its_cases():
    """One of 3000 cases, cut to 256 quantiles, is most of what several together are like."""
    rng = np.random.default_rng(0)
    raw = [rng.normal(10, 1, 3000), *(rng.normal(20, 1, 60) for _ in range(6))]
    laws, cases = [slices(x, 256)[None] for x in raw], [len(x) for x in raw]
    everyone = np.concatenate(raw)
    np.testing.assert_allclose(_together(laws, cases, range(7)).mean(), everyone.mean(), rtol=1e-9)
    np.testing.assert_allclose(np.median(_together(laws, cases, range(7))), np.median(everyone), rtol=0.01)
    assert _together(laws, cases, [1, 2])[0].tolist() == np.sort(np.concatenate(raw[1:3])).tolist()


@pytest.mark.parametrize("key", ["fewest", "levels", "projections", "permutations", "resamples", "take"])
def test_settings_are_checked(key):
    with pytest.raises(ConfigError, match=rf"assess\.{key} = -1"):
        Assess(**{key: -1})


def test_support_grows_with_the_difference():
    """A planted outlier is named, tested and kept in the resamples; the others are not told apart."""
    usual = {s: host(15, k + 70) for k, s in enumerate("abcd")}
    settings = replace(FAST, permutations=4999)
    found = assess({**usual, "e": host(15, 9, brightness=160, volume=40, look=2)}, settings)
    for d in found.distances.values():
        assert d.outlier == "e" and d.named["e"] > 0.95
        if d.name in TESTED:
            assert d.alone["e"] < 0.01 < min(p for s, p in d.alone.items() if s != "e")
            assert (d.adjusted[:4, :4] > 0.05).all()
        assert (d.adjusted[4, :4] <= 0.05).all()
        assert (d.low <= d.matrix).all() and (d.matrix <= d.high).all() and (d.low >= 0).all()
        assert d.low[4, :4].min() > d.chance[:4, :4].max() / 2
        assert d.matrix[:4, :4].max() < 1.8 * d.chance[:4, :4].max()  # about what chance makes of equal sites
    assert found.differ("a", "e") == tuple(found.distances) and found.differ("b", "c") == ()


def test_the_table_holds_every_pair():
    lines = three().table().splitlines()
    assert lines[0] == "distance,site,other,value,low,high,chance,p,p_holm"
    assert len(lines) == 1 + 5 * 3 and lines[1].startswith("emd,a,b,")


def test_pairs_are_judged_by_all_quantities():
    found = three()
    p = np.stack([q.p for q in found.quantities.values()])
    np.testing.assert_allclose(found.distances["emd"].p, significance.simes(p))


def test_directions_are_the_same_everywhere_and_keep_lengths():
    along = directions(40, 6)
    np.testing.assert_allclose(np.linalg.norm(along, axis=1), np.sqrt(40))
    directions.cache_clear()
    np.testing.assert_array_equal(directions(40, 6), along)


def test_a_site_is_set_apart_at_the_level_of_all_tests():
    """At 0.05 over two kinds of tests of four sites; the farthest first, and then the others without it."""
    apart = np.array([[0.0, 1, 1, 5], [1, 0, 1, 4], [1, 1, 0, 4], [5, 4, 4, 0]])

    def asked(least):
        seen = []

        def test(i, others):
            seen.append((i, tuple(others)))
            return least if i in (0, 3) else 1.0

        return *set_apart(apart, test), seen

    p, others, seen = asked(0.05 / 8)
    assert p.tolist() == [0.05 / 8, 1, 1, 0.05 / 8]
    assert others[3] == [0, 1, 2] and others[0] == [1, 2]
    assert seen == [(3, (0, 1, 2)), (0, (1, 2)), (1, (2,)), (2, (1,))]  # the farthest first; a round ends with it
    assert len(asked(0.007)[2]) == 4  # 0.007 * 8 > 0.05: nobody


@pytest.mark.parametrize(("sites", "rounds"), [(30, 7), (100, 3)])
def test_a_large_federation_sets_several_sites_apart_at_once(sites, rounds):
    """Six sites differ: one at a time up to thirty sites, five at a time of a hundred."""
    place = np.arange(sites) * 0.01 + 10.0 * (np.arange(sites) < 6)
    asked = set()

    def test(i, others):
        asked.add(frozenset([i, *others]))
        return 1e-9 if i < 6 else 1.0

    p, others = set_apart(np.abs(np.subtract.outer(place, place)), test)
    assert np.flatnonzero(p < 1).tolist() == list(range(6))
    assert len(asked) == rounds and all(len(others[i]) == sites - 7 for i in range(6, sites))


def test_the_search_in_a_large_federation_ends_after_twenty_rounds():
    """One more site differs in every round, so that one is set apart in each; the rest is tested once more."""
    place, rounds = np.arange(60.0) ** 2, set()

    def test(i, others):
        rounds.add(len(others))
        return 1e-9 if i > max(others) else 1.0

    p, others = set_apart(np.abs(np.subtract.outer(place, place)), test)
    assert rounds == set(range(39, 60)) and np.flatnonzero(p < 1).tolist() == list(range(39, 60))
    assert all(len(others[i]) == 39 for i in range(40))


def test_a_large_federation_tests_its_most_distant_pairs_finely(monkeypatch):
    """Of 31 hospitals, thirty pairs get many permutations, and the verdict says so; thirty hospitals have no limits."""
    asked = []

    def permuted(one, other, statistics, widths, draws):
        asked.append((*statistics, draws))
        return {name: (np.full(len(one), 1 / (1 + draws)), np.ones(len(one))) for name in statistics}

    monkeypatch.setattr(significance, "permuted", permuted)
    found = assess({f"s{k:02}": host(4, k) for k in range(31)})
    assert asked.count(("emd", 999)) == asked.count(("energy", 999)) == 31 * 15
    assert asked.count(("euclidean", "mmd", "frechet", 199)) == 31 * 15
    matrix, fine = found.distances["energy"].matrix, found.distances["energy"].p < 1e-3
    assert fine[np.triu_indices(31)].sum() == 30 and matrix[fine].min() >= matrix[~fine].max()
    assert len(found.limits) == 2 and set(found.limits) <= set(judge(found).cautions)
    assert replace(found, sites=found.sites[:30]).limits == ()


def test_what_stands_out_does_so_over_all_tests():
    found = three()
    (name, quantity), *_ = found.quantities.items()
    level = 0.05 / (3 * 4 * 2)
    for p, out in ((level * 0.99, True), (level * 1.01, False)):
        assert found.stands_out(replace(quantity, alone={"a": p}), "a") is out
    alone = replace(found, distances={"emd": found.distances["emd"]})
    assert alone.stands_out(replace(quantity, alone={"a": 1.9 * level}), "a"), name


def test_deals_suffice_for_the_number_of_pairs(monkeypatch):
    asked = {}

    def permuted(one, other, statistics, widths, draws):
        asked.update(dict.fromkeys(statistics, draws))
        return {name: (np.ones(len(one)), np.ones(len(one))) for name in statistics}

    monkeypatch.setattr(significance, "permuted", permuted)
    assess({f"s{k:02}": host(4, k) for k in range(12)})
    assert asked == {"emd": 40 * 4 * 72, "energy": 20 * 144, "euclidean": 999, "mmd": 999, "frechet": 999}
    assess(THREE)
    assert set(asked.values()) == {499, 40 * 4 * 9 // 2}


def test_how_far_out_a_site_is():
    assert remoteness(np.array([[0.0, 0, 3], [0, 0, 3], [3, 3, 0]]), 2) == float("inf")
    assert remoteness(np.array([[0.0, 2], [2, 0]]), 0) == 1


def test_pairs_that_no_test_can_tell():
    """By the numbers of cases and of pairs: 3 against 3 can reach 0.1 at best, 5 against 5 in three pairs 0.024."""
    sizes = {"a": 5, "b": 5, "c": 5}
    assert assess({s: host(n, k) for k, (s, n) in enumerate(sizes.items())}).unable() == ()
    assert len(assess({s: host(4, k) for k, s in enumerate(sizes)}).unable()) == 3
