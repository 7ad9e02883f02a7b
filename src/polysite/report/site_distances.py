"""Distances between sites in natural order as matrices, read from the folder of an assessment."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polysite.errors import RunError
from polysite.foreign import parse_json
from polysite.heterogeneity.bounds import INTENSITY

Matrix = NDArray[np.float64]
NAMES = {"emd": "EMD", "euclidean": "EUC", "energy": "energy"}


def read(folder: Path) -> dict[str, Matrix]:
    """Return EMD_maxI and EMD_maxL of paper A, and all distances of an assessment, from its folder."""
    try:
        stored = parse_json((folder / "assessment.json").read_text(encoding="utf-8"))
        found: dict[str, list[Matrix]] = {}
        for quantity in stored["quantities"].values():
            kind = "EMD_maxI" if quantity["kind"] == INTENSITY else "EMD_maxL"
            found.setdefault(kind, []).append(np.array(quantity["matrix"], np.float64))
        matrices = {kind: max(each, key=over_pairs) for kind, each in sorted(found.items())}
        named = {NAMES.get(k, k): np.array(d["matrix"], np.float64) for k, d in stored["distances"].items() if d}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as problem:
        raise RunError(f"{folder} is no assessment that can be read: {problem!r}") from problem
    return matrices | named


def over_pairs(matrix: Matrix) -> float:
    """Return the mean of the values above the diagonal.

    >>> over_pairs(np.array([[0, 1, 2], [1, 0, 6], [2, 6, 0]], float))
    3.0
    """
    return float(matrix[np.triu_indices(len(matrix), 1)].mean())
