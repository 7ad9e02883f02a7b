"""Surface distances against MONAI and against all pairs of surface voxels, on every way to the answer."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.metrics import compute_average_surface_distance, compute_hausdorff_distance, compute_surface_dice
from scipy.ndimage import gaussian_filter
from scipy.spatial.distance import cdist

from polysite.compiled import compiled
from polysite.errors import DataError
from polysite.metrics import surface
from polysite.metrics.surface import Surfaces, surfaces
from polysite.training.surface import surfaces as tensor_surfaces

seeds = st.integers(0, 2**32 - 1)


def noise(rng, shape):
    return rng.random(shape) < rng.choice([0.02, 0.1, 0.5, 0.95])


def blob(rng, shape):
    smooth = gaussian_filter(rng.normal(size=shape), 1.5)
    return smooth > np.quantile(smooth, rng.uniform(0.1, 0.95))


def border(rng, shape):
    found = np.zeros(shape, bool)
    axis = rng.integers(len(shape))
    found[(slice(None),) * axis + (rng.choice([0, -1]),)] = True
    return found | (noise(rng, shape) & (rng.random() < 0.5))


def voxel(rng, shape):
    found = np.zeros(shape, bool)
    found[tuple(rng.integers(n) for n in shape)] = True
    return found


def sheet(rng, shape):
    found = np.zeros(shape, bool)
    axis = rng.integers(len(shape))
    found[(slice(None),) * axis + (rng.integers(shape[axis]),)] = True
    return found & (rng.random(shape) < rng.choice([0.3, 1.0]))


def constant(rng, shape):
    return np.full(shape, rng.random() < 0.5)


KINDS = (noise, blob, border, voxel, sheet, constant, constant)


def draw(seed, axes=None, most=12):
    """Two masks of any kinds, often not of the same, and the size of their voxels."""
    rng = np.random.default_rng(seed)
    axes = axes or rng.integers(1, 4)
    shape = tuple(rng.integers(1, most + 1, axes))
    first = KINDS[rng.integers(len(KINDS))](rng, shape)
    match rng.integers(6):
        case 0:
            second = first.copy()
        case 1:
            second = np.roll(first, rng.integers(0, 3, axes), tuple(range(axes)))
        case 2:  # far apart: in two corners
            second = np.zeros(shape, bool)
            half = tuple(slice(n // 2, None) for n in shape)
            second[half] = noise(rng, second[half].shape)
            first = np.flip(second) & noise(rng, shape)
        case _:
            second = KINDS[rng.integers(len(KINDS))](rng, shape)
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


@settings(deadline=None, max_examples=100)
@given(seeds)
def test_tensors_give_the_same(seed):
    predicted, truth, spacing = draw(seed)
    found = tensor_surfaces(torch.from_numpy(predicted), torch.from_numpy(truth), spacing)
    agree(found, surfaces(predicted, truth, spacing))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # MONAI's own
@settings(deadline=None, max_examples=120)
@given(seeds, st.sampled_from([2, 3]), st.sampled_from([0.0, 1.0, 2.5]))
def test_monai(seed, axes, tolerance):
    predicted, truth, spacing = draw(seed, axes)
    if not (predicted.any() and truth.any()):
        return
    found = surfaces(predicted, truth, spacing)
    batch = torch.from_numpy(predicted)[None, None], torch.from_numpy(truth)[None, None]
    with_background = {"include_background": True, "spacing": spacing}
    for percentile in (95, 100):
        expected = compute_hausdorff_distance(*batch, percentile=percentile, **with_background)
        assert found.hausdorff(percentile) == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
    expected = compute_average_surface_distance(*batch, symmetric=True, **with_background)
    assert found.assd() == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
    expected = compute_surface_dice(*batch, class_thresholds=[tolerance], **with_background)
    assert found.nsd(tolerance) == pytest.approx(expected.item(), abs=1e-6)


def test_large_masks_choose_their_way(monkeypatch):
    """Near surfaces are searched; surfaces far apart, in a box of many columns, go over the envelope; all agree."""
    rng = np.random.default_rng(0)
    smooth = gaussian_filter(rng.normal(size=(60, 70, 50)), 4)
    near = smooth > 0, np.roll(smooth, 1, 0) > 0
    far = near[0][::-1] & (np.arange(50) > 44), near[1] & (np.arange(50) < 6)
    used = []
    compiled = surface.compiled
    monkeypatch.setattr(surface, "compiled", lambda kernel: used.append(kernel.__name__) or compiled(kernel))
    for masks, expected in ((near, False), (far, True)):
        used.clear()
        found = surfaces(*masks, (1.0, 2.0, 1.5))
        assert ("_envelope" in used) == expected
        agree(found, tensor_surfaces(*map(torch.from_numpy, masks), (1.0, 2.0, 1.5)))


@pytest.mark.parametrize("length", [253, 254, 255, 300, 70_000])
def test_long_columns(length):
    """The steps along a column outgrow a byte, then two."""
    predicted, truth = np.zeros((2, length, 2, 2), bool)
    predicted[0, 0, 0], truth[-1, 1, 1] = True, True
    agree(surfaces(predicted, truth, (0.5, 1, 1)), brute(predicted, truth, (0.5, 1, 1)))


def test_memory_layout_does_not_matter():
    predicted, truth, spacing = draw(5, 3)
    assert len(set(predicted.shape)) == 3
    expected, turned = brute(predicted, truth, spacing), np.asfortranarray(truth)
    apart, small = np.repeat(predicted, 2, 2)[..., ::2], predicted.astype(np.uint8)
    pairs = (np.asfortranarray(predicted), turned), (predicted, turned), (apart, truth), (small, truth.astype(np.uint8))
    for a, b in pairs:
        a.setflags(write=False)
        agree(surfaces(a, b, spacing), expected)


def test_threads_do_not_disturb_one_another():
    masks = [draw(seed, 3, most=30) for seed in range(40)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(surfaces, *zip(*masks, strict=True)))
    for found, expected in zip(together, (surfaces(*m) for m in masks), strict=True):
        np.testing.assert_array_equal(found.to_truth, expected.to_truth)
        np.testing.assert_array_equal(found.to_predicted, expected.to_predicted)


@pytest.mark.parametrize("way", [surfaces, lambda p, t, s: tensor_surfaces(*map(torch.from_numpy, (p, t)), s)])
def test_empty_masks_have_no_distance(way):
    some, none = np.eye(4, dtype=bool), np.zeros((4, 4), bool)
    for predicted, truth in ((some, none), (none, some), (none, none)):
        found = way(predicted, truth, (1, 1))
        assert found.to_truth.size == found.to_predicted.size == 0 and not found
        assert np.isnan([found.hausdorff(), found.hausdorff(how="union"), found.assd(), found.nsd(1)]).all()


def test_definitions():
    found = Surfaces(np.array([0.0, 1.0, 2.0]), np.array([4.0]))
    assert found.hausdorff(50) == 4 and found.hausdorff(50, "union") == 1.5 and found.assd() == 7 / 4
    assert found.hausdorff(0) == 4 and Surfaces(found.to_truth, found.to_truth).hausdorff(0) == 0
    assert found.nsd(1.5) == 0.5 and found.nsd(2) == 0.75


def test_a_distance_at_the_tolerance_is_within():
    predicted, truth = np.eye(1, 4, 0, dtype=bool), np.eye(1, 4, 3, dtype=bool)
    found = surfaces(predicted, truth, (1, 0.1))
    assert found.hausdorff() > 0.3 and found.nsd(0.3) == 1 and found.nsd(0.2999) == 0


@pytest.mark.parametrize("way", [surfaces, lambda p, t, s: tensor_surfaces(*map(torch.from_numpy, (p, t)), s)])
@pytest.mark.parametrize(
    ("shapes", "spacing"),
    [
        (((2, 3), (3, 2)), (1, 1)),
        (((2, 3), (2, 3)), (1,)),
        (((2, 3), (2, 3)), (1, 0)),
        (((2, 3), (2, 3)), (1, math.nan)),
        (((2, 2, 2, 2),) * 2, (1, 1, 1, 1)),
    ],
)
def test_refused(way, shapes, spacing):
    with pytest.raises(DataError, match="shape"):
        way(*(np.ones(s, bool) for s in shapes), spacing)


def test_kernels_compile_where_nothing_can_be_kept():
    space = {}
    exec(compile("def double(x):\n    return 2 * x", "<nowhere>", "exec"), space)
    assert compiled.__wrapped__(space["double"])(21) == 42


@pytest.mark.parametrize("spacing", [(1.0, 1.0), (0.5, 0.5), (2.0, 0.5), (0.7, 3.0)])
def test_places_are_looked_up_from_near_to_far_and_none_is_passed_over(spacing):
    """As many as were asked for, or a few less; and whatever is nearer than the last of them is among them."""
    j, _, square = surface._around(*spacing)
    assert len(j) > 0.95 * surface.NEAR and (np.diff(square) >= 0).all()
    wide = np.mgrid[-200:201, -200:201].reshape(2, -1) * np.array(spacing)[:, None]
    assert np.count_nonzero((wide**2).sum(0) < square[-1] - 1e-9) - 1 == np.count_nonzero(square < square[-1] - 1e-9)
