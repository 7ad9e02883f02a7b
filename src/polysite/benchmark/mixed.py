"""Ensembles of a benchmark: of the inner folds of a method, or of several methods, in every fold and with every seed.

They are made of finished runs when these have ended (``run.py``), in that process, and compared like methods.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polysite import config
from polysite.errors import ConfigError, nearest


@dataclass(frozen=True)
class EnsembleOf:
    """An ensemble of a benchmark.

    Args:
        of: A method, with ``folds``; or at least two methods.
        folds: Inner folds of the cases that are not tested; the method is trained without each of them.
    """

    of: tuple[str, ...]
    folds: int = 0

    def __post_init__(self) -> None:
        if self.folds == 1 or self.folds < 0 or (len(self.of) == 1) != (self.folds > 0):
            raise ConfigError(
                f"an ensemble is of one method with two or more folds, or of several methods without: of = "
                f"{list(self.of)}, folds = {self.folds}"
            )

    def members(self, name: str) -> tuple[str, ...]:
        """Return the methods whose runs are the members of the ensemble of this name."""
        return tuple(f"{name} inner fold {k}" for k in range(self.folds)) or self.of


def check(found: Mapping[str, EnsembleOf], methods: Mapping[str, Any], bench: str) -> None:
    """Refuse ensembles of unknown methods, or with the name of a method."""
    for name, each in found.items():
        odd = next((m for m in each.of if m not in methods), None)
        if odd is not None:
            raise ConfigError(
                f"the ensemble {name!r} of {bench} is of {odd!r}, which is no method; {nearest(odd, methods)}"
            )
        if name in methods:
            raise ConfigError(f"{bench} has a method and an ensemble called {name!r}; give one of them another name")


def inner_folds(found: Mapping[str, EnsembleOf], methods: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the members that are trained for ensembles alone: methods without one inner fold each."""
    return {
        member: config.merge(methods[each.of[0]], {"split": {"inner": each.folds, "inner_fold": k}})
        for name, each in found.items()
        for k, member in enumerate(each.members(name))
        if each.folds
    }
