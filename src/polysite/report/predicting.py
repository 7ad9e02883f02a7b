"""The table of an ensemble: its members with their weights."""

from collections.abc import Mapping
from typing import Any

from polysite.report.grid import Cell, Grid, Line, name, number


def members(name_of_run: str, about: Mapping[str, Any]) -> Grid:
    """Return the weights of an ensemble's members for every hospital; hospitals with the same weights share a line."""
    sites: dict[tuple[float, ...], list[str]] = {}
    for site, found in about["sites"].items():
        sites.setdefault(tuple(found["weights"]), []).append(site)
    chosen = about["weights"] == "validation"
    lines = []
    for weights, names in sites.items():
        cells = (name(_listed(names, len(about["sites"]))), *(number(w, ".2f") for w in weights))
        lines.append(Line((*cells, _gain(about, names)) if chosen else cells))
    head = ("hospital", *(m["name"] for m in about["members"]), *(["gain on validation"] if chosen else []))
    note = (
        "Chosen for every hospital on its validation cases, and shrunk towards equal weights where there are few. The "
        "gain is that of the mean validation score over equal weights, ± its standard error."
        if chosen
        else "All members have the same weight."
    )
    return Grid("ensemble", f"Members of {name_of_run}", head, tuple(lines), note)


def _listed(names: list[str], count: int) -> str:
    return "all hospitals" if len(names) == count > 1 else ", ".join(names)


def _gain(about: Mapping[str, Any], names: list[str]) -> Cell:
    found = [about["sites"][site] for site in names]
    texts = [f"{f['gain']:+.3f} ± {f['error']:.3f} ({f['cases']} cases)" if f["gain"] else "0" for f in found]
    return Cell("; ".join(dict.fromkeys(texts)))
