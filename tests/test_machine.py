"""What a process may use of the machine, by affinity and by cgroups of both versions; how one of polysite's starts."""

import os
import subprocess
import sys

import pytest

from polysite import machine

GB = 1 << 30
V1 = "cpu,cpuacct/a/cpu.cfs_"


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Return a function that writes /proc/self/cgroup and the files of the cgroups; eight cores by affinity."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)

    def write(listed, files):
        (tmp_path / "cgroup").write_text(listed)
        for name, text in files.items():
            (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "fs" / name).write_text(f"{text}\n")
        machine._quota.cache_clear()
        return tmp_path / "cgroup", tmp_path / "fs"

    return write


@pytest.mark.parametrize(
    ("listed", "files", "cores"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 3),  # 2.5; above it
        ("3:cpu,cpuacct:/a\n", {f"{V1}quota_us": 20000, f"{V1}period_us": 10000}, 2),
        ("3:cpu,cpuacct:/a\n", {"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000}, 8),
        ("3:cpu:/docker/of/the/host\n", {"cpu/cpu.cfs_quota_us": 50000, "cpu/cpu.cfs_period_us": 100000}, 1),  # 0.5
        ("", {}, 8),
        ("0::/\n", {"cpu.max": "6400000 100000"}, 8),  # 64, more than the affinity
    ],
)
def test_cores_are_the_smaller_of_affinity_and_quota(listed, files, cores, groups):
    assert machine.cores(*groups(listed, files)) == cores


def version_1(limit, used, stat=""):
    return {
        "memory/x/memory.limit_in_bytes": limit,
        "memory/x/memory.usage_in_bytes": used,
        "memory/x/memory.stat": stat,
    }


def version_2(folder, limit, used, stat=""):
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": used, f"{folder}/memory.stat": stat}


@pytest.mark.parametrize(
    ("listed", "files", "total", "free"),
    [
        ("0::/job\n", version_2("job", 8 * GB, 5 * GB, f"anon 7\ninactive_file {GB}\nactive_file {GB}"), 8, 5),
        ("0::/a/b\n", version_2("a/b", "max", 1) | version_2("a", 4 * GB, GB), 4, 3),
        ("4:memory:/x\n", version_1(2 * GB, 3 * GB, "total_inactive_file 5"), 2, 0),
        ("4:memory:/x\n", version_1(9223372036854771712, 1), 32, 16),
        ("", {}, 32, 16),
    ],
)
def test_memory_is_that_of_the_machine_or_of_the_group(listed, files, total, free, groups, monkeypatch):
    """Files in memory can go."""
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine.Memory(32 * GB, 0))
    monkeypatch.setattr(machine.Memory, "available", 16 * GB, raising=False)
    found = machine.memory(*groups(listed, files))
    assert (round(found.total / GB), round(found.free / GB)) == (total, free)


BEGIN = """
import sys
from polysite import own_process
own_process.begin()
import polysite.training.tasks
print(sys.modules["mlflow"])
"""


def test_monai_is_imported_without_mlflow():
    assert subprocess.check_output([sys.executable, "-c", BEGIN], text=True) == "None\n"
