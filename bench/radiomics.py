"""93 radiomics features of 240 × 240 × 155 voxels, 1.5 M of them in the mask, against PyRadiomics 3.0.1 and nyxus.

Smooth noise, z-scored, bin width 0.09: about a hundred grey levels. Every library runs in a process of its own, which
keeps the image in memory and waits for its turn; turns are interleaved, the first is not counted (it compiles, and is
stated). Memory is the peak of the process, and what it held before the first turn: interpreter, libraries, image.
PyRadiomics and nyxus are installed into .cache/ with pip; where that fails they are said to be absent. nyxus gets grey
levels (with values it would take minutes), reads them from an uncompressed file, its only way, and makes 166 numbers,
among which those of the NGTDM are 0: there is no choosing of 93.

    python bench/radiomics.py                          two cores
    python bench/radiomics.py --pyradiomics 5.9        no PyRadiomics here: its seconds, measured elsewhere
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

SHAPE, WIDTH = (240, 240, 155), 0.09
CACHE = Path(__file__).parents[1] / ".cache" / "bench-radiomics"
PIP = {
    "pyradiomics": [
        ["numpy<2", "setuptools", "wheel", "scipy", "SimpleITK", "PyWavelets", "pykwalify", "six"],
        ["--no-build-isolation", "--no-deps", "pyradiomics==3.0.1"],
    ],
    "nyxus": [["nyxus==0.11.0"]],
}


def draw(folder: Path) -> None:
    """The image and the mask."""
    from scipy.ndimage import gaussian_filter

    grid = np.ogrid[tuple(slice(0, n) for n in SHAPE)]
    mask = sum(((x - c) / r) ** 2 for x, c, r in zip(grid, (120, 120, 77), (68, 84, 62.2), strict=True)) < 1
    image = gaussian_filter(np.random.default_rng(0).normal(size=SHAPE), 1.0)
    image = ((image - image[mask].mean()) / image[mask].std()).astype(np.float32)
    np.save(folder / "image.npy", image)
    np.save(folder / "mask.npy", mask)


def write_levels(folder: Path) -> None:
    """Grey levels and mask as files, for nyxus."""
    import nibabel

    image, mask = np.load(folder / "image.npy"), np.load(folder / "mask.npy")
    levels = np.where(mask, np.floor(image / WIDTH) - np.floor(image[mask].min() / WIDTH) + 1, 0)
    nibabel.save(nibabel.Nifti1Image(levels.astype(np.int16), np.eye(4)), folder / "image.nii")
    nibabel.save(nibabel.Nifti1Image(mask.astype(np.uint8), np.eye(4)), folder / "mask.nii")


def prepare(library: str, folder: Path) -> Callable[[], object]:
    """What a turn of this library does; returns the features where they compare."""
    if library == "nyxus":
        import nyxus

        families = ["*3D_ALL_INTENSITY*", *(f"*3D_{m}*" for m in ("GLCM", "GLDM", "GLRLM", "GLSZM", "NGTDM"))]
        machine = nyxus.Nyxus3D(families, n_feature_calc_threads=os.cpu_count(), coarse_gray_depth=100)
        files = [str(folder / "image.nii")], [str(folder / "mask.nii")]
        return lambda: {"features": machine.featurize_files(*files, False).shape[1]}
    image, mask = np.load(folder / "image.npy"), np.load(folder / "mask.npy")
    if library == "pyradiomics":
        import logging

        import SimpleITK
        from radiomics.featureextractor import RadiomicsFeatureExtractor

        logging.getLogger("radiomics").setLevel(logging.CRITICAL)
        extractor = RadiomicsFeatureExtractor(binWidth=WIDTH)
        extractor.disableAllFeatures()
        for family in ("firstorder", "glcm", "gldm", "glrlm", "glszm", "ngtdm"):
            extractor.enableFeatureClassByName(family)
        pair = SimpleITK.GetImageFromArray(image), SimpleITK.GetImageFromArray(mask.astype(np.uint8))
        del image, mask
        return lambda: {
            k.removeprefix("original_"): float(v)
            for k, v in extractor.execute(*pair).items()
            if k.startswith("original")
        }
    from polysite.radiomics import Settings, features

    return lambda: features(image, mask, settings=Settings(bin_width=WIDTH))


def peak() -> float:
    """Of this process so far, in MB; getrusage would count its parent in."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def worker(library: str, folder: Path) -> None:
    """Take a turn for every line that comes in, and say how long it took."""
    say, sys.stdout = sys.stdout, sys.stderr  # libraries print
    turn = prepare(library, folder)
    before = peak()
    for _ in sys.stdin:
        began = time.perf_counter()
        found = turn()
        line = {"seconds": time.perf_counter() - began, "before": before, "peak": peak(), "found": found}
        print(json.dumps(line), file=say, flush=True)


def interpreter(library: str) -> Path | None:
    """The Python that has the library, installed if need be."""
    if library not in PIP:
        return Path(sys.executable)
    python = CACHE / library / "bin" / "python"
    if not (CACHE / library / "ready").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        (CACHE / ".gitignore").write_text("*\n")
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", CACHE / library], check=True)
            for packages in PIP[library]:
                subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            print(f"{library} is absent: {error}")
            return None
        (CACHE / library / "ready").touch()
    return python


class Library:
    """A process that takes turns."""

    def __init__(self, name: str, python: Path, folder: Path) -> None:
        command = [
            python,
            "-P",
            __file__,  # -P: this file is not PyRadiomics
            "--worker",
            name,
            "--folder",
            folder,
        ]
        self.name, self.seconds = name, []
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.first = self.turn()

    def turn(self) -> float:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended; run `{' '.join(map(str, self.process.args))}` and press Enter to see why")
        self.last = json.loads(line)
        return self.last["seconds"]

    def report(self) -> str:
        low, middle, high = (f(self.seconds) * 1e3 for f in (min, statistics.median, max))
        top, before = self.last["peak"], self.last["before"]
        return (
            f"{self.name:16} {middle:8.1f} ms ({low:.1f} to {high:.1f}), first turn {self.first:.2f} s; "
            f"memory {top:.0f} MB, {top - before:.0f} above the {before:.0f} before"
        )


def bandwidth(size: int) -> float:
    """Bytes read and written in a second by a copy."""
    block, seconds = np.ones(size, np.uint8), []
    copy = np.empty_like(block)
    for _ in range(8):
        began = time.perf_counter()
        np.copyto(copy, block)
        seconds.append(time.perf_counter() - began)
    return 2 * block.nbytes / statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pyradiomics", type=float, metavar="SECONDS", help="what PyRadiomics took, instead of running it"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker, options.folder)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        draw(folder)
        names = ["polysite"]
        if not options.pyradiomics:
            write_levels(folder)
            names += ["pyradiomics", "nyxus"]
        libraries = [Library(n, python, folder) for n in names if (python := interpreter(n))]
        for _ in range(options.repeats):
            for library in libraries:
                library.seconds.append(library.turn())
        compare(libraries, options)
    return None


def compare(libraries: list[Library], options: argparse.Namespace) -> None:
    print(f"{len(os.sched_getaffinity(0))} cores; median of {options.repeats} interleaved turns")
    for library in libraries:
        print(library.report())
    others = {x.name: x.seconds for x in libraries if x.name in PIP}
    if options.pyradiomics:
        others["pyradiomics"] = [options.pyradiomics] * options.repeats
    ours = libraries[0].seconds
    stated = " (its seconds as given)" if options.pyradiomics else ""
    for name, theirs in others.items():
        ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
        print(
            f"polysite: {statistics.median(ratios):.1f} times as fast as {name}{stated} "
            f"({min(ratios):.1f} to {max(ratios):.1f})"
        )
    found = {x.name: x.last["found"] for x in libraries if len(x.last["found"]) > 1}
    for name, numbers in found.items():
        off = max(abs(numbers[k] - v) / (abs(v) + 1e-6) for k, v in found["polysite"].items())
        if name != "polysite":
            print(f"{name} and polysite differ by at most {off:.0e} of a feature")
    speed, read = bandwidth(1 << 28), int(np.prod(SHAPE)) * 5
    mine = statistics.median(ours)
    print(
        f"floor: {read / 1e6:.0f} MB of image and mask read once at {speed / 1e9:.0f} GB/s: {read / speed * 1e3:.1f} "
        f"ms; polysite takes {mine * speed / read:.0f} times that"
    )


if __name__ == "__main__":
    main()
