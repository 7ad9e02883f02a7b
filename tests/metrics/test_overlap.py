"""Dice and its kin against MONAI, scikit-learn and the stated policies."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.metrics import compute_dice, compute_iou
from sklearn.metrics import confusion_matrix

from polysite.errors import DataError
from polysite.metrics.overlap import Overlap, overlap

seeds = st.integers(0, 2**32 - 1)


@settings(deadline=None, max_examples=100)
@given(seeds)
def test_counts_are_those_of_scikit_learn_however_arrays_lie(seed):
    rng = np.random.default_rng(seed)
    shape = rng.integers(1, 9, rng.integers(1, 4))
    predicted, truth = (rng.random(shape) < rng.choice([0, 0.05, 0.5, 1]) for _ in range(2))
    (tn, fp), (fn, tp) = confusion_matrix(truth.ravel(), predicted.ravel(), labels=[False, True])
    ways = (
        (predicted, truth),
        (np.asfortranarray(predicted), np.asfortranarray(truth)),
        (np.asfortranarray(predicted), truth),
        (np.repeat(predicted, 2, 0)[::2], truth),
    )
    assert {overlap(a, b) for a, b in ways} == {Overlap(tp, fp, fn, tn)}


@settings(deadline=None, max_examples=50)
@given(seeds)
def test_dice_and_iou_are_those_of_monai(seed):
    rng = np.random.default_rng(seed)
    predicted, truth = (rng.random((2, 3, 5, 4, 3)) < rng.choice([0.05, 0.5])) | (np.arange(3) == 2)
    found = [overlap(p, t) for p, t in zip(predicted, truth, strict=True)]
    batch = torch.from_numpy(predicted)[None], torch.from_numpy(truth)[None]
    expected = compute_dice(*batch, ignore_empty=False)[0]
    np.testing.assert_allclose([o.dice for o in found], expected, atol=1e-6)
    np.testing.assert_allclose([o.iou for o in found], compute_iou(*batch, ignore_empty=False)[0], atol=1e-6)


@pytest.mark.parametrize(
    ("counts", "dice", "iou", "sensitivity", "specificity"),
    [
        ((0, 0, 0, 9), 1, 1, math.nan, 1),
        ((0, 0, 3, 6), 0, 0, 0, 1),
        ((0, 3, 0, 6), 0, 0, math.nan, 6 / 9),
        ((9, 0, 0, 0), 1, 1, 1, math.nan),
        ((4, 2, 1, 3), 8 / 11, 4 / 7, 4 / 5, 3 / 5),
    ],
    ids=["both empty", "missed", "false alarm", "everything", "usual"],
)
def test_policies(counts, dice, iou, sensitivity, specificity):
    found = Overlap(*counts)
    assert (found.dice, found.iou) == (dice, iou)
    np.testing.assert_equal([found.sensitivity, found.specificity], [sensitivity, specificity])


def test_shapes_must_agree():
    with pytest.raises(DataError, match=r"\(2, 3\), the truth \(3,\)"):
        overlap(np.ones((2, 3), bool), np.ones(3, bool))
