"""Seconds of a training step and of a validated case: from finished runs of the same benchmark, or measured here.

Records of finished runs are the better source: their turns include everything that an algorithm does within a round
(scores of several models, two fits, augmentation), and show how many runs shared the device. Without them a few real
training steps and one prediction are timed, with the benchmark's own network, patch, batch and augmentation.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np

from polysite import study
from polysite.config import Study
from polysite.data.case import Case
from polysite.data.sources import Phantom
from polysite.engines.record import round_seconds
from polysite.engines.run_folder import RunFolder, file_name
from polysite.errors import RunError
from polysite.site import Budget
from polysite.training import tasks
from polysite.training.network import Network, device_of
from polysite.training.predict import count_windows
from polysite.training.torch_site import TorchSite

# voxels of a brain scan of 1 mm cropped to the head: a mean of FeTS, rounded up to whole patches
VOLUME = (144, 176, 144)
SIDE = 64  # largest side of a patch that is timed on a CPU
STEPS = 12  # timed on a GPU, after as many in which the network is compiled; one on a CPU


@dataclass(frozen=True)
class Speed:
    """Seconds of one run."""

    step: float
    case: float  # validated or tested

    def seconds(self, steps: int, cases: int) -> float:
        """Return the seconds of so many steps and cases."""
        return steps * self.step + cases * self.case


@dataclass(frozen=True)
class Pace(Speed):
    """Seconds of a training step and of a prediction, where they come from, and how many runs share the device."""

    device: str
    how: str  # where they come from, as a sentence
    parallel: float = 1.0  # runs that shared the device, on average
    methods: Mapping[str, Speed] = field(default_factory=dict)  # of methods with a finished run

    def of(self, method: str) -> Speed:
        """Return the speed of a method; that of all without a finished run."""
        return self.methods.get(method, self)


@dataclass(frozen=True)
class _Effort:
    """What a run did, and the seconds that it took."""

    steps: int
    cases: int
    turns: float  # seconds of the sites' turns
    rest: float  # seconds of validation, merging and checkpoints
    begin: float
    end: float


def recorded(out: Path, methods: Collection[str], chosen: Study) -> Pace | None:
    """Return the pace of finished runs in the folder of a benchmark; None if there is none.

    Args:
        out: The folder, which need not exist.
        methods: Names of the benchmark's methods.
        chosen: A study of the benchmark, for its device.
    """
    found = {name: [e for run in _finished(out, name) if (e := _effort(run))] for name in methods}
    every = [effort for efforts in found.values() for effort in efforts]
    if not every:
        return None
    whole, shared = _speed(every), _parallel(every)
    methods_with = {name: _speed(efforts) for name, efforts in found.items() if efforts}
    how = (
        f"Speeds of {len(every)} finished runs in {out}: {whole.step:.3g} s a step and {whole.case:.3g} s a validated "
        f"case on average, with {shared:.1f} runs in parallel; methods without a finished run are taken to have the "
        "average."
    )
    return Pace(whole.step, whole.case, str(device_of(chosen.train.device)), how, shared, methods_with)


def _finished(out: Path, method: str) -> list[Path]:
    """Return the folders of a method's finished runs, in all federations."""
    place = out / "runs" / file_name(method)
    return sorted(file.parent for depth in ("*", "*/*") for file in place.glob(f"{depth}/result.json"))


def _effort(run: Path) -> _Effort | None:
    """Return the effort of a finished run; None if it cannot be read or trained nothing."""
    try:
        records = RunFolder.open(run).records()
        times = [(run / name).stat().st_mtime for name in ("versions.json", "result.json")]
    except (RunError, OSError):
        return None
    turns = sum(site.seconds for record in records for site in record.sites.values())
    steps = sum(site.steps for record in records for site in record.sites.values())
    cases = sum(v.cases for r in records for group in (r.validation, r.peeked) for v in group.values())
    passed = sum(round_seconds(records))
    return _Effort(steps, cases, turns, max(0.0, passed - turns), *times) if steps else None


def _speed(efforts: Sequence[_Effort]) -> Speed:
    steps, cases = sum(e.steps for e in efforts), sum(e.cases for e in efforts)
    return Speed(sum(e.turns for e in efforts) / steps, sum(e.rest for e in efforts) / max(cases, 1))


def _parallel(efforts: Sequence[_Effort]) -> float:
    """Return the mean number of runs that ran at the same time, while any ran.

    >>> one, two, later = (_Effort(1, 1, 1, 0, *when) for when in ((0, 10), (0, 10), (20, 30)))
    >>> _parallel([one, two, later])
    1.5
    """
    busy, last = 0.0, float("-inf")
    for effort in sorted(efforts, key=lambda e: e.begin):
        busy += max(0.0, effort.end - max(last, effort.begin))
        last = max(last, effort.end)
    return max(1.0, sum(e.end - e.begin for e in efforts) / busy) if busy else 1.0


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
