"""Do the tests notice when the mathematics is wrong? One small fault at a time, and who fails.

Draws faults (mutants) at random from the code of PACKAGES: a comparison that moves by one or is turned round, plus for
minus, times for divided, a number that is one larger or doubled, and for or, a lost ``not``, a lost call (CALLS), min
for max, the largest for the sum, branches swapped. Left out is what no test has to know: texts, annotations, constants
at the top of a module, and defaults of fields, which are choices of a hyper-parameter and no mathematics.

Everything happens in a copy. First all tests of TESTS run once, while it is noted which functions each of them calls
and how long it takes: some minutes, which --notes spares the next run. Then every mutant meets the tests that call the
function it is in, the quickest first, until one fails; of the slowest, only those that --most leaves time for. A mutant
that hangs or crashes has been noticed.

    python scripts/mutants.py --count 60 --seed 0
"""

import argparse
import ast
import copy
import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before anything counts the cores

import pytest

PACKAGES = ("algorithms", "cluster", "heterogeneity", "metrics")
TESTS = {  # package -> where its tests are; what is not there is passed over
    "algorithms": (
        "algorithms", "engines/test_rounds.py", "engines/test_phases.py", "training/test_divergence.py",
        "training/test_personal.py", "training/test_mixing.py",
    ),
    "cluster": ("cluster", "algorithms", "heterogeneity"),
    "heterogeneity": ("heterogeneity", "test_assessment.py"),
    "metrics": ("metrics", "heterogeneity"),
}  # fmt: skip
WARM = ("torch", "monai", "numba", "scipy.stats", "sklearn.mixture")  # imported once for all mutants
CALLS = ("abs", "trained", "sorted", "sqrt", "log", "exp", "cumsum")  # f(x) -> x
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "sum": "max", "fsum": "max"}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult
}  # fmt: skip

Where = tuple[str, int]  # of a function: its file in the package, its first line
Notes = Mapping[str, tuple[float, list[Where]]]  # test -> seconds, functions that it calls


@dataclass(frozen=True)
class Mutant:
    file: str  # below src/polysite
    line: int
    column: int
    function: int  # first line of the function that it is in; 0: of none
    span: tuple[int, int]  # bytes that are replaced
    old: str
    new: str
    text: str  # the line as it is

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}  {_short(self.old)}  ->  {_short(self.new)}  in  {self.text}"


@dataclass(eq=False)
class Watch:
    """Part of pytest: lets only some tests run, in their order, and notes what they call, how long, and who fails."""

    only: Sequence[str] | None = None  # None: all
    root: str = ""  # note calls of functions in files below; empty: none
    failed: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, list[Where]] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.only is not None:
            place = {name: n for n, name in enumerate(self.only)}
            items[:] = sorted((i for i in items if i.nodeid in place), key=lambda i: place[i.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        seen: set[Where] = set()

        def trace(frame: FrameType, event: str, arg: object) -> None:
            code = frame.f_code
            if code.co_filename.startswith(self.root):
                seen.add((code.co_filename, code.co_firstlineno))

        if self.root:
            threading.settrace(trace)
            sys.settrace(trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            self.calls[item.nodeid] = sorted((file.removeprefix(self.root), line) for file, line in seen)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def main() -> None:
    given = _options()
    for name in WARM:
        importlib.import_module(name)
    chosen = random.Random(given.seed).sample(list(everything(given.src)), given.count)
    with TemporaryDirectory() as folder:
        place = Path(folder).resolve()
        shutil.copytree(given.src, place / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        shutil.copytree(given.tests, place / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(given.tests.parent / "bench", place / "bench", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(given.tests.parent / "pyproject.toml", place)
        began = time.perf_counter()
        known = notes(place, given.notes)
        print(f"{len(known)} tests noted after {time.perf_counter() - began:.0f} s", flush=True)
        killed = 0
        for n, mutant in enumerate(chosen, start=1):
            start = time.perf_counter()
            by = killer(place, mutant, known, given.most)
            killed += by is not None
            fate = "SURVIVED" if by is None else f"killed by {by}"
            print(f"{n:3}  {mutant}  {fate}  ({time.perf_counter() - start:.0f} s)", flush=True)
    print(f"killed {killed} of {len(chosen)} after {time.perf_counter() - began:.0f} s")


def _options() -> argparse.Namespace:
    here = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument("--src", type=Path, default=here / "src", help="the folder that holds polysite")
    parser.add_argument("--tests", type=Path, default=here / "tests", help="the folder of tests")
    parser.add_argument("--notes", type=Path, help="where to keep what tests call, for the next run on the same tree")
    parser.add_argument("--most", type=float, default=60.0, help="seconds' worth of tests for one mutant")
    return parser.parse_args()


def everything(src: Path) -> Iterator[Mutant]:
    """All mutants there are."""
    root = src / "polysite"
    for path in sorted(p for package in PACKAGES for p in (root / package).rglob("*.py")):
        lines = path.read_bytes().splitlines(keepends=True)
        starts = [0, *accumulate(map(len, lines))]
        for node, new, function in _places(ast.parse(path.read_bytes()), 0, top=True):
            first, last = node.lineno - 1, (node.end_lineno or 0) - 1
            span = starts[first] + node.col_offset, starts[last] + (node.end_col_offset or 0)
            place = f"{path.relative_to(root)}", node.lineno, node.col_offset + 1, function, span
            yield Mutant(*place, ast.unparse(node), ast.unparse(new), lines[first].decode().strip())


def _places(node: ast.AST, function: int, top: bool) -> Iterator[tuple[ast.expr, ast.expr, int]]:
    """(What is there, what comes instead, the function around it). ``top``: directly in a module or class."""
    if isinstance(node, ast.JoinedStr | ast.Raise) or _is_text(node):
        return
    if top and isinstance(node, ast.Assign | ast.AnnAssign):
        return
    if isinstance(node, ast.FunctionDef):
        function = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    if isinstance(node, ast.If) and isinstance(node.body[0], ast.Return) and not isinstance(node.test, ast.UnaryOp):
        yield node.test, ast.UnaryOp(ast.Not(), node.test), function
    if isinstance(node, ast.expr):
        yield from ((node, new, function) for new in _instead(node))
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _places(child, function, isinstance(node, ast.Module | ast.ClassDef))


def _is_text(node: ast.AST) -> bool:
    """Such as ``"s" * (count != 1)``."""
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else ()
    return any(
        isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and isinstance(s.value, str)) for s in sides
    )


def _instead(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.Compare):
        for n, op in enumerate(node.ops):
            if type(op) in COMPARISONS:
                yield _with(node, ops=[*node.ops[:n], COMPARISONS[type(op)](), *node.ops[n + 1 :]])
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield _with(node, op=OPERATORS[type(node.op)]())
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        yield ast.Constant(node.value + 1)
        if node.value not in (0, 1):
            yield ast.Constant(2 * node.value)
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield _with(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Call):
        called = node.func
        name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
        if name in CALLS and len(node.args) == 1:
            yield node.args[0]
        if name in NAMES and isinstance(called, ast.Attribute) and name != "fsum":  # x.sum()
            yield _with(node, func=_with(called, attr=NAMES[name]))
        elif name in NAMES:
            yield _with(node, func=ast.Name(NAMES[name]))


def _with(node: Any, **changes: Any) -> Any:
    new = copy.copy(node)
    for name, value in changes.items():
        setattr(new, name, value)
    return new


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:60]} ... {text[-35:]}"


def paths(place: Path, package: str) -> list[str]:
    """The tests of a package, and its own examples."""
    found = [f"tests/{path}" for path in TESTS[package] if (place / "tests" / path).exists()]
    return [*found, f"src/polysite/{package}"]


def notes(place: Path, kept: Path | None) -> Notes:
    """What is kept of an earlier run, if it was one of the same code and tests."""
    tree = sha256(b"".join(path.read_bytes() for path in sorted(place.rglob("*.py")))).hexdigest()
    if kept is not None and kept.exists():
        old = json.loads(kept.read_text())
        if old["tree"] == tree:
            return {
                k: (seconds, [(file, line) for file, line in calls]) for k, (seconds, calls) in old["notes"].items()
            }
    found = note(place)
    if kept is not None:
        kept.write_text(json.dumps({"tree": tree, "notes": found}))
    return found


def note(place: Path) -> Notes:
    """Of every test that passes: how long it takes and what it calls."""
    where = {path for package in PACKAGES for path in paths(place, package)}
    watch = _run(place, sorted(where), Watch(root=f"{place}/src/polysite/"), limit=3600.0)
    if watch is None:
        raise SystemExit("the tests do not come to an end")
    for name in watch.failed:
        print(f"fails without any mutant: {name}")
    if not watch.calls:
        raise SystemExit("no test runs")
    return {k: (watch.seconds[k], c) for k, c in watch.calls.items() if k not in watch.failed and k in watch.seconds}


def killer(place: Path, mutant: Mutant, known: Notes, most: float) -> str | None:
    """The test that fails, if any."""
    mine = tuple(paths(place, mutant.file.split("/")[0]))
    near = {k: calls for k, (_, calls) in known.items() if k.startswith(mine)}
    meet = [k for k, calls in near.items() if (mutant.file, mutant.function) in calls]
    if not meet:  # compiled, or not called by any test
        meet = [k for k, calls in near.items() if any(file == mutant.file for file, _ in calls)]
    meet.sort(key=lambda k: known[k][0])
    while meet and sum(known[k][0] for k in meet) > most:
        meet.pop()
    file = place / "src" / "polysite" / mutant.file
    text = file.read_bytes()
    start, end = mutant.span
    try:
        _write(file, text[:start] + f"({mutant.new})".encode() + text[end:])
        watch = _run(place, meet, Watch(only=meet), limit=30 + 3 * sum(known[k][0] for k in meet))
    finally:
        _write(file, text)
    if watch is None:
        return "the clock"
    if not watch.failed and len(watch.seconds) < len(meet):
        raise SystemExit(f"{mutant}: of {len(meet)} tests only {len(watch.seconds)} ran")
    return watch.failed[0] if watch.failed else None


def _write(file: Path, text: bytes) -> None:
    file.write_bytes(text)
    Path(importlib.util.cache_from_source(file)).unlink(missing_ok=True)  # the clock is too coarse to tell it is stale


def _run(place: Path, tests: Sequence[str], watch: Watch, limit: float) -> Watch | None:
    """Run tests in a process of its own; None if that takes too long."""
    if not tests:
        return watch
    told = place / "told.json"
    told.unlink(missing_ok=True)
    child = get_context("fork").Process(target=_child, args=(place, tests, watch, told))
    child.start()
    child.join(limit)
    if child.is_alive() and child.pid is not None:
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
        return None
    if not told.exists():
        return Watch(failed=["a crash"])
    found = json.loads(told.read_text())
    calls = {k: [(file, line) for file, line in v] for k, v in found["calls"].items()}
    return Watch(failed=found["failed"], seconds=found["seconds"], calls=calls)


def _child(place: Path, tests: Sequence[str], watch: Watch, told: Path) -> None:
    os.setsid()
    os.chdir(place)
    os.environ["PYTHONPATH"] = f"{place}/src"
    sys.path.insert(0, f"{place}/src")
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    files = list(dict.fromkeys(t.split("::")[0] for t in tests))
    options = ["-q", "--doctest-modules", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", "-m"]
    options += ["not slow and not soak", "--rootdir", f"{place}", *(["-x"] if watch.only is not None else [])]
    code = pytest.main([*options, *files], plugins=[watch])
    import polysite

    if code not in (0, 1, 5) and not watch.failed:
        watch.failed.append(f"pytest itself ({code!r})")
    if not (polysite.__file__ or "").startswith(f"{place}"):
        watch.failed.append(f"the wrong polysite: {polysite.__file__}")
    told.write_text(json.dumps({"failed": watch.failed, "seconds": watch.seconds, "calls": watch.calls}))


if __name__ == "__main__":
    main()
