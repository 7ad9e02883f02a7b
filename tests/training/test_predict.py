"""Windows of several images together: the logits that MONAI's sliding window has."""

from dataclasses import replace

import pytest
import torch
from monai.inferers.utils import sliding_window_inference

from polysite.training.predict import predict, windowed
from tiny import PLAIN, site


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


def test_a_site_scores_the_mean_over_mirror_images():
    turning, plain = site(replace(PLAIN, mirror=True)), site()
    image = turning.volume("v0")[0].float()
    ((_, expected),) = predict(turning.network, [("v0", image)], (8, 8, 8), 0.5, False, mirror=True)
    for s, same in ((turning, True), (plain, False)):
        ((_, found, _),) = s.predictions(s.start, ["v0"])
        assert torch.allclose(found, expected, atol=1e-4) == same
