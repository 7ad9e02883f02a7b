"""Deep supervision: the loss of a network with heads at several resolutions.

    L = sum_k 2^-k L_k / sum_k 2^-k,    L_k the loss of head k against the ground truth at 1/2^k of the resolution

The weights are nnU-Net's, and so is the coarse ground truth: of every block of voxels, the one at its centre.
"""

from collections.abc import Callable, Sequence

import torch

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits, truth) of a batch -> one number, or one per case


def supervised(loss: Loss, heads: Sequence[torch.Tensor], truth: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean of the losses of all heads, the finest first; of a single head, its loss."""
    total = loss(heads[0], truth)
    if len(heads) == 1:
        return total
    for k, logits in enumerate(heads[1:], start=1):
        total = total + 2.0**-k * loss(logits, coarser(truth, 2**k))
    return total / (2 - 2.0 ** (1 - len(heads)))


def coarser(truth: torch.Tensor, factor: int) -> torch.Tensor:
    """Return the ground truth of a batch at a fraction of its resolution, by nearest neighbours.

    >>> coarser(torch.arange(8).view(1, 1, 8), 4)
    tensor([[[2, 6]]])
    """
    space = (slice(factor // 2, None, factor) for _ in truth.shape[2:])
    return truth[:, :, *space]
