"""Check that all text of a figure can be read: none is cut off at its edge, and none lies over other text."""

from itertools import combinations
from unittest.mock import patch

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

DPI = 300  # at which letters have their true widths
SLACK = 4.0  # dots by which boxes may touch


def problems(figure):
    """Return a sentence for every text that is clipped, and for every pair of texts that overlap."""
    drawn, draw = [], Text.draw

    def note(text, renderer):
        drawn.append(text)
        draw(text, renderer)

    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    with patch.object(Text, "draw", note):
        canvas.draw()
    shown = [t for t in drawn if t.get_visible() and t.get_text().strip()]
    boxes = [(t.get_text(), t.get_window_extent(canvas.get_renderer())) for t in shown]
    paper = figure.bbox
    found = []
    for text, box in boxes:
        beyond = max(paper.x0 - box.x0, paper.y0 - box.y0, box.x1 - paper.x1, box.y1 - paper.y1)
        if beyond > SLACK:
            found.append(f"{text!r} is cut off by {beyond:.0f} dots")
    for (one, a), (other, b) in combinations(boxes, 2):
        if min(a.x1, b.x1) - max(a.x0, b.x0) > SLACK and min(a.y1, b.y1) - max(a.y0, b.y0) > SLACK:
            found.append(f"{one!r} lies over {other!r}")
    return found
