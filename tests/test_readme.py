"""What the README prints works as printed."""

import re
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from polysite import benchmark
from polysite.algorithms import ALGORITHMS
from polysite.benchmark.jobs import studies
from polysite.cli import app
from polysite.config import parse, presets
from polysite.data.federation import FEDERATIONS
from polysite.data.layouts import LAYOUTS
from polysite.data.manifest import read
from polysite.deploy.proxy import Proxy

README = Path(__file__).parents[1] / "README.md"
PAGES = (
    "data",
    "algorithms",
    "assess",
    "evaluate",
    "cluster",
    "deploy",
    "hospital",
    "protection",
    "story",
    "predict",
    "extend",
)
DATA, ALGORITHM, ASSESS, EVALUATE, CLUSTER, DEPLOY, HOSPITAL, PROTECTION, STORY, PREDICT, EXTEND = (
    README.parent / "docs" / f"{page}.md" for page in PAGES
)


def blocks(language, page=README):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


PRINTED = [(README, "runs"), (ASSESS, "assessments"), (EVALUATE, "runs")]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "folder"), PRINTED, ids=["readme", "assess", "evaluate"])
def test_the_python_block_runs(page, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python", page)
    exec(compile(code, str(page), "exec"), {})
    assert folder in capsys.readouterr().out and len(list(Path(folder).iterdir())) == 1


TUTORIALS = sorted((README.parent / "docs" / "tutorials").glob("*.md"))
SHOWN = [README, DATA, ALGORITHM, ASSESS, EVALUATE, CLUSTER, DEPLOY, HOSPITAL, PROTECTION, STORY, PREDICT, *TUTORIALS]


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.stem)
def test_what_the_page_shows_exists(page, tmp_path):
    shown = blocks("toml", page)
    assert shown or page in (PROTECTION, PREDICT, *TUTORIALS)
    for name in ("proxy.crt", "proxy.login"):  # that a section [proxy] names
        (tmp_path / name).write_text("USER:PASSWORD\n")
    for text in shown:
        if "proxy" in (given := tomllib.loads(text)):
            assert Proxy.parse(given["proxy"], tmp_path)
        elif "methods" in given:
            (tmp_path / "mine.toml").write_text(text)
            assert studies(benchmark.load(str(tmp_path / "mine.toml")), {})
        else:
            parse(text)
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


def test_the_page_on_data_names_every_layout_federation_and_preset():
    text = DATA.read_text()
    for name in (*LAYOUTS, *FEDERATIONS, *presets()):
        assert f"`{name}`" in text, name


def test_the_page_on_algorithms_names_them_all():
    text = ALGORITHM.read_text()
    for name in ALGORITHMS:
        assert f"`{name}`" in text, name


def test_the_manifest_it_shows_is_read(tmp_path):
    (text,) = blocks("csv", DATA)
    (tmp_path / "m.csv").write_text(text)
    found = read(tmp_path / "m.csv")
    assert found.modalities == ("t1", "flair") and found.label_names == ("WT", "TC", "ET") and len(found.rows) == 2
