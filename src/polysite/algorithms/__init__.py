"""Federated algorithms: one file each, a frozen dataclass of hyper-parameters with five pure methods.

``ALGORITHMS`` maps every name to its module and class. ``find`` and ``describe`` import a module on first use.
"""

from collections.abc import Iterator
from importlib import import_module
from inspect import getdoc
from typing import Any

from polysite.errors import ConfigError, nearest

ALGORITHMS = {
    "averaged": "averaged:Averaged",
    "cfft": "cfft:Cfft",
    "cfl": "cfl:Cfl",
    "clustered": "clustered:Clustered",
    "ditto": "ditto:Ditto",
    "fedabc": "fedabc:FedABC",
    "fedadagrad": "fedavg:FEDADAGRAD",
    "fedadam": "fedavg:FEDADAM",
    "fedamp": "fedamp:FedAMP",
    "fedavg": "fedavg:FedAvg",
    "fedbn": "fedbn:FedBN",
    "fedcostwavg": "cost_weighted:FedCostWAvg",
    "feddiv": "feddiv:FedDiv",
    "feddyn": "feddyn:FedDyn",
    "fedexp": "fedexp:FedExP",
    "fednova": "fednova:FedNova",
    "fedper": "fedper:FedPer",
    "fedpidavg": "cost_weighted:FedPIDAvg",
    "fedprox": "fedprox:FedProx",
    "fedrep": "fedrep:FedRep",
    "fedrod": "fedrod:FedRoD",
    "fedyogi": "fedavg:FEDYOGI",
    "fine_tune": "fine_tune:FineTune",
    "fpfc": "fpfc:Fpfc",
    "geometric_median": "robust:GeometricMedian",
    "ifca": "ifca:Ifca",
    "interpolated": "interpolated:Interpolated",
    "krum": "robust:Krum",
    "l2gd": "l2gd:L2gd",
    "lg_fedavg": "fedper:LGFedAvg",
    "local": "local:Local",
    "median": "robust:Median",
    "moon": "moon:Moon",
    "pfedme": "pfedme:PFedMe",
    "pfednet": "pfednet:PFedNet",
    "qfedavg": "qfedavg:QFedAvg",
    "robust": "robust_rules:Robust",
    "scaffold": "scaffold:Scaffold",
    "superfed": "superfed:SuPerFed",
    "top_k": "cost_weighted:TopK",
    "trimmed_mean": "robust:TrimmedMean",
    "weighted": "weighted:Weighted",
}
SERVER_OPTIMISERS = {
    "sgd": "server_optimisers:Sgd",
    "adagrad": "server_optimisers:Adagrad",
    "adam": "server_optimisers:Adam",
    "yogi": "server_optimisers:Yogi",
}


def find(name: str, among: dict[str, str], what: str) -> Any:
    """Return the class behind a name, or an instance whose fields can be replaced. Refuse an unknown name."""
    if name not in among:
        raise ConfigError(f"there is no {what} called {name!r}; {nearest(name, among)}")
    module, attribute = among[name].split(":")
    return getattr(import_module(f"polysite.algorithms.{module}"), attribute)


def name_of(value: Any) -> str:
    """Return the name of an algorithm or server optimiser.

    >>> from polysite.algorithms.fedavg import FedAvg
    >>> name_of(FedAvg())
    'fedavg'
    >>> from polysite.algorithms.server_optimisers import Adam
    >>> name_of(FedAvg(server=Adam(lr=0.1)))
    'fedadam'
    """
    kind = f"{type(value).__module__.rpartition('.')[2]}:{type(value).__name__}"
    name = next((n for n, k in {**ALGORITHMS, **SERVER_OPTIMISERS}.items() if k == kind), type(value).__name__)
    adaptive = f"fed{name_of(value.server)}" if name == "fedavg" and value.server else ""
    return adaptive if adaptive in ALGORITHMS else name


def names_of(algorithm: Any) -> tuple[str, ...]:
    """Return the names of an algorithm and of those inside it, outermost first.

    >>> from polysite.algorithms.weighted import Weighted
    >>> names_of(Weighted())
    ('weighted', 'fedavg')
    """
    inner = getattr(algorithm, "inner", None)
    return (name_of(algorithm), *(names_of(inner) if hasattr(inner, "merge") else ()))


def docstring(algorithm: Any) -> str:
    """Return the documentation of a class, or of its module if only that names a paper, without hyper-parameters."""
    kind = algorithm if isinstance(algorithm, type) else type(algorithm.server)
    own = (getdoc(kind) or "").partition("\n\nArgs:\n")[0]
    return (own if "Paper: " in own else getdoc(import_module(kind.__module__)) or "").replace("``", "")


def traits(algorithm: Any) -> str:
    """Return what an algorithm requires and offers, one line each."""
    from polysite.algorithms.base import facts

    known = facts(algorithm)
    each, sgd, strangers = known.needs == "each", known.plain_sgd, known.strangers
    lines = (
        f"Needs: {known.needs} ({'the server must see each reply' if each else 'a sum of the replies is enough'})",
        f"Local optimiser: {'plain SGD only, without momentum' if sgd else 'any'}",
        f"A site that never trained: is served {'a' if strangers else 'no'} trained model",
    )
    return "\n".join(lines)


def describe() -> Iterator[tuple[str, str, str, str]]:
    """Yield every algorithm, with its default hyper-parameters, as (name, paper, summary, needs)."""
    from polysite.algorithms.base import facts

    for name in sorted(ALGORITHMS):
        algorithm = find(name, ALGORITHMS, "algorithm")
        first, _, rest = docstring(algorithm).partition("\n")
        paper = next((line.removeprefix("Paper: ") for line in rest.splitlines() if line.startswith("Paper: ")), "")
        default = algorithm() if isinstance(algorithm, type) else algorithm
        yield name, paper, first, facts(default).needs
