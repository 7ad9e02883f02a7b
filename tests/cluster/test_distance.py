"""Clusters from distances: the paper's own tables, planted blocks, and every possibility tried."""

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, is_valid_linkage, linkage
from scipy.spatial.distance import pdist, squareform
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import silhouette_samples

from polysite.cluster.bipartition import bipartition
from polysite.cluster.distance import around_outlier, check, graded, linked, outlier, sums, tree
from polysite.errors import ConfigError, DataError

# Table 2 of Alekseenko et al., above the diagonal, row by row. All six are printed symmetric; the sums below some of
# their columns are not those of the entries. (The asymmetric print is table 7, where FeTS is 1.70 one way, 1.75 back.)
TABLE_2 = {
    "FeTS EMD": [3.60, 7.87, 13.91, 1.75, 4.55, 2.98],
    "FeTS EUC": [23, 49, 63, 30, 47, 22],
    "prostate EMD": [1.24, 3.01, 8.54, 2.70, 11.05, 4.31],
    "prostate EUC": [51, 83, 122, 60, 98, 59],
    "KiTS EMD": [0.92, 1.45, 2.46, 13.86, 1.03, 2.37, 12.55, 1.15, 11.03, 4.89],
    "KiTS EUC": [936, 1268, 2743, 1207, 844, 2211, 600, 1602, 303, 1548],
}
TABLE_4 = {  # which client is the outlier, and the two clusters; clients count from one
    "FeTS EMD": (1, {1, 2}, {3, 4}),
    "FeTS EUC": (1, {1, 2}, {3, 4}),
    "prostate EMD": (4, {1, 2}, {3, 4}),
    "prostate EUC": (4, {1, 2}, {3, 4}),
    "KiTS EMD": (5, {1, 2, 3}, {4, 5}),
    "KiTS EUC": (4, {1, 2}, {3, 4, 5}),
}


def blocks(sizes, near=1.0, far=10.0, seed=0):
    """Distances between points in the plane that lie in heaps far from each other."""
    rng = np.random.default_rng(seed)
    points = [rng.normal([far * k, 0], near / 4, (size, 2)) for k, size in enumerate(sizes)]
    return squareform(pdist(np.concatenate(points)))


def scattered(sites, seed):
    return squareform(np.random.default_rng(seed).uniform(0.1, 1, sites * (sites - 1) // 2))


def inside(apart, clusters):
    return sum(apart[i, j] for members in clusters for i, j in combinations(members, 2))


def as_sets(clusters, names=None):
    return {frozenset(i if names is None else int(names[i]) for i in members) for members in clusters}


@pytest.mark.parametrize("name", TABLE_2)
def test_outliers_and_clusters_are_those_of_the_paper(name):
    apart, (far, *clusters) = squareform(TABLE_2[name]), TABLE_4[name]
    assert outlier(apart) + 1 == far
    assert around_outlier(apart) == tuple(tuple(i - 1 for i in sorted(members)) for members in clusters)


SUMS = {  # below Table 2, as printed; where it leaves out the distance to client 1, as the entries add up
    "FeTS EMD": [25.38, 9.90, 12.60, 21.44],  # printed 6.30 and 4.73 for clients 2 and 3
    "FeTS EUC": [135, 100, 101, 132],
    "prostate EMD": [12.79, 14.99, 10.02, 23.90],  # printed 13.75 and 7.02
    "prostate EUC": [256, 209, 202, 279],
    "KiTS EMD": [18.69, 16.87, 14.66, 10.87, 42.33],  # printed 15.95, 13.21 and 8.40 for clients 2 to 4
    "KiTS EUC": [6154, 4591, 4017, 8104, 3658],
}


@pytest.mark.parametrize("name", TABLE_2)
def test_sums_of_distances(name):
    assert sums(squareform(TABLE_2[name])) == pytest.approx(SUMS[name], abs=0.011)


def test_factors_fall_with_the_sum_of_distances():
    """At most 1, and 1 for the nearer half; of a site far from four others near to one another, about 1/4."""
    for name in TABLE_2:
        factors, every = graded(squareform(TABLE_2[name])), sums(squareform(TABLE_2[name]))
        assert [f for _, f in sorted(zip(every, factors, strict=True))] == sorted(factors, reverse=True)
        assert max(factors) == 1 and sum(f == 1 for f in factors) >= len(factors) / 2
        assert factors[outlier(squareform(TABLE_2[name]))] == pytest.approx(np.median(every) / max(every))
    far = blocks([4, 1], near=0.01)
    assert graded(far)[4] == pytest.approx(1 / 4, abs=0.01)
    assert graded(np.zeros((3, 3))) == [1, 1, 1] and graded([[0, 2], [2, 0]]) == [1, 1] and graded([[0]]) == [1]


@pytest.mark.parametrize("name", TABLE_2)
def test_the_printed_algorithm_leaves_two(name):
    apart = squareform(TABLE_2[name])
    first, second = around_outlier(apart, "literal")
    with_outlier, others = (first, second) if outlier(apart) in first else (second, first)
    assert len(others) == 2 and len(with_outlier) == len(apart) - 2
    assert (around_outlier(apart, "literal") == around_outlier(apart)) == (name != "KiTS EMD")
    assert around_outlier(apart, "literal") == around_outlier(apart, len(apart) - 3)


@pytest.mark.parametrize("sites", [4, 5, 6, 9])
@pytest.mark.parametrize("seed", range(6))
def test_least_against_every_number_that_may_be_taken(sites, seed):
    apart = scattered(sites, seed)
    centre = max(range(sites), key=lambda i: apart[i].sum())
    order = sorted(range(sites), key=lambda i: apart[centre, i])  # the outlier itself comes first
    every = {take: around_outlier(apart, take) for take in range(sites - 1)}
    for take, clusters in every.items():
        assert as_sets(clusters) == {frozenset(order[: take + 1]), frozenset(order[take + 1 :])}
    best = min(range(1, sites - 1), key=lambda take: inside(apart, every[take]))
    assert around_outlier(apart) == every[best]


def test_all_but_one_may_join_the_outlier():
    """Among four sites no metric asks for it; but a table need not keep the triangle inequality."""
    assert around_outlier(squareform([1.0, 1.0, 5.0, 0.5, 0.05, 1.9])) == ((0, 1, 2), (3,))  # 2.5 against 2.9


def test_of_equals_the_first_outlier_the_nearest_first_and_the_fewest():
    same = 1 - np.eye(4)
    assert outlier(same) == 0 and around_outlier(same) == ((0, 1), (2, 3))
    assert around_outlier(1 - np.eye(5)) == ((0, 1), (2, 3, 4))  # one or two sites: 1 + 3 = 3 + 1 distances
    assert around_outlier(1 - np.eye(5), 0) == ((0,), (1, 2, 3, 4))
    assert around_outlier(np.zeros((6, 6))) == ((0, 1), (2, 3, 4, 5))


def test_few_sites():
    assert around_outlier([[0]]) == around_outlier([[0]], "literal") == around_outlier([[0]], 0) == ((0,),)
    two = [[0, 3], [3, 0]]
    assert around_outlier(two) == around_outlier(two, "literal") == around_outlier(two, 0) == ((0,), (1,))
    for order in permutations(range(3)):
        three = squareform([1.0, 10.0, 9.0])[np.ix_(order, order)]
        alone = order.index(2)
        assert outlier(three) == alone
        for take in ("least", "literal", 0):
            assert as_sets(around_outlier(three, take)) == {frozenset({alone}), frozenset({0, 1, 2} - {alone})}
        pair = {alone, order.index(1)}
        assert as_sets(around_outlier(three, 1)) == {frozenset(pair), frozenset({0, 1, 2} - pair)}


@pytest.mark.parametrize(("take", "sites"), [(4, 5), (-1, 5), (1, 2), (1, 1), ("most", 5)])
def test_a_number_that_cannot_be_taken_is_refused(take, sites):
    with pytest.raises(ConfigError, match=f"take = {take!r} sites cannot join the outlier of {sites} sites"):
        around_outlier(scattered(sites, 0) if sites > 1 else [[0]], take)


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 8), st.integers(0, 1000), st.randoms(use_true_random=False))
def test_the_order_of_the_sites_plays_no_part(sites, seed, random):
    apart = scattered(sites, seed)
    order = random.sample(range(sites), sites)
    shuffled = apart[np.ix_(order, order)]
    assert order[outlier(shuffled)] == outlier(apart)
    for take in ("least", "literal", 1):
        assert as_sets(around_outlier(shuffled, take), order) == as_sets(around_outlier(apart, take))
    (one, height), (other, same_height) = linked(apart), linked(shuffled)
    assert as_sets(other, order) == as_sets(one) and same_height == pytest.approx(height)


@pytest.mark.parametrize("sites", [1, 2, 3, 5, 8])
def test_clusters_are_a_partition_in_order(sites):
    for seed in range(10):
        apart = scattered(sites, seed) if sites > 1 else np.zeros((1, 1))
        for clusters in (around_outlier(apart), around_outlier(apart, "literal"), linked(apart)[0]):
            assert sorted(i for members in clusters for i in members) == list(range(sites))
            assert clusters[0][0] == 0 and list(clusters) == sorted(tuple(sorted(m)) for m in clusters)
            assert all(type(i) is int for members in clusters for i in members)


@pytest.mark.parametrize("sizes", [(3, 3), (2, 5), (4, 3, 2), (2, 2, 2, 2), (5, 1, 3)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_planted_blocks_are_found(sizes, seed):
    ends = np.cumsum(sizes)
    planted = tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))
    clusters, silhouette = linked(blocks(sizes, seed=seed))
    assert clusters == planted and silhouette > 0.6


def by_hand(apart, labels):
    """The mean of (b - a) / max(a, b); 0 for a site that is alone."""
    found = []
    for i, mine in enumerate(labels):
        own = [apart[i, j] for j in range(len(apart)) if labels[j] == mine and j != i]
        others = [np.mean(apart[i, labels == other]) for other in set(labels) - {mine}]
        a, b = np.mean(own) if own else 0.0, min(others)
        found.append((b - a) / max(a, b) if own else 0.0)
    return np.mean(found)


@pytest.mark.parametrize("sites", [3, 4, 6, 10])
@pytest.mark.parametrize("seed", range(5))
def test_linked_against_scipy_and_scikit_learn(sites, seed):
    apart = scattered(sites, seed) + 3 * blocks([sites // 2, sites - sites // 2], far=0.5, seed=seed)
    scores = {}
    for count in range(2, sites):
        labels = fcluster(linkage(squareform(apart), "average"), count, "maxclust")
        theirs = AgglomerativeClustering(count, metric="precomputed", linkage="average").fit_predict(apart)
        assert as_sets(groups(labels)) == as_sets(groups(theirs))
        scores[count] = by_hand(apart, labels), as_sets(groups(labels))
        assert scores[count][0] == pytest.approx(silhouette_samples(apart, labels, metric="precomputed").mean())
    best = max(scores, key=lambda count: scores[count][0])
    clusters, silhouette = linked(apart)
    if scores[best][0] > 1e-9:
        assert as_sets(clusters) == scores[best][1] and silhouette == pytest.approx(scores[best][0])
    else:
        assert clusters == (tuple(range(sites)),) and silhouette == 0.0
    for most in range(2, sites):
        assert linked(apart, most)[1] == pytest.approx(max(0.0, *(scores[count][0] for count in range(2, most + 1))))


def groups(labels):
    return [np.flatnonzero(labels == k).tolist() for k in set(labels)]


def test_there_may_be_a_limit_to_the_number_of_clusters():
    apart = blocks((2, 2, 2, 2))
    assert [len(linked(apart, most)[0]) for most in (1, 2, 3, 4, 99)] == [1, 2, 3, 4, 4]
    assert linked(apart, 1) == ((tuple(range(8)),), 0.0)
    with pytest.raises(ConfigError, match="one cluster at least, got most = 0"):
        linked(apart, 0)


@pytest.mark.parametrize(
    "apart",
    [[[0]], [[0, 2], [2, 0]], np.zeros((5, 5)), 0.1 - 0.1 * np.eye(6), 0.7 - 0.7 * np.eye(7)],
    ids=["one site", "two sites", "all in one place", "six alike", "seven alike"],
)
def test_sites_without_structure_are_one_cluster(apart):
    assert linked(apart) == ((tuple(range(len(apart))),), 0.0)


def test_sites_in_the_same_place_belong_together():
    apart = np.kron(1 - np.eye(2), np.ones((2, 2)))  # two pairs of twins
    assert linked(apart) == (((0, 1), (2, 3)), 1.0)


def test_the_tree_is_that_of_scipy():
    apart = scattered(6, 3)
    assert is_valid_linkage(tree(apart)) and np.array_equal(tree(apart), linkage(squareform(apart), "average"))
    assert tree([[0]]).shape == (0, 4) and tree([[0, 2], [2, 0]]).tolist() == [[0, 1, 2, 2]]


REFUSED = {
    "not square": ([[0, 1, 2], [1, 0, 3]], r"square table, a row for each; this one is of shape \(2, 3\)"),
    "a list": ([0, 1, 2], "square table"),
    "nobody": (np.zeros((0, 0)), "square table"),
    "words": ([[0, "far"], ["far", 0]], "a table of numbers"),
    "ragged": ([[0, 1], [1]], "a table of numbers"),
    "table 7, asymmetric in print": (
        [[0, 3.60, 7.87, 13.91], [3.60, 0, 1.70, 4.43], [7.87, 1.75, 0, 3.02], [13.91, 4.43, 3.02, 0]],
        "row 2, column 3 of the table is 1.7; the way back is as long",
    ),
    "not a number": ([[0, np.nan], [np.nan, 0]], "row 1, column 2 of the table is nan; a distance is finite"),
    "without end": ([[0, np.inf], [np.inf, 0]], "is inf; a distance is finite"),
    "negative": ([[0, -1], [-1, 0]], "is -1; a distance is not negative"),
    "away from itself": ([[0, 1], [1, 0.5]], "row 2, column 2 of the table is 0.5; no site is away from itself"),
}


@pytest.mark.parametrize(("matrix", "sentence"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("function", [check, outlier, sums, graded, around_outlier, linked, tree])
def test_what_is_no_distance_is_refused(function, matrix, sentence):
    with pytest.raises(DataError, match=sentence):
        function(matrix)


def test_a_rounding_error_is_forgiven_and_nothing_is_changed():
    apart = squareform(TABLE_2["KiTS EUC"])
    assert np.array_equal(check(apart), apart)
    bent = apart.astype(float)
    bent[0, 1] += 1e-8
    bent.setflags(write=False)
    found = check(bent)
    assert np.array_equal(found, found.T) and around_outlier(bent) == around_outlier(apart)
    assert linked(bent)[0] == linked(apart)[0]


def parted(sites):
    """Every way to part sites in two: 2^(K-1) - 1 of them, the first site always in the first group."""
    for size in range(sites - 1):
        for others in combinations(range(1, sites), size):
            first = (0, *others)
            yield first, tuple(i for i in range(sites) if i not in first)


def across(alike, halves):
    return max(alike[i, j] for i in halves[0] for j in halves[1])


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 7), st.integers(0, 10**6), st.sampled_from([1, 2, 3, 8]), st.booleans())
def test_single_linkage_parts_sites_as_well_as_any_of_all_bipartitions(sites, seed, dims, ties):
    updates = np.random.default_rng(seed).normal(size=(sites, dims))
    updates /= np.linalg.norm(updates, axis=1, keepdims=True)
    alike = updates @ updates.T
    alike = np.round(alike, 1) if ties else alike
    every = list(parted(sites))
    assert len(every) == 2 ** (sites - 1) - 1
    halves, largest = bipartition(alike)
    assert halves in every and largest == across(alike, halves)
    assert largest == pytest.approx(min(across(alike, h) for h in every), abs=1e-12)
    complete, at_most = bipartition(alike, "complete")
    assert complete in every and at_most == across(alike, complete) >= largest - 1e-12


def test_complete_linkage_misses_the_least_similarity_across():
    """Five directions in a plane: the widest gap, 67 degrees, is at the edge; complete linkage wants even groups."""
    angles = np.radians([0, 67, 88, 119, 160])
    alike = np.cos(angles[:, None] - angles)
    single, complete = bipartition(alike), bipartition(alike, "complete")
    assert single[0] == ((0,), (1, 2, 3, 4)) and single[1] == pytest.approx(np.cos(np.radians(67)))
    assert complete[0] == ((0, 1, 2), (3, 4)) and complete[1] == pytest.approx(np.cos(np.radians(31)))
    rng, worse = np.random.default_rng(0), 0
    for _ in range(300):
        updates = rng.normal(size=(6, 3))
        updates /= np.linalg.norm(updates, axis=1, keepdims=True)
        alike = updates @ updates.T
        worse += bipartition(alike, "complete")[1] > bipartition(alike)[1] + 1e-12
    assert 100 < worse < 160


@pytest.mark.parametrize(
    ("alike", "sentence"),
    [
        ([[1.0]], "two or more sites"),
        ([[1.0, 0.5, 0.2], [0.5, 1.0, 0.1]], "square table"),
        ([[1.0, np.nan], [np.nan, 1.0]], "are finite"),
        ([[1.0, 0.5], [0.4, 1.0]], "the same both ways"),
    ],
)
def test_what_is_no_similarity_is_refused(alike, sentence):
    with pytest.raises(DataError, match=sentence):
        bipartition(alike)
