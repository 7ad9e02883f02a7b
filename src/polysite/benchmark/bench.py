"""A benchmark as a TOML file: methods, what they share, and what they are compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from polysite import config
from polysite.algorithms import ALGORITHMS
from polysite.benchmark.axes import NamedFederation, check_sweep, federations
from polysite.benchmark.equal_tuning import Tuning
from polysite.benchmark.mixed import EnsembleOf, inner_folds
from polysite.benchmark.mixed import check as check_ensembles
from polysite.costs.budget import Kind
from polysite.data.sources import Phantom
from polysite.errors import ConfigError, nearest, shown
from polysite.foreign import parse_toml
from polysite.metrics.measures import EmptyMaskPolicy
from polysite.metrics.statistics import Tail
from polysite.report.paper_figures import PAPER_FIGURES
from polysite.report.published import Paper

KEYS: Mapping[str, type] = {  # of a benchmark's file, and what their values are
    **dict.fromkeys(("title", "about", "reference", "preset", "needs", "sizes", "budget"), str),
    **dict.fromkeys(("study", "methods", "sweep", "published_folds", "published", "compare", "radiomics"), dict),
    **dict.fromkeys(("ensembles", "tuning"), dict),
    **dict.fromkeys(("seeds", "federations", "sweep_methods"), list),
    "folds": int,
}
SCALES = {  # besides "full", and tables of changes in a benchmark's file
    "small": "phantoms and few rounds: minutes",
    "tiny": "the data themselves, a tiny network and one or two rounds: shows that everything runs",
}
TINY = "A tiny network was trained for a round or two: it shows that everything runs and nothing about the methods."


@dataclass(frozen=True)
class Compare:
    """How the finished methods are compared.

    Args:
        tail: Alternative of the tests against the reference: ``two-sided``, ``greater`` (better) or ``less`` (worse).
        empty: Distance if exactly one mask is empty: ``penalty``, ``excluded`` or ``excluded-case``, as in
            `EmptyMaskPolicy`.
        hd95: Definition of HD95: ``max`` or ``union``, as in `EmptyMaskPolicy`.
        figures: Figures to add, by the names in ``PAPER_FIGURES``; none by default.
        cases: Names of the cases that the figure ``cases`` shows; none by default.
        questions: Additional tests, such as those that a paper reports, as in ``scaffold > fedavg @ 12,13 / TC``.
    """

    tail: Tail = "two-sided"
    empty: str = "penalty"
    hd95: str = "max"
    figures: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        odd = next((name for name in self.figures if name not in PAPER_FIGURES), None)
        if odd is not None:
            raise ConfigError(f"compare.figures: there is no figure {odd!r}; {nearest(odd, PAPER_FIGURES)}")

    @property
    def policy(self) -> EmptyMaskPolicy:
        """The policy for empty masks."""
        return EmptyMaskPolicy(empty=self.empty, hd95=self.hd95)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Folds:
    """Published folds, which ``--folds FOLDER`` reads.

    Args:
        file: Path of a fold's test cases inside the folder, with ``{fold}`` for its number.
        study: Changes of the common settings if these folds are used, as in TOML; none by default.
    """

    file: str
    study: Mapping[str, Any] = field(default_factory=dict)

    def within(self, folder: Path, count: int) -> str:
        """Return the path of the files with ``{fold}``; refuse a folder that does not hold all of them."""
        places = (folder / self.file, folder / Path(self.file).name)
        missing = {place: [k for k in range(count) if not _filled(place, k).is_file()] for place in places}
        for place, absent in missing.items():
            if not absent:
                return str(place)
        place, absent = min(missing.items(), key=lambda item: len(item[1]))
        raise ConfigError(f"--folds {folder}: {_filled(place, absent[0])} is missing; name the folder of these files")


def _filled(place: Path, fold: int) -> Path:
    return Path(str(place).replace("{fold}", str(fold)))


@dataclass(frozen=True)
class Bench:
    """A benchmark: its methods and their common settings."""

    name: str
    title: str
    methods: Mapping[str, Mapping[str, Any]]  # changes of each, as in TOML
    study: Mapping[str, Any] = field(default_factory=dict)  # common settings, as in TOML
    about: str = ""
    reference: str | None = None
    seeds: tuple[int, ...] = (0,)
    folds: int = 0  # folds of a cross-validation; 0 for none
    budget: Kind = "rounds"  # what is equal for all methods: rounds, or the steps or bytes of the reference
    federations: tuple[NamedFederation, ...] = ()  # none: all methods have the federation of the study
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # key of a study -> values
    ensembles: Mapping[str, EnsembleOf] = field(default_factory=dict)  # of finished runs
    members: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # methods that are trained for these alone
    tuning: Tuning | None = None  # settings that every method tries in every fold
    sweep_methods: tuple[str, ...] = ()  # methods that are swept; none: all that have a swept key
    phantoms: bool = False  # whether its data are phantoms
    needs: str = ""  # the data that it is made for, and how to name them
    sizes: str = ""  # published table of the cases of every site, for a plan without the data
    published_folds: Folds | None = None
    published: Paper = Paper()
    compare: Compare = Compare()
    radiomics: Mapping[str, Any] | None = None  # settings of a benchmark that trains nothing: features and clusters
    scales: tuple[str, ...] = ("full",)
    remarks: tuple[str, ...] = ()  # on the page and in the terminal

    def only(self, methods: Sequence[str]) -> "Bench":
        """Return the benchmark with these methods only; with all, if none is named."""
        known = [*self.methods, *self.ensembles]
        for name in methods:
            if name not in known:
                raise ConfigError(f"{self.name} has no method {name!r}; {nearest(name, known)}")
        if not methods:
            return self
        mixed = {n: e for n, e in self.ensembles.items() if n in methods}
        needed = {*methods, *(m for n, e in mixed.items() for m in e.members(n))}
        chosen, members = ({n: m for n, m in each.items() if n in needed} for each in (self.methods, self.members))
        swept = tuple(n for n in self.sweep_methods if n in chosen)
        sweep = self._sweep_of(swept)
        return replace(self, methods=chosen, members=members, ensembles=mixed, sweep_methods=swept, sweep=sweep)

    @property
    def whole(self) -> "Bench":
        """The benchmark with the members of its ensembles as methods: all that is trained."""
        return replace(self, methods={**self.methods, **self.members})

    def _sweep_of(self, swept: Sequence[str]) -> Mapping[str, Sequence[Any]]:
        """Return the sweep; empty if all methods that it names are left out."""
        return {} if self.sweep_methods and not swept else self.sweep

    def at_equal(self, budget: str | None) -> "Bench":
        """Return the benchmark with another budget; unchanged if None."""
        known = get_args(Kind)
        if budget is not None and budget not in known:
            raise ConfigError(f"budget = {budget!r}: compare at equal {', '.join(known[:-1])} or {known[-1]}")
        return self if budget is None else replace(self, budget=known[known.index(budget)])

    def untuned(self) -> "Bench":
        """Return the benchmark with the settings that it has for every method, without trials."""
        methods = {n: {k: v for k, v in m.items() if k != "tuning"} for n, m in self.methods.items()}
        return replace(self, tuning=None, methods=methods)

    def on_folds(self, folder: Path | None) -> "Bench":
        """Return the benchmark on the published folds in a folder; on its own folds, with a remark, without one."""
        if self.published_folds is None:
            if folder is not None:
                raise ConfigError(f"--folds {folder}: no folds were published for {self.name}; leave it out")
            return self
        if folder is None:
            words = f"The {self.folds} folds are polysite's own, not the published ones: --folds FOLDER names those."
            return replace(self, remarks=(*self.remarks, words))
        file = self.published_folds.within(folder, self.folds)
        words = f"The folds are the published ones: {file}."
        study = config.merge(self.study, config.merge(self.published_folds.study, {"split": {"file": file}}))
        return replace(self, study=study, remarks=(*self.remarks, words))

    def lacks_data(self, overrides: Mapping[str, str], scale: str) -> str:
        """Return a sentence on the data to name, or an empty text if there are data.

        A benchmark of real data refuses phantoms, except at small scale: it would take days and show nothing.
        """
        named = {k: v for k, v in overrides.items() if k.startswith("data.")}
        if scale == "small" or self.phantoms or (named and not isinstance(config.build({}, named).data, Phantom)):
            return ""
        given = self.study.get("data", {})
        source = given.get("name", "phantom")
        if source != "phantom" and (source != "files" or given.get("path")):
            return ""
        needs = f" ({self.needs})" if self.needs else ""
        small = " or try it on phantoms with --scale small" if "small" in self.scales else ""
        return f"{self.name} at {scale} scale is for real scans{needs}: name them with --data{',' * bool(small)}{small}"

    @property
    def dealt(self) -> tuple[NamedFederation, ...]:
        """The federations; one without a title if the benchmark lists none."""
        return self.federations or (NamedFederation(),)

    @property
    def places(self) -> list[tuple[int, int]]:
        """All combinations of fold and seed."""
        return [(fold, seed) for seed in self.seeds for fold in range(max(1, self.folds))]


def names() -> list[str]:
    """Return the names of the benchmarks that come with polysite."""
    return sorted(f.name.removesuffix(".toml") for f in resources.files("polysite").joinpath("benches").iterdir())


def load(name: str, scale: str = "full") -> Bench:
    """Load a benchmark of polysite by name, or from a .toml file, at a scale: full, small or tiny."""
    if scale not in ("full", *SCALES):
        raise ConfigError(f"--scale {scale}: full or {' or '.join(SCALES)}")
    path = Path(name)
    if path.suffix == ".toml":
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigError(f"the benchmark {path} cannot be read: {problem}") from problem
    elif name in names():
        text = resources.files("polysite").joinpath("benches", f"{name}.toml").read_text(encoding="utf-8")
    else:
        raise ConfigError(f"there is no benchmark called {name!r}; {nearest(name, names())}, or name a .toml file")
    return _bench(path.stem, parse_toml(text, f"the benchmark {name}"), scale)


def _bench(name: str, given: dict[str, Any], scale: str) -> Bench:
    scales = {k: given.pop(k) for k in SCALES if k in given}
    for key, changes in scales.items():
        _check_kind(name, key, changes, dict)
    if scale not in ("full", *scales):
        raise ConfigError(f"the benchmark {name} has no {scale} scale; leave out --scale {scale}")
    odd = next((k for part in (given, *scales.values()) for k in part if k not in KEYS), None)
    if odd is not None:
        raise ConfigError(f"unknown key {odd!r} in the benchmark {name}; {nearest(odd, KEYS)}")
    for part in (given, *scales.values()):
        _check_kinds(name, part)
    _check_federations(name, given)
    if scale != "full":
        given = config.merge(given, scales[scale])
    if not given.get("methods") and "radiomics" not in given:
        raise ConfigError(f"the benchmark {name} has no [methods]")
    study, folds = given.get("study", {}), given.get("published_folds")
    methods, swept = given.get("methods", {}), given.get("sweep_methods", ())
    sweep = config.flat(given.get("sweep", {}))
    mixed = {n: config.convert(EnsembleOf, e, f"ensembles.{n}") for n, e in given.get("ensembles", {}).items()}
    check_ensembles(mixed, methods, name)
    check_sweep(sweep, swept, methods)
    tuning = config.convert(Tuning, given["tuning"], "tuning") if "tuning" in given else None
    _check_tuning(name, tuning, methods, sweep, mixed)
    _check_reference(name, given.get("reference"), methods)
    _check_algorithms(name, methods, study)
    real = scale != "small"  # phantoms have neither published folds nor published numbers
    return Bench(
        name=name,
        title=given.get("title", name),
        methods=methods,
        ensembles=mixed,
        members=inner_folds(mixed, methods),
        federations=federations(given.get("federations", ())),
        sweep=sweep,
        tuning=tuning,
        sweep_methods=tuple(swept),
        study={**({"preset": given["preset"]} if given.get("preset") else {}), **study},
        about=given.get("about", ""),
        reference=given.get("reference"),
        seeds=tuple(given.get("seeds", (0,))),
        folds=given.get("folds", 0),
        phantoms="data" in study and _source(study["data"]) == "phantom",
        needs=given.get("needs", ""),
        sizes=given.get("sizes", ""),
        published_folds=config.convert(Folds, folds, "published_folds") if folds and real else None,
        published=config.convert(Paper, given.get("published", {}), "published") if real else Paper(),
        compare=config.convert(Compare, given.get("compare", {}), "compare"),
        radiomics=given.get("radiomics"),
        scales=("full", *scales),
        remarks=(TINY,) if scale == "tiny" else (),
    ).at_equal(given.get("budget"))


def _source(data: Any) -> Any:
    """Return the name of a source of cases, given as a section or by its name alone."""
    return data if isinstance(data, str) else data.get("name", "phantom")


def _check_kinds(name: str, given: Mapping[str, Any]) -> None:
    """Refuse values of the wrong kind, and methods or members of the study that are no sections."""
    for key, value in given.items():
        _check_kind(name, key, value, KEYS[key])
    for method, changes in given.get("methods", {}).items():
        _check_kind(name, f"methods.{method}", changes, dict)
    for key in ("data", "algorithm"):
        if not isinstance(given.get("study", {}).get(key, ""), str):
            _check_kind(name, f"study.{key}", given["study"][key], dict)
    for seed in given.get("seeds", ()):
        _check_kind(name, "seeds", seed, int)


def _check_kind(name: str, key: str, value: Any, kind: type) -> None:
    if type(value) is not kind:
        words = {str: "a text", dict: "a section", list: "a list", int: "a whole number"}
        raise ConfigError(f"the benchmark {name}: {key} = {shown(repr(value), 80)} must be {words[kind]}")


def _check_tuning(
    name: str, tuning: Tuning | None, methods: Mapping[str, Any], sweep: Mapping[str, Any], mixed: Mapping[str, Any]
) -> None:
    """Refuse unequal tuning, and tuning together with what trains the same method in several ways."""
    if tuning is None:
        odd = next((n for n, method in methods.items() if "tuning" in method), None)
        if odd is not None:
            raise ConfigError(f"the method {odd!r} of {name} has settings to try, but the benchmark has no [tuning]")
        return
    if sweep or mixed:
        raise ConfigError(f"{name} has [tuning] and {'[sweep]' if sweep else '[ensembles]'}; leave out one of them")
    tuning.check(methods)


def _check_reference(name: str, reference: str | None, methods: Mapping[str, Any]) -> None:
    """Refuse a reference that is neither a method nor a method with swept values."""
    if reference is not None and methods and not any(reference == n or reference.startswith(f"{n}, ") for n in methods):
        raise ConfigError(f"the reference {reference!r} of {name} is no method; {nearest(reference, methods)}")


def _check_algorithms(name: str, methods: Mapping[str, Mapping[str, Any]], study: Mapping[str, Any]) -> None:
    """Refuse a method that is called like an algorithm but sets none, and so would train FedAvg under its name."""
    for method, changes in methods.items():
        chosen = {"algorithm", "then"} & (changes.keys() | study.keys())
        if method in ALGORITHMS and method != "fedavg" and not chosen:
            raise ConfigError(
                f"the method {method!r} of {name} sets no algorithm and would train fedavg; add "
                f'algorithm = "{method}" to [methods.{method}], or give it another name'
            )


def _check_federations(name: str, given: Mapping[str, Any]) -> None:
    """Refuse methods with a federation of their own, and published settings of federations that are not listed."""
    odd = next((n for n, method in given.get("methods", {}).items() if "federation" in method), None)
    if given.get("federations") and odd is not None:
        raise ConfigError(
            f"the method {odd!r} of {name} has a federation, but the benchmark lists federations for all methods; "
            "move it there"
        )
    titles = [f.title for f in federations(given.get("federations", ()))]
    for title in given.get("published", {}).get("settings", {}) if titles else ():
        if title not in titles:
            raise ConfigError(f"published.settings names the federation {title!r}; {nearest(title, titles)}")
