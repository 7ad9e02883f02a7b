"""A study as a TOML file, mapped onto the dataclasses themselves.

Every section is a dataclass and every key one of its fields; the ``Args:`` section of the class documents the keys. A
section with a ``name`` chooses the dataclass: ``[algorithm] name = "scaffold"``. The error about an
unknown name or key suggests the nearest one.
"""

import copy
import dataclasses
import inspect
import re
import textwrap
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

from polysite import plugins
from polysite.algorithms import ALGORITHMS, SERVER_OPTIMISERS, docstring, find, name_of, traits
from polysite.algorithms.base import Algorithm, facts, scaled
from polysite.costs.speeds import SPEEDS, Speeds
from polysite.data.case import CaseRef
from polysite.data.federation import FEDERATIONS, Federation, Natural, Steps
from polysite.data.prepare import Prepare
from polysite.data.slices import Slices, Step
from polysite.data.sources import SOURCES, Counted, Phantom, Source
from polysite.data.split import Split
from polysite.engines.noise import check_replies
from polysite.engines.plan import Plan
from polysite.engines.secure.settings import check_algorithm
from polysite.errors import ConfigError, nearest, shown
from polysite.foreign import parse_toml, read_toml, without_removed
from polysite.heterogeneity.exchange import Assess
from polysite.models import CHOICES, MODELS, Model
from polysite.models.encoders import ENCODERS, Bundled, Encoder
from polysite.training.settings import Train

T = TypeVar("T")
# what a class from outside of polysite must have
CONTRACTS = {"algorithm": ("init", "send", "local", "merge", "serve", "reply"), "model": ("build", "task", "divisor")}
MAX_PHASES = 100  # after the first; each is built and checked as a study of its own


@dataclass(frozen=True)
class ThenTrain:
    """Local training that a later phase changes, as in `Train`; None: as in the first phase."""

    lr: float | None = None
    gamma: float | None = None
    epochs: int | None = None
    patches: int | None = None
    steps: int | None = None
    optimiser: Literal["sgd", "adam", "adamw"] | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    clip_gradients: float | None = None
    loss: Literal["auto", "dice", "dice_ce", "ce"] | None = None
    foreground: float | None = None
    augment: Literal["full", "light", "none"] | None = None


@dataclass(frozen=True)
class ThenRun:
    """Rounds that a later phase changes, as in `Plan`; None: as in the first phase."""

    rounds: int | None = None
    share: float | None = None
    validate_every: int | None = None
    best: Literal["case", "site", "own"] | None = None
    best_from: int | None = None
    patience: int | None = None
    pooled: bool | None = None


@dataclass(frozen=True)
class Then:
    """What a later phase changes: how and how long sites train, but neither the network nor the data.

    Args:
        algorithm: Federated algorithm; None: that of the first phase.
        train: Changes of local training.
        run: Changes of rounds, participation and validation.
    """

    algorithm: Algorithm[Any] | None = None
    train: ThenTrain = ThenTrain()
    run: ThenRun = ThenRun()


@dataclass(frozen=True)
class Study:
    """All settings of a study.

    Args:
        seed: Seed of all randomness, 0 to 2**63 - 1.
        algorithm: Federated algorithm of the first phase.
        model: Network to train.
        data: Source of the images.
        federation: How cases are assigned to sites; a list of federations is applied step by step.
        prepare: Preparation of images before training.
        split: How the cases of a site are divided into training, validation and test cases.
        slices: 2D slices of volumes as cases.
        train: Local training at the sites.
        run: Rounds, participation, checkpoints and validation.
        assess: What the assessment computes.
        encoder: Network whose embeddings the assessment compares.
        cost: Speeds from which time is estimated.
        then: Later phases, each a `Then` or, as in TOML, a mapping of the sections that it changes; a phase starts from
            the best model so far.
    """

    seed: int = 0
    algorithm: Algorithm[Any] = field(default_factory=lambda: _fedavg())
    model: Model = MODELS["unet_small"]
    data: Source = field(default_factory=Phantom)
    federation: Federation = Natural()
    prepare: Prepare = Prepare()
    split: Split = Split()
    slices: Slices = Slices()
    train: Train = Train()
    run: Plan = Plan()
    assess: Assess = Assess()
    encoder: Encoder = Bundled()
    cost: Speeds = SPEEDS["paper_b"]
    then: tuple[Then, ...] = ()

    def __post_init__(self) -> None:
        if len(self.then) > MAX_PHASES:
            raise ConfigError(f"then has {len(self.then)} phases; a study has at most {MAX_PHASES} after the first")
        then = tuple(_then(each, self.algorithm, f"then[{k}]") for k, each in enumerate(self.then))
        object.__setattr__(self, "then", then)
        self._check_contracts()
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed = {self.seed} must lie between 0 and 2**63")
        if self.run.pooled and not facts(self.algorithm).poolable:
            name = name_of(self.algorithm)
            raise ConfigError(f"run.pooled is centralised training and goes with fedavg or cfft, not with {name!r}")
        if self.run.secure.on:
            check_algorithm(self.algorithm)
        self.train.allow(self.algorithm, name_of(self.algorithm))
        self._check_private()
        if self.train.foreground and self.model.task == "classification":
            raise ConfigError(
                f"train.foreground = {self.train.foreground} chooses patches by labelled voxels, but this model "
                "classifies images, which have none: set it to 0"
            )
        if self.train.clean.does and self.model.task == "classification":
            raise ConfigError("train.clean is for predicted masks, but this model classifies images: leave it out")
        step = self.model.divisor
        for name in ("patch", "window"):
            given = getattr(self.train, name)
            if any(side < step or side % step for side in given):
                raise ConfigError(
                    f"train.{name} = {list(given)}: every side must be a multiple of {step} for this model"
                )
        if self.slices.axis and self.prepare.orientation:
            raise ConfigError(
                f"slices.axis = {self.slices.axis!r} turns every volume already: leave out prepare.orientation = "
                f"{self.prepare.orientation!r}"
            )
        phases(self)

    def _check_contracts(self) -> None:
        """Refuse an algorithm or a network that is none, such as a class or a module of torch."""
        for name, like in (("algorithm", "ps.FedAvg()"), ("model", "ps.UNet() or ps.Monai('SegResNet')")):
            given = getattr(self, name)
            if isinstance(given, type) or not is_dataclass(given) or _lacking(given, name):
                what = (
                    f"the class {given.__name__}" if isinstance(given, type) else f"of the type {type(given).__name__}"
                )
                raise ConfigError(
                    f"{name} is {what}, which is no {name} of polysite: give an instance such as {like}; "
                    "docs/extend.md says what one of your own must have"
                )

    def _check_private(self) -> None:
        """Refuse what the noise of differential privacy does not cover."""
        private, name = self.train.private, name_of(self.algorithm)
        if private.unit == "hospital" and self.assess.private.on:
            raise ConfigError(
                "assess.private protects patients, and train.private.unit = 'hospital' promises noise for hospitals: "
                "leave one of them out"
            )
        if facts(self.algorithm).noisy_sums and private.unit != "patient":
            raise ConfigError(
                f"algorithm.noisy adds noise to the sums of {name}, and its training has none: set "
                "train.private.unit = 'patient'"
            )
        if not private.on:
            return
        self.train.check_private(self.algorithm, name)
        if private.unit == "hospital":
            check_replies(name, self.algorithm.reply)
        if self.run.pooled:
            raise ConfigError("run.pooled has the cases of all hospitals in one place: leave out train.private")

    @property
    def dims(self) -> int:
        """Spatial dimensions of a case: those of the data, or 2 for slices of volumes."""
        return 2 if self.slices.axis else self.data.dims

    def cut(self, volumes: Sequence[CaseRef], watch: Step = lambda *_: None) -> dict[CaseRef, list[CaseRef]]:
        """Return the cases of every volume: its slices, or the volume itself without ``[slices]``.

        ``watch`` is called with the numbers of volumes that are cut and of all volumes, and the name of the last one.
        """
        if not self.slices.axis:
            return {volume: [volume] for volume in volumes}
        if isinstance(self.data, Counted):
            return self.slices.count(volumes)
        return self.slices.cut(volumes, self.prepare, self.train.patch, watch)

    def check(self) -> None:
        """Refuse a model or training settings that do not fit the data. This opens the data source."""
        from polysite.training import tasks

        for phase in phases(self):
            phase.train.check_rate(phase.algorithm, name_of(phase.algorithm))
        if self.model.task != self.data.task:
            fitting = " or ".join(n for n, m in MODELS.items() if m.task == self.data.task)
            raise ConfigError(
                f"the data are for {self.data.task}, the model for {self.model.task}: model.name = {fitting}"
            )
        self._check_slices()
        for name in ("patch", "window"):
            given, dims = getattr(self.train, name), self.dims
            if given and len(given) != dims:
                fit = f"for {dims}D {'slices' if self.slices.axis else 'data'}; set it to {[given[0]] * dims}"
                raise ConfigError(f"train.{name} = {list(given)} has {len(given)} sides {fit}")
        tasks.check_loss(tasks.find(self.data.task, self.train.exclusive), self.train.loss)

    def _check_slices(self) -> None:
        """Refuse slices of 2D data, labelled slices of a classification, and a spacing or size that is not 3D."""
        if not self.slices.axis:
            return
        if self.data.dims != 3:
            raise ConfigError(f"slices.axis = {self.slices.axis!r} cuts volumes, but the data are 2D: leave it out")
        if self.slices.labelled and self.data.task == "classification":
            raise ConfigError(
                "slices.labelled chooses slices by their labels, but these data have classes: leave it out"
            )
        for name in ("spacing", "size"):
            given = getattr(self.prepare, name)
            if given and len(given) != 3:
                raise ConfigError(
                    f"prepare.{name} = {list(given)} is that of the volume before it is cut: give three numbers, for "
                    "slice, row and column"
                )


def _lacking(given: Any, section: str) -> list[str]:
    """Return what an object does not have that an algorithm, or a network, must have."""
    return [part for part in CONTRACTS[section] if not hasattr(given, part)]


def _fedavg() -> Algorithm[Any]:
    """Return the default algorithm."""
    algorithm: Algorithm[Any] = find("fedavg", ALGORITHMS, "algorithm")()
    return algorithm


def flat(given: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dotted keys.

    >>> flat({"algorithm": {"lam": [0, 1]}, "train.lr": [0.1, 0.4]})
    {'algorithm.lam': [0, 1], 'train.lr': [0.1, 0.4]}
    """
    found: dict[str, Any] = {}
    for key, value in given.items():
        found.update(flat(value, f"{at}{key}.") if isinstance(value, Mapping) else {f"{at}{key}": value})
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested tables.

    >>> nested({"algorithm.server.lr": 0.1, "train.lr": 2, "algorithm.b": 1})
    {'algorithm': {'server': {'lr': 0.1}, 'b': 1}, 'train': {'lr': 2}}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        at = found
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value
    return found


def phases(study: Study) -> tuple[Study, ...]:
    """Return the phases of a study, each as a study of its own, with shares of its rounds turned into rounds.

    >>> study = Study(then=(Then(find("scaffold", ALGORITHMS, "algorithm")(), run=ThenRun(rounds=5)),))
    >>> [(name_of(s.algorithm), s.run.rounds) for s in phases(study)]
    [('fedavg', 30), ('scaffold', 5)]
    """
    base = dataclasses.replace(study, then=()) if study.then else study
    studies = (base, *(_phase(base, then, f"then[{k}]") for k, then in enumerate(study.then)))
    studies = tuple(_scaled(s) for s in studies)
    last = next((s.algorithm for s in studies[:-1] if facts(s.algorithm).ends_study), None)
    if last is not None:
        raise ConfigError(
            f"nothing comes after {name_of(last)}: it ends with a model per cluster of patients, not with a single one"
        )
    return studies


def _scaled(study: Study) -> Study:
    algorithm = scaled(study.algorithm, study.run.rounds)
    return study if algorithm == study.algorithm else dataclasses.replace(study, algorithm=algorithm)


def whole(study: Study) -> Study:
    """Return a study of slices as one of whole volumes, with the same orientation and preparation.

    >>> whole(Study(slices=Slices("axial"), train=Train(patch=(32, 32)))).train.patch
    (32, 32, 32)
    """
    if not study.slices.axis:
        return study
    side, *others = study.train.patch
    train = dataclasses.replace(study.train, patch=(side, side, *others), window=())
    return dataclasses.replace(study, slices=Slices(), prepare=study.slices.oriented(study.prepare), train=train)


def is_beginning(study: Study, of: Study) -> bool:
    """Return whether a study consists of the first phases of another one, and is shorter.

    >>> long = Study(then=({"algorithm": "scaffold"},))
    >>> is_beginning(Study(), of=long), is_beginning(long, of=long)
    (True, False)
    """
    return any(study == dataclasses.replace(of, then=of.then[:k]) for k in range(len(of.then)))


def _then(given: Any, first: Algorithm[Any], at: str) -> Then:
    """Build a phase from its sections; keys of the same algorithm that are not given are those of the first phase."""
    if isinstance(given, Then):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"then holds {given!r}; a phase is a section, as in [[then]] algorithm.name = 'fine_tune'")
    try:
        made: Then = _instance(Then, _named(Then(first), given, ""), "", Then(first))
    except ConfigError as problem:
        raise ConfigError(f"{at}: {problem}") from problem
    return made if "algorithm" in given else dataclasses.replace(made, algorithm=None)


def _changed(value: T, changes: ThenTrain | ThenRun) -> T:
    given = {f.name: new for f in fields(changes) if (new := getattr(changes, f.name)) is not None}
    return dataclasses.replace(value, **given)  # type: ignore[type-var]


def _phase(base: Study, then: Then, at: str) -> Study:
    try:
        train, run = _changed(base.train, then.train), _changed(base.run, then.run)
        phase = dataclasses.replace(base, algorithm=then.algorithm or base.algorithm, train=train, run=run)
    except ConfigError as problem:
        raise ConfigError(f"{at}: {problem}") from problem
    name, known = name_of(phase.algorithm), facts(phase.algorithm)
    if phase.run.rounds < known.exchanges:
        raise ConfigError(
            f"{at}: run.rounds = {phase.run.rounds} may end before {name} has tuned: with the fit of the clusters it "
            f"takes up to {known.exchanges}"
        )
    if known.masks_head and phase.prepare.normalise == "none":
        raise ConfigError(
            f"{at}: {name} needs prepare.normalise = 'nonzero', 'padded' or 'all', which separate the head from the "
            "background"
        )
    return phase


def load(path: Path, overrides: Mapping[str, str] | None = None) -> Study:
    """Read a study from a file, with ``section.key = value`` overrides."""
    return build(read_toml(path, "the configuration"), overrides)


def parse(text: str, overrides: Mapping[str, str] | None = None, where: str = "the configuration") -> Study:
    """Parse a study from TOML text that polysite wrote. Keys that no longer exist are ignored and reported.

    >>> study = parse('seed = 3', {"algorithm.lr": "0.2", "run.rounds": "5"})
    >>> study.seed, study.algorithm.lr, study.run.rounds
    (3, 0.2, 5)
    """
    return build(without_removed(parse_toml(text, where), where), overrides)


def build(given: Mapping[str, Any], overrides: Mapping[str, str] | None = None) -> Study:
    """Build a study from parsed TOML.

    >>> build({"seed": 3, "algorithm": "fedprox"}).algorithm.mu
    0.01
    """
    wanted = {k: _section(k, v) for k, v in copy.deepcopy(dict(given)).items()}
    for key, value in (overrides or {}).items():
        _put(wanted, key, value, Study())
    if "preset" in wanted:
        wanted = _over_preset(preset(wanted.pop("preset")), wanted)
    return _build(Study, without_removed(wanted), "")  # type: ignore[no-any-return]


def convert(kind: type[T], given: Mapping[str, Any], at: str, where: str = "") -> T:
    """Convert parsed TOML to a dataclass that is no part of a study; ``at`` is its place in the file ``where``.

    >>> convert(Split, {"folds": 5}, "split").folds
    5
    """
    try:
        return _build(kind, given, at)  # type: ignore[no-any-return]
    except ConfigError as problem:
        raise ConfigError(f"{where}: {problem}".removeprefix(": ")) from problem


def _section(name: str, given: Any) -> Any:
    """Expand ``algorithm = "fedprox"`` to the section ``{"name": "fedprox"}``."""
    return {"name": given} if isinstance(given, str) and _choices(name) is not None else given


def dump(study: Study, notes: bool = False) -> str:
    """Return the whole study as TOML; parsing it gives the same study. ``notes`` adds the documentation of the keys.

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
    documented = list(_documented(study, ""))
    notes_of = {path: note for path, note, _ in documented}
    unset = [path for path, _, is_unset in documented if is_unset]
    at, lines = "", list[str]()
    for line in text.splitlines():
        if line.startswith("["):
            at = "".join(f"{name}." for name in _names(line.strip("[]")))
        key, is_value, _ = line.partition(" = ")
        lines += _noted(line, notes_of.get(at + key, "") if is_value else "")
        for path in unset if line.startswith("[") else ():
            if path.rpartition(".")[0] == at.removesuffix("."):
                lines += _noted(f"# {path.rpartition('.')[2]} =", notes_of[path])
    return "\n".join(lines) + "\n"


def _noted(line: str, note: str) -> list[str]:
    """Return the line with the note as a comment to its right, wrapped."""
    wrapped = textwrap.wrap(note, 84)
    return [f"{part:32}  # {words}" for part, words in zip_longest([line], wrapped, fillvalue="")] if note else [line]


def plain(study: Study) -> dict[str, Any]:
    """Return the whole study as parsed TOML.

    >>> plain(Study(seed=3))["seed"]
    3
    """
    found: dict[str, Any] = _plain(study)
    return found


def vary(study: Study, changes: Mapping[str, Any]) -> Study:
    """Return the study with other values of some fields, given by section or dotted key as in TOML.

    >>> varied = vary(Study(seed=3), {"algorithm": {"name": "fedprox", "mu": 0.5}, "train.lr": 0.2})
    >>> varied.algorithm.mu, varied.train.lr
    (0.5, 0.2)
    """
    return _instance(Study, _named(study, nested(changes), ""), "", study)  # type: ignore[no-any-return]


def _named(value: Any, changes: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Return changes in which every section of a choice, such as the algorithm, has the name that it has in the value,
    unless it has one: keys alone never choose another. A mapping, such as that of hospitals, keeps its other entries.
    """
    found: dict[str, Any] = {}
    for key, given in changes.items():
        path, now = f"{at}.{key}".strip("."), getattr(value, key, None)
        if isinstance(given, Mapping) and isinstance(now, Mapping):
            parts = {k: v for k, v in given.items() if is_dataclass(now.get(k)) and isinstance(v, Mapping)}
            built = {k: _instance(type(now[k]), part, f"{path}.{k}", now[k]) for k, part in parts.items()}
            given = {**now, **given, **built}
        if isinstance(given, Mapping) and is_dataclass(now) and not isinstance(now, Steps):
            name = _name_in(path, now) if _choices(path) is not None else None
            given = {**({"name": name} if name else {}), **_named(now, given, path)}
        found[key] = given
    return found


def _names(key: str) -> list[str]:
    """Return the names of a dotted key; quotes hold one together that has dots itself.

    >>> _names('data.sites."St. Olavs".cases')
    ['data', 'sites', 'St. Olavs', 'cases']
    """
    if not {'"', "'"} & {*key}:
        return key.split(".")
    inside: Any = parse_toml(f"{key} = 0", f"the key {key}")
    names = list[str]()
    while isinstance(inside, dict):
        name, inside = next(iter(inside.items()))
        names.append(name)
    return names


def explain(name: str) -> str:
    """Return the documentation of an algorithm: its equation, what it requires, its hyper-parameters.

    >>> "mu = 0.01                         # Weight of the proximal term" in explain("fedprox")
    True
    """
    study = parse("", {"algorithm.name": name})
    keys = [part for part in dump(study, notes=True).split("\n\n") if part.startswith("[algorithm")]
    kind = find(name, ALGORITHMS, "algorithm") if name in ALGORITHMS else type(study.algorithm)
    return "\n\n".join([docstring(kind), traits(study.algorithm), *keys]).strip()


def field_docs(kind: type) -> dict[str, str]:
    """Return the documentation of the fields of a dataclass, by name, from the ``Args:`` section of its docstring.

    >>> field_docs(type(parse("", {"algorithm": "fedprox"}).algorithm))
    {'mu': 'Weight of the proximal term (mu in the paper), at least 0; 0 is FedAvg. Default: docs/results/defaults.md.'}
    """
    section = re.search(r"^Args:\n((?:(?: .*)?\n?)*)", inspect.getdoc(kind) or "", re.MULTILINE)
    entries = re.findall(r"^    (\w+): (.+(?:\n {5,}.+)*)", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(text.replace("``", "").split()) for name, text in entries}


def _documented(value: Any, at: str) -> Iterator[tuple[str, str, bool]]:
    """Yield the path of every key, its documentation, and whether it has no value."""
    if isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _documented(inside, f"{at}{key}.")
    elif is_dataclass(value):
        notes = field_docs(type(value))
        for f in fields(value):
            inside = getattr(value, f.name)
            yield f"{at}{f.name}", notes.get(f.name, ""), inside is None
            yield from _documented(inside, f"{at}{f.name}.")


def presets() -> list[str]:
    """Return the names of the presets: published studies that a file can start from with ``preset = "NAME"``."""
    return sorted(f.name.removesuffix(".toml") for f in resources.files("polysite").joinpath("presets").iterdir())


def preset(name: Any) -> dict[str, Any]:
    """Return a preset as parsed TOML, merged over the preset that it starts from.

    Its ``methods`` map the name of an algorithm, or ``pooled``, to the sections that this method changes.
    """
    if name not in presets():
        raise ConfigError(f"there is no preset called {name!r}; {nearest(str(name), presets())}")
    given = tomllib.loads(resources.files("polysite").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8"))
    return merge(preset(given.pop("preset")), given) if "preset" in given else given


def _over_preset(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Merge the given values over the preset's values for the chosen method, and these over the rest of the preset.

    >>> base = {"train": {"lr": 1, "batch": 4}, "methods": {"scaffold": {"train": {"lr": 2}}}}
    >>> _over_preset(base, {"algorithm": {"name": "scaffold"}, "train": {"batch": 8}})
    {'train': {'lr': 2, 'batch': 8}, 'algorithm': {'name': 'scaffold'}}
    """
    rest = {key: value for key, value in base.items() if key != "methods"}
    method = _method(merge(rest, given))
    named = {} if method == "pooled" else {"algorithm": {"name": method}}
    return merge(merge(rest, merge(named, base.get("methods", {}).get(method, {}))), given)


def _method(given: Mapping[str, Any]) -> str:
    """Return ``pooled`` or the name of the algorithm, which may follow from its keys alone.

    >>> _method({"run": {"pooled": True}}), _method({"algorithm": {"q": 2.0}}), _method({})
    ('pooled', 'qfedavg', 'fedavg')
    """
    run, algorithm = (given[k] if isinstance(given.get(k), dict) else {} for k in ("run", "algorithm"))
    if run.get("pooled") is True:
        return "pooled"
    return str(algorithm.get("name") or _meant(_choices("algorithm") or {}, algorithm, "algorithm", _fedavg()))


def merge(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the given values over the base. A section with another ``name`` replaces the base's.

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
    """Return the choices of the section at this path, by name: classes, or instances whose fields the keys replace."""
    if re.fullmatch(r"algorithm(\.inner)*", at):  # inner: the algorithm inside a combinator
        return {n: find(n, ALGORITHMS, "algorithm") for n in ALGORITHMS}
    if re.fullmatch(r"algorithm(\.inner)*\.server", at):
        return {n: find(n, SERVER_OPTIMISERS, "server optimiser") for n in SERVER_OPTIMISERS}
    if re.fullmatch(r"model(\.members\[\d*\])?", at):
        return CHOICES
    sections: dict[str, Mapping[str, Any]]
    sections = {"data": SOURCES, "federation": FEDERATIONS, "encoder": ENCODERS, "cost": SPEEDS}
    return sections.get(re.sub(r"^federation\[\d+\]", "federation", at))


def _name_in(at: str, value: Any) -> str | None:
    """Return the name of the choice that is most like a value."""
    section = re.split(r"[.\[]", at)[0]
    if section in CONTRACTS and plugins.is_foreign(value):
        return plugins.path_of(value)
    if section == "algorithm":
        return name_of(value)
    choices = _choices(at) or {}
    same = [n for n, c in choices.items() if (c if isinstance(c, type) else type(c)) is type(value)]
    return max(same, key=lambda n: _likeness(choices[n], value), default=None)


def _likeness(choice: Any, value: Any) -> int:
    """Return the number of fields in which a choice equals a value."""
    if isinstance(choice, type):
        return 0
    return sum(getattr(choice, f.name) == getattr(value, f.name) for f in fields(value))


def _build(kind: Any, given: Any, at: str, default: Any = None) -> Any:
    """Convert a TOML value to the wanted type."""
    choices, given = _choices(at), _section(at, given)
    if at == "federation" and isinstance(given, list):
        return _steps(given)
    if isinstance(default, Steps) and isinstance(given, Mapping) and "name" not in given:
        _refuse(at, given, "changes one step of several: give all of them, as a list")
    if is_dataclass(given) and (choices is not None or type(given) is kind):
        return given  # from Python
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
    if at == "then" and isinstance(given, list | tuple):
        return tuple(given)  # the study builds its phases
    if origin is tuple and isinstance(given, (str, int, float)):
        given = [given]  # a list of one may be written without brackets
    if origin is tuple and isinstance(given, list | tuple):
        return tuple(_build(inside[0], v, f"{at}[{i}]") for i, v in enumerate(given))
    if at == "then" and isinstance(given, Mapping):
        _refuse(at, given, "must be a list of phases: write [[then]], with two brackets")
    if origin is Mapping and isinstance(given, Mapping):
        return {k: _build(inside[1], v, f"{at}.{k}") for k, v in given.items()}
    return _scalar(kind, given, at)


def _steps(steps: list[Any]) -> Federation:
    """Build a federation from a list of steps."""
    if not steps:
        _refuse("federation", steps, "must have a step; leave it out for the natural sites")
    built = tuple(_build(Federation, step, f"federation[{k}]") for k, step in enumerate(steps))
    return built[0] if len(built) == 1 else Steps(built)


def _may_be(kind: Any, given: Any) -> bool:
    """Return whether a value may be converted to this member of a union.

    An integer never matches a ``Literal``, and a string never matches ``bool``.
    """
    if get_origin(kind) is Literal:
        return type(given) is not int
    return not (kind is bool and isinstance(given, str))


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
    if isinstance(name, str) and name not in choices and (own := _own(name, at)) is not None:
        return _instance(own, given, at, default if type(default) is own else None)
    if not isinstance(name, str) or name not in choices:
        what = {"inner": "algorithm", "server": "server optimiser"}.get(at.rpartition(".")[2], at.partition("[")[0])
        raise ConfigError(f"there is no {what} called {name!r}; {nearest(str(name), choices)}")
    chosen = choices[name]
    if default is not None and name == _name_in(at, default):
        return _instance(type(default), given, at, default)
    return (
        _instance(chosen, given, at, None) if isinstance(chosen, type) else _instance(type(chosen), given, at, chosen)
    )


def _own(name: str, at: str) -> Any | None:
    """Return an algorithm or network from outside of polysite, by import path; None if the name is none."""
    section = re.split(r"[.\[]", at)[0]
    found = None if section not in CONTRACTS or at.endswith(".server") else plugins.find(name, f"{at}.name")
    if found is None:
        return None
    lacking = _lacking(found, section)
    if not isinstance(found, type) or not is_dataclass(found) or lacking:
        why = f"it has no {', '.join(lacking)}" if lacking else "it is none"
        what = f"a frozen dataclass with {', '.join(CONTRACTS[section])}"
        raise ConfigError(f"{at}.name = {name!r} must be {what}, as docs/extend.md says; {why}")
    return found


def _meant(choices: Mapping[str, Any], given: Mapping[str, Any], at: str, default: Any) -> str | None:
    """Return the choice that a section without ``name`` means: the default, or the only choice with all its keys."""
    name = _name_in(at, default) if default is not None else None
    having = {n for n, c in choices.items() if given.keys() <= {f.name for f in fields(c)}}
    return name if name in having or len(having) != 1 else having.pop()


def _instance(kind: Any, given: Any, at: str, default: Any) -> Any:
    """Build a dataclass from a section; keys that are not given come from ``default`` or from the class."""
    if not isinstance(given, Mapping):
        _refuse(at, given, "must be a section")
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind) if f.init}
    for key in given:
        if key not in known:
            what = "a phase does not change" if kind in (Then, ThenTrain, ThenRun) else "unknown key"
            raise ConfigError(f"{what} {f'{at}.{key}'.strip('.')!r}; {_hint(at, key, known)}")
    base = default if default is not None else (kind() if kind is Study else None)
    values = {k: _build(hints[k], v, f"{at}.{k}".strip("."), getattr(base, k, None)) for k, v in given.items()}
    try:
        return dataclasses.replace(base, **values) if base is not None else kind(**values)
    except ConfigError as problem:
        if "." not in at and at != "algorithm":
            raise
        raise ConfigError(f"{at}: {problem}") from problem  # the message of a nested value does not say where it is


def _hint(at: str, key: str, known: Mapping[str, Any]) -> str:
    """Suggest the section that has this key, or the nearest key."""
    elsewhere = [
        f"{f.name}.{key}" for f in fields(Study) if is_dataclass(f.type) and key in {g.name for g in fields(f.type)}
    ]
    return f"did you mean {elsewhere[0]!r}?" if elsewhere and at else nearest(key, [*known, *(["name"] if at else [])])


def _refuse(at: str, given: Any, why: str) -> Any:
    raise ConfigError(f"{at or 'the configuration'} = {shown(repr(given))} {why}")


def _put(given: dict[str, Any], key: str, text: str, default: Any) -> None:
    """Set ``a.b.c`` to the TOML value in ``text``; text that is no TOML value is taken as a string.

    A mapping that the file does not give (the phantom hospitals) keeps its other entries.
    """
    value = _toml_value(text)
    if _choices(key) is not None and isinstance(value, str):
        key += ".name"  # algorithm=fedprox
    *sections, last = _names(key)
    for k, name in enumerate(sections):
        if name in given:
            given[name] = _section(".".join(sections[: k + 1]), given[name])
        if key == "federation.name" and isinstance(given.get(name), list):
            given[name] = {}  # another federation instead of the steps
        default = default.get(name) if isinstance(default, Mapping) else getattr(default, name, None)
        below = given.setdefault(name, _plain(default) if isinstance(default, Mapping) else {})
        if not isinstance(below, dict):
            what = "a list: set all of it" if isinstance(below, list) else "a value, not a section"
            raise ConfigError(f"--set {key}={text}: {name!r} is {what}")
        given = below
    given[last] = value


def _toml_value(text: str) -> Any:
    """Parse a TOML value; words need no quotes.

    >>> _toml_value("2"), _toml_value("dice"), _toml_value("[t1, t2]")
    (2, 'dice', ['t1', 't2'])
    """
    try:
        return parse_toml(f"value = {text}", "a value")["value"]
    except ConfigError:
        inside = text.strip().removeprefix("[").removesuffix("]")
        return [w.strip() for w in inside.split(",")] if text.strip() == f"[{inside}]" else text


def _plain(value: Any, at: str = "") -> Any:
    """Return a value as plain TOML types; keys whose value is None are left out."""
    if isinstance(value, Steps):
        return [_plain(step, at) for step in value.steps]
    if is_dataclass(value):
        at = "" if isinstance(value, Then) else at  # it has the sections of a study
        name = _name_in(at, value) if _choices(at) is not None else None
        inside = {f.name: _plain(getattr(value, f.name), f"{at}.{f.name}".strip(".")) for f in fields(value) if f.init}
        given = {k: v for k, v in inside.items() if v is not None and not (isinstance(value, Then) and not v)}
        return {**({"name": name} if name else {}), **given}
    if isinstance(value, Mapping):
        return {k: _plain(v, f"{at}.{k}") for k, v in value.items() if v is not None}
    return [_plain(v, f"{at}[]") for v in value] if isinstance(value, tuple) else value
