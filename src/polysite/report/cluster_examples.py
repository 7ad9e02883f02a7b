"""Example scans of clusters and of outliers, for the hospital that they belong to.

Clusters are found across hospitals, but a scan is shown only to its own hospital. Every hospital gets the most typical
of its own cases in each cluster, those that it asks for by name, and its outliers (Manthe et al. 2023, Figures 5, 6 and
8).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from polysite.report.drawing import WIDE, unformatted
from polysite.report.example_cases import Scan
from polysite.report.figure_files import Drawing, draw

SHOWN = (0.35, 0.5, 0.65)  # slices, as shares of those with something in them


def typical(
    sites: Sequence[str], clusters: Sequence[str], cases: Sequence[str], distances: np.ndarray
) -> Mapping[tuple[str, str], str]:
    """Return for every hospital and cluster the case that is nearest to the middle of the cluster.

    Args:
        sites: Hospital of every case.
        clusters: Cluster of every case.
        cases: Names of the cases.
        distances: Distance of every case from the middle of its cluster.
    """
    found: dict[tuple[str, str], str] = {}
    for k in np.argsort(distances, kind="stable"):
        found.setdefault((sites[k], clusters[k]), cases[k])
    return dict(sorted(found.items()))


def draw_scan(scan: Scan, modalities: Sequence[str]) -> Drawing:
    """Draw three slices of an upright scan, a column per modality."""
    image, (height, width) = scan.image, scan.crop["pixel"]
    (filled,) = np.nonzero(image.any((0, 2, 3)))
    low, high = (int(filled[0]), int(filled[-1])) if len(filled) else (0, image.shape[1] - 1)
    rows = sorted({round(low + share * (high - low)) for share in SHOWN})
    side = min(1.9, WIDE / len(modalities))
    tall = side * image.shape[2] * height / (image.shape[3] * width)
    figure = Figure((side * len(modalities), tall * len(rows) + 0.3), layout="constrained")
    grid = figure.subplots(len(rows), len(modalities), squeeze=False)
    for panels, row in zip(grid, rows, strict=True):
        for axes, modality in zip(panels, image, strict=True):
            axes.imshow(modality[row], cmap="gray", vmin=0, vmax=255, aspect=height / width)
            axes.set_axis_off()
    for axes, title in zip(grid[0], modalities, strict=True):
        axes.set_title(unformatted(title), fontsize=9)
    return draw(figure)
