"""What the README prints works as printed."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from polysite.cli import app
from polysite.config import parse

README = Path(__file__).parents[1] / "README.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.S)


@pytest.mark.slow
def test_the_python_block_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    exec(compile(code, str(README), "exec"), {})
    assert "capital" in capsys.readouterr().out and len(list(Path("runs").iterdir())) == 1


def test_the_study_parses():
    (text,) = blocks("toml")
    assert parse(text).data.label_names == ("WT", "TC", "ET")


def test_every_command_and_option_exists():
    commands = get_command(app).commands
    for line in [w for block in blocks("sh") for w in block.splitlines() if w.startswith("polysite ")]:
        _, name, *words = line.split("#")[0].split()
        known = {o for p in commands[name].params for o in p.opts}
        assert {w for w in words if w.startswith("--")} <= known, line


def test_every_file_it_links_to_exists():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
