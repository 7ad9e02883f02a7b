"""What runs of a benchmark share: seconds until a run has its cases, and memory of its own that the cases take.

A second run in the same worker process takes the prepared cases of the first; the reference is the same run in a
process that opens them from the filled cache, as every run did before. Between processes, cases that stay on disk
(``train.cases = "disk"``) are mapped, so that the page cache holds them once; the reference is ``"device"`` on a CPU.
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import psutil

import polysite as ps
from polysite import config, study
from polysite.benchmark.last_run import LastRun
from polysite.data.phantom import write


def seconds(call) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def private() -> int:
    """Return the bytes that are no pages of files, which other processes can share."""
    return sum(area.anonymous for area in psutil.Process().memory_maps(grouped=True))


def own_memory(text: str) -> int:
    """Return the bytes of its own that a process takes to build its sites and to read every training case once."""
    chosen, before = config.parse(text), private()
    sites = study.build_sites(chosen)
    for site in sites.values():
        for name in site.cases("train"):
            site.sketch("images", [name])  # reads every voxel
    return private() - before


def in_child(chosen: ps.Study) -> int:
    """Return ``own_memory`` of a process that has done nothing else."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(own_memory, (config.dump(chosen),))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--cases", type=int, default=24)
    options.add_argument("--side", type=int, default=96)
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args()
    sites = {name: ps.Hospital(cases=given.cases // 2) for name in ("east", "west")}
    drawn = ps.Study(
        data=ps.Phantom(shape=(given.side,) * 3, sites=sites),
        model=ps.UNet(filters=(4, 8, 16)),
        train=ps.Train(patch=(32, 32, 32), device="cpu"),
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["POLYSITE_CACHE"] = f"{folder}/cache"
        refs = [ref for listed in drawn.data.case_refs(0).values() for ref in listed]
        write((ref.open() for ref in refs), Path(folder) / "scans")
        files = replace(drawn, data=ps.Files(path=f"{folder}/scans"))
        for title, chosen in (("files", files), ("phantoms", drawn)):
            dealt, last = study.deal_cases(chosen), LastRun()
            last.cases(chosen, dealt)
            anew, again, rest = [], [], []
            for _ in range(given.repeats if title == "files" else 1):
                anew.append(seconds(lambda chosen=chosen, dealt=dealt: study.load_cases(chosen, dealt)))
                again.append(seconds(lambda chosen=chosen, dealt=dealt, last=last: last.cases(chosen, dealt)))
                rest.append(seconds(lambda chosen=chosen, dealt=dealt: study.build_sites(chosen, dealt)))
            new, kept, both = map(statistics.median, (anew, again, rest))
            built = max(0.0, both - new)
            print(
                f"{title}: {given.cases} cases of 4 x {given.side}^3: {new:.3f} s anew, {kept:.4f} s kept, "
                f"ratio {new / kept:.0f}; with the sites {(new + built) / (kept + built):.1f} ({built:.3f} s more)"
            )
        device, disk = (in_child(replace(files, train=replace(files.train, cases=kind))) for kind in ("device", "disk"))
        print(f"memory of a process for its cases: device {device / 1e6:.0f} MB, disk {disk / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
