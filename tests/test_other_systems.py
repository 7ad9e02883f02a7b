"""Simulations use no module that only POSIX has; deployment says that it needs Linux."""

import subprocess
import sys

from studies import text

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
from polysite import cli
sys.argv = ["polysite", *sys.argv[1:]]
cli.main()
"""


def elsewhere(folder, *words):
    """Call the command line in a process without such modules."""
    command = [sys.executable, "-W", "ignore:only soft file lock", "-c", WITHOUT, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_training_needs_no_fcntl(tmp_path):
    (tmp_path / "study.toml").write_text(text({"capital": 5, "island": 4}, run="rounds = 1", patch=24))
    done = elsewhere(tmp_path, "train", "study.toml", "--out", "run", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run" / "index.html").exists()


def test_a_site_says_that_it_needs_linux(tmp_path):
    done = elsewhere(tmp_path, "site", "run", "north")
    assert done.returncode == 2
    assert done.stderr == "polysite: this command needs Linux: Python has no module 'fcntl' here\n"
