"""Random patches and their augmentation, computed on the device of the network.

All random choices come from one NumPy generator on the host, so a round can be replayed; only the noise itself is drawn
on the device. The full augmentations and their probabilities are those of the FeTS 2022 benchmark, by its text: noise
has a standard deviation of 0.25 (MONAI by default draws one below that). The benchmark adjusts the contrast between the
extremes of the whole image, which is ``contrast = "image"``. Every batch reuses the same memory: on a CPU, allocating
memory costs more than all the arithmetic.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import torch

Pair = tuple[torch.Tensor, torch.Tensor]  # the image and the label of one case, or of a batch
Kind = Literal["full", "light", "none"]
Extremes = Literal["modality", "image"]
Labelled = tuple[np.ndarray, ...]  # voxels of every label that a case has, as indices into its flattened volume

LISTED = 4096  # voxels of a label that are listed at most


class Patches:
    """Makes batches of patches. A batch is valid until the next one is made."""

    def __init__(self, device: torch.device):
        self.device = device
        self._memory: dict[str, torch.Tensor] = {}

    def batch(
        self,
        cases: Sequence[Pair],
        patch: Sequence[int],
        rng: np.random.Generator,
        augment: Kind,
        contrast: Extremes = "modality",
        foreground: float = 0.0,
        labelled: Sequence[Labelled] = (),
    ) -> Pair:
        """Return one random, augmented patch of every case.

        Args:
            cases: Images and labels.
            patch: Size of a patch.
            rng: Source of all random choices.
            augment: Augmentations.
            contrast: Extremes between which the contrast is changed.
            foreground: Probability that a patch is centred on a labelled voxel.
            labelled: The labelled voxels of every case; needed if ``foreground`` is more than 0.
        """
        spaces = [image.shape[1:] for image, _ in cases]
        if foreground:
            windows = [
                labelled_window(space, patch, rng, voxels) if rng.random() < foreground else window(space, patch, rng)
                for space, voxels in zip(spaces, labelled, strict=True)
            ]
        else:
            windows = [window(space, patch, rng) for space in spaces]
        image, label = cases[0]
        x = self._get("image", (len(cases), image.shape[0], *patch))
        y = self._get("label", (len(cases), label.shape[0], *(patch if label.ndim > 1 else ())))
        for k, ((image, label), place) in enumerate(zip(cases, windows, strict=True)):
            axes = [] if augment == "none" else [a for a in range(1, image.ndim) if rng.random() < 0.5]
            put(x[k], image[:, *place], axes)
            put(y[k], label[:, *place] if label.ndim > 1 else label, axes if label.ndim > 1 else [])
            if augment == "full":
                full(x[k], rng, self._get("scratch", x[k].shape), contrast)
            elif augment == "light":
                x[k].mul_(1 + rng.uniform(-0.1, 0.1)).add_(rng.uniform(-0.1, 0.1))
        return x, y

    def _get(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return memory of this shape, reused if it is large enough."""
        size = math.prod(shape)
        if name not in self._memory or self._memory[name].numel() < size:
            fresh = torch.from_numpy(np.zeros(size, np.float32))  # NumPy requests huge pages
            self._memory[name] = fresh.to(self.device)
        return self._memory[name][:size].view(*shape)


def window(space: Sequence[int], patch: Sequence[int], rng: np.random.Generator) -> tuple[slice, ...]:
    """Return a random position of a patch."""
    start = [int(rng.integers(0, s - p + 1)) for s, p in zip(space, patch, strict=True)]
    return tuple(slice(a, a + p) for a, p in zip(start, patch, strict=True))


def labelled_voxels(label: torch.Tensor, rng: np.random.Generator) -> Labelled:
    """Return the voxels of every label that a case has; of a label with more than ``LISTED``, that many at random.

    The list is made once per case and stays on the host, so that drawing a patch does not wait for the device.
    """
    found = [torch.nonzero(channel.reshape(-1))[:, 0].cpu().numpy() for channel in label]
    kept = [v if len(v) <= LISTED else np.sort(rng.choice(v, LISTED, replace=False)) for v in found if len(v)]
    return tuple(v.astype(np.int64 if label[0].numel() > np.iinfo(np.int32).max else np.int32) for v in kept)


def labelled_window(
    space: Sequence[int], patch: Sequence[int], rng: np.random.Generator, voxels: Labelled
) -> tuple[slice, ...]:
    """Return the position of a patch around a random voxel of a random label; any position if there is no label.

    A patch that would reach beyond the volume is moved back into it.
    """
    if not voxels:
        return window(space, patch, rng)
    chosen = voxels[int(rng.integers(len(voxels)))]
    start = corners(chosen[[int(rng.integers(len(chosen)))]], space, patch)[0].tolist()
    return tuple(slice(a, a + p) for a, p in zip(start, patch, strict=True))


def corners(voxels: np.ndarray, space: Sequence[int], patch: Sequence[int]) -> np.ndarray:
    """Return the first corners of the patches around these voxels, one row per voxel.

    >>> corners(np.array([0, 7, 14]), (4, 4), (2, 2))  # voxels (0, 0), (1, 3) and (3, 2)
    array([[0, 0],
           [0, 2],
           [2, 1]])
    """
    here = np.stack(np.unravel_index(voxels, tuple(space)), axis=1)
    room = np.subtract(space, patch)
    inside: np.ndarray = np.clip(here - np.array(patch) // 2, 0, room)
    return inside


def mixed_shares(label: torch.Tensor, patch: Sequence[int], foreground: float, voxels: Labelled) -> torch.Tensor:
    """Return the share of every label in a patch, if a part ``foreground`` of all patches is around labelled voxels."""
    anywhere = shares(label, patch)
    if not foreground or not voxels:
        return anywhere
    space = label.shape[1:]
    covered = label.double()
    for axis, length in enumerate(patch, start=1):  # sums over all patches, axis by axis
        total = covered.cumsum(axis)
        before = torch.cat([torch.zeros_like(total.narrow(axis, 0, 1)), total], axis)
        places = space[axis - 1] - length + 1
        covered = before.narrow(axis, length, places) - before.narrow(axis, 0, places)
    at = [np.ravel_multi_index(tuple(corners(v, space, patch).T), tuple(covered.shape[1:])) for v in voxels]
    flat = [covered.flatten(1)[:, torch.from_numpy(places).to(label.device)] for places in at]
    around = torch.stack([share.mean(1) for share in flat]).mean(0) / math.prod(patch)
    return (1 - foreground) * anywhere + foreground * around.float()


def shares(label: torch.Tensor, patch: Sequence[int]) -> torch.Tensor:
    """Return the share of every label in a random patch, averaged over all positions; for a class, 1 or 0.

    >>> shares(torch.tensor([[1, 0, 0, 0]]), [2])  # half of the patch in one of three positions
    tensor([0.1667])
    """
    covered = label.float()
    for side, length in zip(label.shape[1:], patch, strict=False):
        places, here = side - length + 1, torch.arange(side, device=label.device)
        patches = torch.minimum(here + 1, side - here).clamp(max=min(length, places))  # that cover a voxel
        covered = torch.tensordot(covered, patches.float() / (places * length), ([1], [0]))
    return covered


def put(target: torch.Tensor, source: torch.Tensor, axes: Sequence[int]) -> None:
    """Copy a tensor, flipped along these axes."""
    if not axes or target.device.type != "cpu" or source.device.type != "cpu":
        target.copy_(source.flip(list(axes)) if axes else source)
        return
    backwards = tuple(slice(None, None, -1 if a in axes else None) for a in range(source.ndim))
    np.copyto(target.numpy(), source.numpy()[backwards])  # torch would allocate a flipped copy first


def full(image: torch.Tensor, rng: np.random.Generator, scratch: torch.Tensor, extremes: Extremes = "modality") -> None:
    """Apply noise, blur, intensity scaling and contrast in place, each with its probability."""
    if rng.random() < 0.15:
        image.add_(noise(scratch, rng), alpha=0.25)
    if rng.random() < 0.15:
        blur(image, rng.uniform(0.5, 1.0, image.ndim - 1), scratch)
    if rng.random() < 0.15:
        image.mul_(rng.uniform(0.7, 1.3))
    if rng.random() < 0.3:
        contrast(image, rng.uniform(0.5, 2.0), extremes)


def noise(target: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Fill a tensor with standard normal noise, drawn on its device."""
    return target.normal_(generator=torch.Generator(target.device).manual_seed(int(rng.integers(1 << 62))))


def blur(image: torch.Tensor, sigmas: Iterable[float], scratch: torch.Tensor) -> None:
    """Smooth in place with a Gaussian, axis by axis, each with its own width; values outside the image are zero.

    On a CPU, each channel, which fits into its cache, is a sum of shifted copies; on a GPU all channels together are.
    """
    widths = list(enumerate(sigmas))
    parts = [(image, scratch)] if image.is_cuda else zip(image, scratch, strict=True)
    for part, spare in parts:
        source, target = part, spare
        for axis, sigma in widths:
            _smooth(source, target, axis - len(widths), sigma)
            source, target = target, source
        if source is not part:
            part.copy_(source)


def _smooth(source: torch.Tensor, target: torch.Tensor, axis: int, sigma: float) -> None:
    radius, side = int(4 * sigma + 0.5), source.shape[axis]
    weights = np.exp(-0.5 * (np.arange(radius + 1) / sigma) ** 2)
    weights /= weights[0] + 2 * weights[1:].sum()
    torch.mul(source, float(weights[0]), out=target)
    for shift in range(1, min(radius, side - 1) + 1):
        weight, rest = float(weights[shift]), side - shift
        target.narrow(axis, shift, rest).add_(source.narrow(axis, 0, rest), alpha=weight)
        target.narrow(axis, 0, rest).add_(source.narrow(axis, shift, rest), alpha=weight)


def contrast(image: torch.Tensor, gamma: float, extremes: Extremes = "image") -> None:
    """Apply gamma correction in place, between the extremes of each modality or of the image.

    That is w ((x - low) / w)^gamma + low. On a CPU every modality, which fits into its cache, is corrected by itself.
    """
    if extremes == "modality" and not image.is_cuda:
        for part in image:
            contrast(part, gamma)
        return
    axes = tuple(range(1 if extremes == "modality" else 0, image.ndim))
    low, high = (
        (torch.amin(image, axes, True), torch.amax(image, axes, True)) if image.is_cuda else torch.aminmax(image)
    )
    width = (high - low).clamp_min(1e-7)
    image.sub_(low).pow_(gamma).mul_(width ** (1 - gamma)).add_(low)
