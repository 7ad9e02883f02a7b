"""Weights of members: clear evidence is followed, little evidence is not."""

import numpy as np
import torch

from polysite.ensembles.weights import PRIOR, SPREAD, choose, equal, grid, mixed


def dice(points, qualities):
    """Scores of all points if a case's score is the weighted mean of its members' qualities."""
    return points @ np.asarray(qualities).T


def test_the_grid_covers_the_simplex_and_begins_with_equal_weights():
    for count in (2, 3, 5, 12):
        points = grid(count)
        assert np.allclose(points.sum(1), 1) and (points >= 0).all() and len(points) <= 101
        assert np.allclose(points[0], 1 / count) and len(np.unique(points, axis=0)) == len(points)
        assert all(np.eye(count)[k].tolist() in points.tolist() for k in range(count))


def test_a_perfect_member_beside_a_useless_one_is_chosen():
    points = grid(2)
    found = choose(points, dice(points, [[1.0, 0.0]] * 2))
    assert found.weights == (1.0, 0.0) and found.cases == 2 and found.gain == 0.5
    assert np.isclose(found.error, np.sqrt(PRIOR * SPREAD**2 / (PRIOR + 2) / 2))


def test_two_cases_without_a_difference_leave_equal_weights():
    points = grid(3)
    for noise in (0.0, 0.01):
        scores = dice(points, [[0.7, 0.7 + noise, 0.7], [0.6, 0.6, 0.6 + noise]])
        assert choose(points, scores).weights == equal(3).weights
    assert choose(points, np.zeros((len(points), 0))) == equal(3)


def test_more_cases_show_smaller_gains():
    points, quality = grid(2), [0.74, 0.70]
    few, many = (choose(points, dice(points, [quality] * n)) for n in (2, 60))
    assert few.weights == (0.5, 0.5) and many.weights == (1.0, 0.0) and np.isclose(many.gain, 0.02)


def test_of_equally_good_weights_those_nearest_to_equal_are_taken():
    points = grid(2)
    scores = np.where(points[:, :1] > 0.55, 1.0, 0.0) + np.zeros((1, 4))
    assert choose(points, scores).weights == (0.6, 0.4)


def test_logits_are_mixed():
    logits = torch.tensor([[[1.0, 2.0]], [[3.0, -2.0]]])
    assert mixed(np.array([0.25, 0.75]), logits).tolist() == [[2.5, -1.0]]
