"""The wheel: complete, and it works outside of the repository, in an empty folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.release]


def called(*words, **given):
    """What a program prints; it has to succeed."""
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, **given)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the sources: a build leaves folders behind."""
    pytest.importorskip("setuptools", reason="a wheel is built with setuptools")
    root = tmp_path_factory.mktemp("wheel")
    clean = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "src", root / "copy" / "src", ignore=clean)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root / "copy" / name)
    called("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", root, root / "copy")
    (found,) = root.glob("polysite-*.whl")
    return found


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    with ZipFile(wheel) as packed:
        inside = {name for name in packed.namelist() if name.startswith("polysite/")}
    source = ROOT / "src"
    files = {f.relative_to(source).as_posix() for f in (source / "polysite").rglob("*") if f.is_file()}
    assert {f for f in files if "__pycache__" not in f and not f.endswith(".so")} == inside


def test_the_installed_command_works_in_an_empty_folder(wheel, tmp_path):
    """The wheel is in a folder of its own; its dependencies are those of this Python."""
    installed = wheel.parent / "site"
    called("-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", installed, wheel)
    given = {**os.environ, "PYTHONPATH": str(installed), "POLYSITE_CACHE": str(tmp_path / ".cache")}

    def polysite(*words):
        command = words if words[0] == "-c" else (installed / "bin" / "polysite", *words)
        return called(*command, cwd=tmp_path, env=given)

    code = "import polysite, pathlib; print(pathlib.Path(polysite.__file__).parents[1])"
    assert Path(polysite("-c", code).strip()) == installed
    assert "fedavg" in polysite("algorithms")
    assert "patch = [128, 128, 128]" in polysite("train", "--print-config", "--set", "preset=fets_benchmark")
    drawn = ("--set", "data.shape=[24,24,24]", "--set", "data.sites={north={cases=5}, south={cases=5}}")
    small = ("--set", "train.patch=[16,16,16]", "--set", "model.filters=[2,4,4]", "--set", "train.device=cpu")
    polysite("train", *drawn, *small, "--set", "run.rounds=1", "--out", "run", "--quiet")
    assert (tmp_path / "run" / "index.html").stat().st_size > 10_000
    polysite("data", "phantom", "scans", *drawn)
    polysite("data", "scan", "scans", "--labels", "WT=1,2,4; TC=1,4; ET=4")
    polysite("predict", "run", "manifest.csv", "--out", "masks", "--quiet")
    assert len(list((tmp_path / "masks").glob("*/*_WT.nii.gz"))) == 10
    polysite("-c", "from polysite import tuning, advice, benchmark; tuning.load()")
