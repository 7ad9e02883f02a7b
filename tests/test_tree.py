"""Tree arithmetic: the same answers from arrays and tensors, and an honest mean."""

import numpy as np
import pytest
import torch

from polysite import tree


def models(k=5, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"big": (tree.ARRAY_SLICE // 64, 129), "small": 3, "one": ()}
    kinds = {"big": np.float32, "small": float, "one": float}
    return [{name: np.asarray(rng.normal(size=s), kinds[name]) for name, s in shapes.items()} for _ in range(k)]


def test_mean_equals_numpys_average_across_slices():
    ms, weights = models(), [1, 2, 3, 4, 0]
    found = tree.mean(ms, weights)
    for name in ms[0]:
        assert found[name] == pytest.approx(np.average([m[name] for m in ms], axis=0, weights=weights), abs=1e-6)
        assert found[name].shape == ms[0][name].shape and found[name].dtype == ms[0][name].dtype
        assert (tree.mean(ms[:1], [7.0])[name] == ms[0][name]).all()  # of one, to the last bit


def test_arrays_and_tensors_agree():
    ms = models(2)
    ts = [{k: torch.tensor(v) for k, v in m.items()} for m in ms]
    x = ts[0]["big"].T  # strides do not matter
    assert torch.equal(tree.mean([{"w": x}, {"w": x.contiguous()}])["w"], x)
    assert tree.norm(ts[0]) == pytest.approx(tree.norm(ms[0]), rel=1e-5)
    assert tree.dot(ts[0], ts[1]) == pytest.approx(tree.dot(ms[0], ms[1]), rel=1e-3, abs=1e-2)


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [1], [float("nan"), 1], [float("inf"), 1]])
def test_weights_that_mean_nothing_are_refused(weights):
    with pytest.raises(ValueError, match="weights"):
        tree.mean(models(2), weights)


def test_different_shapes_and_names_are_refused():
    for a, b in (((4,), (1,)), ((2, 3), (3, 2))):
        with pytest.raises(ValueError, match="same names and shapes"):
            tree.mean([{"w": np.ones(a)}, {"w": np.ones(b)}])
    with pytest.raises(KeyError, match="differ in"):
        tree.add({"a": np.ones(1)}, {"b": np.ones(1)})


def close(count, spread, kind, seed=0):
    """Trees whose differences are small against their lengths."""
    rng = np.random.default_rng(seed)
    common = {"a": rng.normal(size=(7, 31)), "b": rng.normal(size=(5,)), "c": rng.normal(size=())}
    trees = [{k: kind(x + spread * rng.normal(size=x.shape)) for k, x in common.items()} for _ in range(count)]
    return [*trees, trees[1]]


def flat(trees):
    return np.array([np.concatenate([np.ravel(np.asarray(t[k], float)) for k in sorted(t)]) for t in trees])


KINDS = {
    "float64": np.asarray,
    "float32": lambda x: np.asarray(x, np.float32),
    "tensors": torch.tensor,
    "float32 tensors": lambda x: torch.tensor(x, dtype=torch.float32),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("block", [8, 1 << 22])
def test_products_distances_and_mixtures_of_all_pairs(monkeypatch, kind, block):
    monkeypatch.setattr(tree, "BLOCK", block)
    monkeypatch.setattr(tree, "NARROW", block)
    monkeypatch.setattr(tree, "MANY", 5 if block == 8 else 64)  # fewer than the trees here
    for spread in (1.0, 1e-3):
        trees = close(6, spread, kind)
        rows, origin = flat(trees), trees[3]
        assert tree.gram(trees) == pytest.approx(rows @ rows.T, rel=1e-12)
        moved = rows - rows[3]
        assert tree.gram(trees, origin) == pytest.approx(moved @ moved.T, rel=1e-9, abs=1e-20)
        lengths = np.linalg.norm(moved, axis=1)
        apart = np.abs(tree.gram(trees, origin, coarse=True) - moved @ moved.T)
        assert (apart <= 2e-6 * lengths[:, None] * lengths).all()
        squares = ((rows[:, None] - rows) ** 2).sum(-1)
        assert tree.squared_distances(trees, exact=True) == pytest.approx(squares, rel=1e-7, abs=0)
        shares = np.random.default_rng(1).normal(size=(3, 7))
        for start, expected in ((None, shares @ rows), (origin, rows[3] + shares @ moved)):
            mixed = tree.mixtures(trees, shares, start)
            assert [type(x) for x in mixed[0].values()] == [type(x) for x in trees[0].values()]
            assert flat(mixed) == pytest.approx(expected, abs=1e-5)
    assert tree.mixtures(trees, []) == [] and tree.squared_distances(trees[:1]).tolist() == [[0.0]]


def test_distances_inside_groups_that_are_far_apart_keep_their_digits():
    away = {"a": 1e3, "b": 1.0, "c": 0.0}
    trees = [*close(4, 1e-6, np.asarray), *(tree.add(t, away) for t in close(4, 1e-6, np.asarray, 1))]
    exact = np.array([[tree.norm(tree.sub(x, y)) ** 2 for x in trees] for y in trees])
    assert tree.squared_distances(trees) == pytest.approx(exact, rel=1e-7, abs=0)


@pytest.mark.parametrize("library", [np, torch])
def test_distances_and_mixtures_of_many_trees_in_float32(monkeypatch, library):
    monkeypatch.setattr(tree, "NARROW", 1000)
    draw = np.random.default_rng(0)
    start = draw.normal(size=(1, 300)) * 10
    rows = (start + draw.normal(size=(70, 300))).astype(np.float32)
    rows[5], rows[6], rows[0] = rows[4], rows[4] + 1e-4, rows[9]  # equal, nearly equal, equal to the first
    trees = [{"a": r[:100].reshape(10, 10), "b": r[100:]} for r in rows]
    if library is torch:
        trees = [{k: torch.from_numpy(x.copy()) for k, x in t.items()} for t in trees]
    exact = ((rows[:, None].astype(float) - rows) ** 2).sum(-1)
    found = tree.squared_distances(trees)
    assert found == pytest.approx(exact, rel=1e-5, abs=0) and found[4, 5] == found[0, 9] == 0
    assert not np.array_equal(found, tree.squared_distances(trees, exact=True))
    huge = [tree.map(lambda x: x * 2.0**60, t) for t in trees]
    assert tree.squared_distances(huge) == pytest.approx(exact * 2.0**120, rel=1e-5, abs=0)
    shares = draw.dirichlet(np.ones(70), size=3)
    mixed = tree.mixtures(trees, shares)
    assert type(mixed[0]["a"]) is type(trees[0]["a"]) and mixed[0]["a"].shape == (10, 10)
    assert flat(mixed) == pytest.approx(shares @ rows, rel=1e-5, abs=1e-5)
