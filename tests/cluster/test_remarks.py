"""What is said about clusters that are empty, that are hospitals, or that another seed would change."""

import pytest

from polysite.cluster.remarks import remarks, sites_index

MIXED = {"a": {"0": 6.0, "1": 6.0}, "b": {"0": 5.0, "1": 7.0}}
APART = {"a": {"0": 12.0}, "b": {"1": 11.0, "0": 1.0}}


@pytest.mark.parametrize(
    ("counts", "options", "sentences"),
    [
        (MIXED, {"components": 2}, []),
        ({"a": {"0": 9.0}}, {"components": 1}, []),  # one hospital, one cluster
        ({"a": {"0": 5.0}, "b": {"0": 5.0}}, {"components": 1}, []),
        (MIXED, {"components": 4}, ["2 of 4 clusters have no case (3, 4)"]),
        (APART, {"components": 2}, ["the clusters coincide with the hospitals (adjusted Rand index 0.8"]),
        (MIXED, {"components": 2, "agreement": 0.3}, ["restarts end in different clusters (adjusted Rand index 0.30)"]),
    ],
)
def test_odd_clusters_are_named(counts, options, sentences):
    found = remarks(counts, **options)
    assert [said in text for said, text in zip(sentences, found, strict=True)] == [True] * len(sentences)


def test_the_index_of_clusters_and_hospitals():
    assert sites_index({"a": {"0": 9.0}, "b": {"1": 9.0}}) == 1 and sites_index({"a": {"0": 9.0}, "b": {"0": 9.0}}) == 0
    assert abs(sites_index({key: {"0": 9.0, "1": 9.0} for key in "ab"})) < 0.1
