"""Classes against scikit-learn."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, recall_score

from polysite.errors import DataError
from polysite.metrics.classification import accuracy, balanced_accuracy, confusion, f1, specificity

pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=30)


@given(pairs)
def test_scikit_learn(found):
    predicted, true = map(list, zip(*found, strict=True))
    occur, in_truth = sorted({*predicted, *true}), sorted(set(true))
    np.testing.assert_array_equal(confusion(predicted, true, 6), confusion_matrix(true, predicted, labels=range(6)))
    assert accuracy(predicted, true) == accuracy_score(true, predicted)
    mean = {"average": "macro", "zero_division": 0}
    recall = recall_score(true, predicted, labels=in_truth, **mean)
    assert balanced_accuracy(predicted, true, 6) == pytest.approx(recall)
    assert f1(predicted, true, 6) == pytest.approx(f1_score(true, predicted, labels=occur, **mean))
    others = [c for c in occur if any(t != c for t in true)]
    negatives = [recall_score(np.not_equal(true, c), np.not_equal(predicted, c)) for c in others]
    np.testing.assert_allclose(specificity(predicted, true, 6), np.mean(negatives) if negatives else math.nan)


def test_nothing_to_judge():
    assert all(map(math.isnan, [accuracy([], []), *(f([], [], 2) for f in (balanced_accuracy, f1, specificity))]))
    assert math.isnan(specificity([1, 1], [1, 1], 2))


def test_a_class_must_exist_and_every_case_has_one_answer():
    for predicted, true in (([0, 2], [0, 1]), ([0, 1], [-1, 1])):
        with pytest.raises(DataError, match="not one of 0 to 1"):
            confusion(predicted, true, 2)
    with pytest.raises(DataError, match="2 classes were predicted for 1 cases"):
        accuracy([0, 1], [0])
