"""The size of the project: how much a person has to read. Fails above the limits in pyproject.toml.

Lines of code are lines of Python that are neither blank nor a comment nor part of a docstring; every file below a
folder counts, code in strings too. They are counted in a copy that ruff formats at 120 columns, without the comments
and commas that steer ruff, so that another layout of the same code changes nothing. Public names have no leading
underscore and stand at the top of a module. TOML, HTML and JavaScript have a limit of their own; tests count as ``wc
-l`` does.

    python scripts/size.py             a table of the packages, and the sums beside their limits
    python scripts/size.py --check     only the sums; exit status 1 if one is above its limit
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
LIMITS = "[tool.polysite.size] of pyproject.toml"
COUNTED = ("src", "bench", "scripts")  # folders whose Python has a limit
STEERING = re.compile(r" *# (fmt|yapf): *(skip|off|on|disable|enable)\b")  # comments that ruff's formatter obeys
OTHERS = {".toml": "#", ".html": "<!--", ".js": "//"}  # how a comment begins
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
HIDING = ("exec", "eval", "compile")  # builtins that run code from strings


def main() -> int:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    package = ROOT / "src" / "polysite"
    with TemporaryDirectory() as place:
        copy = _formatted(Path(place))
        if "--check" not in sys.argv:
            print("\n".join(_table(copy / "src" / "polysite")))
        sums = {name: sum(map(code, (copy / name).rglob("*.py"))) for name in COUNTED}
    sums["toml-html-js"] = sum(map(other, package.rglob("*")))
    sums["tests"] = sum(len(_lines(path)) for path in (ROOT / "tests").rglob("*.py"))
    wrong = list(_hidden(package.rglob("*.py")))
    for name, limit in settings["polysite"]["size"].items():
        print(f"{sums[name]:8,} of {limit:6,} lines  {name}")
        if sums[name] > limit:
            wrong.append(f"{name} has {sums[name]:,} lines, {LIMITS} allows {limit:,}: find its room by deleting")
    print(*wrong, sep="\n", end="\n" * bool(wrong), file=sys.stderr)
    return 1 if wrong else 0


def _formatted(place: Path) -> Path:
    """Copy the counted folders to a place, in the one layout that ruff gives them; return the place."""
    for name in COUNTED:
        for path in (ROOT / name).rglob("*.py"):
            target = place / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(STEERING.sub("", path.read_text(encoding="utf-8")), encoding="utf-8")
    (place / "ruff.toml").write_text("line-length = 120\nformat.skip-magic-trailing-comma = true\n", encoding="utf-8")
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", "--no-cache", str(place)], check=True)
    return place


def _table(package: Path) -> Iterator[str]:
    """Yield a line for every package, the largest first; modules beside the packages are one line."""
    rows: dict[str, list[int]] = {}
    for path in package.rglob("*.py"):
        below = path.relative_to(package).parts
        row = rows.setdefault(below[0] if len(below) > 1 else "(modules)", [0, 0, 0])
        for k, count in enumerate((1, code(path), len(public(path)))):
            row[k] += count
    yield f"{'package':16}{'files':>8}{'lines':>8}{'public':>8}"
    total = [sum(column) for column in zip(*rows.values(), strict=True)]
    for name, row in [*sorted(rows.items(), key=lambda item: -item[1][1]), ("sum", total)]:
        yield f"{name:16}" + "".join(f"{count:8,}" for count in row)


def code(path: Path) -> int:
    """Return the number of lines of code in a Python file."""
    text = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - set(_docstrings(ast.parse(text))))


def _docstrings(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def public(path: Path) -> list[str]:
    """Return the public classes, functions and values that a Python file defines at its top."""
    names: list[str] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def other(path: Path) -> int:
    """Return the number of lines of a TOML, HTML or JavaScript file that are neither blank nor a comment; else 0."""
    if path.suffix not in OTHERS:
        return 0
    return sum(bool(line.strip()) and not line.strip().startswith(OTHERS[path.suffix]) for line in _lines(path))


def _hidden(paths: Iterable[Path]) -> Iterator[str]:
    """Yield where code is run from strings, which nothing here could count."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in HIDING:
                yield f"{path.relative_to(ROOT)}:{node.lineno} calls {node.func.id}(): write the code out"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    sys.exit(main())
