"""Axes of a benchmark besides methods, folds and seeds: federations, and values of settings (a sweep).

>>> federations([{"title": "a", "name": "dirichlet", "alpha": 0.1}])[0].study
{'federation': {'name': 'dirichlet', 'alpha': 0.1}}
>>> points({"algorithm.lam": [0, 10]})
[{'algorithm.lam': 0}, {'algorithm.lam': 10}]
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import product
from typing import Any

import tomli_w

from polysite.config import Study
from polysite.engines.run_folder import file_name
from polysite.errors import ConfigError, nearest

FIXED = ("seed", "data", "federation", "split", "slices")  # sections that choose the cases: no sweep changes them
OWN = ("title", "study", "federation")  # keys of an entry of ``federations`` that are not keys of a federation


@dataclass(frozen=True)
class NamedFederation:
    """A federation of a benchmark: its title, and the settings of a study that define it."""

    title: str = ""  # empty if the benchmark has no axis of federations
    study: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """A method of a benchmark with one combination of swept values."""

    name: str
    method: str
    point: Mapping[str, Any] = field(default_factory=dict)  # swept key -> value

    @property
    def overrides(self) -> dict[str, str]:
        """The swept values as TOML text."""
        return {key: _toml(value) for key, value in self.point.items()}


def federations(given: Sequence[Any]) -> tuple[NamedFederation, ...]:
    """Return the federations that a benchmark lists; refuse two with one title."""
    named = tuple(_federation(entry) for entry in given)
    folders: dict[str, str] = {}
    for each in named:
        twin = folders.setdefault(file_name(each.title).lower(), each.title)
        if sum(twin == other.title for other in named) > 1 or twin != each.title:
            raise ConfigError(f"two federations are called {each.title!r}; give each a title of its own")
    return named


def _federation(entry: Any) -> NamedFederation:
    if not isinstance(entry, Mapping) or not entry.get("title"):
        example = "{ title = 'equal', name = 'iid', sites = 5 }"
        raise ConfigError(f"federations holds {entry!r}; an entry is a table with a title, as in {example}")
    title, own = str(entry["title"]), {k: v for k, v in entry.items() if k not in OWN}
    if bool(own) == ("federation" in entry):
        raise ConfigError(
            f"the federation {title!r} needs either a name with its keys, or the key 'federation' with a list of "
            "federations"
        )
    study = entry.get("study", {})
    if not isinstance(study, Mapping) or "federation" in study:
        raise ConfigError(
            f"the key 'study' of the federation {title!r} must be a table of sections of a study other than federation"
        )
    return NamedFederation(title, {**study, "federation": entry.get("federation", own)})


def points(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the values of all keys."""
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def check_sweep(sweep: Mapping[str, Any], only: Iterable[str], methods: Iterable[str]) -> None:
    """Refuse a sweep of settings that choose the cases, of fewer than two values, or of unknown methods."""
    known = list(methods)
    for key, values in sweep.items():
        if not isinstance(values, list) or len(values) < 2:
            raise ConfigError(f"sweep.{key!r} = {values!r} needs a list of at least two values")
        if len({words(value) for value in values}) < len(values):
            raise ConfigError(f"sweep.{key!r} = {values!r} names a value twice")
        if key.partition(".")[0] in FIXED:
            raise ConfigError(
                f"sweep.{key!r} would change the cases that are compared; list such settings under federations"
            )
    for name in only:
        if name not in known:
            raise ConfigError(f"sweep_methods names {name!r}; {nearest(name, known)}")


def variants(method: str, study: Study, sweep: Mapping[str, Sequence[Any]], named: bool) -> list[Variant]:
    """Return a method with every combination of the swept values that apply to it; the method as it is if none apply.

    Args:
        method: Name of the method.
        study: Its study before any swept value is set.
        sweep: Swept keys and their values.
        named: Whether ``sweep_methods`` names this method, which must then have every swept key.
    """
    mine = {key: values for key, values in sweep.items() if named or _has(study, key)}
    if not mine:
        return [Variant(method, method)]
    return [Variant(f"{method}, {_point(each, sweep)}", method, each) for each in points(mine)]


def _has(value: Any, key: str) -> bool:
    """Return whether a study has a key such as ``algorithm.lam``."""
    for name in key.split("."):
        if is_dataclass(value) and hasattr(value, name):
            value = getattr(value, name)
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            return False
    return True


def _point(point: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Return swept values as text; a key is shortened to its last word where that is unique.

    >>> _point({"algorithm.lam": 10, "train.lr": 0.1}, ["algorithm.lam", "algorithm.lr", "train.lr"])
    'lam = 10, train.lr = 0.1'
    """
    ends = [key.rpartition(".")[2] for key in keys]
    short = {key: end if ends.count(end := key.rpartition(".")[2]) == 1 else key for key in point}
    return ", ".join(f"{short[key]} = {words(value)}" for key, value in point.items())


def words(value: Any) -> str:
    """Return a value of a setting as text.

    >>> words(0.1), words(10.0), words("sum"), words([1, 2])
    ('0.1', '10', 'sum', '[1, 2]')
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else _toml(value)
    return f"{value:g}"


def _toml(value: Any) -> str:
    """Return a value as TOML."""
    text = tomli_w.dumps({"value": value}).partition("=")[2]
    return " ".join(text.split()).replace("[ ", "[").replace(", ]", "]").replace(",]", "]")
