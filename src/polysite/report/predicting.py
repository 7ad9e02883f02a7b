"""Tables on how a run predicts: the members of an ensemble with their weights, and the cleaning of masks."""

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


def cleaning(name_of_run: str, found: Mapping[str, Any]) -> Grid:
    """Return the gain of every way of cleaning masks on the validation cases, and how sure it is."""
    chosen = _chosen(found)
    lines = [
        Line(
            (
                Cell(row["option"], best=row["option"] == chosen),
                number(row["gain"], "+.4f"),
                number(row["p"], ".3g"),
                number(row["changed"], "d"),
            )
        )
        for row in found["options"]
    ]
    taken = chosen or "no cleaning, since no gain is beyond chance (p < 0.05)"
    note = (
        f"Gain of the mean Dice over no cleaning, on {found['cases']} validation cases of all hospitals; p of "
        f"Wilcoxon's signed-rank test paired by case (gain above zero), corrected by Holm. Taken: {taken}."
    )
    head = ("cleaning", "gain", "p", "cases that change")
    return Grid("cleaning", f"Cleaning of masks by {name_of_run}", head, tuple(lines), note)


def _chosen(found: Mapping[str, Any]) -> str:
    from polysite.training.cleaning import Clean

    clean = Clean(**found["chosen"])
    return str(clean) if clean.does else ""
