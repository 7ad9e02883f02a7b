"""Averages over classes and clients against numbers computed by hand."""

import math
from fractions import Fraction as F
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, recall_score

from polysite.metrics.averages import AVERAGES, WAYS, Way, average, averaged, of_cases, of_classes, total
from polysite.metrics.overlap import BACKGROUND
from polysite.site import CaseScore

_, PER_CLIENT_BG, POOLED, POOLED_BG = WAYS

# of two clients with ten voxels each
COUNTS = (
    {BACKGROUND: (3, 1, 1, 5), "a": (3, 1, 1, 5), "b": (1, 1, 1, 7)},
    {BACKGROUND: (9, 1, 0, 0), "a": (0, 0, 1, 9), "b": (0, 0, 0, 10)},  # b neither occurs nor is predicted
)
SEGMENTED = {  # the values of the classes per client and of both clients together; the background comes first
    "iou": ((F(3, 5), F(3, 5), F(1, 3)), (F(9, 10), F(0)), (F(12, 15), F(3, 6), F(1, 3))),
    "dice": ((F(6, 8), F(6, 8), F(2, 4)), (F(18, 19), F(0)), (F(24, 27), F(6, 9), F(2, 4))),
    "sensitivity": ((F(3, 4), F(3, 4), F(1, 2)), (F(1), F(0)), (F(12, 13), F(3, 5), F(1, 2))),
    "specificity": ((F(5, 6), F(5, 6), F(7, 8)), (F(0), F(1)), (F(5, 7), F(14, 15), F(17, 18))),
}


@pytest.mark.parametrize("measure", SEGMENTED)
def test_a_segmentation_by_hand(measure):
    one, two, both = SEGMENTED[measure]
    expected = (fmean([fmean(one[1:]), fmean(two[1:])]), fmean([fmean(one), fmean(two)]), fmean(both[1:]), fmean(both))
    assert [averaged(COUNTS, measure, way) for way in WAYS] == pytest.approx([float(value) for value in expected])


def test_voxel_accuracy_needs_a_class_for_every_voxel():
    assert averaged(COUNTS, "accuracy", PER_CLIENT_BG) == pytest.approx((0.7 + 0.9) / 2)
    assert averaged(COUNTS, "accuracy", POOLED_BG) == pytest.approx(16 / 20)
    assert math.isnan(averaged(COUNTS, "accuracy", WAYS[0]))


def test_a_classification_by_hand():
    """Three classes; the second client has no case of the last one and never predicts it."""
    one = of_classes([(0, 0), (0, 0), (1, 0), (1, 1), (2, 1), (2, 2)])
    two = of_classes([(1, 1), (1, 0)])
    assert one == {"0": (2, 0, 1, 3), "1": (1, 1, 1, 3), "2": (1, 1, 0, 4)}
    assert two == {"0": (0, 0, 1, 1), "1": (1, 1, 0, 0)}
    expected = {
        "accuracy": (4 / 6 + 1 / 2) / 2,
        "balanced_accuracy": (fmean([2 / 3, 1 / 2, 1]) + 1 / 2) / 2,
        "f1": (fmean([4 / 5, 2 / 4, 2 / 3]) + fmean([0, 2 / 3])) / 2,
        "sensitivity": (fmean([2 / 3, 1 / 2, 1]) + 1 / 2) / 2,
        "specificity": (fmean([1, 3 / 4, 4 / 5]) + fmean([1, 0])) / 2,
    }
    assert {k: averaged([one, two], k) for k in expected} == pytest.approx(expected)


def test_every_name_of_paper_d_is_measured():
    names = {"BMACC", "BMBACC", "BMCAF1", "BMSpec", "BMIoU", "BMDice", "BMSens"}
    assert {a.best_mean for a in AVERAGES.values()} == names


def test_an_answer_of_background_alone_is_right_about_one_class_of_four():
    """46.4 % of the voxels: IoU 46.4 / 4 = 11.60 and specificity 75, about the row of FedPer in paper D, Table IV."""
    truth = {"a": 200, "b": 200, "c": 136}
    counts = {BACKGROUND: (464, 536, 0, 0), **{k: (0, 0, n, 1000 - n) for k, n in truth.items()}}
    assert average(counts, "iou") == pytest.approx(0.1160)
    assert average(counts, "sensitivity") == 0.25 and average(counts, "specificity") == 0.75


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=30), st.integers(0, 30))
def test_averages_over_classes_are_those_of_scikit_learn(pairs, at):
    """Of all cases together, also where these are the pooled cases of two clients."""
    predicted, true = map(list, zip(*pairs, strict=True))
    occur, mean = sorted({*predicted, *true}), {"average": "macro", "zero_division": 0}
    others = [c for c in occur if any(t != c for t in true)]
    negatives = [recall_score(np.not_equal(true, c), np.not_equal(predicted, c)) for c in others]
    expected = {
        "accuracy": accuracy_score(true, predicted),
        "balanced_accuracy": recall_score(true, predicted, labels=sorted(set(true)), **mean),
        "f1": f1_score(true, predicted, labels=occur, **mean),
        "specificity": np.mean(negatives) if negatives else math.nan,
    }
    clients = [of_classes(part) for part in (pairs[:at], pairs[at:])]
    for measure, value in expected.items():
        for counts, way in (([of_classes(pairs)], Way()), (clients, POOLED)):
            np.testing.assert_allclose(averaged(counts, measure, way), value)


def test_counts_of_cases_are_added_and_a_case_without_any_leaves_none():
    cases = {str(k): CaseScore({"a": 0.5}, 0.0, counts=counts) for k, counts in enumerate(COUNTS)}
    assert of_cases(cases) == total(COUNTS) == {BACKGROUND: (12, 2, 1, 5), "a": (3, 1, 2, 14), "b": (1, 1, 1, 17)}
    assert of_cases({**cases, "old": CaseScore({"a": 0.5}, 0.0)}) == {} == of_cases({})
    assert math.isnan(averaged([], "dice")) and math.isnan(averaged([{}], "dice", Way(pooled=True)))
