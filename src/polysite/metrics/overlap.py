"""How well two masks agree.

Empty masks follow one stated policy: both empty is a perfect answer (1), exactly one empty is a complete miss (0).

>>> import numpy as np
>>> dice(np.array([1, 1, 0, 0], bool), np.array([1, 0, 0, 0], bool))
0.6666666666666666
>>> dice(np.zeros(4, bool), np.zeros(4, bool)), dice(np.zeros(4, bool), np.ones(4, bool))
(1.0, 0.0)
"""

from typing import Any


def dice(predicted: Any, truth: Any) -> float:
    """Dice coefficient of two boolean arrays or tensors: 2 |A and B| / (|A| + |B|)."""
    total = int(predicted.sum()) + int(truth.sum())
    return 2 * int((predicted & truth).sum()) / total if total else 1.0
