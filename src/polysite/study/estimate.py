"""What a study takes, before anything is trained: steps and bytes of every round, memory and disk space.

Steps, bytes and the sizes of states and replies come from a rehearsal (``costs/rehearsal.py``), seconds from steps and
a speed (``benchmark/pace.py``). Memory and disk space are lower bounds: what is refused cannot work, and what is
accepted may still fail. The memory of a training step has the parameters, gradients and optimiser, and the outputs of
the layers (those of a small patch, scaled to the number of voxels). A simulated run also has the cases, the server's
state, and the replies of a round if the algorithm needs all together; the sites' memories are listed apart, because
they leave the device when they do not fit (``engines/memory_store.py``).
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from math import ceil, prod
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch

from polysite import config, machine
from polysite.algorithms.base import facts, trials
from polysite.config import Study
from polysite.costs.model import Cost, Demand, Load, planned, without_grid
from polysite.costs.rehearsal import Effort, rehearse
from polysite.data.case import SPLITS
from polysite.data.files import Files
from polysite.data.sources import Phantom, PhantomClasses
from polysite.engines.memory_store import SHARE
from polysite.engines.plan import cohort
from polysite.engines.run_folder import KEPT
from polysite.errors import ConfigError
from polysite.machine import Memory
from polysite.payload import Payload
from polysite.study.cases import PreparedCases, deal_cases
from polysite.study.sites import POOLED, build_module, train_sizes
from polysite.training import tasks
from polysite.training.network import device_of, leaves_of
from polysite.tree import Tree

Look = Callable[[Any, Mapping[str, Payload]], None]  # sees the server's state and the memories of the sites

FLOAT, HALF, DOUBLE = 4, 2, 8  # bytes of a number
SIDE = 32  # voxels of a side of the patch whose layers are measured
COPIES = 3  # of the parameters in a step: the model, its gradients, and what the server sent
UNKNOWN = 1 << 62
CROPPED = 8  # times that cropping to the foreground may make a scan smaller; known only when it is opened
VERSIONS = 6  # of a hospital's memory and of models on its disk: the last, the best, and those that checkpoints need


def initial_params(study: Study, module: Any = None) -> Tree:
    """Return the parameters that every site starts from, without building a site."""
    leaves = leaves_of(build_module(study) if module is None else module)[1]
    return {k: v.detach().clone(memory_format=torch.contiguous_format) for k, v in leaves.items()}


# steps and bytes


def cost(study: Study, grid: bool = True) -> Cost:
    """Forecast the steps, bytes and simulated time of a study. Nothing is trained: the rounds are rehearsed with the
    sizes of its hospitals.

    Args:
        study: The study.
        grid: Count all candidates that fine-tuning chooses from; otherwise only the one that a site keeps.
    """
    done = loads(study)
    return planned(done if grid else without_grid(done), study.cost, study.train.batch)


def loads(study: Study, params: Tree | None = None, most: int | None = None) -> list[Mapping[str, Load]]:
    """Return the work and traffic of every site in each round of a study, by rehearsing the rounds.

    Args:
        study: The study.
        params: Initial parameters; None builds the network of the study.
        most: Rounds of a phase to rehearse; the others are assumed to be like the last of these. None rehearses all.
    """
    params = initial_params(study) if params is None else params
    dealt = deal_cases(study)
    train = {site: len(splits["train"]) for site, splits in dealt.items() if splits["train"]}
    validation = {site: len(splits["validation"]) for site, splits in dealt.items() if splits["validation"]}
    done: list[Mapping[str, Load]] = []
    for k, phase in enumerate(config.phases(study)):
        algorithm: Any = phase.algorithm
        few = None if facts(algorithm).exchanges else most  # such an algorithm needs all its rounds
        if most and hasattr(algorithm, "restarts"):
            phase = replace(phase, algorithm=replace(algorithm, restarts=1))  # one start of a mixture will do
        done += _rehearsed(phase, params, train, validation, done, most=few, final=k == len(study.then))
    return done


def _rehearsed(
    study: Study,
    params: Tree,
    train: Mapping[str, int],
    validation: Mapping[str, int],
    before: Sequence[Mapping[str, Load]] = (),
    look: Look | None = None,
    most: int | None = None,
    final: bool = False,
) -> list[Mapping[str, Load]]:
    """Return the load of every site in each round of a phase. The first round includes the model handed over, and the
    last one, with ``final``, the evaluation of the best model."""
    plan = study.run
    if plan.pooled:
        train, validation = {POOLED: sum(train.values())}, {POOLED: sum(validation.values())}

    def asked(index: int) -> Sequence[str]:
        return cohort(tuple(sorted(train)), plan.share, study.seed, len(before) + index)

    loads = list(
        rehearse(
            study.algorithm,
            params,
            train,
            Effort(study.train.batch, study.train.epochs, study.train.patches, study.train.steps),
            rounds=plan.rounds,
            most=most,
            cohort=asked,
            validation=validation,
            validate_every=plan.validate_every,
            numbers=len(study.data.label_names) + 1 if study.data.task == "segmentation" else 4,
            handed={i: _model(before, i) for i in train if before},
            final=final,
            modalities=len(study.data.modality_names),
            look=look,
        )
    )
    if plan.pooled:
        loads = [{i: replace(load, down=0, up=0) for i, load in each.items()} for each in loads]
    return [{i: replace(load, trials=trials(study.algorithm)) for i, load in each.items()} for each in loads]


def _model(rounds: Sequence[Mapping[str, Load]], site: str) -> int:
    """Return the bytes of the model that a site was sent in earlier rounds."""
    return min((each[site].down for each in rounds if site in each and each[site].down), default=0)


def exchanged(phase: Study, params: Tree, train: Mapping[str, int]) -> tuple[int, int, int]:
    """Return the bytes of the server's state in a phase, of the memories of all sites and, if the algorithm needs them
    together, of the replies of a round. They come from two rehearsed rounds; zeros if these are not possible.

    Args:
        phase: The phase of a study.
        params: Initial parameters.
        train: Number of training cases of every site that trains.
    """
    elements = {k: prod(v.shape) for k, v in params.items()}
    states, memories = [0], [0]

    def look(state: Any, memory: Any) -> None:
        states.append(tree_bytes(state, elements))
        memories.append(tree_bytes(memory, elements))

    everyone = replace(phase, run=replace(phase.run, share=1.0))  # in the end all sites have taken part
    try:
        loads = _rehearsed(everyone, params, train, {}, look=look, most=2)
    except Exception:  # a user's algorithm may ask a site for what a stand-in lacks; the run itself reports mistakes
        return 0, 0, 0
    up = max((sum(load.up for load in each.values()) for each in loads), default=0)
    together = facts(phase.algorithm).needs == "each"
    return max(states), max(memories), int(up * phase.run.share) if together else 0


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


# memory and disk space of a simulated run


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
        why = ""
        if self.fixed > self.there.total:
            largest = max(self.parts, key=lambda name: self.parts[name])
            why = f"{self.device} has {gigabytes(self.there.total)} in all: {ADVICE[largest]}"
        elif self.spread["disk"] > self.temporary:
            free = gigabytes(self.temporary)
            why = f"the temporary folder has {free} free: set TMPDIR to a folder with more"
        elif self.disk > self.free_disk:
            why = "choose another --out"
        if why:
            raise ConfigError(f"the run does not fit: {self.line}; {why}")
        return self


STEP, LAYERS, CASES, SERVER, REPLIES = "model and optimiser", "layers of a step", "cases", "server", "replies"
ADVICE = {
    STEP: "choose a smaller model",
    LAYERS: "choose a smaller train.batch or train.patch",
    CASES: "set train.cases = 'disk'",
    SERVER: "choose fewer sites, or an algorithm that keeps one model",
    REPLIES: "choose fewer sites (run.share), or an algorithm with needs = 'sum'",
}


def foresee(study: Study, ready: PreparedCases, out: Path) -> Peak:
    """Return the memory and disk space that a simulated run takes at its peak; refuse one that cannot fit.

    Args:
        study: The study.
        ready: The prepared cases of every site.
        out: The run folder, which need not exist.
    """
    module = build_module(study)
    params = initial_params(study, module)
    train = {site: count for site, count in train_sizes(ready).items() if count}
    step, (device, there) = step_bytes(study, module), device_memory(study)
    phases = [exchanged(phase, params, train) for phase in config.phases(study)]
    state, memories, replies = map(max, zip(*phases, strict=True))
    cases = sum(c.image.nbytes + c.label.nbytes for splits in ready.values() for k in SPLITS for c in splits[k])
    parts = {
        STEP: step.parameters,
        LAYERS: step.layers,
        CASES: cases if study.train.cases == "device" else 0,
        SERVER: state,
        REPLIES: replies,
    }
    disk = folder_bytes(study, step.model, state + memories)
    rooms = [free_disk(path) for path in (out, Path(gettempdir()))]
    return Peak(device, there, parts, memories, len(train), machine.memory().free, disk, *rooms).check()


def folder_bytes(study: Study, models: int, checkpoint: int) -> int:
    """Return the bytes of a run's checkpoints, and of its best and last models.

    Args:
        study: The study.
        models: Bytes of a model, or of those of all sites that have one of their own.
        checkpoint: Bytes of a checkpoint: the server's state and the memories of the sites.
    """
    kept = KEPT + 1 + len(study.then)  # the last ones, the best, and the beginning of every phase
    return kept * checkpoint + 2 * models


def free_disk(path: Path) -> int:
    """Return the free bytes of the disk of a path, which need not exist."""
    return shutil.disk_usage(path).free if path.exists() else free_disk(path.absolute().parent)


def device_memory(study: Study) -> tuple[str, Memory]:
    """Return the name of the device that a study trains on, and its memory."""
    try:
        device = device_of(study.train.device)
    except ConfigError:  # the run reports the unknown device
        return study.train.device, Memory(UNKNOWN, UNKNOWN)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return str(device), Memory(total, free)
    return "this machine", machine.memory()


@dataclass(frozen=True)
class TrainingStep:
    """Lower bounds of the bytes of one training step."""

    model: int  # one copy of the parameters
    parameters: int  # with gradients, optimiser and what the server sent
    layers: int  # outputs of the layers

    @property
    def total(self) -> int:
        """Parameters and layers together."""
        return self.parameters + self.layers


def step_bytes(study: Study, module: Any) -> TrainingStep:
    """Return lower bounds of the bytes of one training step.

    Args:
        study: The study.
        module: Its network, which predicts one small patch; outputs of layers grow with the number of voxels.
    """
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
    return TrainingStep(model, (COPIES + states) * model, (HALF if half else FLOAT) * layers)


# what a study takes at one hospital, which opens no case (except one, for its size) to find out


def demand(local: Study, cases: int) -> Demand:
    """Return what a study takes at a hospital with so many cases.

    The network is built on torch's device ``meta``, which has shapes and no memory, and one training step is measured
    there: nothing that a coordinator chooses is allocated.
    """
    try:
        with torch.device("meta"):
            module = build_module(local)
            step = step_bytes(local, module)
    except RuntimeError as problem:  # sizes that no 64-bit number holds
        raise ConfigError("the network of this study is too large for any computer; choose a smaller one") from problem
    modalities, labels = len(local.data.modality_names), local.data.label_names
    outputs = tasks.find(local.data.task, local.train.exclusive).outputs(labels)
    image = case_bytes(local, _voxels(local))
    predicted = FLOAT * prod(local.train.window or local.train.patch) * (modalities + outputs)
    kept = image * cases
    computed = max(step.total, step.model + predicted)
    on_gpu = device_of(local.train.device).type == "cuda"
    if generated := isinstance(local.data, Phantom | PhantomClasses):
        held = kept + DOUBLE * modalities * prod(local.data.shape)  # one is drawn, in float64
    else:
        held = 2 * image  # files are mapped from the cache
    return Demand(
        parameters=step.model // FLOAT,
        memory=held + 2 * step.model + (0 if on_gpu else computed),
        gpu=computed + (kept if local.train.cases == "device" else 0) if on_gpu else 0,
        disk=VERSIONS * step.model + (0 if generated else kept),
    )


def case_bytes(study: Study, voxels: int) -> int:
    """Return the bytes of a prepared case: an image of 32-bit numbers and, in a segmentation, a byte per label."""
    labels = len(study.data.label_names) if study.data.task == "segmentation" else 0
    return voxels * (FLOAT * len(study.data.modality_names) + labels)


def _voxels(local: Study) -> int:
    """Return the voxels of a prepared case: of the image itself if one can be opened, at least those of the patch."""
    shape, spacing = _geometry(local)
    wanted = local.prepare.spacing
    if wanted and len(wanted) == len(shape):
        shape = tuple(ceil(n * s / w) for n, s, w in zip(shape, spacing, wanted, strict=True))
    sides = local.prepare.size
    if sides and len(sides) == len(shape):
        shape = tuple(side or n for side, n in zip(sides, shape, strict=True))
    patch = local.train.patch if len(local.train.patch) == len(shape) else (1, *local.train.patch)
    if len(patch) != len(shape):
        return prod(local.train.patch)
    least = prod(max(p, s) for p, s in zip(patch, sides or patch, strict=False))
    whole = prod(max(n, p) for n, p in zip(shape, patch, strict=True))
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


def gigabytes(count: int) -> str:
    """Return a number of bytes as text.

    >>> gigabytes(3_250_000_000), gigabytes(40_000_000)
    ('3.2 GB', '40 MB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
