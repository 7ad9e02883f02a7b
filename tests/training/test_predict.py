"""Windows of several images together: the logits that MONAI's sliding window has."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from monai.inferers.utils import sliding_window_inference

from polysite.data.case import Case
from polysite.models.unet import UNet
from polysite.training.network import Network
from polysite.training.predict import mirrored, predict, windowed
from polysite.training.settings import Train
from polysite.training.torch_site import TorchSite


def network(x):
    """Two outputs that depend on the neighbourhood and on the place in the window."""
    ramp = torch.linspace(0, 1, x.shape[2]).view(-1, *(1 for _ in x.shape[3:]))
    smooth = torch.nn.functional.avg_pool3d(x, 3, 1, 1) if x.ndim == 5 else torch.nn.functional.avg_pool2d(x, 3, 1, 1)
    return torch.cat([smooth[:, :1] + ramp, smooth[:, 1:] * ramp], 1)


@pytest.mark.parametrize("window", [(8, 8, 4), (16, 6, 5), (8, 8)])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.7])
def test_windows_of_images_of_any_size_are_monais(window, overlap):
    drawn = torch.Generator().manual_seed(0)
    shapes = [(13, 9, 7), (8, 8, 4), (5, 20, 3), (13, 9, 7), (30, 17, 11)]
    images = [(f"{k}", torch.randn(2, *s[: len(window)], generator=drawn)) for k, s in enumerate(shapes)]
    found = list(windowed(network, images, window, overlap))
    assert [name for name, _ in found] == [name for name, _ in images]
    for (_, logits), (_, image) in zip(found, images, strict=True):
        expected = sliding_window_inference(image[None], window, 4, network, overlap, mode="gaussian")[0]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_images_are_taken_as_they_are_needed_and_passes_are_full():
    asked, passes = [], []

    def images():
        for k in range(6):
            asked.append(k)
            yield str(k), torch.zeros(2, 512, 512)

    def counted(x):
        passes.append(len(x))
        return x

    for done, (name, _) in enumerate(predict(counted, images(), (512, 512), 0.5, on_gpu=True)):
        assert name == str(done)
    assert passes == [6] and asked == list(range(6))  # 32 windows of this size fit into one pass
    passes.clear()
    list(predict(counted, ((str(k), torch.zeros(1, 40, 33)) for k in range(2)), (8, 8), 0.5, on_gpu=True))
    assert passes[0] == 32 and sum(passes) == 2 * 9 * 8


FLIPS = [(), (2,), (3,), (4,), (2, 3), (2, 4), (3, 4), (2, 3, 4)]


def test_mirror_images_are_averaged_on_both_ways():
    """The mean of the logits of all flips of a window, flipped back; the windows are those without mirroring."""
    image = torch.randn(2, 13, 9, 7, generator=torch.Generator().manual_seed(1))

    def by_hand(x):
        return torch.stack([network(x.flip(axes)).flip(axes) for axes in FLIPS]).mean(0)

    expected = sliding_window_inference(image[None], (8, 8, 4), 4, by_hand, 0.5, mode="gaussian")[0]
    for on_gpu in (False, True):
        ((_, found),) = predict(network, [("x", image)], (8, 8, 4), 0.5, on_gpu, mirror=True)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        ((_, plain),) = predict(network, [("x", image)], (8, 8, 4), 0.5, on_gpu)
        assert (found - plain).abs().max() > 0.1


def test_classes_are_averaged_over_mirror_images():
    def classify(x):
        return torch.stack([x[:, 0, 0, 0], x[:, 0, -1, 0]], 1)  # of two corners

    x = torch.arange(6.0).view(1, 1, 2, 3)
    assert mirrored(classify)(x).tolist() == [[2.5, 2.5]]  # the mean of all four corners


def test_a_site_scores_the_mean_over_mirror_images():
    image = np.random.default_rng(0).normal(size=(1, 12, 10, 8)).astype(np.float32)
    train = Train(patch=(8, 8, 8), device="cpu", mirror=True)
    net = Network(UNet(filters=(2, 4, 4)).build(dims=3, modalities=1, outputs=1, seed=1), train)
    site = TorchSite("s", net, {"test": [Case("s", "x", image, (image > 1).astype(np.uint8))]}, ["L"], train, 0)
    plain = site.under(replace(train, mirror=False))
    ((_, found, _),) = site.predictions(site.start, ["x"])
    turned = torch.from_numpy(image).flip((1, 3))  # one of the mirror images: their mean is the same, mirrored
    site._volumes["x"] = turned, site._volumes["x"][1]
    ((_, other, _),) = site.predictions(site.start, ["x"])
    torch.testing.assert_close(other.flip((1, 3)), found, atol=1e-5, rtol=1e-4)
    ((_, once, _),) = plain.predictions(site.start, ["x"])
    assert (once - other).abs().max() > 0.01
