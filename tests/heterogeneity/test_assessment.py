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
from polysite.heterogeneity import assessment, significance
from polysite.heterogeneity.analysis import _together, analyse, random_case_angles
from polysite.heterogeneity.assessment import TESTED, combined
from polysite.heterogeneity.distances import Weights, angle, energy, merged, slices
from polysite.heterogeneity.exchange import Assess, directions
from polysite.heterogeneity.verdict import judge
from polysite.payload import Payload

THREE = {"a": host(9, 1), "b": host(12, 2), "c": host(7, 3, brightness=150, look=2)}
PAIRS = list(combinations(range(3), 2))


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


def symmetric(*pairs):
    """The matrix of these distances between pairs."""
    square = np.zeros((int((1 + 8 * len(pairs)) ** 0.5 + 1) // 2,) * 2)
    square[np.triu_indices(len(square), 1)] = pairs
    return square + square.T


def test_paper_a_table_6_to_7():
    """FLAIR and ET, the quantities with the largest distance of their kind, averaged: Table 7, and its outlier."""
    printed = {  # of the other modalities and labels, the paper prints the mean over the pairs
        **{f"intensity {m}": symmetric(*[v] * 6) for m, v in {"T2": 0.393, "T1": 0.247, "T1C+": 0.290}.items()},
        "intensity FLAIR": symmetric(0.33, 0.32, 0.27, 0.34, 1.45, 0.86),
        "volume WT": symmetric(*[0.935] * 6),
        "volume ET": symmetric(6.87, 15.42, 27.55, 3.07, 7.40, 5.18),
        "volume TC": symmetric(*[0.561] * 6),
    }
    chosen, distance = combined(printed)
    assert chosen == ["intensity FLAIR", "volume ET"]
    np.testing.assert_allclose(distance, symmetric(3.60, 7.87, 13.91, 1.70, 4.43, 3.02), atol=0.006)
    assert cluster.outlier(distance) == 0 and cluster.around_outlier(distance) == ((0, 1), (2, 3))


def test_the_metadata_distance_is_the_mean_of_the_largest_of_either_kind():
    found = three(scale="none")
    raw = {n: {s: h.quantities[n] for s, h in THREE.items()} for n in THREE["a"].quantities}
    emd = {n: {p: stats.wasserstein_distance(v[p[0]], v[p[1]]) for p in combinations("abc", 2)} for n, v in raw.items()}
    mean = {n: np.mean(list(d.values())) for n, d in emd.items()}
    assert {n: q.mean for n, q in found.quantities.items()} == pytest.approx(mean)
    brightest, largest = (max((n for n in mean if n.startswith(k)), key=mean.__getitem__) for k in ("int", "vol"))
    assert (found.largest("intensity").name, found.largest("volume").name) == (brightest, largest)
    expected = [(emd[brightest][p] + emd[largest][p]) / 2 for p in combinations("abc", 2)]
    np.testing.assert_allclose(found.distances["emd"].matrix, symmetric(*expected))
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
        plain = raw.quantities[name]
        np.testing.assert_allclose(q.matrix, symmetric(*(plain.matrix[i, j] / own["abc"[i]] for i, j in PAIRS)))
        np.testing.assert_array_equal(q.p, plain.p)
    d, e = first.distances["emd"], raw.distances["emd"]
    np.testing.assert_array_equal(d.adjusted, e.adjusted)
    assert (d.low <= d.matrix).all() and (d.matrix <= d.high).all()
    chosen = [first.largest("intensity"), first.largest("volume")]
    np.testing.assert_allclose(d.matrix, np.mean([q.matrix for q in chosen], 0))
    assert (d.chance[np.triu_indices(3, 1)] < 5).all()  # in deviations, not in units of intensity


def test_all_quantities_may_count():
    found = three(combine="mean")
    every = [q.matrix for q in found.quantities.values()]
    np.testing.assert_allclose(found.distances["emd"].matrix, np.mean(every, 0))
    others = {'assess.scale = "first"', 'assess.scale = "none"', 'assess.combine = "max"'}
    assert found.alternatives["emd"].keys() == others


def test_the_outlier_may_depend_on_the_scale():
    pooled, first = (assess(spread_out(), replace(FAST, projections=0, scale=s)) for s in ("pooled", "first"))
    assert (pooled.distances["emd"].outlier, first.distances["emd"].outlier) == ("d", "a")
    assert pooled.alternatives == {
        "emd": {'assess.scale = "first"': "a", 'assess.scale = "none"': "d", 'assess.combine = "mean"': "d"}
    }


@cache
def kits(by_size):
    """The kidney and tumour volumes of Fed-KiTS2019, all cases, with the deviation of the first site as the unit."""
    bench = run_path(str(Path(__file__).parents[2] / "bench" / "assess.py"))
    return bench["kits"](by_size, Assess(projections=0, scale="first", permutations=99, resamples=100), labels="apart")


@pytest.mark.usefixtures("shared")
def test_the_paper_s_distances_of_real_kidneys():
    """EMD_maxL in Table 1: 0.87 in the natural federation, 11.62 in the sorted one. Its Table 2 is a mean of three.

    Of intensity, kidney and tumour: what intensity must be is a distance for all ten pairs; the paper has 0.51.
    """
    natural, by_size = (kits(sort).largest("volume") for sort in (False, True))
    assert (natural.of, round(natural.mean, 3)) == ("kidney", 0.870)
    assert (by_size.of, round(by_size.mean, 3)) == ("tumour", 11.625)
    table_2 = symmetric(0.92, 1.45, 2.46, 13.86, 1.03, 2.37, 12.55, 1.15, 11.03, 4.89)
    kidney, tumour = (kits(True).quantities[f"volume {label}"].matrix for label in ("kidney", "tumour"))
    intensity, upper = 3 * table_2 - kidney - tumour, np.triu_indices(5, 1)
    assert intensity[upper].min() > 0 and intensity[upper].mean() == pytest.approx(0.51, abs=0.01)
    assert (2 * table_2 - tumour)[upper].min() < 0  # the mean of the largest two would need a negative distance
    printed = {"intensity CT": intensity, "volume kidney": kidney, "volume tumour": tumour}
    chosen, distance = combined(printed, "mean")
    assert chosen == list(printed)
    np.testing.assert_allclose(distance, table_2)
    assert cluster.outlier(distance) == 4 and cluster.around_outlier(distance) == ((0, 1, 2), (3, 4))


def test_angles_between_random_cases():
    """One case of each of two sites, anew for every pair, by the seed; a site of one case leaves no choice."""
    rng = np.random.default_rng(0)
    cases = {"a": rng.normal(size=(1, 8, 2)), "b": rng.normal(size=(1, 8, 2)), "c": rng.normal(size=(20, 8, 2))}
    found, again = random_case_angles(cases, 3), random_case_angles(cases, 3)
    for k, (name, matrix) in enumerate(found.items()):
        assert name == f"component {k + 1}" and (matrix == matrix.T).all() and not matrix.diagonal().any()
        assert matrix[0, 1] == pytest.approx(angle(cases["a"][0, :, k], cases["b"][0, :, k]))
        possible = [angle(cases["a"][0, :, k], case[:, k]) for case in cases["c"]]
        assert np.isclose(possible, matrix[0, 2]).sum() == 1 and (again[name] == matrix).all()
    drawn = {random_case_angles(cases, seed)["component 1"][0, 2].item() for seed in range(20)}
    assert len(found) == 2 and len(drawn) > 5


def test_the_embedding_distance_is_that_of_the_means():
    found, averaged = three(), three(modalities="mean").distances["euclidean"].matrix
    means = [h.embedding.mean(0) for h in THREE.values()]
    for i, j in PAIRS:
        apart = means[i] - means[j]
        assert found.distances["euclidean"].matrix[i, j] == pytest.approx(np.linalg.norm(apart))
        assert averaged[i, j] == pytest.approx(np.linalg.norm(apart.mean(0)))
        u, v = (means[k][..., 1].ravel() for k in (i, j))  # the second component
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
    assert energy(z, Weights(weights[:, None])).mean() * constant == pytest.approx(whole, rel=0.05)
    np.testing.assert_allclose(np.linalg.norm(along, axis=1), np.sqrt(d))
    directions.cache_clear()
    np.testing.assert_array_equal(directions(d, 4000), along)


def test_order_of_cases_and_of_sites_and_duplicates_of_all_cases_are_irrelevant():
    rng = np.random.default_rng(0)
    shuffled = {}
    for site, h in reversed(THREE.items()):
        deal = rng.permutation(h.size)
        shuffled[site] = Host({n: v[deal] for n, v in h.quantities.items()}, h.embedding[deal])
    one, other = three(), assess(shuffled)
    same(one, other)
    assert {n: d.outlier for n, d in one.distances.items()} == {n: d.outlier for n, d in other.distances.items()}
    same(one, assess({"z" + s if s == "a" else s: h for s, h in THREE.items()}), {"a": "za", "b": "b", "c": "c"})

    def twice(h):
        return Host({n: np.tile(v, 2) for n, v in h.quantities.items()}, np.tile(h.embedding, (2, 1, 1, 1)))

    same(one, assess({s: twice(h) for s, h in THREE.items()}))


def test_equal_sites_are_at_distance_zero_and_never_told_apart():
    found = assess({"a": host(9, 1), "b": host(9, 1), "c": host(9, 1)})
    for d in found.distances.values():
        np.testing.assert_allclose(d.matrix, 0, atol=1e-9)
        assert (d.p == 1).all() and (d.adjusted == 1).all() and d.linked == (("a", "b", "c"),)
    assert all(q.mean == pytest.approx(0, abs=1e-9) for q in found.quantities.values())


def test_few_cases_stay_at_home():
    """Below ``fewest`` a site tells a number of cases and nothing else; it is not even opened."""
    small = host(2, 4)
    replies = ask({**THREE, "d": small})
    nothing = {field: {} if kind == "statistics" else 0.0 for field, kind in FAST.reply.items()}
    assert replies["d"] == Payload(**{**nothing, "cases": 2.0}) and small.asked == []
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
    bytes_left, words = three().left["b"]
    assert bytes_left == asked_three()["b"].nbytes == 8 * (4 + 4 * 12 + 4 + 32 + 8 * 12 + 2 * 12)
    assert "12 sorted values, one for each case, of 4 quantities" in words


def test_it_is_an_algorithm_like_any_other(tmp_path):
    """Inputs are not changed, the wire changes nothing, order and absence of replies are fine, the state is kept."""
    hosts = {s: Host({n: v.copy() for n, v in h.quantities.items()}, h.embedding.copy()) for s, h in THREE.items()}
    for h in hosts.values():
        for v in (*h.quantities.values(), h.embedding):
            v.flags.writeable = False
    plain = ask(hosts)
    assert plain == ask(hosts, wire=True)
    backwards = FAST.merge(FAST.init({}, list(THREE)), dict(reversed(plain.items())))
    assert list(backwards.replies) == ["a", "b", "c"]
    same(analyse({s: plain[s] for s in "bca"}, FAST), analyse(plain, FAST))
    assert analyse({s: plain[s] for s in "ab"}, FAST).sites == ("a", "b")
    checkpoint.save(tmp_path / "x", backwards)
    assert checkpoint.load(tmp_path / "x") == backwards


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


@pytest.mark.parametrize(("change", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_a_reply_that_no_honest_site_sends_is_left_out(change, reason):
    found = analyse(spoilt(change), FAST)
    assert reason in found.refused["c"] and found.sites == ("a", "b")


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f["quantiles"].update({"volume WT": np.full(7, np.nan)}),
        lambda f: f["directions"].update(embedding=np.zeros((8, 7), np.float32)),
        lambda f: f.update(image={"scan": np.zeros((4, 4))}),
    ],
    ids=["not finite", "another type", "another field"],
)
def test_the_engine_refuses_what_is_no_statistic(change):
    class Lies(Assess):
        def local(self, got, memory, site):
            reply, kept = super().local(got, memory, site)
            return (spoilt(change)["c"] if site is THREE["c"] else reply), kept

    settings = Lies(permutations=499, resamples=100, projections=8)
    (only,) = run_rounds(settings, Simulator(settings, THREE), {}, Plan(rounds=1), 0)
    assert list(only.refused) == ["c"] and list(only.state.replies) == ["a", "b"]


def test_one_hospital_alone_is_refused():
    for hosts, said in (({"a": host(9), "b": host(2)}, "1 of 2 can be described"), ({"a": host(9)}, "only one")):
        with pytest.raises(DataError, match=said):
            analyse(ask(hosts), FAST)


def test_a_quantity_that_never_varies_tells_nothing():
    """Scans of 8 bits whose largest value is 255: the rounding of long lists must not become a distance."""
    hosts = {s: host(cases, k) for k, (s, cases) in enumerate({"a": 300, "b": 40, "c": 40}.items())}
    for h in hosts.values():
        h.quantities["intensity t2"] = np.full(h.size, 255.1)
    constant = assess(hosts).quantities["intensity t2"]
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


def test_pairs_are_judged_by_all_quantities_and_listed():
    found = three()
    p = np.stack([q.p for q in found.quantities.values()])
    np.testing.assert_allclose(found.distances["emd"].p, significance.simes(p))
    lines = found.table().splitlines()
    assert lines[0] == "distance,site,other,value,low,high,chance,p,p_holm"
    assert len(lines) == 1 + 3 * 3 and lines[1].startswith("emd,a,b,")


def searched(matrix, least):
    """(p, the others of every site, the tests that were made), where ``least`` tells p."""
    seen = []

    def test(i, others):
        seen.append((i, tuple(others)))
        return least(i, others)

    found = replace(assessment.Tested.empty(len(matrix), 1), matrix=matrix).set_apart(test)
    return found.alone, found.others, seen


def test_a_site_is_set_apart_at_the_level_of_all_tests():
    """At 0.05 over two kinds of tests of four sites; the farthest first, and then the others without it."""
    apart = symmetric(1, 1, 5, 1, 4, 4)
    p, others, seen = searched(apart, lambda i, _: 0.05 / 8 if i in (0, 3) else 1.0)
    assert p.tolist() == [0.05 / 8, 1, 1, 0.05 / 8]
    assert others[3] == [0, 1, 2] and others[0] == [1, 2]
    assert seen == [(3, (0, 1, 2)), (0, (1, 2)), (1, (2,)), (2, (1,))]  # the farthest first; a round ends with it
    assert len(searched(apart, lambda i, _: 0.007 if i in (0, 3) else 1.0)[2]) == 4  # 0.007 * 8 > 0.05: nobody


@pytest.mark.parametrize(("sites", "rounds"), [(30, 7), (100, 3)])
def test_a_large_federation_sets_several_sites_apart_at_once(sites, rounds):
    """Six sites differ: one at a time up to thirty sites, five at a time of a hundred."""
    place = np.arange(sites) * 0.01 + 10.0 * (np.arange(sites) < 6)
    p, others, seen = searched(np.abs(np.subtract.outer(place, place)), lambda i, _: 1e-9 if i < 6 else 1.0)
    assert np.flatnonzero(p < 1).tolist() == list(range(6))
    assert len({frozenset([i, *rest]) for i, rest in seen}) == rounds
    assert all(len(others[i]) == sites - 7 for i in range(6, sites))


@pytest.fixture
def deals(monkeypatch):
    """(statistic, number of permutations) of every pair; p is the least that they can tell."""
    asked = []

    def permuted(one, other, statistic, draws):
        asked.append((statistic.__name__, draws))
        return np.full(len(one), 1 / (1 + draws)), np.ones(len(one))

    monkeypatch.setattr(significance, "permuted", permuted)
    return asked


def test_a_large_federation_tests_its_most_distant_pairs_finely(deals):
    """Of 31 hospitals, thirty pairs get many permutations, and the verdict says so; thirty hospitals have no limits."""
    found = assess({f"s{k:02}": host(4, k) for k in range(31)})
    assert deals.count(("earth_movers_of", 999)) == deals.count(("energy", 999)) == 31 * 15
    assert deals.count(("shift", 199)) == 31 * 15
    matrix, fine = found.distances["energy"].matrix, found.distances["energy"].p < 1e-3
    assert fine[np.triu_indices(31)].sum() == 30 and matrix[fine].min() >= matrix[~fine].max()
    assert len(found.limits) == 2 and set(found.limits) <= set(judge(found).cautions)
    assert replace(found, sites=found.sites[:30]).limits == ()


def test_deals_suffice_for_the_number_of_pairs(deals):
    assess({f"s{k:02}": host(4, k) for k in range(12)})
    assert dict(deals) == {"earth_movers_of": 40 * 4 * 72, "energy": 20 * 144, "shift": 999}
    deals.clear()
    assess(THREE)
    assert {each[-1] for each in deals} == {499, 40 * 4 * 9 // 2}


def test_what_stands_out_does_so_over_all_tests():
    found = three()
    (name, quantity), *_ = found.quantities.items()
    level = 0.05 / (3 * 4 * 2)
    for p, out in ((level * 0.99, True), (level * 1.01, False)):
        assert found.stands_out(replace(quantity, alone={"a": p}), "a") is out
    alone = replace(found, distances={"emd": found.distances["emd"]})
    assert alone.stands_out(replace(quantity, alone={"a": 1.9 * level}), "a"), name


def test_pairs_that_no_test_can_tell():
    """By the numbers of cases and of pairs: 3 against 3 can reach 0.1 at best, 5 against 5 in three pairs 0.024."""
    assert assess({s: host(5, k) for k, s in enumerate("abc")}).unable() == ()
    assert len(assess({s: host(4, k) for k, s in enumerate("abc")}).unable()) == 3
