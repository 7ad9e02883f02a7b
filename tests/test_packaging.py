"""The container files beside the code: built from files that are there, without root, for a command that exists."""

import json
from pathlib import Path

import pytest
from typer.main import get_command

from polysite.cli import app

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["coordinator", "site"])
def test_a_container_runs_a_command_that_exists_from_files_that_are_there_and_without_root(name):
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
    steps = [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip() and line[0] != "#"]
    copied = [word for step, rest in steps if step == "COPY" for word in rest.split()[:-1]]
    assert copied and all((ROOT / word).exists() for word in copied)
    assert "--require-hashes --no-deps -r hospital.lock" in text
    assert [rest for step, rest in steps if step == "USER"][-1] not in ("0", "root")
    assert ("EXPOSE" in dict(steps)) == (name == "coordinator")  # a site only connects out
    program, *line = [w for step, rest in steps if step in ("ENTRYPOINT", "CMD") for w in json.loads(rest)]
    command = get_command(app)
    while hasattr(command, "commands") and not line[0].startswith("-"):
        command = command.commands[line.pop(0)]
    assert program == "polysite" and command.name in ("run", "deploy")
