"""Public names: the same in Python and on the command line; old ones answer for one release, with a hint."""

import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import polysite as ps
from polysite.cli.base import ORDER

ROOT = Path(__file__).parents[2]
RENAMED = {"run": "train", "survey": "assess", "forecast": "cost", "Policy": "EmptyMaskPolicy"}


def test_every_public_name_exists_is_documented_and_is_no_module():
    """Importing a module of that name would replace the function."""
    for name in ps.__all__:
        value = getattr(ps, name)
        assert not isinstance(value, ModuleType)
        assert not callable(value) or (value.__doc__ and value.__name__ == name)
    assert not {module.name for module in pkgutil.iter_modules(ps.__path__)} & set(ps.__all__)
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        assert set(re.findall(r"\bps\.([A-Za-z]\w*)", page.read_text())) <= set(ps.__all__), page


def test_an_old_name_warns_and_is_the_new_one_and_an_unknown_one_is_refused():
    for old, new in RENAMED.items():
        sentence = f"'polysite.{old}' is now 'polysite.{new}'; the old name goes in 0.3"
        with pytest.warns(DeprecationWarning, match=sentence):
            assert getattr(ps, old) is getattr(ps, new)
        assert old not in dir(ps)
    with pytest.raises(AttributeError, match="module 'polysite' has no attribute 'nothing'"):
        _ = ps.nothing


def test_an_old_command_runs_as_before_with_a_hint(polysite):
    sites = ("--set", "data.shape=[24,24,24]", "--set", "data.sites={north={cases=3}}")
    code, out, err = polysite("data", "phantom", "scans", *sites)
    assert (code, err) == (0, "") and "3 cases of 1 hospitals in scans" in out
    given = ("scans", "--set", "data.labels={WT=[1,2,4]}")
    new, old = polysite("data", "check", *given), polysite("check-data", *given)
    hint = "'polysite check-data' is now 'polysite data check'; the old name goes in 0.3\n"
    assert new[0] == 0 and old == (*new[:2], hint + new[2])


def test_the_help_lists_whole_lines_of_the_commands_in_order_without_the_old_ones(polysite):
    outer, inner = (polysite(*words, "--help")[1].partition("Commands:")[2] for words in ((), ("data",)))
    assert tuple(re.findall(r"^  ([a-z-]+)  ", outer, re.M)) == ORDER and "..." not in outer + inner
    assert all(f"\n  {name} " in inner for name in ("scan", "check", "preview", "phantom", "cache", "formats"))
