"""Every tutorial can be followed: its commands, one after the other, in an empty folder."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PORT = "9443"  # of the coordinator, in the tutorials


def commands(page):
    return "\n".join(re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.S))


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def shell(tmp_path):
    """A folder with the command polysite of this source on its path."""
    programs, work = tmp_path / "bin", tmp_path / "work"
    programs.mkdir()
    work.mkdir()
    polysite = programs / "polysite"
    polysite.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m polysite.cli "$@"\n')
    polysite.chmod(0o755)
    paths = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    return work, {**os.environ, **paths, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}


@pytest.mark.soak
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_can_be_followed(page, shell):
    work, environment = shell
    script = f"set -e\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n{commands(page).replace(PORT, free_port())}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=work, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert list(work.glob("runs/*/index.html"))
    for words in re.findall(r'\|\| echo "(.*?)"', script):
        assert words in done.stdout  # such as: the change was noticed


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_what_a_tutorial_prints_for_the_shell_is_shell(page):
    checked = subprocess.run(["bash", "-n"], input=commands(page), text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr


def test_every_user_has_a_tutorial():
    assert {p.stem for p in TUTORIALS} == {
        "researcher",
        "data_scientist",
        "hospital_engineer",
        "data_protection_officer",
    }
