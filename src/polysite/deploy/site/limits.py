"""Limits that hold before what a study takes is estimated (``study/estimate.py``), and while it runs.

The coordinator chooses the network, the patch, the size of prepared images and, in a rehearsal, the generated patients;
each could fill the memory or the disk of a hospital.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

from polysite import study
from polysite.config import Study
from polysite.data.sources import Phantom, PhantomClasses
from polysite.errors import ConfigError

MAX_LAYERS = 2000  # of a network; building more would itself take long
MAX_RESOLUTIONS = 16  # of a U-Net, and blocks of a DenseNet
MAX_WIDTH = 1 << 20  # channels of a layer
MAX_CASES = 100_000  # of all hospitals of a rehearsal


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
