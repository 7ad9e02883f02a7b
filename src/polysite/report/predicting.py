"""Tables on how a run predicts: the cleaning of masks."""

from collections.abc import Mapping
from typing import Any

from polysite.report.grid import Cell, Grid, Line, number


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
