"""Figures of a page as files: ``NAME.svg``, ``NAME.pdf`` and ``NAME.png`` of every figure, and ``captions.json``.

A ``Drawing`` is SVG text that knows its Matplotlib figure, so that the figure on the page can also be written as PDF
and PNG.

>>> from tempfile import TemporaryDirectory
>>> with TemporaryDirectory() as folder:
...     drawn = draw(Figure((1, 1)))
...     [path.name for path in write_figures(Path(folder), [Picture("Dice by site", drawn, "Mean over cases.")])]
['dice-by-site.svg', 'dice-by-site.pdf', 'dice-by-site.png', 'captions.json']
"""

import io
import json
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from matplotlib import rc_context
from matplotlib.figure import Figure

from polysite.errors import RunError
from polysite.storage import write_file

DPI = 300  # of PNG files


class Drawing(str):
    """SVG text of a figure, without a date, so that the same data give the same text."""

    figure: Figure
    __slots__ = ("figure",)

    def __new__(cls, svg: str, figure: Figure) -> Self:
        """Keep the figure with its SVG."""
        text = super().__new__(cls, svg)
        text.figure = figure
        return text


@dataclass(frozen=True)
class Picture:
    """A figure with its title and caption.

    Args:
        title: Title above the figure.
        svg: SVG text; a `Drawing` can also be written to files.
        caption: Text below the figure.
        narrow: Whether two stand side by side.
        name: Name of its files; by default the section and the title.
        folded: Whether it is collapsed until a reader opens it.
    """

    title: str
    svg: str
    caption: str
    narrow: bool = False
    name: str = ""
    folded: bool = False


def draw(figure: Figure) -> Drawing:
    """Return a figure as SVG text with a transparent background."""
    text = io.StringIO()
    with rc_context({"svg.hashsalt": "polysite"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    figure.set_layout_engine("none")  # the PNG has the same layout
    return Drawing(text.getvalue()[text.getvalue().index("<svg") :], figure)


def write_figures(folder: Path, figures: Iterable[Picture]) -> list[Path]:
    """Write every drawn figure as SVG, PDF and PNG (300 dpi), with their captions; return the files.

    A figure that exists is replaced; other files of the folder are left alone. Pictures that are no `Drawing` have
    files elsewhere and are skipped. Without any figure nothing is written.
    """
    captions: dict[str, dict[str, str]] = {}
    files: list[Path] = []
    for picture in figures:
        if not isinstance(picture.svg, Drawing):
            continue
        name = _free(slug(picture.name or picture.title) or "figure", captions)
        captions[name] = {"title": picture.title, "caption": picture.caption}
        files += write_drawing(folder, name, picture.svg)
    if captions:
        text = json.dumps(captions, indent=1, ensure_ascii=False) + "\n"
        write_file(folder / "captions.json", lambda p: p.write_text(text, encoding="utf-8"), sync=False)
        files.append(folder / "captions.json")
    return files


def slug(text: str) -> str:
    """Return a text as a file name.

    >>> slug("Dice, hospital by hospital"), slug("É: 50 % / TC")
    ('dice-hospital-by-hospital', 'é-50-tc')
    """
    return re.sub(r"[\W_]+", "-", text.lower()).strip("-")[:80].rstrip("-")


def _free(name: str, taken: Iterable[str]) -> str:
    """Return the name, with a number if another figure has it."""
    used, count, chosen = set(taken), 1, name
    while chosen in used:
        count += 1
        chosen = f"{name}-{count}"
    return chosen


def write_drawing(folder: Path, name: str, drawing: Drawing) -> list[Path]:
    """Write ``NAME.svg``, ``NAME.pdf`` and ``NAME.png``; return the files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"the figures {folder} could not be written: {problem}") from problem
    svg, pdf, png = (folder / f"{name}.{kind}" for kind in ("svg", "pdf", "png"))
    write_file(svg, lambda p: p.write_text(drawing, encoding="utf-8"), sync=False)
    write_file(pdf, lambda p: _save(drawing.figure, p, "pdf", {"CreationDate": None}), sync=False)
    write_file(png, lambda p: _save(drawing.figure, p, "png", {"Software": None}), sync=False)
    return [svg, pdf, png]


def _save(figure: Figure, path: Path, kind: str, metadata: dict[str, None]) -> None:
    """Write a figure; text in a PDF stays text, in fonts that journals accept (TrueType)."""
    with warnings.catch_warnings(), rc_context({"pdf.fonttype": 42}):
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(path, format=kind, dpi=DPI, metadata=metadata)
