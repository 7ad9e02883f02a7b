"""What a network is asked: to outline labels, to give every voxel one label, or to name what an image shows.

A task says how many channels come out of the network, how an answer is judged while it trains (the losses, one number
per case) and how it is judged in the end.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from monai.losses.dice import DiceLoss
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from polysite.errors import ConfigError, DataError
from polysite.metrics.overlap import dice
from polysite.site import CaseScore


class Task(Protocol):
    @property
    def losses(self) -> tuple[str, ...]:
        """The losses it knows; the first is the default."""
        ...

    def outputs(self, labels: Sequence[str]) -> int:
        """Channels of the network."""
        ...

    def loss(self, name: str, logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """One number per case of a batch."""
        ...

    def channels(self, truth: torch.Tensor) -> torch.Tensor:
        """The truth of a batch, channel by channel of the network."""
        ...

    def shift(self, shares: torch.Tensor, count: float, clip: float) -> torch.Tensor:
        """By how much every channel is shifted so that the frequencies of the labels cancel.

        ``shares`` are those of the labels among ``count`` voxels, or cases.
        """
        ...

    def masks(self, logits: torch.Tensor) -> torch.Tensor:
        """The answer to one case: a mask per label; in a classification, True for the class that is said."""
        ...

    def score(self, labels: Sequence[str], logits: torch.Tensor, truth: torch.Tensor, loss: float) -> CaseScore:
        """Compare the prediction of one case with the ground truth."""
        ...


class Outline:
    """Every label is a mask of its own behind a sigmoid, so labels may overlap (whole tumour, core, enhancing)."""

    losses = ("dice", "dice_ce")
    _soft = DiceLoss(sigmoid=True, smooth_nr=1.0, smooth_dr=1.0, reduction="none")

    def outputs(self, labels: Sequence[str]) -> int:
        return len(labels)

    def loss(self, name: str, logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """Soft Dice with smoothing 1: 1 - (2 sum p g + 1) / (sum p + sum g + 1), mean over the labels."""
        found: torch.Tensor = self._soft(logits, truth).flatten(1).mean(1)
        if name == "dice_ce":
            found = found + binary_cross_entropy_with_logits(logits, truth, reduction="none").flatten(1).mean(1)
        return found

    def channels(self, truth: torch.Tensor) -> torch.Tensor:
        return truth

    def shift(self, shares: torch.Tensor, count: float, clip: float) -> torch.Tensor:
        """log(pi / (1 - pi)); pi counts one voxel more on either side, so that it is neither 0 nor 1."""
        return torch.logit((shares.double() * count + 1) / (count + 2)).clamp(-clip, clip).float()

    def masks(self, logits: torch.Tensor) -> torch.Tensor:
        return logits > 0

    def score(self, labels: Sequence[str], logits: torch.Tensor, truth: torch.Tensor, loss: float) -> CaseScore:
        return _dice_score(labels, self.masks(logits), truth, loss)


class Exclusive:
    """Every voxel is background or has exactly one label: a softmax over the labels and the background."""

    losses = ("dice", "dice_ce")
    _soft = DiceLoss(softmax=True, include_background=False, smooth_nr=1.0, smooth_dr=1.0, reduction="none")

    def outputs(self, labels: Sequence[str]) -> int:
        return len(labels) + 1

    def loss(self, name: str, logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """Soft Dice of the labels, the background left out."""
        full = self.channels(truth)
        found: torch.Tensor = self._soft(logits, full).flatten(1).mean(1)
        if name == "dice_ce":
            found = found + cross_entropy(logits, full, reduction="none").flatten(1).mean(1)
        return found

    def channels(self, truth: torch.Tensor) -> torch.Tensor:
        return torch.cat([1 - truth.amax(1, keepdim=True), truth], 1)

    def shift(self, shares: torch.Tensor, count: float, clip: float) -> torch.Tensor:
        """log n_c / n, the background first."""
        full = torch.cat([(1 - shares.sum()).clamp(min=0)[None], shares])
        return full.log().clamp(min=-clip)

    def masks(self, logits: torch.Tensor) -> torch.Tensor:
        chosen = logits.argmax(0)
        return torch.stack([chosen == label for label in range(1, len(logits))])

    def score(self, labels: Sequence[str], logits: torch.Tensor, truth: torch.Tensor, loss: float) -> CaseScore:
        return _dice_score(labels, self.masks(logits), truth, loss)


class Classify:
    """One class per image."""

    losses = ("ce",)

    def outputs(self, labels: Sequence[str]) -> int:
        return len(labels)

    def loss(self, name: str, logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """Cross-entropy."""
        return cross_entropy(logits, truth, reduction="none")

    def channels(self, truth: torch.Tensor) -> torch.Tensor:
        return truth

    def shift(self, shares: torch.Tensor, count: float, clip: float) -> torch.Tensor:
        """log n_c / n."""
        return shares.log().clamp(min=-clip)

    def masks(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(logits), device=logits.device) == logits.argmax()

    def score(self, labels: Sequence[str], logits: torch.Tensor, truth: torch.Tensor, loss: float) -> CaseScore:
        predicted, true = int(logits.argmax()), int(truth.argmax())
        return CaseScore({"accuracy": float(predicted == true)}, loss, predicted, true)


def _dice_score(labels: Sequence[str], masks: torch.Tensor, truth: torch.Tensor, loss: float) -> CaseScore:
    return CaseScore({k: dice(p, t) for k, p, t in zip(labels, masks, truth.bool(), strict=True)}, loss)


def find(kind: str, exclusive: bool) -> Task:
    """The task of the data, as the configuration wants it."""
    if kind == "classification":
        return Classify()
    return Exclusive() if exclusive else Outline()


def check_loss(task: Task, name: str) -> str:
    """The loss by name; ``auto`` is the task's own."""
    if name == "auto":
        return task.losses[0]
    if name not in task.losses:
        raise ConfigError(f"train.loss = {name!r} does not fit this task; choose {' or '.join(task.losses)}")
    return name


def check_label(task: Task, label: torch.Tensor, who: str) -> None:
    """Refuse overlapping labels where a voxel can have only one."""
    if isinstance(task, Exclusive) and bool((label.sum(0) > 1).any()):
        raise DataError(f"{who}: labels overlap, but train.exclusive gives every voxel one label; declare them apart")
