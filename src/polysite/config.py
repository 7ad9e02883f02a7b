"""A study as a TOML file, mapped onto the dataclasses themselves.

Every section is a dataclass and every key one of its fields, so the documentation of a key is the field's own line.
A section with a ``name`` chooses which dataclass: ``[algorithm] name = "scaffold"``. Unknown names and keys are
refused with the nearest that exists.
"""

import copy
import dataclasses
import inspect
import re
import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from polysite.algorithms import ALGORITHMS, SERVER_OPTIMISERS, docstring, find, name_of
from polysite.algorithms.base import Algorithm, facts
from polysite.costs.speeds import SPEEDS, Speeds
from polysite.data.federation import FEDERATIONS, Federation, Natural
from polysite.data.prepare import Prepare
from polysite.data.sources import SOURCES, Phantom, Source
from polysite.data.split import Split
from polysite.engines.plan import Plan
from polysite.errors import ConfigError, nearest
from polysite.heterogeneity.exchange import Assess
from polysite.models import MODELS, Model
from polysite.models.encoders import ENCODERS, Bundled, Encoder
from polysite.training.settings import Train


@dataclass(frozen=True)
class Study:
    """Everything that decides a run."""

    seed: int = 0
    algorithm: Algorithm[Any] = field(default_factory=lambda: _fedavg())
    model: Model = MODELS["unet_small"]
    data: Source = field(default_factory=Phantom)
    federation: Federation = Natural()
    prepare: Prepare = Prepare()
    split: Split = Split()
    train: Train = Train()
    run: Plan = Plan()
    assess: Assess = Assess()
    encoder: Encoder = Bundled()
    cost: Speeds = SPEEDS["paper_b"]
    then: tuple[Mapping[str, Any], ...] = ()  # later phases, each from the best model so far: what they change

    def __post_init__(self) -> None:
        odd = next((phase for phase in self.then if not isinstance(phase, Mapping)), None)
        if odd is not None:
            raise ConfigError(f"then holds {odd!r}; a phase is a section, as in [[then]] algorithm.name = 'fine_tune'")
        plain = tuple({k: _plain(_section(k, v), k) for k, v in phase.items()} for phase in self.then)
        object.__setattr__(self, "then", plain)
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed = {self.seed} must lie between 0 and 2**63")
        if self.run.pooled and not facts(self.algorithm).poolable:
            name = name_of(self.algorithm)
            raise ConfigError(f"run.pooled is centralised training and goes with fedavg or cfft, not with {name!r}")
        self.train.allow(self.algorithm, name_of(self.algorithm))
        step = self.model.divisor
        for name in ("patch", "window"):
            given = getattr(self.train, name)
            if any(side < step or side % step for side in given):
                raise ConfigError(
                    f"train.{name} = {list(given)}: every side must be a multiple of {step} for this model"
                )
        phases(self)

    def check(self) -> None:
        """Refuse what does not fit the data; this looks at them."""
        from polysite.training import tasks

        if self.model.task != self.data.task:
            fitting = " or ".join(n for n, m in MODELS.items() if m.task == self.data.task)
            raise ConfigError(
                f"the data are for {self.data.task}, the model for {self.model.task}: model.name = {fitting}"
            )
        for name in ("patch", "window"):
            given = getattr(self.train, name)
            if given and len(given) != self.data.dims:
                dims = self.data.dims
                fit = f"for {dims}D data; set it to {[given[0]] * dims}"
                raise ConfigError(f"train.{name} = {list(given)} has {len(given)} sides {fit}")
        tasks.check_loss(tasks.find(self.data.task, self.train.exclusive), self.train.loss)


# What a phase may change: how sites train and for how long, not what they train, nor on what.
PHASE: Mapping[str, tuple[str, ...]] = {
    "train": ("lr", "gamma", "epochs", "patches", "steps", "optimiser", "momentum", "weight_decay", "loss", "augment"),
    "run": ("rounds", "share", "validate_every", "patience", "pooled"),
}


def _fedavg() -> Algorithm[Any]:
    """Return the default algorithm."""
    algorithm: Algorithm[Any] = find("fedavg", ALGORITHMS, "algorithm")()
    return algorithm


def phases(study: Study) -> tuple[Study, ...]:
    """The phases of a study, each as a study of its own.

    >>> study = Study(then=({"algorithm": "scaffold", "run": {"rounds": 5}},))
    >>> [(name_of(s.algorithm), s.run.rounds) for s in phases(study)]
    [('fedavg', 30), ('scaffold', 5)]
    """
    base = dataclasses.replace(study, then=()) if study.then else study
    found = (base, *(_stage(base, changes, f"then[{k}]") for k, changes in enumerate(study.then)))
    last = next((s.algorithm for s in found[:-1] if facts(s.algorithm).ends_study), None)
    if last is not None:
        raise ConfigError(
            f"nothing comes after {name_of(last)}: it has a model for every cluster of patients, and not one to go on "
            "from"
        )
    return found


def _stage(base: Study, changes: Mapping[str, Any], at: str) -> Study:
    for section, keys in changes.items():
        if section != "algorithm" and section not in PHASE:
            raise ConfigError(
                f"{at} has {section!r}; a phase has algorithm, {' and '.join(PHASE)}, the rest stays; "
                f"{nearest(section, ['algorithm', *PHASE])}"
            )
        if section in PHASE and not isinstance(keys, Mapping):
            _refuse(f"{at}.{section}", keys, "must be a section")
        for key in keys if section in PHASE else ():
            if key not in PHASE[section]:
                raise ConfigError(f"a phase does not change {section}.{key} ({at}); {nearest(key, PHASE[section])}")
    try:
        stage = vary(base, changes)
    except ConfigError as problem:
        raise ConfigError(f"{at}: {problem}") from problem
    name, known = name_of(stage.algorithm), facts(stage.algorithm)
    if stage.run.rounds < known.exchanges:
        raise ConfigError(
            f"{at}: run.rounds = {stage.run.rounds} may end before {name} has tuned: with the fit of the clusters it "
            f"takes up to {known.exchanges}"
        )
    if known.masks_head and stage.prepare.normalise != "nonzero":
        raise ConfigError(f"{at}: {name} needs prepare.normalise = 'nonzero', which tells the head from the background")
    return stage


def load(path: Path, overrides: Mapping[str, str] | None = None) -> Study:
    """The study in a file, with ``section.key = value`` overrides."""
    try:
        return parse(path.read_text(encoding="utf-8"), overrides, str(path))
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"the configuration {path} cannot be read: {problem}") from problem


def parse(text: str, overrides: Mapping[str, str] | None = None, where: str = "the configuration") -> Study:
    """A study from TOML text.

    >>> study = parse('seed = 3', {"algorithm.lr": "0.2", "run.rounds": "5"})
    >>> study.seed, study.algorithm.lr, study.run.rounds
    (3, 0.2, 5)
    """
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"{where} is not valid TOML: {problem}") from problem
    return build(given, overrides)


def build(given: Mapping[str, Any], overrides: Mapping[str, str] | None = None) -> Study:
    """A study from what TOML text holds.

    >>> build({"seed": 3, "algorithm": "fedprox"}).algorithm.mu
    0.01
    """
    wanted = {k: _section(k, v) for k, v in copy.deepcopy(dict(given)).items()}
    for key, value in (overrides or {}).items():
        _put(wanted, key, value, Study())
    if "preset" in wanted:
        wanted = _vary(preset(wanted.pop("preset")), wanted)
    return _build(Study, wanted, "")  # type: ignore[no-any-return]


def _section(name: str, given: Any) -> Any:
    """``algorithm = "fedprox"`` as the section that it means."""
    return {"name": given} if isinstance(given, str) and _choices(name) is not None else given


def dump(study: Study, notes: bool = False) -> str:
    """The whole study as TOML; reading it gives the same study. ``notes`` explains the keys.

    >>> parse(dump(Study(), notes=True)) == Study()
    True
    """
    text = re.sub(  # a list on one line
        r"\[\n((?:    .+,\n)+)\]",
        lambda m: "[" + m[1][4:-2].replace(",\n    ", ", ") + "]",
        tomli_w.dumps(_plain(study)),
    )
    if not notes:
        return text
    known, at, lines = dict(_notes(study, "")), "", []
    for line in text.splitlines():
        at = line.strip("[]") + "." if line.startswith("[") else at
        note = known.get(at + line.partition(" = ")[0]) if " = " in line else None
        lines.append(f"{line:32}  # {note}" if note else line)
        if line.startswith("["):
            lines += [f"{f'# {key} =':32}  # {known.get(at + key, '')}" for key in _unset(study, at.strip("."))]
    return "\n".join(lines) + "\n"


def vary(study: Study, changes: Mapping[str, Any]) -> Study:
    """The study with some sections changed, as TOML would have them.

    >>> vary(Study(seed=3), {"algorithm": {"name": "fedprox", "mu": 0.5}}).algorithm.mu
    0.5
    """
    return _build(Study, merge(_plain(study), dict(changes)), "")  # type: ignore[no-any-return]


def _unset(study: Study, at: str) -> list[str]:
    """The keys of a section that have no value."""
    value: Any = study
    for name in at.split("."):
        if isinstance(value, tuple):  # of phases, which have only what they change
            return []
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
    return [f.name for f in fields(value) if getattr(value, f.name) is None] if is_dataclass(value) else []


def explain(name: str) -> str:
    """What an algorithm is and which keys it has.

    >>> print(explain("fedprox").splitlines()[-1])
    mu = 0.01                         # how strongly a site is held
    """
    found = find(name, ALGORITHMS, "algorithm")
    text = dump(parse("", {"algorithm.name": name}), notes=True)
    keys = [part for part in text.split("\n\n") if part.startswith("[algorithm")]
    return "\n\n".join([docstring(found), *keys]).strip()


def _notes(value: Any, at: str) -> Iterator[tuple[str, str]]:
    """Path of a key -> what its line in the dataclass says about it."""
    if is_dataclass(value):
        found = re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(type(value)), re.MULTILINE)
        yield from ((f"{at}{key}", note) for key, note in found)
        for f in fields(value):
            yield from _notes(getattr(value, f.name), f"{at}{f.name}.")
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _notes(inside, f"{at}{key}.")


def presets() -> list[str]:
    """The studies of the literature that a file can start from with ``preset = "NAME"``."""
    return sorted(f.name.removesuffix(".toml") for f in resources.files("polysite").joinpath("presets").iterdir())


def preset(name: Any) -> dict[str, Any]:
    """One of them, as TOML has it, over the one that it starts from itself.

    Its ``methods`` say what an algorithm, or ``pooled`` training, changes: name -> sections of a study.
    """
    if name not in presets():
        raise ConfigError(f"there is no preset called {name!r}; {nearest(str(name), presets())}")
    found = tomllib.loads(resources.files("polysite").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8"))
    return merge(preset(found.pop("preset")), found) if "preset" in found else found


def _vary(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The given values over what the preset has for the method that they choose, over the rest of the preset.

    >>> base = {"train": {"lr": 1, "batch": 4}, "methods": {"scaffold": {"train": {"lr": 2}}}}
    >>> _vary(base, {"algorithm": {"name": "scaffold"}, "train": {"batch": 8}})
    {'train': {'lr': 2, 'batch': 8}, 'algorithm': {'name': 'scaffold'}}
    """
    rest = {key: value for key, value in base.items() if key != "methods"}
    method = _method(merge(rest, given))
    named = {} if method == "pooled" else {"algorithm": {"name": method}}
    return merge(merge(rest, merge(named, base.get("methods", {}).get(method, {}))), given)


def _method(given: Mapping[str, Any]) -> str:
    """The name of what trains: that of the algorithm, which its keys may tell, or ``pooled``.

    >>> _method({"run": {"pooled": True}}), _method({"algorithm": {"q": 2.0}}), _method({})
    ('pooled', 'qfedavg', 'fedavg')
    """
    run, algorithm = (given[k] if isinstance(given.get(k), dict) else {} for k in ("run", "algorithm"))
    if run.get("pooled") is True:
        return "pooled"
    return str(algorithm.get("name") or _meant(_choices("algorithm") or {}, algorithm, "algorithm", _fedavg()))


def merge(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given values over the base; a section that chooses another name starts anew.

    >>> merge({"model": {"name": "a", "x": 1}, "train": {"lr": 1}}, {"model": {"name": "b"}, "train": {"batch": 4}})
    {'model': {'name': 'b'}, 'train': {'lr': 1, 'batch': 4}}
    """
    merged = dict(base)
    for key, value in given.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and value.get("name") in (None, below.get("name")):
            value = merge(below, value)
        merged[key] = value
    return merged


def _choices(at: str) -> Mapping[str, Any] | None:
    """What the ``name`` of the section at this path may be: name -> a class, or an instance that the keys vary."""
    if re.fullmatch(r"algorithm(\.inner)*", at):  # inner: that of a combinator
        return {n: find(n, ALGORITHMS, "algorithm") for n in ALGORITHMS}
    if re.fullmatch(r"algorithm(\.inner)*\.server", at):
        return {n: find(n, SERVER_OPTIMISERS, "server optimiser") for n in SERVER_OPTIMISERS}
    found: dict[str, Mapping[str, Any]]
    found = {"model": MODELS, "data": SOURCES, "federation": FEDERATIONS, "encoder": ENCODERS, "cost": SPEEDS}
    return found.get(at)


def _name_in(at: str, value: Any) -> str | None:
    """The name that says best which of the choices a value is."""
    if at.partition(".")[0] == "algorithm":
        return name_of(value)
    choices = _choices(at) or {}
    same = [n for n, c in choices.items() if (c if isinstance(c, type) else type(c)) is type(value)]
    return max(same, key=lambda n: _likeness(choices[n], value), default=None)


def _likeness(choice: Any, value: Any) -> int:
    """In how many fields an instance to choose is as this value is; of equals, the first is meant."""
    if isinstance(choice, type):
        return 0
    return sum(getattr(choice, f.name) == getattr(value, f.name) for f in fields(value))


def _build(kind: Any, given: Any, at: str, default: Any = None) -> Any:
    """One value of the wanted type from what TOML gave."""
    choices = _choices(at)
    if choices is not None and isinstance(given, str):
        given = {"name": given}
    if choices is not None and isinstance(given, Mapping):
        return _chosen(choices, dict(given), at, default)
    if is_dataclass(kind):
        return _instance(kind, given, at, default)
    origin, inside = get_origin(kind), get_args(kind)
    if kind is Any:
        return given
    if origin in (Union, types.UnionType):
        if given is None and type(None) in inside:
            return None
        return _build(next(k for k in inside if k is not type(None) and _may_be(k, given)), given, at, default)
    if origin is Literal:
        return given if given in inside else _refuse(at, given, f"must be one of {', '.join(map(repr, inside))}")
    if origin is tuple and isinstance(given, (str, int, float)):
        given = [given]  # one alone
    if origin is tuple and isinstance(given, list):
        return tuple(_build(inside[0], v, f"{at}[{i}]") for i, v in enumerate(given))
    if at == "then" and isinstance(given, Mapping):
        _refuse(at, given, "must be a list of phases: write [[then]], with two brackets")
    if origin is Mapping and isinstance(given, Mapping):
        return {k: _build(inside[1], v, f"{at}.{k}") for k, v in given.items()}
    return _scalar(kind, given, at)


def _may_be(kind: Any, given: Any) -> bool:
    """Whether a value can be of this kind, one of several: words are no whole number."""
    return not (get_origin(kind) is Literal and type(given) is int)


def _scalar(kind: Any, given: Any, at: str) -> Any:
    if kind is float and isinstance(given, int) and not isinstance(given, bool):
        return float(given)
    if kind in (int, float, str, bool) and type(given) is kind:
        return given
    plain = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}
    wanted = {tuple: "a list", Mapping: "a section"}.get(get_origin(kind)) or plain.get(kind, "a section")
    return _refuse(at, given, f"must be {wanted}")


def _chosen(choices: Mapping[str, Any], given: dict[str, Any], at: str, default: Any) -> Any:
    name = given.pop("name", None) or _meant(choices, given, at, default)
    if name is None:
        raise ConfigError(f"[{at}] needs a name; known: {', '.join(sorted(choices))}")
    if not isinstance(name, str) or name not in choices:
        what = {"inner": "algorithm", "server": "server optimiser"}.get(at.rpartition(".")[2], at)
        raise ConfigError(f"there is no {what} called {name!r}; {nearest(str(name), choices)}")
    chosen = choices[name]
    if isinstance(chosen, type):
        return _instance(chosen, given, at, default if type(default) is chosen else None)
    return _instance(type(chosen), given, at, chosen)


def _meant(choices: Mapping[str, Any], given: Mapping[str, Any], at: str, default: Any) -> str | None:
    """The name of a section that gives none: the default's, or the only one that has all its keys."""
    name = _name_in(at, default) if default is not None else None
    having = {n for n, c in choices.items() if given.keys() <= {f.name for f in fields(c)}}
    return name if name in having or len(having) != 1 else having.pop()


def _instance(kind: Any, given: Any, at: str, default: Any) -> Any:
    """A dataclass from a section: the given keys, the rest from ``default`` or from the class."""
    if not isinstance(given, Mapping):
        _refuse(at, given, "must be a section")
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind) if f.init}
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown key {f'{at}.{key}'.strip('.')!r}; {_hint(at, key, known)}")
    base = default if default is not None else (kind() if kind is Study else None)
    values = {k: _build(hints[k], v, f"{at}.{k}".strip("."), getattr(base, k, None)) for k, v in given.items()}
    try:
        return dataclasses.replace(base, **values) if base is not None else kind(**values)
    except ConfigError as problem:
        if "." not in at and at != "algorithm":
            raise
        raise ConfigError(f"{at}: {problem}") from problem  # a hospital does not know its own name


def _hint(at: str, key: str, known: Mapping[str, Any]) -> str:
    """The nearest key here, or the section that does have this key."""
    elsewhere = [
        f"{f.name}.{key}" for f in fields(Study) if is_dataclass(f.type) and key in {g.name for g in fields(f.type)}
    ]
    return f"did you mean {elsewhere[0]!r}?" if elsewhere and at else nearest(key, [*known, *(["name"] if at else [])])


def _refuse(at: str, given: Any, why: str) -> Any:
    raise ConfigError(f"{at or 'the configuration'} = {given!r} {why}")


def _put(given: dict[str, Any], key: str, text: str, default: Any) -> None:
    """Set ``a.b.c`` to what the text says in TOML; text that is no TOML value is taken as a string.

    A mapping that the file does not give (the phantom hospitals) keeps its other entries.
    """
    if _choices(key) is not None:
        key += ".name"  # algorithm=fedprox
    *sections, last = key.split(".")
    for k, name in enumerate(sections):
        if isinstance(given.get(name), str) and _choices(".".join(sections[: k + 1])) is not None:
            given[name] = {"name": given[name]}
        default = default.get(name) if isinstance(default, Mapping) else getattr(default, name, None)
        given = given.setdefault(name, _plain(default) if isinstance(default, Mapping) else {})
        if not isinstance(given, dict):
            raise ConfigError(f"--set {key}={text}: {name!r} is a value, not a section")
    try:
        given[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:  # words without quotes
        inside = text.strip().removeprefix("[").removesuffix("]")
        given[last] = [w.strip() for w in inside.split(",")] if text.strip() == f"[{inside}]" else text


def _plain(value: Any, at: str = "") -> Any:
    """A value as TOML has it; a key whose value is None is left out."""
    if is_dataclass(value):
        name = _name_in(at, value) if _choices(at) is not None else None
        inside = {f.name: _plain(getattr(value, f.name), f"{at}.{f.name}".strip(".")) for f in fields(value) if f.init}
        return {**({"name": name} if name else {}), **{k: v for k, v in inside.items() if v is not None}}
    if isinstance(value, Mapping):
        return {k: _plain(v, f"{at}.{k}") for k, v in value.items() if v is not None}
    return [_plain(v, f"{at}[]") for v in value] if isinstance(value, tuple) else value
