"""What a process may use of the machine, by affinity and by cgroups of both versions."""

import os

import pytest

from polysite import machine

GB = 1 << 30


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Return a function that writes /proc/self/cgroup and the files of the cgroups; eight cores by affinity."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)

    def write(listed, files):
        (tmp_path / "cgroup").write_text(listed)
        for name, text in files.items():
            (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "fs" / name).write_text(text)
        machine._quota.cache_clear()
        return tmp_path / "cgroup", tmp_path / "fs"

    return write


@pytest.mark.parametrize(
    ("listed", "files", "cores"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "250000 100000\n"}, 3),  # 2.5; above it
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("3:cpu,cpuacct:/a\n",
         {"cpu,cpuacct/a/cpu.cfs_quota_us": "20000", "cpu,cpuacct/a/cpu.cfs_period_us": "10000"}, 2),
        ("3:cpu,cpuacct:/job\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("3:cpu:/docker/of/the/host\n", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),  # 0.5
        ("", {}, 8),
        ("0::/\n", {"cpu.max": "6400000 100000"}, 8),  # 64, more than the affinity
    ],
)  # fmt: skip
def test_cores_are_the_smaller_of_affinity_and_quota(listed, files, cores, groups):
    assert machine.cores(*groups(listed, files)) == cores


@pytest.mark.parametrize(
    ("listed", "files", "total", "free"),
    [
        ("0::/job\n", {"job/memory.max": f"{8 * GB}", "job/memory.current": f"{5 * GB}",
                       "job/memory.stat": f"anon 7\ninactive_file {GB}\nactive_file {GB}\n"}, 8, 5),  # files can go
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/b/memory.current": "1",
                       "a/memory.max": f"{4 * GB}", "a/memory.current": f"{GB}"}, 4, 3),
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": f"{2 * GB}", "memory/x/memory.usage_in_bytes": f"{3 * GB}",
                           "memory/x/memory.stat": "total_inactive_file 5\n"}, 2, 0),
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712",
                           "memory/x/memory.usage_in_bytes": "1"}, 32, 16),
        ("", {}, 32, 16),
    ],
)  # fmt: skip
def test_memory_is_that_of_the_machine_or_of_the_group(listed, files, total, free, groups, monkeypatch):
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine.Memory(32 * GB, 0))
    monkeypatch.setattr(machine.Memory, "available", 16 * GB, raising=False)
    found = machine.memory(*groups(listed, files))
    assert (round(found.total / GB), round(found.free / GB)) == (total, free)


def test_this_machine_has_a_core_and_memory():
    here = machine.memory()
    assert machine.cores() >= 1 and 0 < here.free <= here.total


@pytest.mark.parametrize(
    ("given", "seen"),
    [(None, ["0", "1"]), ("2,7", ["2", "7"]), ("MIG-a,MIG-b,3", ["MIG-a", "MIG-b"])],
)
def test_the_users_own_choice_of_gpus_is_respected(given, seen):
    assert machine.visible_gpus(2, {} if given is None else {"CUDA_VISIBLE_DEVICES": given}) == seen
