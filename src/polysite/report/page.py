"""One self-contained HTML page: a sentence, a table, figures, cost, configuration."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from polysite.report.runs import Summary, mean_std


@dataclass(frozen=True)
class Shown:
    """A figure with its words."""

    title: str
    svg: str
    caption: str
    narrow: bool = False


def build(title: str, lead: str, runs: Sequence[Summary], figures: Sequence[Shown]) -> str:
    """The page as text."""
    return render("page.html", title=title, lead=lead, runs=runs, rows=_rows(runs), figures=figures)


def render(template: str, **values: Any) -> str:
    """A template of this folder, filled in; nothing in a value is taken for HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template(template).render(**values)


def _rows(runs: Sequence[Summary]) -> list[dict[str, Any]]:
    """Hospitals, then all of them, then the labels one by one."""
    first = runs[0]
    rows = [_row(s, "", len(first.cases(s)), [r.cases(s) for r in runs]) for s in first.sites]
    rows.append(_row("all", "total", len(first.cases()), [r.cases() for r in runs]))
    return rows + [_row(k, "label", "", [r.cases(label=k) for r in runs]) for k in first.labels]


def _row(name: str, kind: str, patients: int | str, columns: list[list[float]]) -> dict[str, Any]:
    means = [fmean(c) if c else -1.0 for c in columns]
    cells = [
        {"text": mean_std(c), "best": len(columns) > 1 and m == max(means) >= 0}
        for c, m in zip(columns, means, strict=True)
    ]
    return {"name": name, "kind": kind, "patients": patients, "cells": cells}
