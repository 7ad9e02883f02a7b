"""Algorithms, networks and layouts from outside of polysite, by import path.

    algorithm.name = "my_lab.half_step:HalfStep"     module and class

A study in TOML names its classes in this way, so that it can be read again wherever the package is installed. Nothing
is ever sent: a hospital installs the package itself and names it in its policy, with the digest of its files
(``digest``). What a coordinator asks for is imported only within ``only``.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polysite.errors import ConfigError, nearest

_allowed: ContextVar[Mapping[str, str] | None] = ContextVar("allowed packages", default=None)


def find(name: str, at: str) -> Any | None:
    """Return the object of this name from outside of polysite; None if the name is no path.

    Args:
        name: ``module:attribute``.
        at: The setting that names it, for errors.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        return None
    _permit(module.partition(".")[0], f"{at} = {name!r}")
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as problem:
        raise ConfigError(
            f"{at} = {name!r}: there is no module {problem.name!r} here; install its package, or put its folder on "
            "PYTHONPATH"
        ) from problem
    except AttributeError as problem:
        known = [n for n, v in vars(import_module(module)).items() if isinstance(v, type)]
        raise ConfigError(f"{at} = {name!r}: {module} has no {attribute!r}; {nearest(attribute, known)}") from problem
    except (ImportError, SyntaxError, ValueError, TypeError, RecursionError) as problem:
        raise ConfigError(f"{at} = {name!r} cannot be imported: {problem}") from problem
    return found


def path_of(value: Any) -> str:
    """Return the import path of a class or function, or of the class of an instance; refuse what cannot be imported.

    >>> from fractions import Fraction
    >>> path_of(Fraction(1, 2))
    'fractions:Fraction'
    """
    kind = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    module, name = kind.__module__, kind.__qualname__
    if module in ("__main__", "builtins") or "<" in name:
        raise ConfigError(
            f"{name} is defined in {'a script or notebook' if module == '__main__' else 'a function'}, so the run "
            "could not be resumed, evaluated or exported: put it into a module that can be imported"
        )
    return f"{module}:{name}"


def is_foreign(value: Any) -> bool:
    """Return whether the class of a value is not one of polysite's."""
    return not type(value).__module__.startswith("polysite.")


@contextmanager
def only(packages: Mapping[str, str]) -> Iterator[None]:
    """Allow only these packages to be imported by ``find`` in the block, each with this digest."""
    token = _allowed.set(dict(packages))
    try:
        yield
    finally:
        _allowed.reset(token)


def _permit(package: str, what: str) -> None:
    """Refuse a package that may not be imported here, or that has changed."""
    allowed = _allowed.get()
    if allowed is None:
        return
    if package not in allowed:
        raise ConfigError(f"{what} is code of the package {package!r}, which policy.toml does not name below packages")
    if find_spec(package) is None:
        raise ConfigError(f"{what} needs the package {package!r}, which is not installed here")
    if digest(package) != allowed[package]:
        raise ConfigError(f"{what}: the files of the package {package!r} are not those that policy.toml names")


def digest(package: str) -> str:
    """Return the digest of all Python files of an installed package, by which a policy names it."""
    spec = find_spec(package)
    if spec is None:
        raise ConfigError(f"there is no package {package!r} here; install it first")
    places = [Path(p) for p in spec.submodule_search_locations or ()]
    files = [(f.relative_to(place).as_posix(), f) for place in places for f in place.rglob("*.py")]
    if not places and spec.origin and spec.has_location:
        files = [(Path(spec.origin).name, Path(spec.origin))]
    if not files or not all(file.is_file() for _, file in files):
        raise ConfigError(f"{package!r} has no files of its own, so a policy cannot name it")
    found = hashlib.sha256()
    for name, file in sorted(files):
        found.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()
