"""Checks, before anything trains, that this machine has the memory and the disk space for a benchmark.

Both estimates are lower bounds: a refused benchmark cannot run, and an accepted one may still fail. Memory is that of
one training step: parameters, gradients and the outputs of layers, whose sizes torch's meta device gives without data.
"""

import shutil
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from polysite import machine, study
from polysite.benchmark.jobs import Job
from polysite.config import Study
from polysite.engines.run_folder import KEPT
from polysite.errors import ConfigError
from polysite.training.torch_site import device_of

FLOAT, HALF = 4, 2  # bytes of a number
COPIES = 3  # of the parameters in a step: the model, its gradients, and what the server sent


def refuse_too_large(jobs: Sequence[Job], out: Path) -> None:
    """Refuse a job whose training step exceeds the memory, and jobs whose models exceed the free disk space."""
    sizes: dict[Any, tuple[int, int]] = {}
    stored = 0
    for job in jobs:
        chosen = job.study
        key = (chosen.model, chosen.train.patch, chosen.train.batch, chosen.data.task)
        if key not in sizes:
            sizes[key] = step_bytes(chosen)
            _refuse_memory(job, sum(sizes[key]))
        stored += 0 if job.run.exists() else (KEPT + 1) * sizes[key][0] // COPIES
    free = shutil.disk_usage(_existing(out)).free
    if stored > free:
        raise ConfigError(
            f"the models of {len(jobs)} runs take at least {_gigabytes(stored)}, and {out} has {_gigabytes(free)} "
            "free; choose another --out, or fewer methods with --only"
        )


def _refuse_memory(job: Job, needed: int) -> None:
    device, there = memory(job.study)
    if needed > there:
        train = job.study.train
        patch = " x ".join(map(str, train.patch))
        raise ConfigError(
            f"{job.title}: a training step with {train.batch} patches of {patch} takes at least {_gigabytes(needed)} "
            f"of memory, and {device} has {_gigabytes(there)}; choose a smaller train.batch or train.patch"
        )


def memory(chosen: Study) -> tuple[str, int]:
    """Return the name of the device that a study trains on, and all its memory in bytes."""
    import torch

    try:
        device = device_of(chosen.train.device)
    except ConfigError:  # the run reports the unknown device
        return chosen.train.device, 1 << 62
    if device.type == "cuda":
        return str(device), torch.cuda.get_device_properties(device).total_memory
    return "this machine", machine.memory().total


def step_bytes(chosen: Study) -> tuple[int, int]:
    """Return lower bounds of the bytes of parameters (with copies) and of layer outputs in one training step."""
    import torch

    module = study.build_module(chosen).to("meta")
    half = chosen.train.autocast and memory(chosen)[0].startswith("cuda")
    outputs: list[int] = []

    def note(_layer: Any, _given: Any, made: Any) -> None:
        outputs.append(made.numel() if isinstance(made, torch.Tensor) else 0)

    for layer in module.modules():
        if next(layer.parameters(recurse=False), None) is not None:
            layer.register_forward_hook(note)
    params = sum(prod(p.shape) for p in module.parameters())
    batch = torch.empty((chosen.train.batch, len(chosen.data.modality_names), *chosen.train.patch), device="meta")
    try:
        module.train()(batch)
    except (RuntimeError, NotImplementedError):  # a forward pass that reads values; meta tensors have none
        outputs.clear()
    return COPIES * FLOAT * params, (HALF if half else FLOAT) * sum(outputs)


def _existing(path: Path) -> Path:
    """Return the nearest folder of a path that exists."""
    return path if path.exists() else _existing(path.absolute().parent)


def _gigabytes(count: int) -> str:
    """Return a number of bytes as text.

    >>> _gigabytes(3_250_000_000), _gigabytes(40_000_000)
    ('3.2 GB', '40 MB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
