"""Benchmarks: every method on every fold with every seed, then a comparison.

A benchmark is a TOML file::

    title = "..."                       title of the page
    about = "..."                       description of the benchmark
    reference = "fedavg"                the method that all others are compared with
    preset = "fets_benchmark"           settings that all methods share: a preset,
    [study]                             and sections of a study, which override the preset
    [methods.NAME]                      settings of one method; two keys use the result of an assessment:
    outlier = { distance = "emd", weight = 0.3 }     a lower weight for the outlier by this distance, or
    clusters = "euclidean"                           one model for every cluster by this distance
    [small]                             changes for --scale small, with the same keys

The folder that a benchmark writes::

    bench.toml                          methods, seeds, folds and settings
    assess/fold0-seed0/                 the assessment, where a method needs one
    studies/METHOD/fold0-seed0.toml     every single study, ready for ``polysite train``
    runs/METHOD/fold0-seed0/            its run folder; its output is beside it, fold0-seed0.txt
    comparison/                         tables and page

A benchmark that is started again continues where it stopped. Every run is a separate process. The first runs alone,
to measure how much memory a run needs; then as many run in parallel as fit into memory.
"""

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from signal import SIGTERM, default_int_handler, signal
from typing import Any, Protocol

import tomli_w

from polysite import assessment, config, study
from polysite.algorithms.clustered import Clustered
from polysite.algorithms.weighted import Weighted
from polysite.config import Study
from polysite.data.sources import Phantom
from polysite.data.split import table
from polysite.engines.run_folder import RunFolder, file_name
from polysite.errors import ConfigError, RunError, nearest
from polysite.report.page import Options
from polysite.report.runs import Method, read
from polysite.storage import write_file

SPARE = 0.8  # fraction of the free memory that runs may use
LOOK = 20.0  # seconds after which a run has allocated most of its memory
KEYS = ("title", "about", "reference", "preset", "seeds", "folds", "study", "methods", "small")


@dataclass(frozen=True)
class Bench:
    """A benchmark: methods, and what they have in common."""

    name: str
    title: str
    methods: Mapping[str, Mapping[str, Any]]  # changes of each, as in TOML
    study: Mapping[str, Any] = field(default_factory=dict)  # common settings, as in TOML
    about: str = ""
    reference: str | None = None
    seeds: tuple[int, ...] = (0,)
    folds: int = 0  # of a cross-validation; 0 for none
    phantoms: bool = False  # whether its data are phantoms

    def only(self, methods: Sequence[str]) -> "Bench":
        """Return the benchmark with these methods only; with all, if none is named."""
        for name in methods:
            if name not in self.methods:
                raise ConfigError(f"{self.name} has no method {name!r}; {nearest(name, self.methods)}")
        chosen = {n: m for n, m in self.methods.items() if n in methods} if methods else self.methods
        return replace(self, methods=chosen)

    def check_data(self, overrides: Mapping[str, str], scale: str) -> None:
        """Refuse phantoms at full scale for a benchmark of real data: it would take days and show nothing."""
        chosen = config.build(self.study, overrides)
        if scale == "full" and isinstance(chosen.data, Phantom) and not self.phantoms:
            raise ConfigError(
                f"{self.name} at full scale is for real scans: name them with --data, or try it on phantoms with "
                "--scale small"
            )

    @property
    def places(self) -> list[tuple[int, int]]:
        """All combinations of fold and seed."""
        return [(fold, seed) for seed in self.seeds for fold in range(max(1, self.folds))]


class Step(Protocol):
    """A callback for progress: a note, and how many runs have ended."""

    def __call__(self, note: str, done: int = 1) -> None:
        """Report progress."""
        ...


def silent(note: str, done: int = 1) -> None:
    """Ignore the progress."""


@dataclass(frozen=True, eq=False)
class Job:
    """One run of a benchmark."""

    method: str
    fold: int
    seed: int
    study: Study
    root: Path

    @property
    def place(self) -> str:
        """Relative path of the job."""
        return f"{file_name(self.method)}/fold{self.fold}-seed{self.seed}"

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.root / "runs" / self.place

    @property
    def output(self) -> Path:
        """The file that holds what the process printed."""
        return self.run.with_name(f"{self.run.name}.txt")

    @property
    def title(self) -> str:
        """Method, fold and seed as text."""
        return f"{self.method}, fold {self.fold}, seed {self.seed}"


def names() -> list[str]:
    """Return the names of the benchmarks that come with polysite."""
    return sorted(f.name.removesuffix(".toml") for f in resources.files("polysite").joinpath("benches").iterdir())


def load(name: str, small: bool = False) -> Bench:
    """Load a benchmark of polysite by name, or from a .toml file."""
    path = Path(name)
    if path.suffix == ".toml":
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as problem:
            raise ConfigError(f"the benchmark {path} cannot be read: {problem}") from problem
    elif name in names():
        text = resources.files("polysite").joinpath("benches", f"{name}.toml").read_text(encoding="utf-8")
    else:
        raise ConfigError(f"there is no benchmark called {name!r}; {nearest(name, names())}, or name a .toml file")
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"the benchmark {name} is not valid TOML: {problem}") from problem
    return _bench(path.stem, given, small)


def _bench(name: str, given: dict[str, Any], small: bool) -> Bench:
    changes = given.pop("small", None)
    if small and changes is None:
        raise ConfigError(f"the benchmark {name} has no small scale; leave out --scale small")
    odd = [k for k in (*given, *(changes or {})) if k not in KEYS]
    if odd:
        raise ConfigError(f"unknown key {odd[0]!r} in the benchmark {name}; {nearest(odd[0], KEYS)}")
    if small:
        given = config.merge(given, changes or {})
        if (changes or {}).get("preset") == "":
            given.pop("preset")
    if not given.get("methods"):
        raise ConfigError(f"the benchmark {name} has no [methods]")
    preset = {"preset": given["preset"]} if given.get("preset") else {}
    return Bench(
        name=name,
        title=given.get("title", name),
        methods=given["methods"],
        study={**preset, **given.get("study", {})},
        about=given.get("about", ""),
        reference=given.get("reference"),
        seeds=tuple(given.get("seeds", (0,))),
        folds=given.get("folds", 0),
        phantoms="data" in given.get("study", {}) and given["study"]["data"].get("name", "phantom") == "phantom",
    )


def run(
    bench: Bench,
    out: Path,
    overrides: Mapping[str, str] | None = None,
    jobs: int | None = None,
    step: Step = silent,
) -> tuple[list[Method], dict[str, str]]:
    """Run what is not finished; return the methods to compare, and the failed runs with the reason."""
    out.mkdir(parents=True, exist_ok=True)
    _same(out, bench, overrides or {})
    work = list(_jobs(bench, out, overrides or {}, step))
    for job in work:
        _fits(job)
        if _done(job):
            step(f"{job.title}: finished before")
    failed = _work(work, jobs, step)
    methods = []
    for name in bench.methods:
        done = [read(job.run, name) for job in work if job.method == name and _done(job)]
        if done and not any(job.title in failed for job in work if job.method == name):
            methods.append(Method(name, tuple(done)))
    return methods, failed


def options(bench: Bench, out: Path, methods: Sequence[Method], failed: Mapping[str, str]) -> Options:
    """Return the options of the page: reference method, speeds, the first assessment (if any) and the failed runs."""
    assessed = next(iter(sorted((out / "assess").glob("fold*-seed*"))), None)
    names = [m.name for m in methods]
    reference = bench.reference if bench.reference in names else None
    lost = tuple(f"Left out: {job} failed: {why}." for job, why in failed.items())
    speeds = config.parse(methods[0].first.config).cost
    return Options(reference, speeds=speeds, assessment=assessed, remarks=lost)


def _same(out: Path, bench: Bench, overrides: Mapping[str, str]) -> None:
    """Write the settings to bench.toml, with any new methods; refuse a folder that was begun with other settings."""
    asked = {
        "name": bench.name, "study": bench.study, "methods": bench.methods, "seeds": list(bench.seeds),
        "folds": bench.folds, "set": dict(overrides),
    }  # fmt: skip
    file, text = out / "bench.toml", tomli_w.dumps(asked)
    if not file.exists():
        write_file(file, lambda path: path.write_text(text, encoding="utf-8"))
        return
    before = tomllib.loads(file.read_text(encoding="utf-8"))
    odd = [k for k in asked if k != "methods" and before.get(k) != asked[k]]
    known = before["methods"]
    odd += [f"method {n}" for n, m in bench.methods.items() if n in known and known[n] != m]
    if odd:
        raise RunError(f"{out} was begun with other settings ({odd[0]}); choose another --out, or remove it")
    whole = tomli_w.dumps({**asked, "methods": {**known, **bench.methods}})
    write_file(file, lambda path: path.write_text(whole, encoding="utf-8"))


def _jobs(bench: Bench, out: Path, overrides: Mapping[str, str], step: Step) -> Iterator[Job]:
    """Yield every run with its study."""
    for fold, seed in bench.places:
        for name, method in bench.methods.items():
            changes = {k: v for k, v in method.items() if k not in ("outlier", "clusters")}
            chosen = _placed(config.build(config.merge(bench.study, changes), overrides), fold, seed, bench.folds)
            if "outlier" in method or "clusters" in method:
                step(f"assessing fold {fold}, seed {seed}", 0)
                chosen = _advised(chosen, method, _assess(bench, out, overrides, fold, seed))
            yield Job(name, fold, seed, chosen, out)


def _placed(chosen: Study, fold: int, seed: int, folds: int) -> Study:
    """Return the study on one fold with one seed; the split is the same for all seeds."""
    split = replace(chosen.split, seed=chosen.split.seed_of(0))
    return replace(chosen, seed=seed, split=replace(split, folds=folds, fold=fold) if folds else split)


def _assess(bench: Bench, out: Path, overrides: Mapping[str, str], fold: int, seed: int) -> Mapping[str, Any]:
    """Return the distances between the hospitals of a fold; assess the hospitals unless the folder exists already."""
    path = out / "assess" / f"fold{fold}-seed{seed}"
    if not path.exists():
        assessment.assess(_placed(config.build(bench.study, overrides), fold, seed, bench.folds), path)
    distances: Mapping[str, Any] = json.loads((path / "assessment.json").read_text(encoding="utf-8"))["distances"]
    return distances


def _advised(chosen: Study, method: Mapping[str, Any], distances: Mapping[str, Any]) -> Study:
    """Return the study with a lower weight for the outlier, or with the clusters, found by the method's distance."""
    wanted = method["outlier"]["distance"] if "outlier" in method else method["clusters"]
    if wanted not in distances:
        raise ConfigError(f"the assessment has no distance {wanted!r}; {nearest(wanted, distances)}")
    distance, inner = distances[wanted], chosen.algorithm
    if "outlier" in method:
        return replace(chosen, algorithm=Weighted({distance["outlier"]: float(method["outlier"]["weight"])}, inner))
    groups = {f"group {k}": tuple(members) for k, members in enumerate(distance["clusters"], start=1)}
    train = [site for site, splits in study.deal_cases(chosen).items() if splits["train"]]
    alone = [site for site in train if not any(site in members for members in groups.values())]
    largest = max(groups, key=lambda name: len(groups[name]))  # it takes the sites with too few cases to be compared
    return replace(chosen, algorithm=Clustered({**groups, largest: (*groups[largest], *alone)}, inner))


def _fits(job: Job) -> None:
    """Write the study of a job; refuse an existing run folder with another configuration or other cases."""
    file = job.root / "studies" / f"{job.place}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(config.dump(job.study), encoding="utf-8")
    if not job.run.exists():
        return
    wanted = config.parse(config.dump(study.pinned(job.study)))
    folder = RunFolder.open(job.run)
    if config.parse(folder.config) != wanted:
        raise RunError(f"{job.run} was trained with another configuration; choose another --out, or remove it")
    if table(study.deal_cases(job.study)) != folder.split:
        raise RunError(f"{job.run} was trained on other cases than there are now; choose another --out, or remove it")


def _done(job: Job) -> bool:
    if not (job.run / "config.toml").exists():
        return False
    folder = RunFolder(job.run)
    return folder.finished and any((job.run / "evaluation").glob("*/about.json"))


def _work(jobs: Sequence[Job], most: int | None, step: Step) -> dict[str, str]:
    """Run jobs in parallel as memory allows; return the failed ones with the reason.

    A job whose first phases are a job of their own waits for that job.
    """
    signal(SIGTERM, default_int_handler)  # SIGTERM interrupts like Ctrl-C, so that no child is left behind
    done, room = [job for job in jobs if _done(job)], Room(most)
    left = [job for job in jobs if job not in done]
    running: dict[Job, subprocess.Popen[bytes]] = {}
    failed: dict[str, str] = {}
    try:
        while left or running:
            while len(running) < room.now and (ready := [j for j in left if not _first(j, [*left, *running])]):
                job = ready[0]
                left.remove(job)
                running[job] = _start(job, room.threads, _first(job, done))
                step(f"{len(running)} in parallel · {job.title}", 0)
            time.sleep(0.2)
            room.look()
            for job, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[job]
                room.learnt = room.learnt or not process.returncode
                done += [] if process.returncode else [job]
                if process.returncode:
                    failed[job.title] = _reason(job, process.returncode)
                step(f"{job.title}: {'failed' if process.returncode else 'done'}")
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
    return failed


def _first(job: Job, among: Iterable[Job]) -> Job | None:
    """Return the job among others whose study is the longest first part of this job's study; None if there is none."""
    beginnings = [replace(job.study, then=job.study.then[:k]) for k in range(len(job.study.then))]
    candidates = [other for other in among if other.study in beginnings]
    return max(candidates, key=lambda other: len(other.study.then), default=None)


def _start(job: Job, threads: int, before: Job | None) -> "subprocess.Popen[bytes]":
    """Start or resume ``polysite train`` in a process of its own."""
    job.run.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "polysite.cli", "train"]
    if (job.run / "config.toml").exists():
        command += ["--resume", str(job.run)]
    else:
        command += [str(job.root / "studies" / f"{job.place}.toml"), "--out", str(job.run)]
        command += ["--after", str(before.run)] if before else []
    output = job.output.open("ab")
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    try:
        return subprocess.Popen([*command, "--quiet", "--no-page"], stdout=output, stderr=output, env=environment)
    finally:
        output.close()


def _reason(job: Job, code: int) -> str:
    lines = [line for line in job.output.read_text(errors="replace").splitlines() if line.strip()]
    end = f"it was ended by signal {-code}, perhaps because memory ran out" if code < 0 else f"exit code {code}"
    return f"{lines[-1].removeprefix('polysite: ') if lines else end} ({job.output})"


class Room:
    """The number of runs that fit in memory and GPU memory, measured on the first run."""

    def __init__(self, most: int | None):
        self.cores = os.cpu_count() or 1
        self.most = most or self.cores
        self.threads = max(1, self.cores // self.most)
        self.learnt, self.until = False, time.monotonic() + LOOK
        self.before = self.least = free_memory()

    def look(self) -> None:
        """Measure the memory of the first run until it ends or has trained for a while."""
        if not self.learnt:
            self.least = tuple(map(min, self.least, free_memory()))
            self.learnt = time.monotonic() > self.until

    @property
    def now(self) -> int:
        """Number of runs that may run in parallel now."""
        if self.most == 1 or not self.learnt:
            return 1
        needs = [max(a - b, 1) for a, b in zip(self.before, self.least, strict=True)]
        fit = min(int(SPARE * free / need) for free, need in zip(self.before, needs, strict=True))
        return max(1, min(self.most, fit))


def free_memory() -> tuple[int, ...]:
    """Return the free bytes of the machine and, if there is one, of its first GPU."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = [int(lines["MemAvailable"].split()[0]) * 1024]
    import torch

    if torch.cuda.is_available():
        free.append(torch.cuda.mem_get_info()[0])
    return tuple(free)
