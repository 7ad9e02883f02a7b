"""Tasks: segmentation with overlapping or exclusive labels, and classification.

A task defines the output channels of the network, its losses (one number per case), and the score of a prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from polysite.errors import ConfigError, DataError
from polysite.metrics.overlap import BACKGROUND, counted
from polysite.site import CaseScore


@dataclass(frozen=True)
class Outline:
    """Segmentation with a sigmoid per label, so that labels may overlap (whole tumour, core, enhancing)."""

    losses = ("dice", "dice_ce")

    def outputs(self, labels: Sequence[str]) -> int:
        """Return the number of labels."""
        return len(labels)

    def loss(self, name: str, logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """Return the soft Dice loss with smoothing 1: 1 - (2 sum p g + 1) / (sum p + sum g + 1), mean over labels."""
        found = _soft_dice(torch.sigmoid(logits), truth)
        if name == "dice_ce":
            found = found + binary_cross_entropy_with_logits(logits, truth, reduction="none").flatten(1).mean(1)
        return found

    def channels(self, truth: torch.Tensor) -> torch.Tensor:
        """Return the ground truth: one channel per label."""
        return truth

    def shift(self, shares: torch.Tensor, count: float, clip: float) -> torch.Tensor:
        """Return the shift of every channel that cancels the label frequencies: log(pi / (1 - pi)).

        ``shares`` are the labels' shares of ``count`` voxels, or cases. pi counts one more voxel with and without the
        label, so it is never 0 or 1.
        """
        return torch.logit((shares.double() * count + 1) / (count + 2)).clamp(-clip, clip).float()

    def masks(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a mask per label."""
        return logits > 0


@dataclass(frozen=True)
class Exclusive:
    """Segmentation with a softmax over labels and background, so that a voxel has at most one label."""

    losses = ("dice", "dice_ce", "ce")

    def outputs(self, labels: Sequence[str]) -> int:
        """Return the number of labels, plus one for the background."""
        return len(labels) + 1

    def loss(self, name: str, logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """Return the soft Dice loss of the labels without the background; ``ce`` is the mean cross-entropy of the
        voxels, background included, and ``dice_ce`` the sum of both."""
        full = self.channels(truth)
        if name == "ce":
            return self._entropy(logits, full)
        found = _soft_dice(torch.softmax(logits, 1)[:, 1:], truth)
        return found + self._entropy(logits, full) if name == "dice_ce" else found

    @staticmethod
    def _entropy(logits: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits, full, reduction="none").flatten(1).mean(1)

    def channels(self, truth: torch.Tensor) -> torch.Tensor:
        """Return the ground truth with a background channel first."""
        return torch.cat([1 - truth.amax(1, keepdim=True), truth], 1)

    def shift(self, shares: torch.Tensor, count: float, clip: float) -> torch.Tensor:
        """Return log n_c / n, the background first."""
        full = torch.cat([(1 - shares.sum()).clamp(min=0)[None], shares])
        return full.log().clamp(min=-clip)

    def masks(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a mask per label, without the background."""
        chosen = logits.argmax(0)
        return torch.stack([chosen == label for label in range(1, len(logits))])


@dataclass(frozen=True)
class Classify:
    """Classification: one class per image."""

    losses = ("ce",)

    def outputs(self, labels: Sequence[str]) -> int:
        """Return the number of classes."""
        return len(labels)

    def loss(self, name: str, logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy."""
        return cross_entropy(logits, truth, reduction="none")

    def channels(self, truth: torch.Tensor) -> torch.Tensor:
        """Return the ground truth: one number per class."""
        return truth

    def shift(self, shares: torch.Tensor, count: float, clip: float) -> torch.Tensor:
        """Return log n_c / n."""
        return shares.log().clamp(min=-clip)

    def masks(self, logits: torch.Tensor) -> torch.Tensor:
        """Return True for the predicted class."""
        return torch.arange(len(logits), device=logits.device) == logits.argmax()

    def score(self, logits: torch.Tensor, truth: torch.Tensor, loss: float) -> CaseScore:
        """Return the accuracy (0 or 1), the predicted and the true class."""
        predicted, true = int(logits.argmax()), int(truth.argmax())
        return CaseScore({"accuracy": float(predicted == true)}, loss, predicted, true)


def _soft_dice(probabilities: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return 1 - (2 sum p g + 1) / (sum p + sum g + 1) of every case, mean over labels.

    It equals MONAI's DiceLoss to the last bit; that one calls the host and cannot be compiled as a whole.
    """
    space = tuple(range(2, truth.ndim))
    true = (probabilities * truth).sum(space)
    extra, missed = 0.5 * (probabilities.sum(space) - true), 0.5 * (truth.sum(space) - true)
    return (1 - (2 * true + 1) / (2 * (true + extra + missed) + 1)).mean(1)


def tally(masks: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the voxels in both, in the predicted and in the true mask, of the background and of every label.

    The result stays on the device, so that the host need not wait for every case.
    """
    found = torch.cat([~masks.any(0, keepdim=True), masks]).flatten(1)
    true = torch.cat([~truth.any(0, keepdim=True), truth]).flatten(1)
    return torch.stack([(found & true).sum(1), found.sum(1), true.sum(1)], 1)


def tallied(labels: Sequence[str], counts: Sequence[tuple[int, int, int]], voxels: int, loss: float) -> CaseScore:
    """Return the Dice of every label of a case, with the counts of voxels, from the numbers of ``tally``."""
    found = {k: counted(*each, voxels) for k, each in zip((BACKGROUND, *labels), counts, strict=True)}
    return CaseScore({k: found[k].dice for k in labels}, loss, counts={k: o.count for k, o in found.items()})


Task = Outline | Exclusive | Classify  # what the network predicts, and how that is compared with the ground truth


@dataclass(frozen=True)
class CaseLoss:
    """The loss of every case of a batch; equal ones compute the same.

    Args:
        task: The task.
        name: Name of the loss, one of the task's.
    """

    task: Task
    name: str

    def __call__(self, logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """Return the loss of every case."""
        return self.task.loss(self.name, logits, truth)


def find(kind: str, exclusive: bool) -> Task:
    """Return the task of the data and the configuration."""
    if kind == "classification":
        return Classify()
    return Exclusive() if exclusive else Outline()


def check_loss(task: Task, name: str) -> str:
    """Return the name of the loss; ``auto`` is the default of the task."""
    if name == "auto":
        return task.losses[0]
    if name == "ce" and isinstance(task, Outline):
        raise ConfigError(
            "train.loss = 'ce' is a softmax over background and labels: set train.exclusive = true, or choose "
            f"{' or '.join(task.losses)}"
        )
    if name not in task.losses:
        raise ConfigError(f"train.loss = {name!r} does not fit this task; choose {' or '.join(task.losses)}")
    return name


def check_label(task: Task, label: torch.Tensor, who: str) -> None:
    """Refuse overlapping labels if the task allows one label per voxel."""
    if isinstance(task, Exclusive) and bool((label.sum(0) > 1).any()):
        raise DataError(f"{who}: labels overlap, but train.exclusive gives every voxel one label; declare them apart")
