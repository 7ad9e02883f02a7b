"""What this process may use of the machine: cores, memory and GPUs.

A batch system or a container gives a process fewer cores and less memory than the machine has: by the CPU affinity and
by control groups (cgroups). ``os.cpu_count`` and ``/proc/meminfo`` know neither.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path

GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Memory:
    """Bytes of main memory or of a GPU."""

    total: int
    free: int


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process sees."""

    visible: str  # value of CUDA_VISIBLE_DEVICES that shows a process this GPU alone
    memory: Memory


def cores(groups: Path = GROUPS, mount: Path = MOUNT) -> int:
    """Return the number of cores that this process may use, by its affinity and the quotas of its cgroups."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, ceil(min(allowed, _quota(groups, mount))))


def memory(groups: Path = GROUPS, mount: Path = MOUNT) -> Memory:
    """Return the main memory of this process: that of the machine, or the limit of a cgroup where that is less."""
    import psutil  # here, since few processes ask for it

    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    for limit, used in _limits(groups, mount):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return Memory(total, free)


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process sees, with their free memory. It starts CUDA on each: about 0.5 GB."""
    import torch

    if not torch.cuda.is_available():
        return ()
    found = []
    for k, visible in enumerate(visible_gpus(torch.cuda.device_count())):
        free, total = torch.cuda.mem_get_info(k)
        found.append(Gpu(visible, Memory(total, free)))
    return tuple(found)


def visible_gpus(count: int, environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the value of CUDA_VISIBLE_DEVICES for each of the GPUs that this process sees.

    The user's own value lists them by number or by UUID; without it they are numbered.

    >>> visible_gpus(2, {}), visible_gpus(2, {"CUDA_VISIBLE_DEVICES": "5, GPU-8932f937"})
    (['0', '1'], ['5', 'GPU-8932f937'])
    """
    given = (os.environ if environment is None else environment).get(VISIBLE, "")
    listed = [entry.strip() for entry in given.split(",") if entry.strip()]
    return listed[:count] if len(listed) >= count else [str(k) for k in range(count)]


@cache
def _quota(groups: Path, mount: Path) -> float:
    """Return the cores that cgroups allow; infinite without a quota."""
    allowed = float("inf")
    for folder in _folders("cpu", groups, mount):
        if (limit := _read(folder / "cpu.max")) is not None:  # version 2: microseconds per period
            quota, _, period = limit.partition(" ")
        else:
            quota, period = _read(folder / "cpu.cfs_quota_us") or "-1", _read(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period):
            allowed = min(allowed, int(quota) / int(period))
    return allowed


def _limits(groups: Path, mount: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of memory, in bytes, of every cgroup that has a limit.

    Pages of files count as free, as in the available memory of the machine: the kernel drops them when it needs room.
    """
    names = ("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    for folder in _folders("memory", groups, mount):
        for most, current, prefix in names:
            limit, used = _read(folder / most), _read(folder / current)
            if limit and used and limit.isdigit() and used.isdigit():
                lines = (line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
                facts = {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}
                files = sum(facts.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
                yield int(limit), max(0, int(used) - files)


def _folders(controller: str, groups: Path, mount: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroups with a controller, and of those above them, which limit it too.

    In a container, the path of the cgroup may be that of the host, and the mount that of the container: folders that do
    not exist hold no file to read.
    """
    for line in (_read(groups) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2, alone or beside version 1
            roots = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            roots = [mount / controllers, mount / controller]
        else:
            continue
        inside = Path(path.strip("/"))
        for root in roots:
            yield root / inside
            yield from (root / above for above in inside.parents)


def _read(file: Path) -> str | None:
    """Return the text of a file; None if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return None
