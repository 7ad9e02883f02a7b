"""Tables for Python: a DataFrame where pandas is installed, a list of dictionaries otherwise."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def frame(rows: Rows) -> Any:
    """Return rows as a pandas DataFrame, or as plain dictionaries where there is no pandas.

    >>> len(frame([{"site": "north", "dice": 0.8}]))
    1
    """
    if find_spec("pandas") is None:
        return [dict(row) for row in rows]
    import pandas

    return pandas.DataFrame([dict(row) for row in rows])


def number(cell: str | None) -> Any:
    """Return the cell of a CSV file as a number, None if it is empty, or as it is.

    >>> number("0.5"), number("7"), number(""), number("north"), number("007a")
    (0.5, 7, None, 'north', '007a')
    """
    if not cell:
        return None
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell
