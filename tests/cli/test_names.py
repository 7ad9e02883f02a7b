"""Public names: the same in Python and on the command line; old ones answer for one release, with a hint."""

import pkgutil
import re
import warnings
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

import polysite as ps
from polysite.cli import app
from polysite.cli.base import ORDER

ROOT = Path(__file__).parents[2]
RENAMED = {"run": "train", "survey": "assess", "forecast": "cost", "Policy": "EmptyMaskPolicy"}


@pytest.mark.parametrize("name", ps.__all__)
def test_a_public_name_exists_and_is_documented(name):
    value = getattr(ps, name)
    assert not isinstance(value, ModuleType)
    if callable(value):
        assert value.__doc__ and value.__name__ == name


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_warns_and_is_the_new_one(old, new):
    with pytest.warns(DeprecationWarning, match=f"'polysite.{old}' is now 'polysite.{new}'; the old name goes in 0.3"):
        assert getattr(ps, old) is getattr(ps, new)
    assert old not in dir(ps)


def test_no_module_has_the_name_of_a_public_function():
    """Importing such a module would replace the function."""
    assert not {module.name for module in pkgutil.iter_modules(ps.__path__)} & set(ps.__all__)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: p.stem)
def test_the_names_that_the_pages_use_are_public(page):
    assert set(re.findall(r"\bps\.([A-Za-z]\w*)", page.read_text())) <= set(ps.__all__)


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="module 'polysite' has no attribute 'nothing'"):
        _ = ps.nothing


@pytest.mark.parametrize(
    ("old", "words"), [("check-data", ["DATA"]), ("preview", ["DATA", "--out", "sheets"]), ("phantom", ["new"])]
)
def test_an_old_command_runs_as_before_with_a_hint(old, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sites = ["--set", "data.shape=[24,24,24]", "--set", "data.sites={north={cases=3}}"]
    made = CliRunner().invoke(app, ["data", "phantom", "scans", *sites])
    assert made.exit_code == 0 and made.stderr == "" and "3 cases of 1 hospitals in scans" in made.output
    given = ["--set", "data.labels={WT=[1,2,4]}"] if old != "phantom" else sites
    words = ["scans" if word == "DATA" else word for word in words]
    new = old.removesuffix("-data")
    before = CliRunner().invoke(app, [old, *words, *given])
    hint = f"'polysite {old}' is now 'polysite data {new}'; the old name goes in 0.3\n"
    assert before.exit_code == 0 and before.stderr.startswith(hint), before.exception
    if old != "phantom":  # it writes a new folder
        after = CliRunner().invoke(app, ["data", new, *words, *given])
        assert after.exit_code == 0 and after.stdout == before.stdout and "now" not in after.stderr


def test_the_help_lists_the_commands_in_order_without_the_old_ones():
    listed = re.findall(r"^  ([a-z-]+)  ", CliRunner().invoke(app, ["--help"]).output.partition("Commands:")[2], re.M)
    assert tuple(listed) == ORDER
    inner = CliRunner().invoke(app, ["data", "--help"]).output
    assert all(f"\n  {name} " in inner for name in ("scan", "check", "preview", "phantom", "cache", "formats"))


def test_every_command_line_in_the_help_is_whole():
    for words in ([], ["data"]):
        listed = CliRunner().invoke(app, [*words, "--help"]).output.partition("Commands:")[2]
        assert "..." not in listed


def test_no_warning_without_an_old_name():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert callable(ps.train) and callable(ps.evaluate)
