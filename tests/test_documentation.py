"""What the documentation prints works as printed: README and pages, tutorials, notebooks; equations are typeset."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from consortium import free_port
from polysite import benchmark, config
from polysite.algorithms import ALGORITHMS
from polysite.benchmark.jobs import studies
from polysite.cli import app
from polysite.data.federation import FEDERATIONS
from polysite.data.layouts import LAYOUTS
from polysite.data.manifest import read
from polysite.deploy.proxy import Proxy

ROOT = Path(__file__).parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
NAMES = "data algorithms assess evaluate cluster deploy hospital protection story predict"
SHOWN = [README, *(DOCS / f"{name}.md" for name in NAMES.split()), *TUTORIALS]


def by_name(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.stem)


def blocks(language, page):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


@pytest.mark.slow
@by_name([README, DOCS / "assess.md", DOCS / "evaluate.md"])
def test_the_python_block_runs(page, tmp_path, monkeypatch, capsys):
    folder = "assessments" if page.stem == "assess" else "runs"
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python", page)
    exec(compile(code, str(page), "exec"), {})
    assert folder in capsys.readouterr().out and len(list(Path(folder).iterdir())) == 1


@by_name(SHOWN)
def test_what_the_page_shows_exists(page, tmp_path):
    for name in ("proxy.login",):  # that a section [proxy] names
        (tmp_path / name).write_text("USER:PASSWORD\n")
    for text in blocks("toml", page):
        if "proxy" in (given := tomllib.loads(text)):
            assert Proxy.parse(given["proxy"], tmp_path)
        elif "methods" in given:
            (tmp_path / "mine.toml").write_text(text)
            assert studies(benchmark.load(str(tmp_path / "mine.toml")), {})
        else:
            config.parse(text)
    lines = [w for block in blocks("sh", page) for w in block.splitlines() if w.startswith("polysite ")]
    for line in lines:
        words = line.split("#")[0].split()[1:]
        command = get_command(app)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        assert {w for w in words if w.startswith("--")} <= known, line
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_pages_name_every_layout_federation_preset_and_algorithm_and_the_manifest_is_read(tmp_path):
    data = (*LAYOUTS, *FEDERATIONS, *config.presets())
    for page, names in (("data.md", data), ("algorithms.md", ALGORITHMS)):
        text = (DOCS / page).read_text()
        assert [name for name in names if f"`{name}`" not in text] == []
    (text,) = blocks("csv", DOCS / "data.md")
    (tmp_path / "m.csv").write_text(text)
    found = read(tmp_path / "m.csv")
    assert found.modalities == ("t1", "flair") and found.label_names == ("WT", "TC", "ET") and len(found.rows) == 2


@pytest.mark.soak
@by_name(TUTORIALS)
def test_a_tutorial_can_be_followed(page, tmp_path):
    """Its commands, one after the other, in an empty folder, with the command polysite of this source."""
    work, polysite = tmp_path / "work", tmp_path / "bin" / "polysite"
    work.mkdir()
    polysite.parent.mkdir()
    polysite.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m polysite.cli "$@"\n')
    polysite.chmod(0o755)
    paths = {"PATH": f"{polysite.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"), "HOME": str(tmp_path)}
    commands = "\n".join(blocks("sh", page)).replace("9443", str(free_port()))
    script = f"set -e\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\nexec 2>&1\n{commands}"
    given = {**os.environ, **paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", script], cwd=work, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert list(work.glob("runs/*/index.html"))
    for words in re.findall(r'\|\| echo "(.*?)"', script):
        assert words in done.stdout  # such as: the change was noticed


NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
TINY = {"CASES": 5, "ROUNDS": 1, "STRATEGIES": ("fedavg",)}  # for what the cell of parameters sets


@pytest.mark.release
@by_name(NOTEBOOKS)
def test_a_notebook_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    names, tiny = {"__name__": "__main__"}, 0
    cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
    try:
        for k, cell in enumerate(cell for cell in cells if cell["cell_type"] == "code"):
            exec(compile("".join(cell["source"]), f"{page.name}, cell {k}", "exec"), names)
            if "parameters" in cell["metadata"].get("tags", ()):
                tiny += len(TINY.keys() & names.keys())
                names.update({name: value for name, value in TINY.items() if name in names})
    finally:
        sys.modules.pop("my_lab", None)  # written by a notebook into a folder that is gone
    assert tiny >= 2
    assert list(tmp_path.rglob("result.json"))


def test_the_examples_of_equations_hold():
    assert subprocess.run([sys.executable, "-m", "doctest", ROOT / "scripts" / "equations.py"]).returncode == 0
