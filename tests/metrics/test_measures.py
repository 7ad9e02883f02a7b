"""What a case gets, and what an empty mask is worth under every policy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polysite.errors import ConfigError
from polysite.metrics.measures import MEASURES, EmptyMaskPolicy, measure
from polysite.metrics.overlap import overlap
from polysite.metrics.surface import surfaces

SHAPE, SPACING = (6, 7, 5), (1.0, 0.5, 2.0)
DIAGONAL = math.sqrt(6**2 + 3.5**2 + 10**2)
NONE, GONE = np.zeros(SHAPE, bool), math.nan


def mask(seed, share=None):
    rng = np.random.default_rng(seed)
    return rng.random(SHAPE) < (share or rng.choice([0.01, 0.1, 0.6]))


def row(predicted, truth):
    return measure(predicted, truth, SPACING)


ONE, OTHER = mask(0, 0.3), mask(1, 0.3)


def test_a_row_holds_every_measure():
    found, counts, apart = row(ONE, OTHER), overlap(ONE, OTHER), surfaces(ONE, OTHER, SPACING)
    assert found == {
        "dice": counts.dice,
        "iou": counts.iou,
        "sensitivity": counts.sensitivity,
        "specificity": counts.specificity,
        "hd95": apart.hausdorff(95, "max"),
        "hd95_union": apart.hausdorff(95, "union"),
        "assd": apart.assd(),
        "nsd": apart.nsd(1.0),
        "truth": OTHER.sum(),
        "predicted": ONE.sum(),
        "diagonal": pytest.approx(DIAGONAL),
    }
    assert all(type(v) is float for v in found.values())
    assert measure(ONE, OTHER, SPACING, tolerance=0.1)["nsd"] < found["nsd"]
    assert (
        EmptyMaskPolicy.kind(found) == "" and EmptyMaskPolicy(hd95="union").value(found, "hd95") == found["hd95_union"]
    )
    assert {k for k, m in MEASURES.items() if m.better < 0} == {k for k, m in MEASURES.items() if m.distance}


KINDS = {"missed": (NONE, OTHER), "false alarm": (ONE, NONE), "both empty": (NONE, NONE)}
PENALTY, EXCLUDED = {"penalty": 373.13}, {"empty": "excluded"}


@pytest.mark.parametrize(
    ("kind", "policy", "dice", "distance", "nsd"),
    [
        ("missed", {}, 0, DIAGONAL, 0),
        ("false alarm", {}, 0, DIAGONAL, 0),
        ("both empty", {}, 1, GONE, 1),
        ("missed", PENALTY, 0, 373.13, 0),
        ("false alarm", {**PENALTY, "hd95": "union"}, 0, 373.13, 0),
        ("both empty", PENALTY, 1, GONE, 1),
        ("missed", EXCLUDED, 0, GONE, GONE),
        ("false alarm", {**EXCLUDED, "hd95": "union"}, 0, GONE, GONE),
        ("both empty", EXCLUDED, 1, GONE, 1),
    ],
)
def test_empty_masks(kind, policy, dice, distance, nsd):
    policy, found = EmptyMaskPolicy(**policy), row(*KINDS[kind])
    assert policy.kind(found) == kind
    values = [policy.value(found, k) for k in ("dice", "iou", "hd95", "hd95_union", "assd", "nsd")]
    np.testing.assert_allclose(values, [dice, dice, distance, distance, distance, nsd])
    assert all(math.isnan(found[k]) for k in ("hd95", "hd95_union", "assd", "nsd"))


def mean(policy, rows, key):
    return np.nanmean([policy.value(r, key) for r in rows])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 2**32 - 2), min_size=1, max_size=5), st.sampled_from(["max", "union"]))
def test_a_missed_tumour_never_improves_a_mean(seeds, how):
    """Whatever the first case was given, nothing instead is no better: for distances, Dice, IoU and NSD."""
    truth, policy = mask(seeds[0]), EmptyMaskPolicy(hd95=how)
    truth[0, 0, 0] = True
    others = [row(mask(s), mask(s + 1)) for s in seeds[1:]]
    given_, missed = [row(mask(seeds[0] + 1), truth), *others], [row(NONE, truth), *others]
    for key in ("dice", "iou", "hd95", "assd", "nsd"):
        assert MEASURES[key].better * (mean(policy, missed, key) - mean(policy, given_, key)) <= 1e-12, key


def test_policies_are_named_and_a_penalty_is_a_distance():
    with pytest.raises(ConfigError, match="empty = 'nan' is no policy; choose penalty, excluded, excluded-case"):
        EmptyMaskPolicy(empty="nan")
    with pytest.raises(ConfigError, match="hd95 = 'mean' is no policy; choose max, union"):
        EmptyMaskPolicy(hd95="mean")
    for penalty in (0, -1, math.inf, math.nan, True, "far"):
        with pytest.raises(ConfigError, match=r"penalty = .*'diagonal' or a positive number"):
            EmptyMaskPolicy(penalty=penalty)
    assert "373.13" in EmptyMaskPolicy(**PENALTY).words


def test_one_label_without_a_distance_drops_it_or_the_whole_case():
    """HD95 of three cases and three labels; a false alarm in the third label of the last has none."""
    near, far = {"hd95": 4.0, "truth": 9.0, "predicted": 9.0}, {"hd95": 10.0, "truth": 9.0, "predicted": 9.0}
    alarm, nothing = ({"hd95": math.nan, "truth": 0.0, "predicted": n, "diagonal": 100.0} for n in (5.0, 0.0))
    cases = [(near, near, far), (near, far, nothing), (near, near, alarm)]
    for empty, wanted in (
        ("excluded", [6.0, 7.0, 4.0]),  # over the labels that have a distance
        ("penalty", [6.0, 7.0, 36.0]),
        ("excluded-case", [6.0, GONE, GONE]),
    ):
        policy = EmptyMaskPolicy(empty)
        found = [policy.mean([policy.value(row, "hd95") for row in case], "hd95") for case in cases]
        np.testing.assert_array_equal(found, wanted)
    assert EmptyMaskPolicy("excluded-case").mean([1.0, math.nan], "sensitivity") == 1.0
