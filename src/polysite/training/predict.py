"""The answers to whole images from a network that has seen patches.

To segment, a sliding window with Gaussian weights; to classify, the whole image at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from monai.inferers.utils import sliding_window_inference

Network = Callable[[torch.Tensor], torch.Tensor]

TOGETHER = 4  # windows and equal-sized cases a pass; one alone falls to a slow convolution path on a CPU


@torch.inference_mode()
def predict(
    network: Network, images: Iterable[tuple[str, torch.Tensor]], patch: Sequence[int] | None, overlap: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """The logits of every named image, equal-sized images together; without a patch, the whole image is one window."""
    for names, stack in _equal_sizes(images):
        if patch is None or tuple(stack.shape[2:]) == tuple(patch):
            logits = network(stack)
        else:
            logits = sliding_window_inference(stack, tuple(patch), TOGETHER, network, overlap, mode="gaussian")
        yield from zip(names, logits, strict=True)


def _equal_sizes(images: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[list[str], torch.Tensor]]:
    waiting: list[tuple[str, torch.Tensor]] = []
    for name, image in images:
        if waiting and (len(waiting) == TOGETHER or waiting[0][1].shape != image.shape):
            yield [n for n, _ in waiting], torch.stack([x for _, x in waiting])
            waiting = []
        waiting.append((name, image))
    if waiting:
        yield [n for n, _ in waiting], torch.stack([x for _, x in waiting])
