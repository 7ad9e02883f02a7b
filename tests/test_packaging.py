"""What a release consists of beside the code: container files, the citation, the checklist."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from polysite.cli import app

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def instructions(path):
    """The instructions of a Dockerfile: (NAME, rest), with continued lines joined."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    return [tuple(line.split(maxsplit=1)) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_there_is_one_for_each_side():
    assert [path.name for path in FILES] == ["coordinator.Dockerfile", "site.Dockerfile"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_container_is_built_from_files_that_are_there_and_runs_without_root(path):
    given = instructions(path)
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [word for name, rest in given if name == "COPY" for word in rest.split()[:-1]]
    assert set(copied) == allowed and all((ROOT / word).exists() for word in copied)
    assert [rest for name, rest in given if name == "FROM"] == ["python:3.11-slim-bookworm"]
    assert [rest for name, rest in given if name == "USER"][-1] not in ("0", "root")
    assert "--require-hashes --no-deps -r hospital.lock" in path.read_text()
    used = [name for name, _ in given]
    assert "ADD" not in used and ("EXPOSE" in used) == (path.stem == "coordinator")  # a site only connects out


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_container_starts_a_command_that_exists(path):
    words = [json.loads(rest) for name, rest in instructions(path) if name in ("ENTRYPOINT", "CMD")]
    program, *line = [word for part in words for word in part]
    assert program == "polysite"
    command = get_command(app)
    while hasattr(command, "commands") and not line[0].startswith("-"):
        command = command.commands[line.pop(0)]
    assert command.name in ("run", "deploy")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_linter_finds_nothing(path):
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([linter, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_citation_is_that_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    required = {"cff-version", "message", "title", "authors", "version", "license", "type", "abstract"}
    assert required <= citation.keys() and citation["cff-version"] == "1.2.0"
    assert citation["version"] == project()["version"] and citation["license"] == project()["license"]
    assert all(
        {"name"} <= author.keys() or {"family-names", "given-names"} <= author.keys() for author in citation["authors"]
    )


def test_the_checklist_names_commands_that_exist():
    text = (ROOT / "docs" / "release.md").read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    named = re.findall(r"`make ([a-z-]+)`", text)
    assert named and set(named) <= set(targets)
    for file in re.findall(r"`((?:docs|scripts|docker|tests)/[\w./]+)`", text):
        assert (ROOT / file).exists(), file
