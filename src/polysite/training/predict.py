"""Prediction of whole images by a network that was trained on patches.

A segmentation uses a sliding window with Gaussian weights; a classification sees the whole image at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from monai.inferers.utils import sliding_window_inference

Network = Callable[[torch.Tensor], torch.Tensor]

BATCH = 4  # windows and equal-sized cases per pass; a single one takes a slow convolution path on a CPU


@torch.inference_mode()
def predict(
    network: Network, images: Iterable[tuple[str, torch.Tensor]], patch: Sequence[int] | None, overlap: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the logits of every named image; images of equal size are predicted together.

    A sliding window of the size of ``patch`` is used; without a patch, whole images are predicted.
    """
    for names, stack in _equal_sizes(images):
        if patch is None or tuple(stack.shape[2:]) == tuple(patch):
            logits = network(stack)
        else:
            logits = sliding_window_inference(stack, tuple(patch), BATCH, network, overlap, mode="gaussian")
        yield from zip(names, logits, strict=True)


def _equal_sizes(images: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[list[str], torch.Tensor]]:
    waiting: list[tuple[str, torch.Tensor]] = []
    for name, image in images:
        if waiting and (len(waiting) == BATCH or waiting[0][1].shape != image.shape):
            yield [n for n, _ in waiting], torch.stack([x for _, x in waiting])
            waiting = []
        waiting.append((name, image))
    if waiting:
        yield [n for n, _ in waiting], torch.stack([x for _, x in waiting])
