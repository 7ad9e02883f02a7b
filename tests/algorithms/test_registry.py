"""Lists that name every algorithm agree with one another."""

import tomllib
from pathlib import Path

from polysite.algorithms import ALGORITHMS, SERVER_OPTIMISERS

ROOT = Path(__file__).parents[2]
SHARED = {"__init__", "average", "base", "partial_models"}  # no algorithms themselves
COMBINATORS = {"averaged", "clustered", "robust_rules", "weighted"}


def test_the_import_contracts_list_every_algorithm():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    modules = {p.stem for p in (ROOT / "src" / "polysite" / "algorithms").glob("*.py")} - SHARED
    independent = next(set(c["modules"]) for c in settings if c["type"] == "independence")
    named = next(set(c["forbidden_modules"]) for c in settings if c["name"].startswith("Only the registry"))
    assert independent == {f"polysite.algorithms.{m}" for m in modules - COMBINATORS - {"server_optimisers"}}
    assert named == {f"polysite.algorithms.{m}" for m in modules}
    assert modules == {place.split(":")[0] for place in (*ALGORITHMS.values(), *SERVER_OPTIMISERS.values())}
