"""What must hold after a kill, for ``scripts/kills.py``: files are readable or absent, and the end is the same."""

import csv
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import safetensors.numpy
from PIL import Image

from polysite import assessment as assessments
from polysite import config
from polysite.algorithms import ALGORITHMS
from polysite.engines import checkpoint, site_memory
from polysite.engines.record import Result
from polysite.engines.run_folder import RunFolder
from polysite.report import evaluations, runs, site_distances

_ = ALGORITHMS  # a checkpoint holds classes of algorithms, which must be imported
VARYING = {"seconds", "elapsed", "time"}  # keys of a record that differ from run to run
DRAFT = re.compile(r"\..*\.partial(\.old|\.lock)?")


# readable or absent


def readable(path: Path, read: Callable[[Path], object]) -> Iterator[str]:
    """Yield why a file cannot be read; nothing if it is absent."""
    if path.exists():
        try:
            read(path)
        except Exception as problem:
            yield f"{path} cannot be read: {type(problem).__name__}: {problem}"


def run(folder: Path) -> Iterator[str]:
    """Yield what cannot be read in a run folder, finished or not, by polysite's own readers."""
    if not folder.exists():
        return
    yield from readable(folder, lambda p: (RunFolder.open(p), runs.read(p)))
    yield from readable(folder / "config.toml", config.load)
    yield from readable(folder / "rounds.jsonl", _records)
    yield from readable(folder / "result.json", lambda p: Result.from_json(p.read_text()))
    for path in sorted((folder / "checkpoints").glob("*")):
        if path.suffix == ".safetensors":
            yield from readable(path, checkpoint.load)
        elif path.suffix == ".json":
            yield from readable(path, _json)
        elif not DRAFT.fullmatch(path.name):
            yield f"{path} was set aside or is unknown"
    for path in (folder / "sites").glob("*/*.safetensors"):
        yield from readable(path, site_memory.load_any)
    for path in (folder / "models").glob("*.safetensors"):
        yield from readable(path, safetensors.numpy.load_file)
    for path in _whole(folder / "evaluation"):
        yield from evaluation(path)
    yield from page(folder)


def evaluated(folder: Path) -> Iterator[str]:
    """Yield what cannot be read in a run whose evaluation is replaced: the old or the new one is always there."""
    if not (folder / "evaluation" / "test").is_dir():
        yield f"{folder / 'evaluation' / 'test'} is gone"
    yield from run(folder)


def evaluation(folder: Path) -> Iterator[str]:
    """Yield what cannot be read in an evaluation."""
    yield from readable(folder, lambda p: evaluations.read_evaluation(p.parents[1], p.name))
    for name in ("about.json", "cases.csv", "predictions.npz", "scans.npz"):
        if not (folder / name).exists():
            yield f"{folder / name} is missing"
    for path in folder.glob("*.npz"):
        yield from readable(path, arrays)


def assessment(folder: Path) -> Iterator[str]:
    """Yield what cannot be read in the folder of an assessment, which is whole or absent."""
    if folder.exists():
        yield from readable(folder, lambda p: (assessments.read_verdict(p), site_distances.read(p)))
        for path in (folder / "strategies").glob("*"):
            yield from readable(path, config.load)
        yield from page(folder, needed=True)


def comparison(folder: Path) -> Iterator[str]:
    """Yield what cannot be read in the folder of a comparison, which is whole or absent."""
    if folder.exists():
        yield from page(folder, needed=True)
        for name in ("tables.md", "tables.tex", "overview.csv"):
            if not (folder / name).exists():
                yield f"{folder / name} is missing"


def search(folder: Path) -> Iterator[str]:
    """Yield what cannot be read in the folder of a search and in its runs."""
    yield from readable(folder / "tune.toml", lambda p: tomllib.loads(p.read_text()))
    yield from readable(folder / "candidates.csv", lambda p: list(csv.reader(p.open())))
    for path in (folder / "best.toml", *_whole(folder / "studies", "*/*.toml")):
        yield from readable(path, config.load)
    for path in _whole(folder / "runs", "*/*"):
        if path.is_dir():
            yield from run(path)
    yield from page(folder)


def page(folder: Path, needed: bool = False) -> Iterator[str]:
    """Yield what is cut short of a page and its figures."""
    if needed and not (folder / "index.html").exists():
        yield f"{folder / 'index.html'} is missing"
    yield from readable(folder / "index.html", _ends("</html>"))
    for path in _whole(folder / "figures"):
        known: Mapping[str, Callable[[Path], object]] = {
            ".png": _picture, ".svg": _ends("</svg>"), ".pdf": _ends("%%EOF"), ".json": _json
        }  # fmt: skip
        read = known.get(path.suffix, lambda path: path.read_text())
        yield from readable(path, read)


def cache(folder: Path) -> Iterator[str]:
    """Yield entries of the cache of prepared cases that are damaged."""
    for path in folder.glob("*.safetensors"):
        yield from readable(path, safetensors.numpy.load_file)


def _records(path: Path) -> object:
    """Read whole lines; only the last one may have been cut short, and it is no record then."""
    return RunFolder(path.parent).records()


def _json(path: Path) -> object:
    return json.loads(path.read_text())


def _picture(path: Path) -> object:
    with Image.open(path) as image:
        image.load()
        return image.size


def _ends(text: str) -> Callable[[Path], object]:
    def read(path: Path) -> None:
        if not path.read_bytes().rstrip().endswith(text.encode()):
            raise ValueError(f"does not end with {text}")

    return read


def arrays(path: Path) -> dict[str, Any]:
    """Return the arrays of an .npz file."""
    with ZipFile(path) as archive:
        if archive.testzip():
            raise ValueError("a damaged archive")
    with np.load(path) as found:
        return dict(found)


def _whole(folder: Path, pattern: str = "*") -> list[Path]:
    """Return what is in a folder, without drafts."""
    return [p for p in sorted(folder.glob(pattern)) if not DRAFT.fullmatch(p.name)]


# the same end


def different_runs(one: Path, other: Path) -> Iterator[str]:
    """Yield how two finished runs differ: bits of checkpoints, memories, models, scores and records but for times."""
    for inside in ("checkpoints", "sites", "models"):
        yield from different_files(one / inside, other / inside)
    yield from different_files(one, other, ("config.toml", "split.csv", "result.json"))
    texts = ((p / "rounds.jsonl").read_text().splitlines() for p in (one, other))
    mine, its = ([_timeless(json.loads(line)) for line in text] for text in texts)
    if mine != its:
        yield f"the records of {one} differ from those of {other}: {len(mine)} and {len(its)} lines"
    for path in (other / "evaluation").rglob("*"):
        here = one / path.relative_to(other)
        if path.suffix == ".csv" and not _same_bytes(here, path):
            yield f"{here} differs from {path}"
        elif path.suffix == ".npz":
            a, b = arrays(here), arrays(path)
            if a.keys() != b.keys() or any(not np.array_equal(a[k], b[k], equal_nan=True) for k in a):
                yield f"{here} differs from {path}"
    if not (one / "index.html").exists():
        yield f"{one} has no page"


def different_files(one: Path, other: Path, names: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the files below two folders, or those with these names, that differ."""
    listed = [other / name for name in names] if names else [p for p in other.rglob("*") if p.is_file()]
    for path in listed:
        here = one / path.relative_to(other)
        if path.name not in ("log.txt", ".lock", "versions.json") and not _same_bytes(here, path):
            yield f"{here} differs from {path}"
    if not names:
        there = {p.relative_to(other) for p in other.rglob("*")}
        more = (p for p in one.rglob("*") if p.relative_to(one) not in there and not DRAFT.fullmatch(p.name))
        yield from (f"{p} is not in {other}" for p in more)


def drafts(folder: Path) -> Iterator[str]:
    """Yield drafts that killed processes left, and that the command which went on should have removed: folders, and
    files of a run. Drafts of pages and figures are replaced by nothing and stay, hidden."""
    found = [p for p in folder.rglob(".*") if DRAFT.fullmatch(p.name)]
    inside = ("checkpoints", "sites", "models", "evaluation")
    yield from (f"{p} is left" for p in found if p.is_dir() or any(name in p.parts for name in inside))


def _same_bytes(one: Path, other: Path) -> bool:
    return one.is_file() and one.read_bytes() == other.read_bytes()


def _timeless(value: Any) -> Any:
    """Return JSON without what depends on the clock."""
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if k not in VARYING}
    return [_timeless(v) for v in value] if isinstance(value, list) else value


# rounds


def rounds_done(folder: Path) -> int:
    """Return the number of rounds on record."""
    return len(RunFolder(folder).records()) if (folder / "rounds.jsonl").exists() else 0


def logged(folder: Path) -> int:
    """Return the number of lines in the log of a run."""
    return len((folder / "log.txt").read_text().splitlines()) if (folder / "log.txt").exists() else 0


def repeated(folder: Path, before: tuple[int, int]) -> list[int]:
    """Return how many rounds on record a resumed run repeated; empty if it was not resumed since.

    Args:
        folder: The run.
        before: Rounds on record and lines of the log when it was started.
    """
    done, lines = before
    new = (folder / "log.txt").read_text().splitlines()[lines:] if (folder / "log.txt").exists() else []
    begun = re.search(r"resuming after round (\d+)|starting from round (0)", "\n".join(new))
    return [done - int(begun[1] or begun[2])] if begun else []


def phase(folder: Path) -> str:
    """Return what a run was doing when it was killed, by what is in its folder."""
    if not folder.exists():
        return "before the run folder"
    if (folder / "result.json").exists():
        return "after the result"
    inside = [p.parts[len(folder.parts)] for p in folder.rglob(".*.partial")]
    kinds = {"sites": "checkpoint", "checkpoints": "checkpoint", "models": "models", "evaluation": "evaluation"}
    if inside:
        return kinds.get(inside[0], "records and result")
    last = max((int(p.stem[-6:]) for p in RunFolder(folder).checkpoints()), default=-1)
    if rounds_done(folder) > last + 1:
        return "checkpoint"
    return "models" if any((folder / "models").iterdir()) else "a round"
