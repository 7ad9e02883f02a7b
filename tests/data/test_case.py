"""Cases, patches of them and their augmentation."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from monai.transforms import AdjustContrast
from scipy.ndimage import gaussian_filter

from polysite.data.case import Case, channels
from polysite.errors import DataError
from polysite.training.patches import Patches, blur, contrast, full


def test_channels_may_overlap_and_strangers_are_named():
    values, labels = np.array([0, 1, 2, 4]), [("WT", (1, 2, 4)), ("TC", (1, 4))]
    assert channels(values, labels, "f").tolist() == [[0, 1, 1, 1], [0, 1, 0, 1]]
    for odd, says in ((3, r"\[3\] are not declared"), (0.5, r"\[0.5\]"), (np.nan, "NaN")):
        with pytest.raises(DataError, match=says):
            channels(np.array([odd]), labels, "f")


def test_a_case_whose_parts_do_not_fit_is_refused():
    image, label = np.zeros((1, 2, 2, 2), np.float32), np.zeros((1, 2, 2, 2), np.uint8)
    for wrong, says in (
        ((image, label[:, :1]), "differ in shape"),
        ((image * np.nan, label), "8 voxels of the image are NaN"),
        ((image, label, (1.0, 1.0)), "2 voxel sizes"),
    ):
        with pytest.raises(DataError, match=says):
            Case("s", "c", *wrong)


def batch(image, label, patch, rng, augment="none"):
    x, y = Patches(torch.device("cpu")).batch([(image, label)], patch, rng, augment)
    return x[0], y[0]


def test_patches_take_image_and_label_from_the_same_place_everywhere():
    image, seen = torch.arange(5 * 6 * 7.0).reshape(1, 5, 6, 7), set()
    for seed in range(200):
        x, y = batch(image, image.int(), (3, 4, 7), np.random.default_rng(seed))
        assert x.shape == (1, 3, 4, 7) and torch.equal(x, y)
        seen.add(int(y[0, 0, 0, 0]))
    assert len(seen) == 3 * 3 * 1  # every place is reached
    label = torch.tensor([0, 1], dtype=torch.uint8)  # the class of an image that is cropped and flipped stays
    x, y = batch(torch.randn(1, 9, 9), label, (4, 4), np.random.default_rng(0), "full")
    assert x.shape == (1, 4, 4) and torch.equal(y, label.float())


def test_augmentation_flips_both_and_changes_only_the_image_otherwise():
    rng, changed, turned = np.random.default_rng(0), 0, set()
    image = torch.randn(2, 6, 6, 6)
    label = (image[:1] > 0).to(torch.uint8)
    for _ in range(100):
        x, y = batch(image, label, (6, 6, 6), rng, "full")
        assert y.sum() == label.sum() and x.shape == image.shape and torch.isfinite(x).all()
        flips = [k for k in range(8) if torch.equal(y, label.flip([1 + i for i in range(3) if k >> i & 1]).float())]
        assert flips
        turned.add(flips[0])
        changed += not torch.equal(x, image.flip([1 + i for i in range(3) if flips[0] >> i & 1]))
    assert turned == set(range(8)) and 35 < changed < 85  # 1 - 0.85^3 * 0.7 = 0.57 of them


def test_light_augmentation_scales_and_shifts_within_a_tenth():
    rng, image = np.random.default_rng(0), torch.tensor([[[-1.0, 0.0], [1.0, 2.0]]])
    shifts, scales = [], []
    for _ in range(200):
        x, y = batch(image, image, (2, 2), rng, "light")
        shift = x[y == 0].item()
        shifts.append(shift)
        scales.append(((x - shift) / y)[y != 0])
    for found, middle in ((torch.tensor(shifts), 0), (torch.cat(scales), 1)):
        assert found.min() < middle - 0.08 and found.max() > middle + 0.08 and (found - middle).abs().max() <= 0.1001


@pytest.mark.parametrize("shape", [(2, 9, 8, 7), (1, 12, 3)])
def test_blur_is_scipys(shape):
    """MONAI's sampled kernel does not sum to one: at a width of 0.5 it brightens each axis by 1.4 %."""
    x, sigmas = torch.randn(shape), [0.5, 0.7, 0.95][: len(shape) - 1]
    expected = gaussian_filter(x.numpy(), [0, *sigmas], mode="constant", truncate=4)
    blur(x, sigmas, torch.empty_like(x))
    assert x.numpy() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("extremes", ["modality", "image"])
def test_contrast_is_between_the_extremes_of_a_modality_or_of_the_whole_image(extremes):
    """As MONAI adjusts one modality, or an array with all of them; the random choices are the same."""
    draws, x = iter([0.9, 0.9, 0.9, 0.0]), torch.randn(3, 6, 6, 6) * torch.tensor([1.0, 3.0, 0.5]).view(3, 1, 1, 1)
    contrast_alone = SimpleNamespace(random=lambda: next(draws), uniform=lambda low, high: 1.7)
    y = x.clone()
    full(y, contrast_alone, torch.empty_like(x), extremes)
    whole = AdjustContrast(1.7)(x) if extremes == "image" else torch.stack([AdjustContrast(1.7)(c) for c in x])
    assert torch.allclose(y, whole, atol=1e-5) and not torch.allclose(y, x, atol=0.1)
    flat = torch.full((1, 2, 2), 3.0)
    contrast(flat, 0.5)
    assert torch.equal(flat, torch.full((1, 2, 2), 3.0))


def test_training_draws_its_contrast_as_it_is_told():
    cases = [(torch.randn(2, 8, 8, 8) * torch.tensor([1.0, 4.0]).view(2, 1, 1, 1), torch.zeros(1, 8, 8, 8))] * 40
    drawn = ((Patches(torch.device("cpu")), np.random.default_rng(0), how) for how in ("modality", "image"))
    one, other = (patches.batch(cases, (8, 8, 8), rng, "full", how)[0] for patches, rng, how in drawn)
    differ = (one != other).flatten(1).any(1)
    assert 4 <= differ.sum() <= 24  # of 40, each with probability 0.3; all other choices are the same
