"""What a study asks of a hospital's computer, estimated before anything is allocated.

The coordinator chooses the network, the patch, the size of prepared images and, in a rehearsal, the generated patients;
each could fill the memory or the disk of a hospital. The network is built on torch's device ``meta``, which has shapes
and no memory, and one training step is measured there. All numbers are lower bounds: a refused study cannot work within
the limits, and one that is accepted may still fail.
"""

import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from polysite import machine, peak, study
from polysite.config import Study
from polysite.data.case import CaseRef
from polysite.data.files import Files
from polysite.data.sources import Phantom, PhantomClasses
from polysite.deploy.site.demand import Demand
from polysite.errors import ConfigError
from polysite.training.network import device_of

MAX_LAYERS = 2000  # of a network; building more would itself take long
MAX_RESOLUTIONS = 16  # of a U-Net, and blocks of a DenseNet
MAX_WIDTH = 1 << 20  # channels of a layer
MAX_CASES = 100_000  # of all hospitals of a rehearsal
CROPPED = 8  # times that cropping to the foreground may make a scan smaller; known only when it is opened
VERSIONS = 6  # of a site's memory and of models on disk: the last, the best, and those that checkpoints need
FLOAT, DOUBLE = 4, 8  # bytes of a number


class TimeIsUp(BaseException):
    """A request took longer than the hospital allows. No ``except Exception`` on the way holds it up."""


def refuse_size(wanted: Study) -> None:
    """Refuse a network of too many layers and a rehearsal of too many patients, before either is listed."""
    study.refuse_ensemble(wanted)
    settings = [getattr(wanted.model, f.name) for f in fields(wanted.model)]
    longest = max((len(value) for value in settings if isinstance(value, tuple)), default=0)
    widest = max((n for value in settings for n in _numbers(value)), default=0)
    if longest > MAX_RESOLUTIONS or widest > MAX_WIDTH or sum(getattr(wanted.model, "blocks", ())) > MAX_LAYERS:
        raise ConfigError("the network of this study has more or wider layers than a hospital builds: choose a smaller")
    if isinstance(wanted.data, Phantom | PhantomClasses):
        count = sum(hospital.cases for hospital in wanted.data.sites.values())
        if count > MAX_CASES:
            raise ConfigError(f"a rehearsal of {count} generated patients is too large; choose at most {MAX_CASES}")


def estimate(local: Study, cases: Sequence[CaseRef]) -> Demand:
    """Return what a study takes with these cases, whose images are not opened (except one, for its size)."""
    try:
        with torch.device("meta"):
            module = study.build_module(local)
            step = peak.step_bytes(local, module)
            outputs = len(local.data.label_names) + 1
    except RuntimeError as problem:  # sizes that no 64-bit number holds
        raise ConfigError("the network of this study is too large for any computer; choose a smaller one") from problem
    voxels = _voxels(local)
    image = voxels * (FLOAT * len(local.data.modality_names) + outputs)
    window = math.prod(local.train.window or local.train.patch)
    predicted = FLOAT * window * (len(local.data.modality_names) + outputs)
    generated = isinstance(local.data, Phantom | PhantomClasses)
    kept = image * len(cases)
    parameters = sum(p.numel() for p in module.parameters())
    computed = max(step.total, step.model + predicted)
    on_gpu = device_of(local.train.device).type == "cuda"
    held = kept + _drawing(local) if generated else 2 * image  # files are mapped from the cache
    return Demand(
        parameters=parameters,
        memory=held + 2 * step.model + (0 if on_gpu else computed),
        gpu=computed + (kept if local.train.cases == "device" else 0) if on_gpu else 0,
        disk=VERSIONS * step.model + (0 if generated else kept),
    )


def gpu_memory(local: Study) -> int:
    """Return the bytes of the GPU on which a study trains; 0 without one."""
    device = device_of(local.train.device)
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0


def main_memory() -> int:
    """Return the bytes of main memory that this process may use."""
    return machine.memory().total


def folder_size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TimeIsUp`` in this block after so many seconds. Only the main thread of a process can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _numbers(value: Any) -> list[int]:
    return [n for n in (value if isinstance(value, tuple) else (value,)) if type(n) is int]


def _drawing(local: Study) -> int:
    """Return the bytes of a generated patient while it is drawn, in float64."""
    data = local.data
    sides = data.shape if isinstance(data, Phantom | PhantomClasses) else ()
    return DOUBLE * len(data.modality_names) * math.prod(sides)


def _voxels(local: Study) -> int:
    """Return the voxels of a prepared case: of the image itself if one can be opened, at least those of the patch."""
    shape, spacing = _geometry(local)
    wanted = local.prepare.spacing
    if wanted and len(wanted) == len(shape):
        shape = tuple(math.ceil(n * s / w) for n, s, w in zip(shape, spacing, wanted, strict=True))
    sides = local.prepare.size
    if sides and len(sides) == len(shape):
        shape = tuple(side or n for side, n in zip(sides, shape, strict=True))
    patch = local.train.patch if len(local.train.patch) == len(shape) else (1, *local.train.patch)
    if len(patch) != len(shape):
        return math.prod(local.train.patch)
    least = math.prod(max(p, s) for p, s in zip(patch, sides or patch, strict=False))
    whole = math.prod(max(n, p) for n, p in zip(shape, patch, strict=True))
    cropped = local.prepare.crop and not sides and not isinstance(local.data, Phantom | PhantomClasses)
    return max(least, whole // CROPPED) if cropped else whole


def _geometry(local: Study) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return shape and voxel size of the images: those of generated patients, or of the first file that can be read."""
    data = local.data
    if isinstance(data, PhantomClasses) and data.flat:
        return data.shape[1:], (1.0, 1.0)
    if isinstance(data, Phantom | PhantomClasses):
        return data.shape, (1.0,) * 3
    known = data.geometry() if isinstance(data, Files) else None
    return known or ((1,) * data.dims, (1.0,) * data.dims)
