"""Surface distances against MONAI and against all pairs of surface voxels, on every way to the answer."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.metrics import compute_average_surface_distance, compute_hausdorff_distance, compute_surface_dice
from scipy.ndimage import gaussian_filter
from scipy.spatial.distance import cdist

from polysite.errors import DataError
from polysite.metrics import surface
from polysite.metrics.surface import Surfaces, surfaces

seeds = st.integers(0, 2**32 - 1)


def noise(rng, shape):
    return rng.random(shape) < rng.choice([0.0, 0.02, 0.1, 0.5, 0.95, 1.0])


def blob(rng, shape):
    smooth = gaussian_filter(rng.normal(size=shape), 1.5)
    return smooth > np.quantile(smooth, rng.uniform(0.1, 0.95))


def sheet(rng, shape):
    """Some or all of a plane, often at the border."""
    found, axis = np.zeros(shape, bool), rng.integers(len(shape))
    found[(slice(None),) * axis + (rng.choice([0, -1, rng.integers(shape[axis])]),)] = True
    return found & (rng.random(shape) < rng.choice([0.3, 1.0]))


KINDS = (noise, noise, blob, sheet)


def draw(seed, axes=None, most=12):
    """Two masks of any kinds, often not of the same, and the size of their voxels."""
    rng = np.random.default_rng(seed)
    axes = axes or rng.integers(1, 4)
    shape = tuple(rng.integers(1, most + 1, axes))
    first, second = (KINDS[k](rng, shape) for k in rng.integers(len(KINDS), size=2))
    match rng.integers(5):
        case 0:
            second = np.roll(first, rng.integers(0, 3, axes), tuple(range(axes)))
        case 1:  # far apart: in two corners
            second = np.zeros(shape, bool)
            half = tuple(slice(n // 2, None) for n in shape)
            second[half] = noise(rng, second[half].shape)
            first = np.flip(second) & noise(rng, shape)
    spacing = tuple(rng.choice([(1.0,) * axes, tuple(rng.uniform(0.2, 4, axes)), (0.9, 1.0, 5.0)[:axes]]).tolist())
    return first, second, spacing


def brute(predicted, truth, spacing):
    """Every surface voxel against every other, by the definition alone."""
    points = []
    for mask in (predicted, truth):
        held = {tuple(v) for v in np.argwhere(mask)}
        steps = [tuple(s * (a == b) for b in range(mask.ndim)) for a in range(mask.ndim) for s in (-1, 1)]
        points.append([v for v in sorted(held) if any(tuple(np.add(v, s)) not in held for s in steps)])
    if not all(points):
        return Surfaces(np.empty(0), np.empty(0))
    pairs = cdist(*(np.array(p) * spacing for p in points))
    return Surfaces(pairs.min(1), pairs.min(0))


def agree(found, expected):
    for a, b in ((found.to_truth, expected.to_truth), (found.to_predicted, expected.to_predicted)):
        np.testing.assert_allclose(np.sort(a), np.sort(b), rtol=0, atol=1e-9)


WAYS = {  # what the choice between the ways costs, and how many columns are looked up from near to far
    "search": (math.inf, 4096),
    "search beyond the table": (math.inf, 4),
    "envelope": (-math.inf, 4096),
    "as it likes": (surface.ENVELOPE, surface.NEAR),
}


@pytest.mark.parametrize("way", WAYS)
@settings(deadline=None, max_examples=150)
@given(seeds)
def test_all_pairs(way, seed):
    masks = draw(seed, most=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surface, "ENVELOPE", WAYS[way][0])
        patch.setattr(surface, "NEAR", WAYS[way][1])
        surface._around.cache_clear()
        agree(surfaces(*masks), brute(*masks))
    surface._around.cache_clear()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # MONAI's own
@settings(deadline=None, max_examples=120)
@given(seeds, st.sampled_from([2, 3]), st.sampled_from([0.0, 1.0, 2.5]))
def test_monai(seed, axes, tolerance):
    predicted, truth, spacing = draw(seed, axes)
    if not (predicted.any() and truth.any()):
        return
    found = surfaces(predicted, truth, spacing)
    batch = torch.from_numpy(predicted)[None, None], torch.from_numpy(truth)[None, None]
    about = {"include_background": True, "spacing": spacing}
    for value, expected in (
        (found.hausdorff(95), compute_hausdorff_distance(*batch, percentile=95, **about)),
        (found.hausdorff(100), compute_hausdorff_distance(*batch, percentile=100, **about)),
        (found.assd(), compute_average_surface_distance(*batch, symmetric=True, **about)),
        (found.nsd(tolerance), compute_surface_dice(*batch, class_thresholds=[tolerance], **about)),
    ):
        assert value == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("length", [253, 254, 255, 300, 70_000])
def test_long_columns(length):
    """The steps along a column outgrow a byte, then two."""
    predicted, truth = np.zeros((2, length, 2, 2), bool)
    predicted[0, 0, 0], truth[-1, 1, 1] = True, True
    agree(surfaces(predicted, truth, (0.5, 1, 1)), brute(predicted, truth, (0.5, 1, 1)))


def test_memory_layout_does_not_matter():
    predicted, truth, spacing = draw(5, 3)
    assert len(set(predicted.shape)) == 3 and predicted.any() and truth.any()
    expected, turned = brute(predicted, truth, spacing), np.asfortranarray(truth)
    apart, small = np.repeat(predicted, 2, 2)[..., ::2], predicted.astype(np.uint8)
    pairs = (np.asfortranarray(predicted), turned), (predicted, turned), (apart, truth), (small, truth.astype(np.uint8))
    for a, b in pairs:
        a.setflags(write=False)
        agree(surfaces(a, b, spacing), expected)


def test_definitions():
    found = Surfaces(np.array([0.0, 1.0, 2.0]), np.array([4.0]))
    assert found.hausdorff(50) == 4 and found.hausdorff(50, "union") == 1.5 and found.assd() == 7 / 4
    assert found.hausdorff(0) == 4 and Surfaces(found.to_truth, found.to_truth).hausdorff(0) == 0
    assert found.nsd(1.5) == 0.5 and found.nsd(2) == 0.75
    apart = surfaces(np.eye(1, 4, 0, dtype=bool), np.eye(1, 4, 3, dtype=bool), (1, 0.1))
    assert apart.hausdorff() > 0.3 and apart.nsd(0.3) == 1 and apart.nsd(0.2999) == 0  # at the tolerance is within


def test_empty_masks_have_no_distance():
    some, none = np.eye(4, dtype=bool), np.zeros((4, 4), bool)
    for predicted, truth in ((some, none), (none, some), (none, none)):
        found = surfaces(predicted, truth, (1, 1))
        assert found.to_truth.size == found.to_predicted.size == 0 and not found
        assert np.isnan([found.hausdorff(), found.hausdorff(how="union"), found.assd(), found.nsd(1)]).all()


@pytest.mark.parametrize(
    ("shape", "spacing"),
    [((3, 2), (1, 1)), ((2, 3), (1,)), ((2, 3), (1, 0)), ((2, 3), (1, math.nan)), ((2, 2, 2, 2), (1, 1, 1, 1))],
)
def test_refused(shape, spacing):
    truth = np.ones((2, 3) if len(shape) == 2 else shape, bool)
    with pytest.raises(DataError, match="shape"):
        surfaces(np.ones(shape, bool), truth, spacing)
