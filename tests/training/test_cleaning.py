"""Cleaning of masks: hand-made masks against SciPy, scores of cleaned masks."""

import numpy as np
import pytest
import torch
from scipy import ndimage

import polysite as ps
from polysite.config import dump, parse
from polysite.data.case import Case
from polysite.errors import ConfigError, DataError
from polysite.training import tasks
from polysite.training.cleaning import Clean, cleaned
from polysite.training.network import Network
from polysite.training.torch_site import TorchSite


@pytest.mark.parametrize("dims", [2, 3])
def test_cleaning_is_that_of_scipy(dims):
    """Of random blobs, some of which touch by a corner only or enclose background."""
    smooth = ndimage.gaussian_filter(np.random.default_rng(0).normal(size=(24,) * dims), 1.0)
    mask = smooth > np.quantile(smooth, 0.8)
    mask[(slice(4, 12),) * dims] = True
    mask[(slice(6, 9),) * dims] = False
    marks, count = ndimage.label(mask, np.ones((3,) * dims))
    parts = [marks == k for k in range(1, count + 1)]
    largest, few = max(parts, key=np.sum), np.any([part for part in parts if part.sum() >= 20], 0)
    filled = ndimage.binary_fill_holes(mask)
    assert len(parts) > 3 and few.sum() < mask.sum() < filled.sum()
    for clean, expected in (
        (Clean(largest=True), largest),
        (Clean(smallest=20), few),
        (Clean(fill=True), filled),
        (Clean(largest=True, fill=True), ndimage.binary_fill_holes(largest)),
    ):
        assert (cleaned(mask[None], clean, (1.0,) * dims)[0] == expected).all(), clean


def test_sizes_in_millimetres_need_a_known_spacing():
    masks = np.zeros((1, 8, 8, 8), bool)
    masks[0, 1:3, 1:3, 1:3] = masks[0, 5:7, 5:7, 5] = True
    clean = Clean(smallest=3.0, unit="mm")
    assert cleaned(masks, clean, (1.0, 1.0, 1.0)).sum() == 12  # 8 and 4 mm3
    assert cleaned(masks, clean, (1.0, 1.0, 0.5)).sum() == 8  # 4 and 2 mm3
    with pytest.raises(DataError, match="in millimetres; give the size in voxels instead"):
        cleaned(masks, clean, (1.0, 1.0, 1.0), "")


def test_exclusive_labels_stay_exclusive():
    ring, core = np.zeros((2, 7, 7), bool)
    core[3, 3] = True
    ring[1:6, 1:6], ring[2:5, 2:5] = True, False
    found = cleaned(np.stack([ring, core]), Clean(fill=True), (1, 1), exclusive=True)
    assert (found[1] == core).all() and found[0].sum() == 24 and not (found[0] & found[1]).any()
    assert cleaned(np.stack([ring, core]), Clean(fill=True), (1, 1))[0].sum() == 25


class Given(torch.nn.Module):
    """A network whose logits are its input."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


def test_scores_and_measures_are_those_of_cleaned_masks():
    truth = np.zeros((1, 8, 8, 8), bool)
    truth[0, 1:4, 1:4, 1:4] = True
    predicted = truth.copy()
    predicted[0, 6, 6, 6] = True  # a false island
    case = Case("a", "x", np.where(predicted, 1.0, -1.0).astype(np.float32), truth.astype(np.uint8))

    def site_of(clean):
        train = ps.Train(patch=(8, 8, 8), device="cpu", clean=clean, overlap=0.0)
        return TorchSite("a", Network(Given(), train), {"test": [case]}, ("L",), train, 0, tasks.Outline())

    raw, clean = site_of(Clean()), site_of(Clean(largest=True))
    before, score = (s.score(s.start, ["x"])["x"] for s in (raw, clean))
    assert before.labels["L"] == 54 / 55 and before.loss == score.loss  # the loss is of logits
    assert score.labels["L"] == 1.0 and score.counts["L"] == (27, 0, 0, 485)
    (found,) = clean.examine(clean.start, ["x"], 1.0)
    assert found.measures["L"]["hd95"] == 0.0 and found.prediction.sum() == 27


def test_settings_are_refused_where_they_mean_nothing():
    study = parse("[train]\nclean = { largest = true, smallest = 5, unit = 'mm' }")
    assert study.train.clean == Clean(largest=True, smallest=5.0, unit="mm") and parse(dump(study)) == study
    with pytest.raises(ConfigError, match="smallest = -1"):
        Clean(smallest=-1.0)
    with pytest.raises(ConfigError, match="this model classifies images"):
        parse("model = 'densenet_small'\n[train]\nclean = { fill = true }")
