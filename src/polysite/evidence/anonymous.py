"""What identifies a federation without naming it: keyed digests of its cases, and settings without names.

Settings keep numbers, truth values and words that a setting chooses among. Other texts may name a hospital, so that
lists of names become their number, and mappings by name become their values, sorted.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from hashlib import blake2b
from typing import Any, Literal, get_args, get_origin, get_type_hints

from polysite import config
from polysite.algorithms import name_of
from polysite.config import Study
from polysite.data.sources import Phantom, PhantomClasses
from polysite.data.split import SiteSplit, table
from polysite.evidence.lines import Settings

Dealt = Mapping[str, SiteSplit]
ASIDE = {"device", "cases", "autocast", "compile"}  # where and how fast, not what is computed


def is_drawn(study: Study) -> bool:
    """Return whether the cases of a study are phantoms, drawn anew with every seed."""
    return isinstance(study.data, Phantom | PhantomClasses)


def data_digest(study: Study, key: bytes) -> str:
    """Return the digest of the hospitals of a study and their cases, which all its folds and seeds share.

    Phantoms and drawn federations have other patients with every seed, but the same settings, so they count as one
    federation.
    """
    plain = tomllib.loads(config.dump(study))
    source = study.data
    described = {
        "sites": {site: sorted(c.name for c in cases) for site, cases in source.case_refs(study.seed).items()},
        "drawn": plain["data"] if is_drawn(study) else None,
        "federation": plain["federation"],
        "slices": plain["slices"],
        "names": [source.task, list(source.modality_names), list(source.label_names)],
    }
    return _digest(described, key)


def split_digest(study: Study, dealt: Dealt, key: bytes) -> str:
    """Return the digest of the training, validation and test cases; of phantoms also of the seed that draws them."""
    return _digest([table(dealt), study.seed if is_drawn(study) else None], key)


def _digest(described: Any, key: bytes) -> str:
    text = json.dumps(described, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=10, key=key).hexdigest()


def method_settings(study: Study) -> Settings:
    """Return the settings of the algorithms of a study that differ from their defaults; later phases as ``then.``."""
    first, *later = config.phases(study)
    found = dict(_changed(study.algorithm))  # shares of all rounds as they were given
    if study.run.share != 1:
        found["run.share"] = study.run.share
    for phase in later:
        found |= {f"then.{k}": v for k, v in _changed(phase.algorithm)}
        trained = dict(_changed(phase.train))
        before = dict(_changed(first.train))
        found |= {f"then.train.{k}": v for k, v in trained.items() if before.get(k) != v}
    return found


def training_settings(study: Study) -> Settings:
    """Return the settings of local training that differ from the defaults.

    >>> training_settings(config.parse("train.lr = 0.4"))
    {'lr': 0.4}
    """
    return {k: v for k, v in _changed(study.train) if k not in ASIDE}


def _changed(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a dataclass that differ from the defaults, nested ones with dotted keys."""
    hints = get_type_hints(type(value))
    for f in fields(value):
        given = getattr(value, f.name)
        if not f.init or (f.default is not MISSING and given == f.default) or given == _made(f):
            continue
        if is_dataclass(given):
            yield f"{f.name}.name", name_of(given)
            yield from ((f"{f.name}.{k}", v) for k, v in _changed(given))
        else:
            kept = _nameless(given, hints.get(f.name))
            if kept is not None:
                yield f.name, kept


def _made(f: Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else MISSING


def _nameless(value: Any, hint: Any) -> Any:
    """Return a value without names; None if nothing is left."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value if value in _choices(hint) else None
    if isinstance(value, Mapping):
        return sorted(x if isinstance(x, int | float) else len(x) for x in value.values())
    if isinstance(value, tuple | list):
        return list(value) if all(isinstance(x, int | float) for x in value) else len(value)
    return None


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the words that a type allows.

    >>> _choices(bool | Literal["sizes"])
    ('sizes',)
    """
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(word for part in get_args(hint) for word in _choices(part))
