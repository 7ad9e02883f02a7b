"""Which patients train, which choose the best round, which are kept for the final examination.

Every site is split by itself, deterministically in (seed, site), so that every hospital appears in every part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from polysite.data.case import Case
from polysite.errors import ConfigError, DataError


@dataclass(frozen=True)
class Split:
    validation: float = 0.2  # share of a site's cases; at least one case
    test: float = 0.2  # share of a site's cases; at least one where three or more are there

    def __post_init__(self) -> None:
        if not (0 < self.validation < 1 and 0 <= self.test < 1 and self.validation + self.test < 1):
            raise ConfigError(
                f"split.validation = {self.validation} and split.test = {self.test} must leave cases to train on: "
                "both below 1, validation above 0, their sum below 1"
            )

    def apply(self, site: str, cases: Sequence[Case], seed: int) -> Mapping[str, list[Case]]:
        """The cases of one site as ``train``, ``validation`` and ``test``."""
        n = len(cases)
        if n == 0:
            raise DataError(f"site {site!r} has no cases; add cases or leave the site out")
        if n == 1:
            raise DataError(
                f"site {site!r} has one case, {cases[0].name!r}; it takes two, one to train and one to validate: "
                "add a case or leave the site out"
            )
        names = [c.name for c in cases]
        if len(set(names)) < n:
            twice = next(c for c in names if names.count(c) > 1)
            raise DataError(f"site {site!r} has two cases called {twice!r}; names of cases must be unique in a site")
        test = min(max(1, round(self.test * n)), n - 2) if self.test and n >= 3 else 0
        validation = min(max(1, round(self.validation * n)), n - test - 1)
        order = np.random.default_rng([seed, crc32(site.encode())]).permutation(n)
        shuffled = [sorted(cases, key=lambda c: c.name)[i] for i in order]
        parts = {
            "test": shuffled[:test],
            "validation": shuffled[test : test + validation],
            "train": shuffled[test + validation :],
        }
        return {k: sorted(v, key=lambda c: c.name) for k, v in parts.items()}
