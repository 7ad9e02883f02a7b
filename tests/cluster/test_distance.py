"""Clusters from distances: the paper's own tables, planted blocks, and every possibility tried."""

from itertools import combinations

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
PAPER = {  # distances, row by row; their sums; the outlier and the two clusters, counted from one
    "FeTS EMD": ([3.60, 7.87, 13.91, 1.75, 4.55, 2.98], [25.38, 9.90, 12.60, 21.44], 1, {1, 2}, {3, 4}),
    "FeTS EUC": ([23, 49, 63, 30, 47, 22], [135, 100, 101, 132], 1, {1, 2}, {3, 4}),
    "prostate EMD": ([1.24, 3.01, 8.54, 2.70, 11.05, 4.31], [12.79, 14.99, 10.02, 23.90], 4, {1, 2}, {3, 4}),
    "prostate EUC": ([51, 83, 122, 60, 98, 59], [256, 209, 202, 279], 4, {1, 2}, {3, 4}),
    "KiTS EMD": ([0.92, 1.45, 2.46, 13.86, 1.03, 2.37, 12.55, 1.15, 11.03, 4.89],
                 [18.69, 16.87, 14.66, 10.87, 42.33], 5, {1, 2, 3}, {4, 5}),
    "KiTS EUC": ([936, 1268, 2743, 1207, 844, 2211, 600, 1602, 303, 1548],
                 [6154, 4591, 4017, 8104, 3658], 4, {1, 2}, {3, 4, 5}),
}  # fmt: skip
DISTANCES = {name: squareform(printed) for name, (printed, *_) in PAPER.items()}


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


@pytest.mark.parametrize("name", PAPER)
def test_sums_outliers_and_clusters_are_those_of_the_paper(name):
    apart, (_, every, far, *clusters) = DISTANCES[name], PAPER[name]
    assert sums(apart) == pytest.approx(every, abs=0.011)
    assert outlier(apart) + 1 == far
    assert around_outlier(apart) == tuple(tuple(i - 1 for i in sorted(members)) for members in clusters)
    # the printed algorithm leaves two
    first, second = around_outlier(apart, "literal")
    with_outlier, others = (first, second) if outlier(apart) in first else (second, first)
    assert len(others) == 2 and len(with_outlier) == len(apart) - 2
    assert (around_outlier(apart, "literal") == around_outlier(apart)) == (name != "KiTS EMD")
    assert around_outlier(apart, "literal") == around_outlier(apart, len(apart) - 3)


def test_factors_fall_with_the_sum_of_distances():
    """At most 1, and 1 for the nearer half; of a site far from four others near to one another, about 1/4."""
    for apart in DISTANCES.values():
        factors, every = graded(apart), sums(apart)
        assert [f for _, f in sorted(zip(every, factors, strict=True))] == sorted(factors, reverse=True)
        assert max(factors) == 1 and sum(f == 1 for f in factors) >= len(factors) / 2
        assert factors[outlier(apart)] == pytest.approx(np.median(every) / max(every))
    assert graded(blocks([4, 1], near=0.01))[4] == pytest.approx(1 / 4, abs=0.01)
    assert graded(np.zeros((3, 3))) == [1, 1, 1] and graded([[0, 2], [2, 0]]) == [1, 1] and graded([[0]]) == [1]


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


def test_of_equals_the_first_outlier_the_nearest_first_and_the_fewest():
    same = 1 - np.eye(4)
    assert outlier(same) == 0 and around_outlier(same) == ((0, 1), (2, 3))
    assert around_outlier(1 - np.eye(5)) == ((0, 1), (2, 3, 4))  # one or two sites: 1 + 3 = 3 + 1 distances
    assert around_outlier(1 - np.eye(5), 0) == ((0,), (1, 2, 3, 4))
    # among four sites no metric asks for all but one; but a table need not keep the triangle inequality
    assert around_outlier(squareform([1.0, 1.0, 5.0, 0.5, 0.05, 1.9])) == ((0, 1, 2), (3,))  # 2.5 against 2.9


def test_few_sites():
    for take in ("least", "literal", 0):
        assert around_outlier([[0]], take) == ((0,),) and around_outlier([[0, 3], [3, 0]], take) == ((0,), (1,))
        assert around_outlier(squareform([1.0, 10.0, 9.0]), take) == ((0, 1), (2,))
    assert around_outlier(squareform([1.0, 10.0, 9.0]), 1) == ((0,), (1, 2))


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


@pytest.mark.parametrize("sites", [3, 4, 6, 10])
@pytest.mark.parametrize("seed", range(5))
def test_linked_against_scipy_and_scikit_learn(sites, seed):
    apart = scattered(sites, seed) + 3 * blocks([sites // 2, sites - sites // 2], far=0.5, seed=seed)
    scores = {}
    for count in range(2, sites):
        labels = fcluster(linkage(squareform(apart), "average"), count, "maxclust")
        theirs = AgglomerativeClustering(count, metric="precomputed", linkage="average").fit_predict(apart)
        found, expected = (as_sets(np.flatnonzero(x == k).tolist() for k in set(x)) for x in (labels, theirs))
        assert found == expected
        scores[count] = silhouette_samples(apart, labels, metric="precomputed").mean(), found
    best, partition = max(scores.values(), key=lambda score: score[0])
    clusters, silhouette = linked(apart)
    if best > 1e-9:
        assert as_sets(clusters) == partition and silhouette == pytest.approx(best)
    else:
        assert clusters == (tuple(range(sites)),) and silhouette == 0.0


def test_planted_blocks_are_found():
    assert linked(blocks((5, 1, 3)))[0] == ((0, 1, 2, 3, 4), (5,), (6, 7, 8))
    assert linked(np.kron(1 - np.eye(2), np.ones((2, 2)))) == (((0, 1), (2, 3)), 1.0)  # two pairs of twins
    for alike in ([[0]], [[0, 2], [2, 0]], np.zeros((5, 5)), 0.1 - 0.1 * np.eye(6)):  # without structure: one cluster
        assert linked(alike) == ((tuple(range(len(alike))),), 0.0)
    assert len(linked(blocks((2, 2, 2, 2)))[0]) == 4


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
    apart = DISTANCES["KiTS EUC"]
    assert np.array_equal(check(apart), apart)
    bent = apart.astype(float)
    bent[0, 1] += 1e-8
    bent.setflags(write=False)
    found = check(bent)
    assert np.array_equal(found, found.T) and around_outlier(bent) == around_outlier(apart)
    assert linked(bent)[0] == linked(apart)[0]


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 7), st.integers(0, 10**6), st.sampled_from([1, 2, 3, 8]), st.booleans())
def test_single_linkage_parts_sites_as_well_as_any_of_all_bipartitions(sites, seed, dims, ties):
    updates = np.random.default_rng(seed).normal(size=(sites, dims))
    updates /= np.linalg.norm(updates, axis=1, keepdims=True)
    alike = updates @ updates.T
    alike = np.round(alike, 1) if ties else alike
    firsts = [(0, *others) for size in range(sites - 1) for others in combinations(range(1, sites), size)]
    every = [(first, tuple(i for i in range(sites) if i not in first)) for first in firsts]
    assert len(every) == 2 ** (sites - 1) - 1

    def across(halves):
        return max(alike[i, j] for i in halves[0] for j in halves[1])

    halves, largest = bipartition(alike)
    assert halves in every and largest == across(halves)
    assert largest == pytest.approx(min(map(across, every)), abs=1e-12)
    complete, at_most = bipartition(alike, "complete")
    assert complete in every and at_most == across(complete) >= largest - 1e-12


def test_complete_linkage_misses_the_least_similarity_across():
    """Five directions in a plane: the widest gap, 67 degrees, is at the edge; complete linkage wants even groups."""
    angles = np.radians([0, 67, 88, 119, 160])
    alike = np.cos(angles[:, None] - angles)
    single, complete = bipartition(alike), bipartition(alike, "complete")
    assert single[0] == ((0,), (1, 2, 3, 4)) and single[1] == pytest.approx(np.cos(np.radians(67)))
    assert complete[0] == ((0, 1, 2), (3, 4)) and complete[1] == pytest.approx(np.cos(np.radians(31)))


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
