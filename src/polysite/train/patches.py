"""Random patches and their augmentation, on tensors that already live where the network does.

Every choice comes from one NumPy generator on the host, so a round can be replayed; only the noise itself is drawn on
the device. The full augmentations and their probabilities are those of the FeTS 2022 benchmark.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch.nn.functional import conv1d

Pair = tuple[torch.Tensor, torch.Tensor]  # the image and the label of one case


def crop(case: Pair, patch: Sequence[int], rng: np.random.Generator) -> Pair:
    """The same random window out of the image and the label."""
    image, label = case
    space = image.shape[1:]
    start = [int(rng.integers(0, s - p + 1)) for s, p in zip(space, patch, strict=True)]
    window = (slice(None), *(slice(a, a + p) for a, p in zip(start, patch, strict=True)))
    return image[window], label[window] if label.ndim > 1 else label


def flips(case: Pair, rng: np.random.Generator) -> Pair:
    """Both the image and the label turned over, along each axis in half of the cases."""
    image, label = case
    axes = [1 + a for a in range(image.ndim - 1) if rng.random() < 0.5]
    if not axes:
        return case
    return image.flip(axes), label.flip(axes) if label.ndim > 1 else label


def light(case: Pair, rng: np.random.Generator) -> Pair:
    """Flips, then intensities scaled by 0.9 to 1.1 and shifted by -0.1 to 0.1."""
    image, label = flips(case, rng)
    return image * (1 + rng.uniform(-0.1, 0.1)) + rng.uniform(-0.1, 0.1), label


def full(case: Pair, rng: np.random.Generator) -> Pair:
    """Flips, then noise, blur, intensity scaling and contrast of the image."""
    image, label = flips(case, rng)
    if rng.random() < 0.15:
        image = image + 0.25 * noise_like(image, rng)
    if rng.random() < 0.15:
        image = blur(image, rng.uniform(0.5, 1.0, image.ndim - 1))
    if rng.random() < 0.15:
        image = image * rng.uniform(0.7, 1.3)
    if rng.random() < 0.3:
        image = contrast(image, rng.uniform(0.5, 2.0))
    return image, label


AUGMENTATIONS: Mapping[str, Callable[[Pair, np.random.Generator], Pair]] = {
    "full": full,
    "light": light,
    "none": lambda case, rng: case,
}


def noise_like(image: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Standard normal noise, drawn on the image's device."""
    source = torch.Generator(image.device).manual_seed(int(rng.integers(1 << 62)))
    return torch.randn(image.shape, generator=source, device=image.device, dtype=image.dtype)


def blur(image: torch.Tensor, sigmas: Iterable[float]) -> torch.Tensor:
    """Gaussian smoothing, one axis after the other, each with its own width."""
    for axis, sigma in enumerate(sigmas, start=1):
        radius = int(4 * sigma + 0.5)
        x = torch.arange(-radius, radius + 1, device=image.device, dtype=image.dtype)
        kernel = torch.exp(-0.5 * (x / sigma) ** 2)
        lines = image.movedim(axis, -1)
        smooth = conv1d(
            lines.reshape(-1, 1, lines.shape[-1]), (kernel / kernel.sum()).reshape(1, 1, -1), padding=radius
        )
        image = smooth.reshape(lines.shape).movedim(-1, axis)
    return image.contiguous()


def contrast(image: torch.Tensor, gamma: float) -> torch.Tensor:
    """Gamma correction of every modality between its own extremes."""
    space = tuple(range(1, image.ndim))
    low = image.amin(space, keepdim=True)
    width = (image.amax(space, keepdim=True) - low).clamp_min(1e-7)
    return ((image - low) / width) ** gamma * width + low
