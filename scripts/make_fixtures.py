"""Write small folders as this version of polysite writes them; later versions must still open them.

It was run once, with 0.1.0; what it made is kept in tests/fixtures/v0.1.0, where README.md says what is what. Run it
again only for a new version, into a new folder:

    python scripts/make_fixtures.py tests/fixtures/v0.2.0
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from digests import digest, digests_of_run
from safetensors.numpy import load_file

import polysite as ps
from consortium import NAMES, consortium, open_hospitals
from polysite import config
from polysite.deploy.coordinator import run as coordinator
from polysite.engines.record import RoundRecord
from polysite.engines.sites import Deadlines
from polysite.engines.watch import Watch

DEADLINES = Deadlines(quorum=3, deadline=120, grace=30, again=1, poll=0.02)
PHANTOM = """
seed = 5
[data]
shape = [24, 24, 24]
[data.sites.north]
cases = 5
[data.sites.south]
cases = 6
scanner = 1
[model]
filters = [1, 2, 2]
[train]
patch = [16, 16, 16]
batch = 2
device = "cpu"
augment = "light"
lr = 0.1
[run]
rounds = 4
checkpoint_every = 2
"""
TUNED = f"""{PHANTOM}
[algorithm]
name = "scaffold"
[[then]]
algorithm = {{ name = "fine_tune", lam = [0.1] }}
run.rounds = 3
"""
DITTO = f"""{PHANTOM}
[algorithm]
name = "ditto"
"""
CLASSES = """
seed = 5
[data]
name = "phantom_classes"
[model]
name = "densenet"
blocks = [1, 1]
growth = 2
features = 4
[train]
patch = [16, 16]
batch = 4
device = "cpu"
[run]
rounds = 3
"""
DEPLOYED = """
seed = 5
[data]
shape = [24, 24, 24]
[data.sites.a]
cases = 7
[data.sites.b]
cases = 8
gamma = 1.2
[data.sites.c]
cases = 7
noise = 0.2
[model]
filters = [1, 2, 2]
[train]
patch = [16, 16, 16]
batch = 2
patches = 1
device = "cpu"
lr = 0.1
[algorithm]
name = "ditto"
[run]
rounds = 4
checkpoint_every = 1
[assess]
projections = 0
permutations = 99
resamples = 100
"""
LEFT_OUT = (
    ".lock",
    "*.html",
    "*.png",
    "*.svg",
    "*.npz",
    "*.key",
    "*.crt",
    "*.sock",
    "*.lock",
    "README.md",
    "screen.txt",
)


class Stop(Watch):
    """Ends a study by hand after a round."""

    def __init__(self, after: int):
        self.after = after

    def round(self, record: RoundRecord) -> None:
        if record.round == self.after:
            raise KeyboardInterrupt


def keep(found: Path, place: Path) -> None:
    """Copy what is worth keeping: no pages, no pictures, no keys."""
    shutil.copytree(found, place, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for inside in [p for p in place.rglob("*") if p.is_dir() and not any(p.iterdir())]:
        (inside / ".gitkeep").touch()  # git knows no empty folders


def known(run: Any, *, named: bool = True) -> dict[str, Any]:
    """Return what must hold of a finished run in every later version."""
    folder = run.folder.path
    return {
        "mean": run.mean,
        "by_site": run.dice(),
        **{name: getattr(run.result, name) for name in ("rounds", "best_round", "best_phase")},
        "digests": digests_of_run(folder, named=named),
        "sha256": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((folder / "models").glob("*.safetensors"))
        },
    }


def finished(study: str, work: Path, place: Path) -> dict[str, Any]:
    run = ps.train(config.parse(study), work)
    keep(work, place)
    return known(run)


def interrupted(study: str, after: int, work: Path, place: Path) -> dict[str, Any]:
    """A run folder that can be resumed, and beside it what came of that."""
    try:
        ps.train(config.parse(study), work, Stop(after))
    except KeyboardInterrupt:
        keep(work, place)
    run = ps.resume(work)
    resumed = place.with_name(f"{place.name}-resumed")
    keep(work / "models", resumed / "models")
    shutil.copy(work / "result.json", resumed)
    return known(run)


def deployed(work: Path, place: Path) -> dict[str, Any]:
    """Three hospitals and a coordinator that is stopped after its second round, then started again."""
    made, run = consortium(work, NAMES), work / "run"
    with coordinator.listening(made) as link, open_hospitals(work, NAMES):
        try:
            coordinator.run(config.parse(DEPLOYED), link, NAMES, run, Stop(1), deadlines=DEADLINES, wait=120)
        except KeyboardInterrupt:
            for name in ("run", *NAMES):
                keep(work / name, place / "stopped" / name)
        done = coordinator.resume(run, link, deadlines=DEADLINES, wait=120)
    for name in ("run", "a"):
        keep(work / name, place / "finished" / name)
    models = {path.relative_to(work): path for path in sorted(work.glob("*/state/runs/*/models/*.safetensors"))}
    entries = len((work / "a" / "state" / "ledger.jsonl").read_text().splitlines())
    there = {f"{name.parts[0]} {name.stem}": digest(load_file(path)) for name, path in models.items()}
    return {**known(done, named=False), "models_at_sites": there, "entries_in_ledger_of_a": entries}


def assessed(work: Path, place: Path) -> dict[str, Any]:
    quick = {"assess.permutations": "99", "assess.resamples": "100", "assess.projections": "4"}
    done = ps.assess(config.parse(DEPLOYED, quick), work)
    keep(work, place)
    return {
        "sites": len(done.assessment.sites),
        "strategies": [each.file for each in done.verdict.strategies],
    }


def main(place: Path) -> None:
    if place.exists():
        sys.exit(f"{place} exists already")
    with TemporaryDirectory(prefix="fixtures-") as folder:
        work = Path(folder)
        os.environ["POLYSITE_CACHE"] = f"{folder}/cache"
        expected = {
            "phases": finished(TUNED, work / "phases", place / "phases"),
            "classes": finished(CLASSES, work / "classes", place / "classes"),
            "interrupted/ditto": interrupted(DITTO, 2, work / "ditto", place / "interrupted" / "ditto"),
            "interrupted/phases": interrupted(TUNED, 5, work / "tuned", place / "interrupted" / "phases"),
            "assessment": assessed(work / "assessment", place / "assessment"),
            "deployed": deployed(work / "deployed", place / "deployed"),
        }
    (place / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
