"""The folder of one run, in files that other tools can read.

::

    config.toml        the whole configuration, defaults included
    split.csv          site and split of every case
    versions.json      format of the folder, versions of polysite, Python and libraries, platform, seed
    rounds.jsonl       one RoundRecord a line: losses, validation scores, steps, seconds and bytes of every site
    log.txt            log messages
    checkpoints/       the last two, the best, the own best of every site, and the one that each phase began from
    sites/NAME/        memory of this hospital at each checkpoint
    models/            best and last models as plain safetensors
    result.json        the Result: the best round, its scores per site, case and label
    evaluation/        every case by every measure
    deployment.json    deployed runs: the sites, and the name by which they know the study
    incidents.jsonl    deployed runs: incidents as they happened
    assessment/        deployed runs: how the sites differ
    bundles/           MONAI bundles of ``polysite serve-model``
    index.html         the page about the run
    .lock              held by the process that writes here

A new run gets a new folder; nothing is ever overwritten.
"""

import json
import math
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polysite import machine
from polysite.engines import checkpoint, site_memory
from polysite.engines.record import Result, RoundRecord
from polysite.engines.site_memory import Memory
from polysite.errors import RunError
from polysite.foreign import parse_json
from polysite.locks import held
from polysite.payload import pack, plain
from polysite.privacy import Release
from polysite.storage import Journal, draft_folder, link_file, write_file
from polysite.tree import Tree

KEPT = 2  # checkpoints besides the best
FORMAT = 2  # of a run folder; 0.1.0 wrote 1, without saying so


def file_name(name: str) -> str:
    """Return a name that file systems accept, different for different names.

    >>> file_name("St. Anna"), file_name("../a/b"), file_name("50%")
    ('St. Anna', '%2E.%2Fa%2Fb', '50%25')
    """
    return re.sub(r"[^\w .-]|^\.", lambda found: f"%{ord(found[0]):02X}", name)


class RunFolder:
    """Reader and writer of one run folder."""

    def __init__(self, path: Path):
        self.path = path
        self._rounds = Journal(path / "rounds.jsonl", RoundRecord.from_plain, skip="last")

    @classmethod
    def create(
        cls,
        path: Path,
        config: str,
        seed: int,
        split: str = "",
        after: "RunFolder | None" = None,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> "RunFolder":
        """Create a new folder.

        Args:
            path: The folder; must not exist.
            config: Text of config.toml.
            seed: Seed of the study.
            split: Text of split.csv.
            after: A run whose rounds and checkpoints are taken over.
            more: Further files, by name.
        """
        if path.exists():
            raise RunError(
                f"{path} exists already; a run never overwrites another: choose another folder or resume this one"
            )
        about = {"format": FORMAT, **versions(), "seed": seed}
        with draft_folder(path, "run folder") as draft:
            for inside in ("checkpoints", "sites", "models"):
                (draft / inside).mkdir()
            for name, content in {"config.toml": config, **more}.items():
                (draft / name).write_text(content)
            (draft / "versions.json").write_text(json.dumps(about, indent=1) + "\n")
            (draft / "split.csv").write_text(split)
            (draft / "rounds.jsonl").touch()
            if after:
                shutil.copy(after.path / "rounds.jsonl", draft)
                for inside in ("checkpoints", "sites"):
                    shutil.copytree(after.path / inside, draft / inside, copy_function=_link, dirs_exist_ok=True)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open a run folder of this or an earlier version; refuse one of a later version."""
        if not (path / "config.toml").is_file():
            raise RunError(f"{path} is not a run folder: it holds no config.toml")
        try:
            format = parse_json((path / "versions.json").read_text()).get("format", 1)
        except (OSError, ValueError, AttributeError) as problem:
            raise RunError(
                f"the run folder {path} is damaged: its versions.json cannot be read: {problem}"
            ) from problem
        if format not in range(1, FORMAT + 1):
            raise RunError(
                f"{path} has format {format!r}, this polysite reads up to {FORMAT}: install a newer polysite"
            )
        return cls(path)

    @staticmethod
    def fresh(root: Path, name: str) -> Path:
        """Return a new path below ``root``: date, time and name."""
        stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
        candidates = (root / (stem if k == 1 else f"{stem}-{k}") for k in range(1, 10_000))
        return next(p for p in candidates if not p.exists())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder's lock; a killed process releases it."""
        with ExitStack() as stack:
            try:
                stack.enter_context(held(self.path / ".lock"))
            except OSError as problem:
                raise RunError(f"{self.path} is in use by another process; wait for it or stop it first") from problem
            yield

    @property
    def config(self) -> str:
        """Text of config.toml."""
        with self._reading("config.toml") as path:
            return path.read_text(encoding="utf-8")

    @property
    def split(self) -> str:
        """Text of split.csv."""
        with self._reading("split.csv") as path:
            return path.read_text(encoding="utf-8")

    @property
    def finished(self) -> bool:
        """Whether the run has a result."""
        return (self.path / "result.json").exists()

    @property
    def result(self) -> Result:
        """The result of a finished run."""
        with self._reading("result.json") as path:
            return Result.from_json(path.read_text(encoding="utf-8"))

    def records(self) -> list[RoundRecord]:
        """Return the records of the rounds so far."""
        with self._reading("rounds.jsonl"):
            return self._rounds.read()

    @contextmanager
    def _reading(self, name: str) -> Iterator[Path]:
        """Yield the path of a file; raise RunError with its name if it is missing or cannot be read or parsed."""
        try:
            yield (self.path / name).resolve(strict=True)
        except (OSError, ValueError) as problem:
            reason = " ".join(str(problem).split())
            raise RunError(f"the run folder {self.path} is damaged: its {name} cannot be read: {reason}") from problem

    def append(self, record: RoundRecord) -> None:
        """Add the record of a round."""
        try:
            self._rounds.append(record.to_json(), sync=False)
        except OSError as problem:
            raise RunError(f"round {record.round} could not be recorded in {self.path}: {problem}") from problem

    def rewind(self, round: int) -> None:
        """Delete the records and checkpoints after a round, and unfinished files; the rounds will be repeated."""
        kept = "".join(f"{r.to_json()}\n" for r in self.records() if r.round <= round)
        write_file(self.path / "rounds.jsonl", lambda p: p.write_bytes(kept.encode()))  # as private as the folder
        half = [p for inside in ("checkpoints", "sites", "models") for p in (self.path / inside).rglob(".*.partial")]
        half += [p for name in ("rounds.jsonl", "result.json") for p in self.path.glob(f".{name}.*.partial")]
        kinds = ("round", "best", "own")
        found = (p for kind in kinds for p in (self.path / "checkpoints").glob(f"{kind}-*.safetensors"))
        late = (p for p in found if _round(p) > round)
        for path in (*half, *late):
            path.unlink()
        self._prune()

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints, newest first."""
        return sorted((self.path / "checkpoints").glob("round-*.safetensors"), reverse=True)

    def reached(self, rounds: int) -> bool:
        """Whether there is a checkpoint after at least this many rounds."""
        return any(int(path.stem.removeprefix("round-")) + 1 >= rounds for path in self.checkpoints())

    def round(self, round: int) -> Path:
        """Return the path of the checkpoint of a round."""
        return self.path / "checkpoints" / f"round-{round:06d}.safetensors"

    def best(self, round: int) -> Path:
        """Return the path of the checkpoint of a best round."""
        return self.path / "checkpoints" / f"best-{round:06d}.safetensors"

    def own(self, round: int) -> Path:
        """Return the path of the checkpoint of a round that is the own best of some sites."""
        return self.path / "checkpoints" / f"own-{round:06d}.safetensors"

    def own_rounds(self, until: float = math.inf) -> dict[str, int]:
        """Return the own best round of every site, as it was after a round; empty if sites have none of their own."""
        found: dict[str, int] = {}
        for path in sorted((self.path / "checkpoints").glob("own-*.safetensors")):
            if (round := _round(path)) <= until:
                found |= dict.fromkeys(_versions(path.with_suffix(".json")), round)
        return found

    def phase(self, phase: int) -> Path:
        """Return the path of the checkpoint that a phase began from; it is never deleted."""
        return self.path / "checkpoints" / f"phase-{phase}.safetensors"

    def memory(self, at: Path, site: str) -> Path:
        """Return the path of a site's memory at a checkpoint."""
        return self.path / "sites" / file_name(site) / at.name

    def keep(
        self, path: Path, value: Any, memories: Iterable[Memory], elsewhere: Mapping[str, int] | None = None
    ) -> None:
        """Write a checkpoint and delete those that are no longer needed.

        The best and the last checkpoint of one round are one file with two names, and so are the memories beside them.

        Args:
            path: Path of the checkpoint.
            value: Its content.
            memories: Memories of the sites, written first.
            elsewhere: Version of each memory that is kept by its own site.
        """
        twins = self._twins(path)
        for each in memories:
            site_memory.save(self.memory(path, each.site), each, [self.memory(twin, each.site) for twin in twins])
        if elsewhere:
            write_file(path.with_suffix(".json"), lambda p: p.write_text(json.dumps(dict(elsewhere))))
        checkpoint.save(path, value, twins)
        self._prune()

    def _twins(self, path: Path) -> list[Path]:
        """Return other checkpoints of the same round, which may hold the same: the best one may be the last one."""
        if path.name.startswith("phase-"):
            return []
        round = _round(path)
        return [twin for twin in (self.best(round), self.own(round), self.round(round)) if twin != path]

    def assessed(self) -> dict[str, Release]:
        """Return what the assessment of this study cost every site under noise; nothing without one."""
        file = self.path / "assessment" / "privacy.json"
        if not file.exists():
            return {}
        try:
            return {str(site): Release(**cost) for site, cost in parse_json(file.read_bytes()).items()}
        except (OSError, ValueError, TypeError, AttributeError) as problem:
            raise RunError(f"{file} cannot be read: {problem}; restore it from a backup") from problem

    def needed(self) -> dict[str, set[int]]:
        """Return the versions of memories kept elsewhere that a checkpoint continues from."""
        found: dict[str, set[int]] = {}
        for path in (self.path / "checkpoints").glob("*.json"):
            for site, needed in _versions(path).items():
                found.setdefault(site, set()).add(needed)
        return found

    def _prune(self) -> None:
        kept, old = self.checkpoints()[:KEPT], self.checkpoints()[KEPT:]
        bests = sorted((self.path / "checkpoints").glob("best-*.safetensors"))
        needed = {max((b for b in bests if _round(b) <= _round(c)), default=None) for c in kept} | set(bests[-1:])
        bests += (self.path / "checkpoints").glob("own-*.safetensors")
        needed |= {self.own(r) for until in (*map(_round, kept), math.inf) for r in self.own_rounds(until).values()}
        for path in (*old, *(b for b in bests if b not in needed)):
            path.unlink()
        there = {p.name.removesuffix(".damaged") for p in (self.path / "checkpoints").iterdir()}
        for path in (self.path / "checkpoints").glob("*.json"):
            if f"{path.stem}.safetensors" not in there:
                path.unlink()
        for path in (self.path / "sites").glob("*/*.safetensors"):
            if path.name not in there:
                path.unlink()

    def save_model(self, name: str, model: Tree) -> None:
        """Write a model as plain safetensors."""
        arrays = {k: plain(v) for k, v in model.items()}
        write_file(
            self.path / "models" / f"{file_name(name)}.safetensors", lambda draft: draft.write_bytes(pack(arrays))
        )

    def finish(self, result: Result) -> None:
        """Write the result, which marks the run as finished."""
        write_file(self.path / "result.json", lambda p: p.write_text(result.to_json()))


def _link(source: str, target: str) -> None:
    """Share a finished file with another run folder; neither ever changes it in place."""
    link_file(Path(source), Path(target))


def _versions(path: Path) -> dict[str, int]:
    """Return the version of every site's memory, from the file beside a checkpoint."""
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as problem:
        raise RunError(f"{path} cannot be read: {problem}; remove the checkpoint of this name") from problem
    if not isinstance(found, dict) or any(type(version) is not int for version in found.values()):
        raise RunError(f"{path} does not have the version of every site; remove the checkpoint of this name")
    return found


def _round(path: Path) -> int:
    """Return the round in the name of a checkpoint."""
    return int(path.stem.rpartition("-")[2])


def versions() -> dict[str, str | int]:
    """Return the versions of the libraries that determine results, and the machine."""
    found: dict[str, str | int] = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in ("polysite", "torch", "monai", "numpy", "scipy", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return {**found, "processors": machine.cores()}
