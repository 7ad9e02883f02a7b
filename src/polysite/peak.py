"""The memory and the disk space that a run takes at its peak, estimated before it starts.

All numbers are lower bounds: a refused run cannot work, and an accepted one may still fail. On the device: parameters,
gradients and optimiser of one training step, the outputs of its layers (those of a small patch, scaled to the number of
voxels), the cases, the server's state, and the replies of a round if the algorithm needs all together. The sites'
memories are listed apart, because they leave the device when they do not fit (``engines/memory_store.py``). Sizes of
states, replies and memories come from a rehearsal of two rounds.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from polysite import config, machine
from polysite.algorithms.base import facts
from polysite.config import Study
from polysite.costs.rehearsal import Effort, rehearse
from polysite.engines.memory_store import SHARE
from polysite.engines.run_folder import KEPT
from polysite.errors import ConfigError
from polysite.machine import Memory
from polysite.training.network import device_of
from polysite.tree import Tree

FLOAT, HALF = 4, 2  # bytes of a number
SIDE = 32  # voxels of a side of the patch whose layers are measured
COPIES = 3  # of the parameters in a step: the model, its gradients, and what the server sent
SAMPLE = 8  # sites that are rehearsed of a larger federation; the others are like these
UNKNOWN = 1 << 62


@dataclass(frozen=True)
class Step:
    """Lower bounds of the bytes of one training step."""

    model: int  # one copy of the parameters
    parameters: int  # with gradients, optimiser and what the server sent
    layers: int  # outputs of the layers

    @property
    def total(self) -> int:
        """Parameters and layers together."""
        return self.parameters + self.layers


@dataclass(frozen=True)
class Exchanged:
    """Bytes of what the server and the sites of a phase keep and send."""

    state: int = 0
    memories: int = 0  # of all sites
    replies: int = 0  # of a round, if they are needed together


@dataclass(frozen=True)
class Peak:
    """Lower bounds of what a run takes, in bytes, and what there is."""

    device: str
    there: Memory  # of the device
    parts: Mapping[str, int]  # on the device, besides the memories of the sites
    memories: int
    sites: int
    host: int  # free main memory
    disk: int
    free_disk: int
    temporary: int  # free bytes in the temporary folder, for memories that fit nowhere else

    @property
    def fixed(self) -> int:
        """Bytes that must be on the device."""
        return sum(self.parts.values())

    @property
    def spread(self) -> dict[str, int]:
        """Bytes of the memories on the device, in main memory and on disk."""
        cpu = self.device == "this machine"
        rooms = {} if cpu else {self.device: int(SHARE * max(0, self.there.free - self.fixed))}
        rooms["main memory"] = int(SHARE * max(0, self.host - self.fixed * cpu))
        left, found = self.memories, dict[str, int]()
        for place, room in rooms.items():
            found[place] = min(left, room)
            left -= found[place]
        return {**found, "disk": left}

    @property
    def line(self) -> str:
        """The estimate as one sentence."""
        parts = ", ".join(f"{name} {gigabytes(count)}" for name, count in self.parts.items() if count)
        where = ", ".join(f"{gigabytes(count)} in {place}" for place, count in self.spread.items() if count)
        kept = f"; memories of {self.sites} sites {gigabytes(self.memories)} ({where})" if self.memories else ""
        return (
            f"at its peak the run takes at least {gigabytes(self.fixed)} of {gigabytes(self.there.free)} free on "
            f"{self.device} ({parts}){kept}; disk {gigabytes(self.disk)} of {gigabytes(self.free_disk)} free"
        )

    def check(self) -> "Peak":
        """Return the estimate; refuse a run that cannot fit."""
        if self.fixed > self.there.total:
            largest = max(self.parts, key=lambda name: self.parts[name])
            raise ConfigError(
                f"the run does not fit: {self.line}; {self.device} has {gigabytes(self.there.total)} in all: "
                f"{ADVICE[largest]}"
            )
        if self.spread["disk"] > self.temporary:
            raise ConfigError(
                f"the run does not fit: {self.line}; the temporary folder has {gigabytes(self.temporary)} free: set "
                "TMPDIR to a folder with more"
            )
        if self.disk > self.free_disk:
            raise ConfigError(f"the run does not fit: {self.line}; choose another --out")
        return self


STEP, LAYERS, CASES, SERVER, REPLIES = "model and optimiser", "layers of a step", "cases", "server", "replies"
ADVICE = {
    STEP: "choose a smaller model",
    LAYERS: "choose a smaller train.batch or train.patch",
    CASES: "set train.cases = 'disk'",
    SERVER: "choose fewer sites, or an algorithm that keeps one model",
    REPLIES: "choose fewer sites (run.share), or an algorithm with needs = 'sum'",
}


def estimate(study: Study, module: Any, params: Tree, cases: int, train: Mapping[str, int], out: Path) -> Peak:
    """Return what a simulated run takes.

    Args:
        study: The study.
        module: Its network, which predicts one small patch: outputs of layers grow with the number of voxels.
        params: Its parameters.
        cases: Bytes of all prepared cases.
        train: Number of training cases of every site that trains.
        out: The run folder, which need not exist.
    """
    step = step_bytes(study, module)
    device, there = device_memory(study)
    phases = [exchanged(phase, params, train) for phase in config.phases(study)]
    parts = {
        STEP: step.parameters,
        LAYERS: step.layers,
        CASES: cases if study.train.cases == "device" else 0,
        SERVER: max(p.state for p in phases),
        REPLIES: max(p.replies for p in phases),
    }
    memories = max(p.memories for p in phases)
    kept = KEPT + 1 + len(study.then)  # the last ones, the best, and the beginning of every phase
    disk = kept * (parts[SERVER] + memories) + 2 * step.model  # with the best and the last model
    rooms = [shutil.disk_usage(existing(path)).free for path in (out, Path(gettempdir()))]
    return Peak(device, there, parts, memories, len(train), machine.memory().free, disk, *rooms)


def exchanged(phase: Study, params: Tree, train: Mapping[str, int]) -> Exchanged:
    """Return the bytes of a phase, from a rehearsal; those of many sites from a few of them."""
    if phase.run.pooled:
        return _rehearsed(phase, params, {"pooled": sum(train.values())})
    if len(train) <= SAMPLE:
        return _rehearsed(phase, params, train)
    few = [dict(list(train.items())[:count]) for count in (SAMPLE // 2, SAMPLE)]
    half, some = (_rehearsed(phase, params, each) for each in few)
    if some == Exchanged():  # the algorithm needs more sites, or these by name
        return _rehearsed(phase, params, train)
    times = len(train) / SAMPLE
    grown = max(0, some.state - half.state) / (SAMPLE // 2)  # with every site
    state = some.state + int(grown * (len(train) - SAMPLE))
    return Exchanged(state, int(some.memories * times), int(some.replies * times * phase.run.share))


def _rehearsed(phase: Study, params: Tree, train: Mapping[str, int]) -> Exchanged:
    """Return the bytes of a phase with these sites; zeros if its algorithm cannot be rehearsed with them."""
    elements = {k: prod(v.shape) for k, v in params.items()}
    found = Exchanged()

    def look(state: Any, memories: Any) -> None:
        nonlocal found
        kept, remembered = tree_bytes(state, elements), tree_bytes(memories, elements)
        found = replace(found, state=max(found.state, kept), memories=max(found.memories, remembered))

    effort = Effort(phase.train.batch, phase.train.epochs, phase.train.patches, phase.train.steps)
    modalities = len(phase.data.modality_names)
    try:
        loads = list(rehearse(phase.algorithm, params, train, effort, rounds=2, modalities=modalities, look=look))
    except Exception:  # a user's algorithm may ask a site for what a stand-in lacks; the run itself reports mistakes
        return Exchanged()
    up = max((sum(load.up for load in each.values()) for each in loads), default=0)
    return replace(found, replies=up if facts(phase.algorithm).needs == "each" else 0)


def tree_bytes(value: Any, elements: Mapping[str, int], key: str = "") -> int:
    """Return the bytes of all arrays of a rehearsed value, those of the model at their real size.

    Args:
        value: A state, a payload, or anything that holds arrays.
        elements: Number of elements of every array of the model, for which a rehearsal has one.
        key: Name of the value in what holds it.
    """
    if isinstance(value, Mapping):
        return sum(tree_bytes(v, elements, str(k)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return sum(tree_bytes(v, elements, key) for v in value)
    if is_dataclass(value):
        return sum(tree_bytes(getattr(value, f.name), elements, f.name) for f in fields(value))
    return int(value.nbytes) * (elements.get(key, 1) if value.size == 1 else 1) if hasattr(value, "nbytes") else 0


def device_memory(study: Study) -> tuple[str, Memory]:
    """Return the name of the device that a study trains on, and its memory."""
    import torch

    try:
        device = device_of(study.train.device)
    except ConfigError:  # the run reports the unknown device
        return study.train.device, Memory(UNKNOWN, UNKNOWN)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return str(device), Memory(total, free)
    return "this machine", machine.memory()


def step_bytes(study: Study, module: Any) -> Step:
    """Return lower bounds of the bytes of one training step.

    Args:
        study: The study.
        module: Its network, which predicts one small patch; outputs of layers grow with the number of voxels.
    """
    import torch

    train, least = study.train, max(2 * study.model.divisor, SIDE)
    small = tuple(min(side, least) for side in train.patch)
    half = train.autocast and torch.cuda.is_available() and train.device != "cpu"
    outputs: list[int] = []

    def note(_layer: Any, _given: Any, made: Any) -> None:
        outputs.append(made.numel() if isinstance(made, torch.Tensor) else 0)

    for layer in module.modules():
        if next(layer.parameters(recurse=False), None) is not None:
            layer.register_forward_hook(note)
    model = FLOAT * sum(prod(p.shape) for p in module.parameters())
    try:
        with torch.no_grad():
            module.eval()(torch.zeros((1, len(study.data.modality_names), *small)))
    except (RuntimeError, ValueError):  # of a network that wants another size
        outputs.clear()
    layers = sum(outputs) * train.batch * prod(train.patch) // prod(small)
    states = {"sgd": int(train.momentum > 0)}.get(train.optimiser, 2)  # arrays of the optimiser per parameter
    return Step(model, (COPIES + states) * model, (HALF if half else FLOAT) * layers)


def existing(path: Path) -> Path:
    """Return the nearest folder of a path that exists."""
    return path if path.exists() else existing(path.absolute().parent)


def gigabytes(count: int) -> str:
    """Return a number of bytes as text.

    >>> gigabytes(3_250_000_000), gigabytes(40_000_000)
    ('3.2 GB', '40 MB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
