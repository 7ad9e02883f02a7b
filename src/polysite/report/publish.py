"""Pages and tables as files: the whole folder, or nothing."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polysite.errors import RunError
from polysite.report import costs
from polysite.report.compare import Comparison, compare, summary, tables
from polysite.report.page import Options, build
from polysite.report.runs import Method
from polysite.storage import draft_folder, vacant, write_file


def page(path: Path, methods: Sequence[Method], options: Options = Options()) -> Path:
    """The page about one run; replaces the one that was there."""
    text = build(f"What the hospitals get from {methods[0].name}", methods, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"the page {path} could not be written: {problem}") from problem
    write_file(path, lambda p: p.write_text(text, encoding="utf-8"))
    return path


def comparison(
    folder: Path, title: str, methods: Sequence[Method], options: Options = Options(), replace: bool = False
) -> Comparison:
    """A folder: index.html, and every table in ``tables.md``, ``tables.tex`` and NAME.csv."""
    if not replace:
        vacant(folder, "comparison")
    found = compare(methods, options.reference, options.policy, options.tail)
    grids = [*tables(found), costs.table(methods, options.speeds)]
    words = "\n\n".join([f"# {title}", *summary(found), *found.remarks])
    text = build(title, methods, options)
    with draft_folder(folder, "comparison") as draft:
        (draft / "index.html").write_text(text, encoding="utf-8")
        body = "\n".join(g.markdown() for g in grids)
        (draft / "tables.md").write_text(f"{words}\n\n{body}", encoding="utf-8")
        (draft / "tables.tex").write_text("\n".join(g.latex() for g in grids), encoding="utf-8")
        for grid in grids:
            (draft / f"{grid.name}.csv").write_text(grid.csv(), encoding="utf-8")
    return found


def plain(found: Comparison) -> dict[str, Any]:
    """A comparison for JSON."""
    means = {m.name: {k: {s: m.of(s, k, found.policy) for s in m.sites} for k in found.measures} for m in found.methods}
    return {
        "reference": found.reference,
        "policy": asdict(found.policy),
        "tests": [asdict(t) for t in found.tests],
        "remarks": list(found.remarks),
        "values": means,
    }
