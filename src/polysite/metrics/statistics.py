"""What several tests together allow to say."""

import numpy as np
from numpy.typing import NDArray


def holm(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Holm's step-down correction: the p that each would need to have been found alone.

    >>> holm(np.array([0.01, 0.04, 0.03])).round(3).tolist()
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p)
    steps = p[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty_like(steps)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted
