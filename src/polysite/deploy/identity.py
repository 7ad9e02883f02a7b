"""Identity of the running code, so that two sides can tell whether they compute the same.

The digest covers the modules that decide results: algorithms, tasks, networks, preparation, codec and protocol, found
by following the imports of ``ROOTS`` within polysite. Each module is read as a syntax tree without docstrings and
comments, so that neither prose nor formatting changes the digest.
"""

import ast
import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polysite

ROOTS = (
    "polysite.algorithms",
    "polysite.heterogeneity.exchange",
    "polysite.data.slices",
    "polysite.data.sources",
    "polysite.data.split",
    "polysite.deploy.protocol",
    "polysite.engines.plan",
    "polysite.engines.site_turn",
    "polysite.models",
    "polysite.payload",
    "polysite.training.assessed_site",
    "polysite.training.torch_site",
)


@cache
def identity() -> dict[str, str]:
    """Return the version of polysite and the digest of the code that both sides must share."""
    digest = hashlib.sha256()
    for name, source in sorted(deciding_modules().items()):
        digest.update(f"{name} {code_of(source)}\n".encode())
    return {"polysite": version("polysite"), "code": digest.hexdigest()[:12]}


def difference(other: Mapping[str, Any]) -> str | None:
    """Return a sentence about different code, or None if the coordinator's code decides the same results."""
    own = identity()
    if other.get("code") == own["code"]:
        return None
    given = {k: other.get(k, "unknown") for k in own}
    return (
        f"this site runs polysite {own['polysite']} (code {own['code']}), the coordinator {given['polysite']} "
        f"(code {given['code']}): install the same on both sides"
    )


def deciding_modules() -> dict[str, str]:
    """Return the source of every module that decides results, by name."""
    root = Path(str(polysite.__file__)).parent
    files = {_module_name(path, root): path for path in root.rglob("*.py")}
    below = [name for name in files if name.startswith(("polysite.algorithms.", "polysite.models."))]  # found by name
    queue, sources = [*ROOTS, *below], dict[str, str]()
    while queue:
        name = queue.pop()
        if name not in sources:
            sources[name] = files[name].read_text(encoding="utf-8")
            queue += [found for found in _imports(ast.parse(sources[name])) if found in files]
    return sources


def code_of(source: str) -> str:
    """Return a module's syntax tree as text, without docstrings; the same in every version of Python."""
    return _dumped(ast.parse(source))


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(("polysite", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module imports, within functions, too; some of them are no modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module != "polysite":
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"polysite.{alias.name}" for alias in node.names)


def _dumped(node: Any) -> str:
    """Return a tree as text. Empty fields are left out: newer versions of Python have more of them."""
    if isinstance(node, list):
        return f"[{','.join(map(_dumped, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    values = {name: getattr(node, name, None) for name in node._fields}
    if isinstance(values.get("body"), list):
        values["body"] = [each for each in node.body if not _is_text(each)]  # type: ignore[attr-defined]
    return f"{type(node).__name__}({','.join(f'{k}={_dumped(v)}' for k, v in values.items() if v not in (None, []))})"


def _is_text(node: ast.stmt) -> bool:
    """Whether a statement is only a text: a docstring of a module, class, function or attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
