"""Places of patches: at random, or around labelled voxels."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import polysite as ps
from polysite.config import build
from polysite.data.case import Case
from polysite.errors import ConfigError
from polysite.site import Balanced, Objective
from polysite.training import patches
from polysite.training.network import Network
from polysite.training.patches import Patches, labelled_voxels, labelled_window, window
from polysite.training.torch_site import TorchSite

SPACE, PATCH = (12, 10, 8), (4, 4, 4)
TRAIN = ps.Train(patch=(8, 8, 8), augment="none", batch=2, device="cpu")


def volume():
    """A large label in the middle, one voxel in a corner, and a label that the case does not have."""
    label = torch.zeros(3, *SPACE, dtype=torch.uint8)
    label[0, 4:8, 4:8, 2:6] = 1
    label[1, 11, 0, 7] = 1
    return label


def rng(seed=0):
    return np.random.default_rng(seed)


def test_a_patch_is_around_a_voxel_of_a_label_that_the_case_has_each_as_often():
    voxels, drawn = labelled_voxels(volume(), rng()), rng(1)
    assert [len(v) for v in voxels] == [64, 1]
    places = [labelled_window(SPACE, PATCH, drawn, voxels) for _ in range(400)]
    starts = np.array([[s.start for s in place] for place in places])
    assert all(s.stop - s.start == 4 for place in places for s in place)
    corner = (starts == (8, 0, 4)).all(1)  # moved back into the volume
    assert 160 < corner.sum() < 240
    middle = starts[~corner]
    assert middle.min(0).tolist() == [2, 2, 0] and middle.max(0).tolist() == [5, 5, 3]  # two before the voxel
    none = labelled_voxels(torch.zeros(2, *SPACE), rng())
    assert none == () and labelled_window(SPACE, PATCH, rng(3), none) == window(SPACE, PATCH, rng(3))


@pytest.mark.parametrize("foreground", [0.0, 0.3, 1.0])
def test_the_share_of_patches_around_labels(foreground):
    """With 0 the random numbers are used as without the setting."""
    pair, made, drawn = (torch.randn(1, *SPACE), volume()[1:2].float()), Patches(torch.device("cpu")), rng(5)
    voxels = labelled_voxels(pair[1], rng())
    hits = [made.batch([pair], PATCH, drawn, "none", "modality", foreground, [voxels])[1].sum() for _ in range(300)]
    by_chance = 1 / (9 * 7 * 5)
    assert float(np.mean(hits)) == pytest.approx(foreground + (1 - foreground) * by_chance, abs=0.07)
    if not foreground:
        plain = rng(5)
        [window(SPACE, PATCH, plain) for _ in range(300)]
        assert plain.random() == drawn.random()


def site(**settings):
    drawn, label, train = rng(2), volume()[:2].numpy(), replace(TRAIN, **settings)
    cases = [Case("s", str(k), drawn.normal(size=(1, *SPACE)).astype(np.float32), label) for k in range(3)]
    net = Network(ps.UNet(filters=(2, 4, 4)).build(dims=3, modalities=1, outputs=2, seed=1), train)
    return TorchSite("s", net, {"train": cases}, ["large", "small"], train, 3)


@pytest.mark.parametrize("held", ["device", "disk"])
def test_a_round_is_replayed_whatever_was_listed_before(held, monkeypatch):
    monkeypatch.setattr(patches, "LISTED", 10)  # of a large label, some voxels
    assert [len(set(v.tolist())) for v in labelled_voxels(volume(), rng())] == [10, 1]
    fresh, used = (site(foreground=0.7, cases=held) for _ in range(2))
    used.at(0).fit(used.start)
    first, second = (s.at(4).fit(s.start).params for s in (fresh, used))
    assert all(torch.equal(first[k], second[k]) for k in first)
    plain = site().at(4).fit(fresh.start).params
    assert not all(torch.equal(first[k], plain[k]) for k in first)


def test_a_balanced_loss_knows_the_patches_that_it_is_trained_on():
    often, plain = site(foreground=1.0), site()
    (more, count), (less, same) = often._shares(None), plain._shares(None)
    assert count == same == 3 * 512
    assert 512 * more[1] == pytest.approx(1 / 2) and 512 * less[1] == pytest.approx(1 / 15)  # of all patches have it
    assert often.fit(often.start, Objective(loss=Balanced(clip=7.0))).steps == 2
    assert torch.equal(often.under(TRAIN)._shares(None)[0], less)  # a later phase without the setting


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match=r"train\.foreground must lie in \[0, 1\], got 1\.5"):
        ps.Train(foreground=1.5)
    with pytest.raises(ConfigError, match=r"0\.3 chooses patches by labelled voxels, but this model"):
        build({"model": "densenet_small", "train": {"foreground": 0.3}})
