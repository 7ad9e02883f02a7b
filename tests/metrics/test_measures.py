"""What a case gets, and what an empty mask is worth under every policy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polysite.errors import ConfigError
from polysite.metrics.measures import MEASURES, EmptyMaskPolicy, measure
from polysite.metrics.overlap import overlap
from polysite.metrics.surface import surfaces
from polysite.training.surface import surfaces as tensor_surfaces

SHAPE, SPACING = (6, 7, 5), (1.0, 0.5, 2.0)
DIAGONAL = math.sqrt(6**2 + 3.5**2 + 10**2)
NONE = np.zeros(SHAPE, bool)


def mask(seed, share=None):
    rng = np.random.default_rng(seed)
    return rng.random(SHAPE) < (share or rng.choice([0.01, 0.1, 0.6]))


def row(predicted, truth):
    return measure(predicted, truth, SPACING)


def test_a_row_holds_every_measure():
    predicted, truth = mask(0, 0.3), mask(1, 0.3)
    found, counts, apart = row(predicted, truth), overlap(predicted, truth), surfaces(predicted, truth, SPACING)
    assert found == {
        "dice": counts.dice,
        "iou": counts.iou,
        "sensitivity": counts.sensitivity,
        "specificity": counts.specificity,
        "hd95": apart.hausdorff(95, "max"),
        "hd95_union": apart.hausdorff(95, "union"),
        "assd": apart.assd(),
        "nsd": apart.nsd(1.0),
        "truth": truth.sum(),
        "predicted": predicted.sum(),
        "diagonal": pytest.approx(DIAGONAL),
    }
    assert " ".join(found) == "dice iou sensitivity specificity hd95 hd95_union assd nsd truth predicted diagonal"
    assert all(type(v) is float for v in found.values())
    assert measure(predicted, truth, SPACING, tolerance=0.1)["nsd"] < found["nsd"]
    tensors = measure(torch.from_numpy(predicted), torch.from_numpy(truth), SPACING, surfaces=tensor_surfaces)
    assert tensors == pytest.approx(found, abs=1e-12)
    assert {k for k, m in MEASURES.items() if m.better < 0} == {k for k, m in MEASURES.items() if m.distance}


KINDS = {
    "": (mask(0, 0.3), mask(1, 0.3)),
    "missed": (NONE, mask(1, 0.3)),
    "false alarm": (mask(0, 0.3), NONE),
    "both empty": (NONE, NONE),
}
GONE = math.nan


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


@pytest.mark.parametrize("empty", ["penalty", "excluded"])
def test_other_masks_are_left_as_they_are(empty):
    found = row(*KINDS[""])
    assert EmptyMaskPolicy.kind(found) == "" and found["hd95"] != found["hd95_union"]
    for key in MEASURES.keys() - {"predicted", "diagonal"}:
        assert EmptyMaskPolicy(empty).value(found, key) == found[key]
    assert EmptyMaskPolicy(empty, hd95="union").value(found, "hd95") == found["hd95_union"]


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


def test_it_can_where_empty_masks_are_left_out():
    """The published behaviour: a poor answer counts, no answer does not."""
    truth, corner = np.zeros((2, *SHAPE), bool)
    truth[0, 0, 0], corner[-1, -1, -1] = True, True
    easy = row(truth, truth)
    poor, missed = [easy, row(corner, truth)], [easy, row(NONE, truth)]
    assert mean(EmptyMaskPolicy("excluded"), missed, "hd95") == 0 < mean(EmptyMaskPolicy("excluded"), poor, "hd95")
    assert mean(EmptyMaskPolicy(), missed, "hd95") > mean(EmptyMaskPolicy(), poor, "hd95")


@pytest.mark.parametrize("penalty", [0, -1, math.inf, math.nan, True, "far"])
def test_a_penalty_is_a_distance(penalty):
    with pytest.raises(ConfigError, match=r"penalty = .*'diagonal' or a positive number"):
        EmptyMaskPolicy(penalty=penalty)


def test_policies_are_named():
    with pytest.raises(ConfigError, match="empty = 'nan' is no policy; choose penalty, excluded, excluded-case"):
        EmptyMaskPolicy(empty="nan")
    with pytest.raises(ConfigError, match="hd95 = 'mean' is no policy; choose max, union"):
        EmptyMaskPolicy(hd95="mean")
    for given_, said in (
        ({}, ("diagonal of the image", "the larger of")),
        (PENALTY, ("373.13",)),
        (EXCLUDED, ("left out",)),
        ({**EXCLUDED, "hd95": "union"}, ("together",)),
        ({"empty": "excluded-case"}, ("left out", "any label")),
    ):
        assert all(words in EmptyMaskPolicy(**given_).words for words in said)


def test_one_label_without_a_distance_drops_it_or_the_whole_case():
    """HD95 of three cases and three labels; a false alarm in the third label of the last has none."""
    near, far = {"hd95": 4.0, "truth": 9.0, "predicted": 9.0}, {"hd95": 10.0, "truth": 9.0, "predicted": 9.0}
    alarm, nothing = ({"hd95": math.nan, "truth": 0.0, "predicted": n, "diagonal": 100.0} for n in (5.0, 0.0))
    cases = [(near, near, far), (near, far, nothing), (near, near, alarm)]

    def means(policy):
        return [policy.mean([policy.value(row, "hd95") for row in case], "hd95") for case in cases]

    assert means(EmptyMaskPolicy("excluded")) == [6.0, 7.0, 4.0]  # over the labels that have a distance
    assert means(EmptyMaskPolicy("penalty")) == [6.0, 7.0, 36.0]
    whole = means(EmptyMaskPolicy("excluded-case"))
    assert whole[0] == 6.0 and math.isnan(whole[1]) and math.isnan(whole[2])
    assert EmptyMaskPolicy("excluded-case").mean([1.0, math.nan], "sensitivity") == 1.0
