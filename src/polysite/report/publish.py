"""Write pages and tables as files."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polysite import config
from polysite.errors import RunError
from polysite.report import costs, published
from polysite.report.compare import Comparison, summary, tables
from polysite.report.figure_files import write_figures
from polysite.report.grid import write_tables
from polysite.report.page import Options, build
from polysite.report.runs import Method, methods, read
from polysite.storage import draft_folder, vacant, write_file


def run_page(folder: Path, write: bool = True) -> tuple[list[Method], Options]:
    """Write ``index.html`` of a run into its folder, unless ``write`` is off; return what it shows."""
    found = read(folder)
    speeds = config.parse(found.config, where=str(folder / "config.toml")).cost
    shown, options = methods([found]), Options(speeds=speeds)
    if write:
        page(folder / "index.html", shown, options)
    return shown, options


def page(
    path: Path,
    methods: Sequence[Method],
    options: Options = Options(),
    files: bool = False,
    title: str = "",
    lead: str = "",
) -> Path:
    """Write a page, by default of one run, replacing an existing one; with ``files`` also its figures.

    Figures of ``index.html`` go to ``figures/`` beside it, those of ``page.html`` to ``page_figures/``.
    """
    text = build(title or f"Results of {methods[0].name}", methods, options, lead)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"the page {path} could not be written: {problem}") from problem
    write_file(path, lambda p: p.write_text(text, encoding="utf-8"))
    if files:
        beside = "figures" if path.stem == "index" else f"{path.stem}_figures"
        write_figures(path.parent / beside, text.pictures)
    return path


def comparison(
    folder: Path, title: str, methods: Sequence[Method], options: Options = Options(), replace: bool = False
) -> Comparison:
    """Write a folder with index.html, ``figures/`` and every table in ``tables.md``, ``tables.tex`` and NAME.csv."""
    if not replace:
        vacant(folder, "comparison")
    compared = options.compare(methods)
    beside = published.tables(compared, options.published, options.speeds, options.assessment)
    grids = [*tables(compared), costs.table(compared.methods, options.speeds), *beside]
    words = "\n\n".join([f"# {title}", *summary(compared), *options.remarks, *compared.remarks])
    text = build(title, methods, options)
    with draft_folder(folder, "comparison", private=False) as draft:
        text.write(draft)
        write_tables(draft, grids, words)
    return compared


def plain(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON values."""
    values = {
        m.name: {k: {s: m.of(s, k, comparison.policy) for s in m.sites} for k in comparison.measures}
        for m in comparison.methods
    }
    return {
        "reference": comparison.reference,
        "policy": asdict(comparison.policy),
        "tests": [asdict(t) for t in comparison.tests],
        "asked": [{**asdict(a.question), **asdict(a.test)} for a in comparison.asked],
        "remarks": list(comparison.remarks),
        "values": values,
    }
