"""Seconds of a training step and of a validated case, measured on this machine.

A few real training steps and one prediction are timed, with the study's own network, patch, batch and augmentation.
What an algorithm does besides within a round (scores of several models, say) is not in them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from polysite import study
from polysite.config import Study
from polysite.data.case import Case
from polysite.data.sources import Phantom
from polysite.site import Budget
from polysite.training import tasks
from polysite.training.network import Network
from polysite.training.predict import count_windows
from polysite.training.torch_site import TorchSite

# voxels of a brain scan of 1 mm cropped to the head: a mean of FeTS, rounded up to whole patches
VOLUME = (144, 176, 144)
SIDE = 64  # largest side of a patch that is timed on a CPU
STEPS = 12  # timed on a GPU, after as many in which the network is compiled; one on a CPU


@dataclass(frozen=True)
class Pace:
    """Seconds of a training step and of a prediction on a device."""

    step: float
    case: float  # validated or tested
    device: str
    how: str  # how they were measured, as a sentence

    def seconds(self, steps: int, cases: int) -> float:
        """Return the seconds of so many steps and cases."""
        return steps * self.step + cases * self.case


def measure(chosen: Study, expected: int = 0) -> Pace:
    """Time a few training steps and a prediction of a study's network on this machine's device.

    On a GPU the patch, the batch and the size of a scan are the real ones. On a CPU one patch of at most 64 voxels a
    side is timed, and the time is scaled with the number of voxels.

    Args:
        chosen: The study.
        expected: Steps of a run; long runs compile on a GPU.
    """
    network = Network(study.build_module(chosen), chosen.train, expected)
    gpu = network.device.type == "cuda"
    step = chosen.model.divisor
    patch = (
        chosen.train.patch if gpu else tuple(min(side, max(step, SIDE // step * step)) for side in chosen.train.patch)
    )
    batch = chosen.train.batch if gpu else 1
    task = tasks.find(chosen.data.task, chosen.train.exclusive)
    scans = chosen.data.task == "segmentation"  # a case to classify is as large as the patch
    scan = tuple(max(a, b) for a, b in zip(scan_size(chosen), chosen.train.patch, strict=False))
    whole = scan if gpu and scans else patch
    train = replace(chosen.train, patch=patch, window=(), batch=batch, epochs=1, steps=None)
    rng = np.random.default_rng(0)
    cases = [_drawn(rng, chosen, whole, k) for k in range(batch)]
    split = {"train": cases, "validation": cases[:1]}
    site = TorchSite("plan", network, split, chosen.data.label_names, train, 0, task)
    start = site.start
    steps = STEPS if gpu else 1
    training = _timed(lambda: site.fit(start, budget=Budget(steps=steps)), network) / steps
    predicting = _timed(lambda: site.score(start, [cases[0].name]), network)
    if gpu:
        how = f"Measured on {network.device}: {training:.3g} s a step of {batch} patches, {predicting:.3g} s a scan."
        return Pace(training, predicting, str(network.device), how)
    larger = prod(chosen.train.patch) / prod(patch)
    how = (
        f"Measured on a CPU: {training:.3g} s a patch of {' x '.join(map(str, patch))}, and scaled by the number of "
        "voxels. These are CPU hours; a GPU is tens to hundreds of times faster."
    )
    window = chosen.train.window or chosen.train.patch
    windows = count_windows(scan[: len(window)], window, chosen.train.overlap) if scans else 1
    return Pace(training * larger * chosen.train.batch, predicting * larger * windows, "cpu", how)


def scan_size(chosen: Study) -> tuple[int, ...]:
    """Return the voxels of a scan: the shape of a phantom; a mean head for other data, which are not opened."""
    return chosen.data.shape if isinstance(chosen.data, Phantom) else VOLUME


def _drawn(rng: np.random.Generator, chosen: Study, shape: Sequence[int], k: int) -> Case:
    image = rng.standard_normal((len(chosen.data.modality_names), *shape), np.float32)
    labels = len(chosen.data.label_names)
    drawn = np.array(k % labels) if chosen.data.task == "classification" else rng.integers(0, max(10, labels), shape)
    label = np.stack([drawn == channel for channel in range(labels)]).astype(np.uint8)
    return Case("plan", str(k), image, label, (1.0,) * len(shape))


def _timed(call: Callable[[], object], network: Network) -> float:
    """Return the seconds of a second call; the first one warms up."""
    import torch

    for _ in range(2):
        begun = time.perf_counter()
        call()
        if network.device.type == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - begun
