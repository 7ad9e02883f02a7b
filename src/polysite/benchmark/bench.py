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
from polysite.costs.budget import Kind
from polysite.data.sources import Phantom
from polysite.errors import ConfigError, nearest
from polysite.foreign import parse_toml, read_toml, without_removed
from polysite.metrics.measures import EmptyMaskPolicy
from polysite.metrics.statistics import Tail
from polysite.report.paper_figures import PAPER_FIGURES
from polysite.report.published import Paper

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
class BenchFile:
    """What the file of a benchmark states."""

    title: str = ""
    about: str = ""
    preset: str = ""
    study: Mapping[str, Any] = field(default_factory=dict)  # common settings, as in TOML
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # changes of each, as in TOML
    reference: str | None = None
    seeds: tuple[int, ...] = (0,)
    folds: int = 0  # folds of a cross-validation; 0 for none
    budget: Kind = "rounds"  # what is equal for all methods: rounds, or the steps or bytes of the reference
    federations: tuple[Any, ...] = ()  # none: all methods have the federation of the study
    sweep: Mapping[str, Any] = field(default_factory=dict)  # key of a study -> values
    sweep_methods: tuple[str, ...] = ()  # methods that are swept; none: all that have a swept key
    tuning: Tuning | None = None  # settings that every method tries in every fold
    needs: str = ""  # the data that it is made for, and how to name them
    sizes: str = ""  # published table of the cases of every site, for a plan without the data
    published_folds: Folds | None = None
    published: Paper = Paper()
    compare: Compare = Compare()
    radiomics: Mapping[str, Any] | None = None  # settings of a benchmark that trains nothing: features and clusters
    small: Mapping[str, Any] | None = None  # changes for these scales
    tiny: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Bench(BenchFile):
    """A benchmark at a scale: its methods and their common settings."""

    name: str = ""
    federations: tuple[NamedFederation, ...] = ()
    remarks: tuple[str, ...] = ()  # on the page and in the terminal

    @property
    def scales(self) -> tuple[str, ...]:
        """The scales at which it can run."""
        return ("full", *(scale for scale in SCALES if getattr(self, scale) is not None))

    def only(self, methods: Sequence[str]) -> "Bench":
        """Return the benchmark with these methods only; with all, if none is named."""
        for name in methods:
            if name not in self.methods:
                raise ConfigError(f"{self.name} has no method {name!r}; {nearest(name, self.methods)}")
        if not methods:
            return self
        chosen = {n: m for n, m in self.methods.items() if n in methods}
        swept = tuple(n for n in self.sweep_methods if n in chosen)
        sweep = {} if self.sweep_methods and not swept else self.sweep
        return replace(self, methods=chosen, sweep_methods=swept, sweep=sweep)

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
        if scale == "small" or (named and not isinstance(config.build({}, named).data, Phantom)):
            return ""
        given = self.study.get("data", {"name": ""})
        given = given if isinstance(given, Mapping) else {"name": given}
        source = given.get("name", "phantom")
        if source == "phantom" or (source and (source != "files" or given.get("path"))):
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
        given = read_toml(path, "the benchmark")
    elif name in names():
        text = resources.files("polysite").joinpath("benches", f"{name}.toml").read_text(encoding="utf-8")
        given = parse_toml(text, f"the benchmark {name}")
    else:
        raise ConfigError(f"there is no benchmark called {name!r}; {nearest(name, names())}, or name a .toml file")
    return _bench(path.stem, without_removed(given), scale)


def _bench(name: str, given: Mapping[str, Any], scale: str) -> Bench:
    whole = config.convert(BenchFile, given, "", f"the benchmark {name}")
    for key in ("data", "algorithm"):
        if not isinstance(value := whole.study.get(key, ""), str | Mapping):
            raise ConfigError(f"the benchmark {name}: study.{key} = {value!r} must be a section")
    _check_federations(name, whole)
    scales = {
        each: config.convert(BenchFile, config.merge(given, changes), "", f"the benchmark {name} at {each} scale")
        for each in SCALES
        if (changes := getattr(whole, each)) is not None
    }
    file = {"full": whole, **scales}.get(scale)
    if file is None:
        raise ConfigError(f"the benchmark {name} has no {scale} scale; leave out --scale {scale}")
    if not file.methods and file.radiomics is None:
        raise ConfigError(f"the benchmark {name} has no [methods]")
    sweep = config.flat(file.sweep)
    check_sweep(sweep, file.sweep_methods, file.methods)
    _check_tuning(name, file)
    wanted = file.reference
    if wanted and file.methods and not any(wanted == n or wanted.startswith(f"{n}, ") for n in file.methods):
        raise ConfigError(f"the reference {wanted!r} of {name} is no method; {nearest(wanted, file.methods)}")
    _check_algorithms(name, file)
    real = scale != "small"  # phantoms have neither published folds nor published numbers
    changed: dict[str, Any] = {
        "title": file.title or name,
        "study": {**({"preset": file.preset} if file.preset else {}), **file.study},
        "federations": federations(file.federations),
        "sweep": sweep,
        **({} if real else {"published_folds": None, "published": Paper()}),
    }
    remarks = (TINY,) if scale == "tiny" else ()
    return Bench(**{**vars(file), **changed}, name=name, remarks=remarks)


def _check_tuning(name: str, file: BenchFile) -> None:
    """Refuse unequal tuning, and tuning together with what trains the same method in several ways."""
    if file.tuning is None:
        odd = next((n for n, method in file.methods.items() if "tuning" in method), None)
        if odd is not None:
            raise ConfigError(f"the method {odd!r} of {name} has settings to try, but the benchmark has no [tuning]")
        return
    if file.sweep:
        raise ConfigError(f"{name} has [tuning] and [sweep]; leave out one of them")
    file.tuning.check(file.methods)


def _check_algorithms(name: str, file: BenchFile) -> None:
    """Refuse a method that is called like an algorithm but sets none, and so would train FedAvg under its name."""
    for method, changes in file.methods.items():
        chosen = {"algorithm", "then"} & (changes.keys() | file.study.keys())
        if method in ALGORITHMS and method != "fedavg" and not chosen:
            raise ConfigError(
                f"the method {method!r} of {name} sets no algorithm and would train fedavg; add "
                f'algorithm = "{method}" to [methods.{method}], or give it another name'
            )


def _check_federations(name: str, file: BenchFile) -> None:
    """Refuse methods with a federation of their own, and published settings of federations that are not listed."""
    odd = next((n for n, method in file.methods.items() if "federation" in method), None)
    if file.federations and odd is not None:
        raise ConfigError(
            f"the method {odd!r} of {name} has a federation, but the benchmark lists federations for all methods; "
            "move it there"
        )
    titles = [f.title for f in federations(file.federations)]
    for title in file.published.settings if titles else ():
        if title not in titles:
            raise ConfigError(f"published.settings names the federation {title!r}; {nearest(title, titles)}")
