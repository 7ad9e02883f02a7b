"""Simulations use no module that only POSIX has; deployment says that it needs Linux."""

import subprocess
import sys

import pytest

from test_demo import TINY

# fcntl is gone for all; the others, which libraries load on Linux, are refused to polysite's own modules
WITHOUT = """
import builtins, os, sys
sys.modules["fcntl"] = None
ONLY_POSIX = {"fcntl", "pwd", "grp", "resource", "termios", "tty", "pty", "posix", "syslog"}
real = builtins.__import__
def guarded(name, given=None, *rest, **more):
    if name.partition(".")[0] in ONLY_POSIX and str((given or {}).get("__name__")).startswith("polysite"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return real(name, given, *rest, **more)
builtins.__import__ = guarded
"""
DEMO = """
from pathlib import Path
from polysite import demo
from polysite.engines.rounds import Watch
demo.STUDY = Path("study.toml").read_text()
demo.run(Path("demo"), 0, Watch())
"""
COMMAND = """
from polysite import cli
sys.argv = ["polysite", *sys.argv[1:]]
cli.main()
"""


@pytest.fixture
def elsewhere(tmp_path):
    """Run code in a process without such modules."""
    (tmp_path / "study.toml").write_text(TINY)

    def run(code, *words):
        return subprocess.run(
            [sys.executable, "-W", "ignore:only soft file lock", "-c", WITHOUT + code, *words],
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip

    return tmp_path, run


def test_training_and_the_demonstration_need_no_fcntl(elsewhere):
    folder, run = elsewhere
    done = run(DEMO + COMMAND, "train", "study.toml", "--set", "run.rounds=1", "--out", "run", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert all((folder / name / "index.html").exists() for name in ("demo", "run"))


def test_a_site_says_that_it_needs_linux(elsewhere):
    _, run = elsewhere
    done = run(COMMAND, "site", "run", "north")
    assert done.returncode == 2
    assert done.stderr == "polysite: this command needs Linux: Python has no module 'fcntl' here\n"
