"""Splits, preparation and augmentation of cases."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.transforms import GaussianSmooth, NormalizeIntensity

from polysite.data.case import Case, channels
from polysite.data.prepare import prepare, z_score
from polysite.data.split import Split
from polysite.errors import ConfigError, DataError
from polysite.train.patches import augment, blur, contrast, crop


def case(name="c", shape=(6, 7, 8), seed=0):
    rng = np.random.default_rng(seed)
    image = rng.uniform(1, 9, (2, *shape)).astype(np.float32)
    return Case("s", name, image, (image[:1] > 5).astype(np.uint8))


@given(st.integers(2, 40), st.floats(0.01, 0.95), st.floats(0, 0.95), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_every_case_is_in_one_split_and_both_train_and_validation_have_one(n, validation, test, seed):
    if validation + test >= 1:
        with pytest.raises(ConfigError):
            Split(validation, test)
        return
    cases = [case(f"{i:02d}", (1, 1, 1)) for i in range(n)]
    parts = Split(validation, test).apply("s", cases, seed)
    assert sorted(c.name for p in parts.values() for c in p) == [c.name for c in cases]
    assert parts["train"] and parts["validation"] and (bool(parts["test"]) == (test > 0 and n >= 3))


def test_a_split_depends_on_seed_and_site_but_not_on_order():
    cases = [case(f"{i:02d}", (1, 1, 1)) for i in range(12)]

    def names(site, given, seed):
        return [c.name for c in Split().apply(site, given, seed)["test"]]

    first = names("a", cases, 0)
    assert first == names("a", cases[::-1], 0)
    assert len({tuple(names(s, cases, k)) for s in "ab" for k in range(5)}) > 5


def test_two_cases_of_one_name_are_refused():
    with pytest.raises(DataError, match="two cases called 'x'"):
        Split().apply("s", [case("x"), case("x"), case("y")], 0)


def test_z_score_is_monais():
    x = np.where(np.random.default_rng(0).random((5, 6, 7)) < 0.3, 0, case().image[0, :5, :6, :7]).astype(np.float32)
    assert z_score(x) == pytest.approx(NormalizeIntensity(nonzero=True)(x), abs=1e-5)
    assert (z_score(np.zeros((2, 2), np.float32)) == 0).all() and (z_score(np.full((2, 2), 7, np.float32)) == 0).all()


def test_prepare_crops_to_the_foreground_and_pads_to_the_patch():
    c = case(shape=(20, 20, 20))
    inside = (slice(None), slice(4, 15), slice(3, 9), slice(10, 12))
    image, label = np.zeros_like(c.image), np.zeros_like(c.label)
    image[inside], label[inside] = c.image[inside], c.label[inside]
    found = prepare(Case("s", "c", image, label), (8, 8, 8))
    assert found.image.shape == (2, 11, 8, 8) and found.label.sum() == label.sum()
    assert found.image[:, :, 1:7, 3:5].std() == pytest.approx(1, abs=1e-3) and not found.image[:, :, 0].any()


def test_prepare_loses_no_truth_outside_the_image():
    image, label = np.zeros((1, 9, 9, 9), np.float32), np.zeros((1, 9, 9, 9), np.uint8)
    image[0, 4, 4, 4], label[0, 8, 8, 8] = 1, 1
    assert prepare(Case("s", "c", image, label), (4, 4, 4)).label.sum() == 1


def test_channels_may_overlap_and_strangers_are_named():
    values = np.array([0, 1, 2, 4])
    assert channels(values, [("WT", (1, 2, 4)), ("TC", (1, 4))], "f").tolist() == [[0, 1, 1, 1], [0, 1, 0, 1]]
    for odd, says in (
        (np.array([3]), r"\[3\] are not declared"),
        (np.array([0.5]), r"\[0.5\]"),
        (np.array([np.nan]), "NaN"),
    ):
        with pytest.raises(DataError, match=says):
            channels(odd, [("WT", (1, 2, 4))], "f")


def test_a_case_whose_parts_do_not_fit_is_refused():
    image, label = np.zeros((1, 2, 2, 2), np.float32), np.zeros((1, 2, 2, 2), np.uint8)
    for wrong, says in (
        ((image, label[:, :1]), "differ in shape"),
        ((image * np.nan, label), "8 voxels of the image are NaN"),
    ):
        with pytest.raises(DataError, match=says):
            Case("s", "c", *wrong)
    with pytest.raises(DataError, match="2 voxel sizes"):
        Case("s", "c", image, label, (1.0, 1.0))


def test_crops_take_image_and_label_from_the_same_place_everywhere():
    image = torch.arange(5 * 6 * 7.0).reshape(1, 5, 6, 7)
    seen = set()
    for seed in range(200):
        x, y = crop((image, image.int()), (3, 4, 7), np.random.default_rng(seed))
        assert x.shape == (1, 3, 4, 7) and torch.equal(x, y.float())
        seen.add(int(y[0, 0, 0, 0]))
    assert len(seen) == 3 * 3 * 1  # every place is reached


def test_augmentation_flips_both_and_changes_only_the_image_otherwise():
    rng, changed = np.random.default_rng(0), 0
    image = torch.randn(2, 6, 6, 6)
    label = (image[:1] > 0).to(torch.uint8)
    for _ in range(60):
        x, y = augment((image, label), rng)
        assert y.sum() == label.sum() and x.shape == image.shape and torch.isfinite(x).all()
        flips = [a for k in range(8) if torch.equal(y, label.flip(a := [1 + i for i in range(3) if k >> i & 1]))]
        assert flips
        changed += not torch.equal(x, image.flip(flips[0]))
    assert 20 < changed < 55


def test_blur_is_monais_and_contrast_keeps_the_extremes():
    x = torch.randn(1, 9, 9, 9)
    assert torch.allclose(blur(x, [0.7, 0.7, 0.7]), GaussianSmooth(0.7, approx="sampled")(x), rtol=2e-3, atol=1e-4)
    y = contrast(x, 2.0)
    assert torch.allclose(y.amin(), x.amin()) and torch.allclose(y.amax(), x.amax()) and not torch.allclose(y, x)
