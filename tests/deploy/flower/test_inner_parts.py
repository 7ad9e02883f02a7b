"""Which inner parts of Flower are used, and whether the installed version still has them."""

import ast
from importlib.metadata import version
from pathlib import Path

import polysite.deploy.flower
from polysite.deploy.flower import messages  # noqa: F401  (silences Flower before it is imported)
from polysite.deploy.flower.inner_parts import INNER_PARTS, missing_parts

PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp")


def imported():
    for file in Path(polysite.deploy.flower.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "flwr":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_flower_has_all_inner_parts_that_are_used():
    assert not missing_parts(), f"flwr {version('flwr')} moved or removed these"


def test_the_table_of_inner_parts_is_complete():
    inner = {name for name in imported() if name.rpartition(".")[0] not in PUBLIC}
    assert inner and all(any(f"{part}.".startswith(f"{name}.") for part in INNER_PARTS) for name in inner)
