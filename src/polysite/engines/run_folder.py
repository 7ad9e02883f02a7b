"""The folder of one run: everything that happened, in files that other tools can read.

::

    config.toml        the whole configuration, as resolved
    split.csv          which case trained, validated or tested, and where
    versions.json      what ran it: polysite, Python, libraries, platform, seed
    rounds.jsonl       one line a round: per site losses, Dice per label, steps, seconds, bytes up and down
    log.txt            what was said
    checkpoints/       the last two, the best, and what each phase began from: where the study stood
    sites/NAME/        what this hospital remembered then, under the same names
    models/            best and last models as plain safetensors
    result.json        at the end: the best round, its scores per site, case and label
    deployment.json    over real sites: which, and by which name they know the study
    incidents.jsonl    over real sites: what went wrong on the way, as it happened
    assessment/        over real sites: how they differ
    evaluation/        what ``polysite evaluate`` measured: every case by every measure
    bundles/           what ``polysite serve-model`` wrote: a hospital's model as a MONAI bundle
    index.html         the page about the run
    tensorboard/, mlflow/   where they were asked for
    .lock              held by the process that writes here

A new run gets a new folder; nothing is ever overwritten.
"""

import fcntl
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors.numpy

from polysite.engines import checkpoint, site_memory
from polysite.engines.record import Result, RoundRecord, read_records
from polysite.engines.site_memory import Memory
from polysite.errors import RunError
from polysite.payload import plain
from polysite.storage import draft_folder, write_file
from polysite.tree import Tree

KEPT = 2  # checkpoints besides the best
FORMAT = 2  # of a run folder; 0.1.0 wrote 1, without saying so


def file_name(name: str) -> str:
    """A name that file systems take, and different ones for different names.

    >>> file_name("St. Anna"), file_name("../a/b"), file_name("50%")
    ('St. Anna', '%2E.%2Fa%2Fb', '50%25')
    """
    return re.sub(r"[^\w .-]|^\.", lambda found: f"%{ord(found[0]):02X}", name)


class RunFolder:
    def __init__(self, path: Path):
        self.path = path

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
        """A new folder, complete or not there at all; ``after`` another, it begins with all its rounds. ``more``: files
        by name."""
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
                    shutil.copytree(after.path / inside, draft / inside, dirs_exist_ok=True)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open a run folder of this or an earlier version; refuse one of a later version."""
        if not (path / "config.toml").is_file():
            raise RunError(f"{path} is not a run folder: it holds no config.toml")
        try:
            format = json.loads((path / "versions.json").read_text()).get("format", 1)
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
        """A path below ``root`` that does not exist yet: date, time and name."""
        stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
        candidates = (root / (stem if k == 1 else f"{stem}-{k}") for k in range(1, 10_000))
        return next(p for p in candidates if not p.exists())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time; a killed one lets go by itself."""
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as problem:
                raise RunError(f"{self.path} is in use by another process; wait for it or stop it first") from problem
            yield

    @property
    def config(self) -> str:
        return (self.path / "config.toml").read_text()

    @property
    def split(self) -> str:
        return (self.path / "split.csv").read_text()

    @property
    def finished(self) -> bool:
        return (self.path / "result.json").exists()

    @property
    def result(self) -> Result:
        """The result of a finished run."""
        return Result.from_json((self.path / "result.json").read_text())

    def records(self) -> list[RoundRecord]:
        """Return the records of the rounds so far."""
        return read_records((self.path / "rounds.jsonl").read_text().splitlines())

    def append(self, record: RoundRecord) -> None:
        """Add the record of a round."""
        try:
            with (self.path / "rounds.jsonl").open("a") as file:
                file.write(record.to_json() + "\n")
        except OSError as problem:
            raise RunError(f"round {record.round} could not be recorded in {self.path}: {problem}") from problem

    def rewind(self, round: int) -> None:
        """Forget what came after a round, and what was being written: it will be run again, to the same result."""
        kept = "".join(r.to_json() + "\n" for r in self.records() if r.round <= round)
        write_file(self.path / "rounds.jsonl", lambda p: p.write_text(kept))
        half = (p for inside in ("checkpoints", "sites", "models") for p in (self.path / inside).rglob(".*.partial"))
        found = (p for kind in ("round", "best") for p in (self.path / "checkpoints").glob(f"{kind}-*.safetensors"))
        late = (p for p in found if _round(p) > round)
        for path in (*half, *late):
            path.unlink()
        self._prune()

    def checkpoints(self) -> list[Path]:
        """Newest first."""
        return sorted((self.path / "checkpoints").glob("round-*.safetensors"), reverse=True)

    def round(self, round: int) -> Path:
        return self.path / "checkpoints" / f"round-{round:06d}.safetensors"

    def best(self, round: int) -> Path:
        return self.path / "checkpoints" / f"best-{round:06d}.safetensors"

    def phase(self, phase: int) -> Path:
        """What a phase began from; it is never let go."""
        return self.path / "checkpoints" / f"phase-{phase}.safetensors"

    def memory(self, at: Path, site: str) -> Path:
        """Where a site's memory lies that belongs to a checkpoint."""
        return self.path / "sites" / file_name(site) / at.name

    def keep(
        self, path: Path, value: Any, memories: Iterable[Memory], elsewhere: Mapping[str, int] | None = None
    ) -> None:
        """Write a checkpoint, the memories first, and which versions it goes on from of those that lie ``elsewhere``;
        then let go of what is not needed: of checkpoints all but the last two, of bests all but the newest of each of
        these."""
        for each in memories:
            site_memory.save(self.memory(path, each.site), each)
        if elsewhere:
            write_file(path.with_suffix(".json"), lambda p: p.write_text(json.dumps(dict(elsewhere))))
        checkpoint.save(path, value)
        self._prune()

    def needed(self) -> dict[str, set[int]]:
        """The versions of memories elsewhere that some checkpoint goes on from."""
        found: dict[str, set[int]] = {}
        for path in (self.path / "checkpoints").glob("*.json"):
            for site, needed in json.loads(path.read_text()).items():
                found.setdefault(site, set()).add(needed)
        return found

    def _prune(self) -> None:
        kept, old = self.checkpoints()[:KEPT], self.checkpoints()[KEPT:]
        bests = sorted((self.path / "checkpoints").glob("best-*.safetensors"))
        needed = {max((b for b in bests if _round(b) <= _round(c)), default=None) for c in kept} | set(bests[-1:])
        for path in (*old, *(b for b in bests if b not in needed)):
            path.unlink()
        there = {p.name.removesuffix(".damaged") for p in (self.path / "checkpoints").iterdir()}
        for path in (self.path / "checkpoints").glob("*.json"):
            if f"{path.stem}.safetensors" not in there:
                path.unlink()
        for path in (self.path / "sites").glob("*/*.safetensors"):
            if path.name not in there:
                path.unlink()

    def set_aside(self, damaged: Iterable[Path]) -> None:
        """Out of the way, but not gone: somebody may want to look."""
        for path in damaged:
            path.rename(path.with_name(f"{path.name}.damaged"))

    def save_model(self, name: str, model: Tree) -> None:
        arrays = {k: plain(v) for k, v in model.items()}
        write_file(
            self.path / "models" / f"{file_name(name)}.safetensors", lambda p: safetensors.numpy.save_file(arrays, p)
        )

    def finish(self, result: Result) -> None:
        """Write the result, which marks the run as finished."""
        write_file(self.path / "result.json", lambda p: p.write_text(result.to_json()))


def _round(path: Path) -> int:
    """The round in the name of a checkpoint."""
    return int(path.stem.rpartition("-")[2])


def versions() -> dict[str, str | int]:
    """What is running: the libraries that decide the numbers, and the machine."""
    found: dict[str, str | int] = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in ("polysite", "torch", "monai", "numpy", "scipy", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return {**found, "processors": os.cpu_count() or 0}
