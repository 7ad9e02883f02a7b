"""Hyper-parameters that are shares of all rounds become numbers of rounds where a study is built."""

import pytest

import polysite as ps
from polysite import config
from polysite.algorithms.base import in_rounds, scaled
from polysite.config import dump, parse, phases
from table import CASES


@pytest.mark.parametrize(
    ("given", "rounds", "want"),
    [(0.4, 30, 12), (0.4, 1, 1), (0.001, 30, 1), (0.999, 4, 4), (1, 30, 1), (0, 30, 0), (50, 30, 50)],
)
def test_a_share_is_of_all_rounds_and_at_least_one(given, rounds, want):
    assert in_rounds(given, rounds) == want


def test_algorithms_scale_what_they_count_in_rounds():
    assert scaled(ps.SuPerFed(), 100).after == 40 and scaled(ps.Fpfc(warmup=0.1), 100).warmup == 10
    assert scaled(ps.Ifca(), 100) == ps.Ifca(warmup=10, settle=30) and scaled(ps.FedAvg(), 100) == ps.FedAvg()


def test_a_combinator_scales_its_inner_algorithm():
    groups = {"north": ("a", "b"), "south": ("c",)}
    inside = ps.Weighted({"a": 0.5}, ps.Clustered(groups, ps.SuPerFed()))
    assert scaled(inside, 50) == ps.Weighted({"a": 0.5}, ps.Clustered(groups, ps.SuPerFed(after=20)))
    unchanged = ps.Clustered(groups, ps.FedAvg())
    assert scaled(unchanged, 50) is unchanged


@pytest.mark.parametrize("name", CASES)
def test_scaling_twice_changes_nothing(name):
    once = scaled(CASES[name], 40)
    assert scaled(once, 40) == once and scaled(once, 400) == once


def test_every_phase_of_a_study_counts_its_own_rounds():
    study = parse("[run]\nrounds = 20\n[algorithm]\nname = 'superfed'\n[[then]]\nalgorithm = 'ifca'\nrun.rounds = 50\n")
    first, second = phases(study)
    assert first.algorithm == ps.SuPerFed(after=8) and second.algorithm == ps.Ifca(warmup=5, settle=15)
    assert study.algorithm == ps.SuPerFed() and parse(dump(study)) == study  # a file keeps the shares
    assert phases(first) == (first,)


@pytest.mark.parametrize("after", ["8", "8.0", "0.4"])
def test_a_file_gives_rounds_or_a_share(after):
    assert (
        phases(parse("[run]\nrounds = 20", {"algorithm": "superfed", "algorithm.after": after}))[0].algorithm.after == 8
    )
    assert "Rounds before the twins; a value between 0 and 1 is a share of all rounds" in config.explain("superfed")
