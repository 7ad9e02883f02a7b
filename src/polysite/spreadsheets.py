"""CSV files that spreadsheets open: no name of a site or a case is taken for a formula.

A spreadsheet computes a cell that begins with ``=``, ``+``, ``-`` or ``@``, also in a CSV file, and a formula can open
programs and send data away. Names of sites and cases come from others. Such a text gets an apostrophe in front, which
spreadsheets show as text; ``rows`` removes it again, so that polysite reads back what it wrote. Numbers stay as they
are.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

FORMULA = re.compile(r"'*[=+\-@\t\r].", re.DOTALL)
SHIELDED = re.compile(r"'+[=+\-@\t\r].", re.DOTALL)


def shielded(cell: Any) -> Any:
    """Return a cell as it may be written: a text that a spreadsheet would compute with an apostrophe in front.

    >>> shielded("=1+2"), shielded("-0.5"), shielded(-0.5), shielded("north"), shielded("'=1")
    ("'=1+2", '-0.5', -0.5, 'north', "''=1")
    """
    return f"'{cell}" if isinstance(cell, str) and FORMULA.match(cell) and not _is_number(cell) else cell


def plain_cell(text: str) -> str:
    """Return the text of which ``shielded`` made a cell.

    >>> plain_cell("'=1+2"), plain_cell("-0.5"), plain_cell("''=1"), plain_cell("'quoted'")
    ('=1+2', '-0.5', "'=1", "'quoted'")
    """
    return text[1:] if SHIELDED.match(text) else text


def csv_text(head: Iterable[Any], rows: Iterable[Iterable[Any]], end: str = "\n") -> str:
    """Return a CSV file as text; its cells are no formulas, and ``end`` is the end of every line.

    >>> csv_text(["site", "score"], [["north", 0.5]])
    'site,score\\nnorth,0.5\\n'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator=end)
    for row in (head, *rows):
        writer.writerow([shielded(cell) for cell in row])
    return text.getvalue()


def mappings_text(found: Sequence[Mapping[str, Any]], end: str = "\n") -> str:
    """Return mappings with the same keys as the rows of a CSV file, below a row of the keys."""
    return csv_text(found[0], ([row.get(key, "") for key in found[0]] for row in found), end)


def rows(lines: Iterable[str], delimiter: str = ",") -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file by the names of its columns, without the apostrophes of ``csv_text``.

    A row that is too short has None in the missing columns, and the cells of one that is too long are below None, as in
    ``csv.DictReader``.
    """
    for row in csv.DictReader(lines, delimiter=delimiter):
        yield {_plain(key): _plain(value) for key, value in row.items()}


def _plain(cell: Any) -> Any:
    return plain_cell(cell) if isinstance(cell, str) else cell


def _is_number(text: str) -> bool:
    """Whether a text is a number, or several with spaces in between."""
    try:
        return bool([float(part) for part in text.split()])
    except ValueError:
        return False
