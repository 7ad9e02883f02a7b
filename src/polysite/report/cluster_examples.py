"""Example scans of clusters and of outliers, for the hospital that they belong to.

Clusters are found across hospitals, but a scan is shown only to its own hospital. Every hospital gets the most typical
of its own cases in each cluster, those that it asks for by name, and its outliers (Manthe et al. 2023, Figures 5, 6 and
8).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from polysite.report.drawing import WIDE, pictures
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
    slices = [("", dict(zip(modalities, image[:, row], strict=True))) for row in rows]
    return draw(pictures(slices, side, tall, (0, 255), height / width))
