"""Cases, patches of them and their augmentation."""

import numpy as np
import pytest
import torch
from monai.transforms import GaussianSmooth

from polysite.data.case import Case, channels
from polysite.errors import DataError
from polysite.train.patches import blur, contrast, crop, full, light


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
        x, y = full((image, label), rng)
        assert y.sum() == label.sum() and x.shape == image.shape and torch.isfinite(x).all()
        flips = [a for k in range(8) if torch.equal(y, label.flip(a := [1 + i for i in range(3) if k >> i & 1]))]
        assert flips
        changed += not torch.equal(x, image.flip(flips[0]))
    assert 20 < changed < 55


def test_light_augmentation_scales_and_shifts_within_a_tenth():
    rng, image = np.random.default_rng(0), torch.tensor([[[-1.0, 0.0], [1.0, 2.0]]])
    shifts, scales = [], []
    for _ in range(200):
        x, y = light((image, image), rng)
        shift = x[y == 0].item()
        shifts.append(shift)
        scales.append(((x - shift) / y)[y != 0])
    for found, middle in ((torch.tensor(shifts), 0), (torch.cat(scales), 1)):
        assert found.min() < middle - 0.08 and found.max() > middle + 0.08 and (found - middle).abs().max() <= 0.1001


def test_the_class_of_a_cropped_and_flipped_image_stays():
    label = torch.tensor([0, 1], dtype=torch.uint8)
    x, y = full(crop((torch.randn(1, 9, 9), label), (4, 4), np.random.default_rng(0)), np.random.default_rng(0))
    assert x.shape == (1, 4, 4) and torch.equal(y, label)


def test_blur_is_monais_and_contrast_keeps_the_extremes():
    x = torch.randn(1, 9, 9, 9)
    assert torch.allclose(blur(x, [0.7, 0.7, 0.7]), GaussianSmooth(0.7, approx="sampled")(x), rtol=2e-3, atol=1e-4)
    y = contrast(x, 2.0)
    assert torch.allclose(y.amin(), x.amin()) and torch.allclose(y.amax(), x.amax()) and not torch.allclose(y, x)
