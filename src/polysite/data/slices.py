"""2D slices of volumes as cases.

A volume is prepared as a whole (resampled, cropped, normalised), so that all its slices have the same scale, and then
cut. Sites and splits are decided for volumes before they are cut: no patient has slices in two splits.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from threading import Lock
from typing import Literal

import numpy as np

from polysite import machine
from polysite.data.cache import Cache, place
from polysite.data.case import Case, CaseRef
from polysite.data.prepare import Prepare
from polysite.errors import ConfigError

Step = Callable[[int, int, str], None]
VERSION = 1  # of the facts about slices in the cache
# orientation (slice, row, column) that shows slices upright: head or front up, the patient's left on the right
STACKS: Mapping[str, str] = {"axial": "SPL", "coronal": "AIL", "sagittal": "RIP"}
LETTERS: Mapping[str, str] = {"axial": "z", "coronal": "y", "sagittal": "x"}


@dataclass(frozen=True)
class Slices:
    """Settings that make every slice of a volume a 2D case. Volumes are split first, then cut.

    Slices of the volume NAME are called NAME/z077: slice 77 of the prepared volume from 0, along z (axial), y (coronal)
    or x (sagittal). ``prepare.spacing`` and ``prepare.size`` are those of the volume, in the order slice, row, column.

    Args:
        axis: Direction of the slices; empty leaves volumes whole.
        every: Take every nth slice.
        labelled: Take only slices with a label.
        most: Take at most this number of slices of a volume, evenly spaced, of those that ``labelled`` and ``every``
            leave; 0 for all.
    """

    axis: Literal["", "axial", "coronal", "sagittal"] = ""
    every: int = 1
    labelled: bool = False
    most: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"slices.every = {self.every} must be at least 1")
        if self.most < 0:
            raise ConfigError(f"slices.most = {self.most} must be a number of slices, or 0 for all")
        if not self.axis and (self.every, self.labelled, self.most) != (1, False, 0):
            raise ConfigError(f"[slices] has no axis; set slices.axis to one of {', '.join(STACKS)}")

    def oriented(self, prepare: Prepare) -> Prepare:
        """Return the preparation of a volume, with the slices along its first axis."""
        return replace(prepare, orientation=STACKS[self.axis]) if self.axis else prepare

    def chosen(self, labelled: Sequence[bool] | np.ndarray) -> list[int]:
        """Return the slices to take from a volume, given for every slice whether it has a label.

        >>> Slices("axial", labelled=True, every=2).chosen([False, True, True, True, False])
        [1, 3]
        >>> Slices("axial", most=2).chosen([False] * 8)
        [2, 6]
        """
        marked = np.asarray(labelled, bool)
        (found,) = np.nonzero(marked | (not self.labelled))
        found = found[:: self.every]
        if self.most and len(found) > self.most:
            found = found[((np.arange(self.most) + 0.5) * len(found) / self.most).astype(int)]
        return [int(k) for k in found]

    def cut(
        self, volumes: Sequence[CaseRef], prepare: Prepare, patch: Sequence[int], watch: Step = lambda *_: None
    ) -> dict[CaseRef, list[CaseRef]]:
        """Return the slices of every volume. Volumes are prepared on first use; files stay prepared in the cache.

        Args:
            volumes: The volumes.
            prepare: Preparation of the volumes.
            patch: Size of a patch of a slice, to which slices are padded.
            watch: Called with the numbers of finished and of all volumes, and the name of the last one.
        """
        stacks = [_Stack(volume, self.oriented(prepare), (1, *patch)) for volume in volumes]
        with ThreadPoolExecutor(machine.cores()) as pool:
            found = {}
            for done, (stack, marks) in enumerate(zip(stacks, pool.map(_Stack.labelled, stacks), strict=True), start=1):
                volume = stack.volume
                found[volume] = [stack.slice(k, self._name(volume, k)) for k in self.chosen(marks)]
                watch(done, len(stacks), f"{volume.site} · {volume.name}")
        return found

    def count(self, volumes: Sequence[CaseRef]) -> dict[CaseRef, list[CaseRef]]:
        """Return ``most`` slices of every volume, for a data source that only counts its cases."""
        if not self.most:
            raise ConfigError(
                "the volumes are only counted, and so are their slices: set slices.most to the number per volume"
            )
        return {v: [_slice(v, self._name(v, k)) for k in range(self.most)] for v in volumes}

    def _name(self, volume: CaseRef, index: int) -> str:
        return f"{volume.name}/{LETTERS[self.axis]}{index:03d}"


def _range(counts: Sequence[int]) -> str:
    """Return the smallest and the largest number as text.

    >>> _range([3, 5]), _range([3, 3])
    ('3 to 5', '3')
    """
    low, high = min(counts), max(counts)
    return f"{low} to {high}" if low < high else str(low)


def summary(found: Mapping[CaseRef, Sequence[CaseRef]]) -> list[str]:
    """Return a sentence per site with the number of its slices, and one about volumes without slices."""
    counts: dict[str, list[int]] = {}
    for volume, slices in found.items():
        counts.setdefault(volume.site, []).append(len(slices))
    told = [
        f"{site}: {sum(each)} slices of {len(each)} volumes, {_range(each)} of each" for site, each in counts.items()
    ]
    return [*told, *left_out([volume for volume, slices in found.items() if not slices])]


def left_out(volumes: Sequence[CaseRef]) -> list[str]:
    """Return a sentence about volumes without slices; none if there are no such volumes."""
    if not volumes:
        return []
    some = ", ".join(f"{v.site}/{v.name}" for v in volumes[:5]) + ", ..." * (len(volumes) > 5)
    verbs = "s have", "are"
    if len(volumes) == 1:
        verbs = " has", "is"
    return [f"{len(volumes)} volume{verbs[0]} no slice with a label and {verbs[1]} left out: {some}"]


def volume_of(name: str) -> str:
    """Return the name of the volume that a slice comes from; text after the slice's number is kept.

    >>> volume_of("a-007/z077"), volume_of("a-007/z077, seed 1"), volume_of("a-007")
    ('a-007', 'a-007, seed 1', 'a-007')
    """
    return re.sub(r"/[xyz]\d{3,}(?=$|, seed \d+$)", "", name)


class _Stack:
    """A prepared volume as a stack of slices, opened when a slice is needed."""

    def __init__(self, volume: CaseRef, prepare: Prepare, patch: Sequence[int]):
        self.volume, self.prepare, self.patch = volume, prepare, patch
        self._cache, self._lock = Cache(place()), Lock()
        self._opened: Case | None = None

    def open(self) -> Case:
        """Return the prepared volume; one that is read from files is mapped from the cache."""
        with self._lock:
            if self._opened is None:
                self._opened = self._cache.get(self.volume, self.prepare, self.patch)
            return self._opened

    def labelled(self) -> np.ndarray:
        """Return for every slice whether it has a label; True for all in a classification."""
        how = ["slices", VERSION, version("monai"), asdict(self.prepare), list(self.patch)]
        known = self._cache.recall(self.volume, how)
        if known is None:
            case = self.open()
            label = case.label if case.label.ndim > 1 else np.ones((1, *case.image.shape[1:]), np.uint8)
            known = {"labelled": label.max((0, 2, 3))}
            self._cache.keep(self.volume, how, known)
        return known["labelled"].astype(bool)

    def slice(self, index: int, name: str) -> CaseRef:
        """Return one slice as a case."""

        def read() -> Case:
            whole = self.open()
            label = whole.label[:, index] if whole.label.ndim > 1 else whole.label
            return replace(
                whole, image=whole.image[:, index], label=label, spacing=whole.spacing[1:], affine=None, prepared=True
            )

        recipe = f"{self.volume.recipe} slice {index} of {self.prepare.orientation}"
        return replace(_slice(self.volume, name), read=read, recipe=recipe, prepared=True)


def _slice(volume: CaseRef, name: str) -> CaseRef:
    """Return a slice of a volume as a case of the same patient."""
    return replace(volume, name=name, patient=volume.patient or "/".join(volume.source), origin=volume.source)
