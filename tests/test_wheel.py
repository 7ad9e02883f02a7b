"""The wheel: complete, and it works outside of the repository, in an empty folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13")
pytestmark = [pytest.mark.slow, pytest.mark.release]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the sources: a build leaves folders behind."""
    pytest.importorskip("setuptools", reason="a wheel is built with setuptools")
    root = tmp_path_factory.mktemp("wheel")
    clean = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "src", root / "copy" / "src", ignore=clean)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root / "copy" / name)
    words = ["pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", root, root / "copy"]
    done = subprocess.run([sys.executable, "-m", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = root.glob("polysite-*.whl")
    return found


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    with ZipFile(wheel) as packed:
        inside = {name for name in packed.namelist() if name.startswith("polysite/")}
        about = next(packed.read(n).decode() for n in packed.namelist() if n.endswith("/METADATA"))
    source = ROOT / "src"
    files = {f.relative_to(source).as_posix() for f in (source / "polysite").rglob("*") if f.is_file()}
    assert {f for f in files if "__pycache__" not in f and not f.endswith(".so")} == inside
    for version in VERSIONS:
        assert f"Classifier: Programming Language :: Python :: {version}" in about


@pytest.fixture(scope="module")
def installed(wheel):
    """The wheel in a folder of its own; its dependencies are those of this Python."""
    site = wheel.parent / "site"
    words = ["pip", "install", "--no-deps", "--no-index", "-q", "--target", site, wheel]
    done = subprocess.run([sys.executable, "-m", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return site


def run(site, folder, *words):
    """Call the installed command in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(site), "POLYSITE_CACHE": str(folder / ".cache")}
    command = [sys.executable, str(site / "bin" / "polysite"), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def test_the_installed_command_works_in_an_empty_folder(installed, tmp_path):
    code = "import polysite, pathlib; print(pathlib.Path(polysite.__file__).parents[1])"
    here = {**os.environ, "PYTHONPATH": str(installed)}
    where = subprocess.run([sys.executable, "-c", code], env=here, cwd=tmp_path, capture_output=True, text=True)
    assert Path(where.stdout.strip()) == installed
    assert "fedavg" in run(installed, tmp_path, "algorithms")
    assert "patch = [128, 128, 128]" in run(
        installed, tmp_path, "train", "--print-config", "--set", "preset=fets_benchmark"
    )
    assert "benchmark" in run(installed, tmp_path, "bench", "--help")
    small = ["--set", "data.shape=[24,24,24]", "--set", "train.patch=[16,16,16]", "--set", "model.filters=[2,4,4]"]
    sites = ["--set", "data.sites={north={cases=5}, south={cases=5}}", "--set", "train.device=cpu"]
    run(installed, tmp_path, "train", *small, *sites, "--set", "run.rounds=1", "--out", "run", "--quiet")
    assert (tmp_path / "run" / "index.html").stat().st_size > 10_000
    run(installed, tmp_path, "data", "phantom", "scans", *small[:2], *sites[:2])
    run(installed, tmp_path, "data", "scan", "scans", "--labels", "WT=1,2,4; TC=1,4; ET=4")
    run(installed, tmp_path, "predict", "run", "manifest.csv", "--out", "masks", "--quiet")
    assert len(list((tmp_path / "masks").glob("*/*_WT.nii.gz"))) == 10
    code = "from polysite import tuning, advice, benchmark; from importlib import resources as r; " + (
        "print(all(r.files('polysite').joinpath(*p.split('/')).is_file() for p in ('tuning/space.toml', 'py.typed')))"
    )
    found = subprocess.run([sys.executable, "-c", code], env=here, cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.strip() == "True", found.stderr


@pytest.mark.soak
def test_the_demonstration_runs_from_the_wheel(installed, tmp_path):
    run(installed, tmp_path, "demo", "--quiet")
    assert list(tmp_path.glob("demo/*/index.html"))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_sources_are_valid_in_every_declared_python(version, tmp_path):
    """Where that Python is installed: it reads every file without a warning."""
    found = next(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), None) or shutil.which(f"python{version}")
    if found is None:
        pytest.skip(f"Python {version} is not installed here")
    code = "import pathlib, sys; [compile(p.read_bytes(), p, 'exec') for p in pathlib.Path(sys.argv[1]).rglob('*.py')]"
    done = subprocess.run(
        [str(found), "-W", "error", "-c", code, str(ROOT / "src")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
