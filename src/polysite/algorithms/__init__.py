"""One algorithm, one file: a frozen dataclass of hyper-parameters with five pure methods.

``ALGORITHMS`` names them all; ``find`` and ``describe`` import a file only when it is asked for.
"""

from collections.abc import Iterator
from importlib import import_module
from inspect import getdoc
from typing import Any

from polysite.errors import ConfigError, nearest

ALGORITHMS = {
    "fedavg": "fedavg:FedAvg",
    "local": "local:Local",
    "scaffold": "scaffold:Scaffold",
}
SERVER_OPTIMISERS = {
    "sgd": "server:Sgd",
    "adagrad": "server:Adagrad",
    "adam": "server:Adam",
    "yogi": "server:Yogi",
}


def find(name: str, among: dict[str, str], what: str) -> Any:
    """The class behind a name; an unknown name suggests the nearest."""
    if name not in among:
        raise ConfigError(f"there is no {what} called {name!r}; {nearest(name, among)}")
    module, attribute = among[name].split(":")
    return getattr(import_module(f"polysite.algorithms.{module}"), attribute)


def name_of(value: Any) -> str:
    """The name under which an algorithm or server optimiser is known.

    >>> from polysite.algorithms.fedavg import FedAvg
    >>> name_of(FedAvg())
    'fedavg'
    """
    kind = f"{type(value).__module__.rpartition('.')[2]}:{type(value).__name__}"
    return next((n for n, k in {**ALGORITHMS, **SERVER_OPTIMISERS}.items() if k == kind), type(value).__name__)


def describe() -> Iterator[tuple[str, str, str]]:
    """Every algorithm as (name, paper, one line), read from its module's docstring."""
    for name in sorted(ALGORITHMS):
        module = import_module(find(name, ALGORITHMS, "algorithm").__module__)
        first, _, rest = (getdoc(module) or "").partition("\n")
        paper = next((line.removeprefix("Paper: ") for line in rest.splitlines() if line.startswith("Paper: ")), "")
        yield name, paper, first
