"""What a search tries: methods, and values of their settings.

A file in TOML extends or replaces what polysite knows (``space.toml``)::

    reference = "fedavg"                       # always trained to the end, for comparison
    [search]                                   # for all methods
    "train.lr" = ["x0.5", "x1", "x2"]          # "x2" is twice the value of the study
    [methods.fedprox]
    algorithm = "fedprox"
    search = { "algorithm.mu" = [0.01, 0.1] }

A candidate is a method with one value of each of its settings. All methods get equally many candidates, as far as their
grids reach: the first has the method's own values, the others are drawn at random from the grid, without repetition.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from polysite import config
from polysite.benchmark.axes import FIXED
from polysite.benchmark.equal_tuning import check_settings, words
from polysite.config import Study
from polysite.errors import ConfigError, nearest
from polysite.foreign import read_toml


@dataclass(frozen=True)
class SpaceFile:
    """What the file of a search space states; what it leaves out is that of polysite's own."""

    reference: str = ""
    default: tuple[str, ...] = ()
    search: Mapping[str, Any] | None = None
    methods: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """A method of a search: sections of a study that it changes, and the values that are tried for settings."""

    changes: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]

    @property
    def points(self) -> int:
        """Number of combinations of all values."""
        return prod(len(values) for values in self.grid.values())


@dataclass(frozen=True)
class Candidate:
    """A method with one value of each of its settings; without values it has its own."""

    method: str
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Method and values as text.

        >>> Candidate("fedprox", {"algorithm.mu": 0.1, "train.lr": 0.2}).name
        'fedprox, mu 0.1, lr 0.2'
        """
        return ", ".join([self.method, *([words(self.values)] if self.values else [])])


@dataclass(frozen=True)
class Space:
    """All methods of a search."""

    reference: str
    methods: Mapping[str, Method]

    def study(self, base: Study, candidate: Candidate) -> Study:
        """Return the study of a candidate.

        Args:
            base: The study that is tuned.
            candidate: The candidate.
        """
        return config.vary(self._own(base, candidate.method), candidate.values)

    def _own(self, base: Study, method: str) -> Study:
        return config.vary(base, self.methods[method].changes)

    def candidates(self, base: Study, count: int, seed: int) -> list[Candidate]:
        """Return up to ``count`` candidates of every method, those of the reference first."""
        order = [self.reference, *(name for name in self.methods if name != self.reference)]
        return [c for name in order for c in islice(self._draw(base, name, seed), count)]

    def _draw(self, base: Study, name: str, seed: int) -> Iterator[Candidate]:
        """Yield the candidates of a method in a random order, its own values first."""
        own = config.flat(config.plain(self._own(base, name)))
        grid = {key: _values(name, key, values, own) for key, values in self.methods[name].grid.items()}
        yield Candidate(name)
        rng = np.random.default_rng([seed, *name.encode()])
        for point in rng.permutation(prod(map(len, grid.values()))) if grid else ():
            values = {}
            for key, listed in grid.items():
                point, at = divmod(int(point), len(listed))
                values[key] = listed[at]
            if any(own.get(key) != value for key, value in values.items()):
                yield Candidate(name, values)


def load(file: Path | None = None, methods: Sequence[str] = ()) -> Space:
    """Return the space of a search.

    Args:
        file: A TOML file that extends polysite's own space; its ``[search]`` and methods take precedence.
        methods: Names of the methods to try; empty for those of ``default``.
    """
    known = _read(Path(str(files("polysite.tuning").joinpath("space.toml"))))
    given = _read(file) if file else SpaceFile()
    listed = {**known.methods, **given.methods}
    shared = config.flat((known.search if given.search is None else given.search) or {})
    reference = given.reference or known.reference
    chosen = list(methods) or given.default or list(given.methods) or known.default
    for name in (*chosen, reference):
        if name not in listed:
            raise ConfigError(f"there is no method {name!r} to tune; {nearest(name, listed)}")
    return Space(reference, {n: _method(n, listed[n], shared) for n in dict.fromkeys([reference, *chosen])})


def _read(file: Path) -> SpaceFile:
    return config.convert(SpaceFile, read_toml(file, "the search space"), "", str(file))


def _method(name: str, given: Any, shared: Mapping[str, Any]) -> Method:
    if not isinstance(given, Mapping):
        raise ConfigError(f"the method {name!r} of the search space must be a table with sections of a study")
    grid = {**shared, **config.flat(given.get("search", {}))}
    changes = {k: {"name": v} if k == "algorithm" and isinstance(v, str) else v for k, v in given.items()}
    changes.pop("search", None)
    if grid:
        check_settings(f"the method {name!r}", grid)
    odd = next((key for key in (*grid, *changes) if key.partition(".")[0] in FIXED), None)
    if odd is not None:
        raise ConfigError(f"the method {name!r} changes {odd!r}, which chooses the cases; all methods need the same")
    return Method(changes, grid)


def _values(method: str, key: str, values: Sequence[Any], own: Mapping[str, Any]) -> list[Any]:
    """Return the values of a setting; "x2" becomes twice the method's own value."""
    found = []
    for value in values:
        if isinstance(value, str) and value.startswith("x") and value[1:].replace(".", "", 1).isdecimal():
            if not isinstance(own.get(key), int | float):
                raise ConfigError(f"{method!r} has no number {key!r} to multiply by {value[1:]}; write values instead")
            value = float(f"{own[key] * float(value[1:]):.6g}")
        found.append(value)
    return list(dict.fromkeys(found))
