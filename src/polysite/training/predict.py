"""Prediction of whole images by a network that was trained on patches.

A segmentation uses a sliding window with Gaussian weights; a classification sees the whole image at once. On a CPU the
windows are MONAI's. On a GPU windows of several images go through the network together, and the weights are computed
once.

With mirroring the network sees each window in all mirror images of its axes, and the results, mirrored back, are
averaged. The mean is of logits, not of probabilities: so is that of overlapping windows, and masks, losses and exported
models start from logits with or without mirroring. nnU-Net does the same.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product

import torch
from torch.nn.functional import pad

Network = Callable[[torch.Tensor], torch.Tensor]

BATCH = 4  # windows and equal-sized cases per pass; a single one takes a slow convolution path on a CPU
VOXELS, MOST = 1 << 23, 32  # voxels and windows per pass on a GPU


@torch.inference_mode()
def predict(
    network: Network,
    images: Iterable[tuple[str, torch.Tensor]],
    patch: Sequence[int] | None,
    overlap: float,
    on_gpu: bool = False,
    mirror: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the logits of every named image.

    A sliding window of the size of ``patch`` is used; without a patch, whole images of equal size go
    through the network together. ``mirror`` averages over the mirror images of a window.
    """
    if mirror:
        network = mirrored(network)
    if patch is not None and on_gpu:
        yield from windowed(network, images, tuple(patch), overlap)
        return
    from monai.inferers.utils import sliding_window_inference  # importing MONAI takes seconds

    for names, stack in _equal_sizes(images):
        if patch is None or tuple(stack.shape[2:]) == tuple(patch):
            logits = network(stack)
        else:
            logits = sliding_window_inference(stack, tuple(patch), BATCH, network, overlap, mode="gaussian")
        yield from zip(names, logits, strict=True)


def mirror_axes(dims: int) -> list[tuple[int, ...]]:
    """Return the axes of a batch to flip for every mirror image, the image itself first.

    >>> mirror_axes(2)
    [(), (2,), (3,), (2, 3)]
    """
    axes = range(2, 2 + dims)
    return [some for count in range(dims + 1) for some in combinations(axes, count)]


def mirrored(network: Network) -> Network:
    """Return a network that averages its logits over all mirror images of a batch, one after the other."""

    def mean(x: torch.Tensor) -> torch.Tensor:
        flips = mirror_axes(x.ndim - 2)
        total = network(x)
        for axes in flips[1:]:
            logits = network(x.flip(axes))
            total = total + (logits.flip(axes) if logits.ndim == x.ndim else logits)  # a class has no axes
        return total / len(flips)

    return mean


def windowed(
    network: Network,
    images: Iterable[tuple[str, torch.Tensor]],
    window: tuple[int, ...],
    overlap: float,
    most: int = 0,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the logits of every named image; each pass takes windows of as many images as it needs.

    The windows, their weights and the padding of small images are those of MONAI's ``sliding_window_inference``.

    Args:
        network: The network.
        images: Names and images (modality, *space).
        window: Size of a window.
        overlap: Share of a window that the next one overlaps.
        most: Windows per pass; 0 for as many as suit a GPU.
    """
    most = most or windows_per_pass(window)
    begun: deque[_Canvas] = deque()
    waiting: deque[tuple[_Canvas, tuple[int, ...]]] = deque()
    for name, image in images:
        canvas = _Canvas(name, image, window, overlap)
        begun.append(canvas)
        waiting.extend((canvas, place) for place in canvas.places)
        while len(waiting) >= most:
            _pass(network, [waiting.popleft() for _ in range(most)])
        while begun and not begun[0].left:
            yield begun.popleft().finish()
    while waiting:
        _pass(network, [waiting.popleft() for _ in range(min(most, len(waiting)))])
    for canvas in begun:
        yield canvas.finish()


def windows_per_pass(window: Sequence[int]) -> int:
    """Return the number of windows that go through the network together on a GPU."""
    return max(BATCH, min(MOST, VOXELS // max(1, torch.Size(window).numel())))


def count_windows(size: Sequence[int], window: Sequence[int], overlap: float) -> int:
    """Return the number of windows of an image.

    >>> count_windows((300, 128), (128, 128), 0.5), count_windows((20, 20), (32, 32), 0.5)
    (4, 1)
    """
    counts = [len(_starts(max(s, w), w, overlap)) for s, w in zip(size, window, strict=True)]
    return int(torch.Size(counts).numel())


class _Canvas:
    """The logits of one image while its windows are predicted."""

    def __init__(self, name: str, image: torch.Tensor, window: tuple[int, ...], overlap: float):
        self.name, self.window, self.shape = name, window, image.shape[1:]
        missing = [max(w - s, 0) for s, w in zip(self.shape, window, strict=True)]
        self.margin = tuple(m // 2 for m in missing)
        sides = [side for m in reversed(missing) for side in (m // 2, m - m // 2)]
        self.image = pad(image, sides) if any(missing) else image
        self.grid = _grid(tuple(self.image.shape[1:]), window, overlap, image.device)
        self.places, self.left = self.grid.places, len(self.grid.places)
        self.sum: torch.Tensor | None = None

    def cut(self, place: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the window at this place."""
        return (slice(None), *(slice(a, a + w) for a, w in zip(place, self.window, strict=True)))

    def add(self, place: tuple[int, ...], logits: torch.Tensor) -> None:
        """Add the weighted logits of a window."""
        if self.sum is None:
            self.sum = logits.new_zeros((len(logits), *self.image.shape[1:]))
        self.sum[self.cut(place)].addcmul_(logits, self.grid.weights)
        self.left -= 1

    def finish(self) -> tuple[str, torch.Tensor]:
        """Return the name and the logits, without padding."""
        assert self.sum is not None
        inner = (slice(a, a + s) for a, s in zip(self.margin, self.shape, strict=True))
        return self.name, self.sum.div_(self.grid.total)[:, *inner]


@dataclass(frozen=True)
class _Grid:
    """The windows of an image of some size."""

    places: tuple[tuple[int, ...], ...]  # corners of the windows
    weights: torch.Tensor  # of the voxels of a window
    total: torch.Tensor  # of the weights, for every voxel of the image


@lru_cache(maxsize=16)
def _grid(size: tuple[int, ...], window: tuple[int, ...], overlap: float, device: torch.device) -> _Grid:
    weights = _weights(window, device)
    places = tuple(product(*(_starts(s, w, overlap) for s, w in zip(size, window, strict=True))))
    total = torch.zeros(size, device=device)
    for place in places:
        total[tuple(slice(a, a + w) for a, w in zip(place, window, strict=True))] += weights
    return _Grid(places, weights, total)


@lru_cache(maxsize=4)
def _weights(window: tuple[int, ...], device: torch.device) -> torch.Tensor:
    from monai.data.utils import compute_importance_map

    weights: torch.Tensor = compute_importance_map(window, mode="gaussian", device=device)
    return weights


def _starts(size: int, window: int, overlap: float) -> list[int]:
    """Return the positions of the window along one axis; the last one ends with the image.

    >>> _starts(172, 128, 0.5), _starts(128, 128, 0.5), _starts(300, 128, 0.5)
    ([0, 44], [0], [0, 64, 128, 172])
    """
    step = max(1, int(window * (1 - overlap)))
    return [*range(0, size - window, step), size - window]


def _pass(network: Network, windows: Sequence[tuple[_Canvas, tuple[int, ...]]]) -> None:
    """Predict windows together, and add each to its image."""
    logits = network(torch.stack([canvas.image[canvas.cut(place)] for canvas, place in windows]))
    for (canvas, place), own in zip(windows, logits, strict=True):
        canvas.add(place, own)


def _equal_sizes(images: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[list[str], torch.Tensor]]:
    waiting: list[tuple[str, torch.Tensor]] = []
    for name, image in images:
        if waiting and (len(waiting) == BATCH or waiting[0][1].shape != image.shape):
            yield [n for n, _ in waiting], torch.stack([x for _, x in waiting])
            waiting = []
        waiting.append((name, image))
    if waiting:
        yield [n for n, _ in waiting], torch.stack([x for _, x in waiting])
