"""Example scans of clusters (Manthe et al. 2023, Figures 5, 6 and 8)."""

from collections.abc import Sequence

import numpy as np

from polysite.report.drawing import WIDE, pictures
from polysite.report.example_cases import Scan
from polysite.report.figure_files import Drawing, draw

SHOWN = (0.35, 0.5, 0.65)  # slices, as shares of those with something in them


def draw_scan(scan: Scan, modalities: Sequence[str]) -> Drawing:
    """Draw three slices of an upright scan, a column per modality."""
    image, (height, width) = scan.image, scan.crop["pixel"]
    (filled,) = np.nonzero(image.any((0, 2, 3)))
    low, high = (int(filled[0]), int(filled[-1])) if len(filled) else (0, image.shape[1] - 1)
    rows = sorted({round(low + share * (high - low)) for share in SHOWN})
    side = min(1.9, WIDE / len(modalities))
    tall = side * image.shape[2] * height / (image.shape[3] * width)
    slices = [("", dict(zip(modalities, image[:, row], strict=True))) for row in rows]
    return draw(pictures(slices, side, tall, (0, 255), height / width))
