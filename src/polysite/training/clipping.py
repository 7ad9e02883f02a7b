"""Clipping of gradients: steps that are too long are shortened, so that a single batch cannot spoil a model."""

from collections.abc import Sequence

import torch


def clip(weights: Sequence[torch.nn.Parameter], most: float) -> None:
    """Scale the gradients of parameters down to a norm over all of them; 0 leaves them as they are.

    If the norm is not finite, at least one gradient becomes NaN, and the site refuses the fit as diverged.
    """
    if most:
        torch.nn.utils.clip_grad_norm_(weights, most, foreach=True)
