"""Digests of everything that polysite computes: after a change that must not change results, all must be equal.

A digest is taken over values alone: arrays by type, shape and bytes, numbers by their digits, under the names of sites,
cases, labels and parameters. Names of classes and fields do not count, nor in what order or how deep values are nested,
so that all of these may change. Times are left out. A processor of another kind may round differently; compare on one.

    python scripts/digests.py --out scripts/digests.json             record
    python scripts/digests.py --compare scripts/digests.json         what differs; exit status 1 if anything does
    python scripts/digests.py --only contract --compare scripts/digests.json
"""

import argparse
import csv
import hashlib
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # sums come out the same however many processors there are
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1] / "src")  # for the processes of hospitals
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
from safetensors.numpy import load_file

import polysite as ps
from polysite import config, demo
from polysite import study as studies
from polysite.algorithms.base import is_finished, serving_payloads
from polysite.engines.plan import Plan
from polysite.engines.rounds import Watch, run_rounds
from polysite.engines.simulator import Simulator
from table import CASES, START, sites

# ---- what is asked of polysite and its tests: a renamed function, field or key is renamed here and nowhere else

SOURCE = Path(os.environ["PYTHONPATH"])
NAMES = ("a", "b", "c")  # hospitals of the deployed run


def exchanged(algorithm: Any, count: int, share: float, wire: bool) -> Iterator[tuple[Any, Simulator]]:
    """The rounds of an algorithm over the sites of the contract, and the engine."""
    engine = Simulator(algorithm, sites(), wire=wire)
    for r in run_rounds(algorithm, engine, START, Plan(rounds=count, share=share), seed=0):
        yield r, engine
        if is_finished(algorithm, r.state):
            return


def facts(r: Any) -> dict[str, Any]:
    """What is known of a round."""
    return {
        "replies": {i: reply.payload for i, reply in r.replies.items()},
        "losses": {i: [fit.loss for fit in reply.fits] for i, reply in r.replies.items()},
        "shares": r.shares,
        "told": r.diagnostics,
        "bytes": {i: [r.sent[i].nbytes, reply.payload.nbytes] for i, reply in r.replies.items()},
    }


def ended(algorithm: Any, r: Any, engine: Simulator) -> dict[str, Any]:
    """What is there after the last round."""
    sent = serving_payloads(algorithm, r.state, engine.audience)
    return {
        "state": r.state,
        "memories": engine.memories(),
        "served": engine.serve(r.index, sent).models,
        "scores": plainly(engine.score(r.index, sent, "validation")),
    }


def train(study: str, folder: Path) -> None:
    """Simulate a study, given as TOML; the run evaluates its best model."""
    studies.train(config.parse(study), folder, page=False)


def demonstrate(folder: Path) -> Sequence[str]:
    """The demonstration; returns the names of its runs."""
    demo.run(folder, 0, Watch())
    return demo.METHODS


def deploy(algorithms: Sequence[str], folder: Path) -> None:
    """Studies over three hospitals, which are real processes; a run folder for each beside those of the hospitals."""
    from consortium import config_of, consortium, open_hospitals
    from polysite.deploy.coordinator import run as coordinator
    from polysite.deploy.coordinator.roster import Deadlines

    deadlines = Deadlines(quorum=3, deadline=120, grace=30, again=1, poll=0.02)
    made = consortium(folder, NAMES)
    with coordinator.listening(made) as link, open_hospitals(folder, NAMES):
        for name in algorithms:
            study = config.parse(config_of(name), {"model.filters": "[16, 32, 64, 128]"})
            coordinator.run(study, link, NAMES, folder / name, deadlines=deadlines, assess=False, wait=120)


def normal(score: Any) -> dict[str, Any]:
    """The score of a case, whatever holds it: {"WT": 0.5, "loss": 0.1, "said": 1, "true": 0} as it was written until
    0.1.0, or labels, loss, predicted and true by name."""
    if is_dataclass(score):
        score = {f.name: getattr(score, f.name) for f in fields(score)}
    aside = {name: score.get(name) for name in ("loss", "true")}
    aside["predicted"] = score.get("predicted", score.get("said"))
    known = ("labels", "loss", "true", "predicted", "said")
    labels = score["labels"] if "labels" in score else {k: v for k, v in score.items() if k not in known}
    return {**{f"label {k}": v for k, v in labels.items()}, **aside}


def traced(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of rounds.jsonl, without times."""
    told = ("loss", "steps", "lr_sum", "bytes_down", "bytes_up")
    return {
        "all": [record.get(name) for name in ("round", "phase", "mean_score", "best_round")],
        "sites": {i: [site[name] for name in told] for i, site in record["sites"].items()},
        "shares": record["shares"],
    }


def chosen(result: Mapping[str, Any]) -> list[int]:
    """How many rounds there were, and of which the model is."""
    return [result[name] for name in ("rounds", "best_round", "best_phase")]


# ---- digests


def plainly(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    return {site: {case: normal(score) for case, score in cases.items()} for site, cases in scores.items()}


def digest(value: Any, names: Collection[str] | None = None) -> str:
    """Of all numbers and arrays in a value; of the keys on the way to them only these ``names`` count, or all."""
    return _short("\n".join(sorted(_leaves(value, names, ""))))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _leaves(x: Any, names: Collection[str] | None, at: str) -> Iterator[str]:
    """A line for every number and array. Text is left out: the words for things may change."""
    if x is None or isinstance(x, str):
        return
    if isinstance(x, bool | int | float | np.generic):
        if not math.isnan(x):  # written as nothing in JSON
            yield f"{at} {float(x)!r}"
    elif hasattr(x, "dtype"):
        array = np.ascontiguousarray(x.detach().cpu() if hasattr(x, "detach") else x)
        yield f"{at} {array.dtype.str} {np.shape(x)} {hashlib.sha256(array.tobytes()).hexdigest()}"
    elif is_dataclass(x):
        for f in fields(x):
            yield from _leaves(getattr(x, f.name), names, at)
    elif isinstance(x, Mapping):
        for key, inside in x.items():
            counts = names is None or key in names or str(key).isdigit()
            yield from _leaves(inside, names, f"{at}/{key}" if counts else at)
    elif isinstance(x, tuple | list | set | frozenset):
        for inside in x:
            yield from _leaves(inside, names, at)
    else:
        raise TypeError(f"a {type(x).__name__} has no digest")


def digests_of_run(folder: Path, *, named: bool = True) -> dict[str, str]:
    """Of a finished run folder; ``named``: whether cases have the same names every time, as in simulations."""
    result = json.loads((folder / "result.json").read_text())
    scores = {part: plainly(result[part]) for part in ("validation", "test")}
    found = {f"scores {part}": digest(by_site if named else _nameless(by_site)) for part, by_site in scores.items()}
    found["choice"] = digest(chosen(result))
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    found["rounds"] = digest({str(k): traced(json.loads(line)) for k, line in enumerate(lines)})
    for path in sorted((folder / "models").glob("*.safetensors")):
        found[f"model {path.stem}"] = digest(load_file(path))
    for path in sorted((folder / "evaluation").glob("*/*.csv")) if named else ():
        with path.open(newline="") as file:
            _, *rows = csv.reader(file)
        text = "\n".join(sorted(" ".join(sorted(row)) for row in rows))
        found[f"evaluation {path.parent.name} {path.stem}"] = _short(text)
    return found


def _nameless(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Cases called by what they scored."""
    return {site: Counter(map(digest, cases.values())) for site, cases in scores.items()}


# ---- what is computed

PHANTOM = """
seed = 3
[data]
shape = [24, 24, 24]
[data.sites.east]
cases = 5
[data.sites.north]
cases = 6
scanner = 1
[data.sites.west]
cases = 5
scanner = 2
[model]
filters = [2, 4, 4]
[train]
patch = [16, 16, 16]
batch = 2
device = "cpu"
augment = "light"
lr = 0.1
"""
TUNED = f"""{PHANTOM}
[run]
rounds = 3
checkpoint_every = 1
[[then]]
algorithm = {{ name = "fine_tune", lam = [0.0, 0.1] }}
train = {{ lr = 0.05, augment = "none" }}
run.rounds = 2
"""
GROUPED = f"""{PHANTOM}
[algorithm]
name = "scaffold"
[run]
rounds = 2
[[then]]
algorithm = {{ name = "clustered", groups = {{ coast = ["east", "west"], inland = ["north"] }} }}
run.rounds = 2
[[then]]
algorithm = "fine_tune"
run.rounds = 2
"""
CLASSES = """
seed = 3
[data]
name = "phantom_classes"
[model]
name = "densenet"
blocks = [2, 2]
growth = 4
features = 8
[train]
patch = [16, 16]
batch = 4
device = "cpu"
[run]
rounds = 3
"""
CLUSTERS = f"""{PHANTOM}
[run]
rounds = 2
[[then]]
algorithm = {{ name = "cfft", components = 2, rounds = 3, fewest = 0, dimensions = 3 }}
run.rounds = 80
"""
POOLED = CLUSTERS.replace("fewest = 0", 'fewest = 0, fit = "pooled"')


def contract(_: Path) -> Iterator[tuple[str, str]]:
    """Every line of the contract table: all sites for some rounds, and some of them, over the wire, for more."""
    names = {*START, *sites()}
    for name, algorithm in CASES.items():
        for kind, count, share, wire in (("all sites", 6, 1.0, False), ("some sites", 12, 0.75, True)):
            played = list(exchanged(algorithm, 50 if "cfft" in name else count, share, wire))
            seen, (last, engine) = [facts(r) for r, _ in played], played[-1]
            for what in seen[0]:
                yield f"{name}, {kind}: {what}", digest({str(k): each[what] for k, each in enumerate(seen)}, names)
            for what, value in ended(algorithm, last, engine).items():
                yield f"{name}, {kind}: {what}", digest(value, None if what == "scores" else names)


def demonstration(place: Path) -> Iterator[tuple[str, str]]:
    for name in demonstrate(place / "demo"):
        yield from _run(name, place / "demo" / name)


def phases(place: Path) -> Iterator[tuple[str, str]]:
    for name, study in (
        ("fedavg, fine_tune", TUNED),
        ("scaffold, clustered, fine_tune", GROUPED),
        ("classes", CLASSES),
    ):
        train(study, place / name)
        yield from _run(name, place / name)


def cfft(place: Path) -> Iterator[tuple[str, str]]:
    for name, study in (("federated", CLUSTERS), ("pooled", POOLED)):
        train(study, place / name)
        yield from _run(name, place / name)


def deployed(place: Path) -> Iterator[tuple[str, str]]:
    """What of a model stays at a hospital is looked at there."""
    algorithms = "fedavg", "ditto", "fine_tune"
    deploy(algorithms, place)
    for name in algorithms:
        yield from _run(name, place / name, named=False)
    for site in NAMES:
        kept = sorted((place / site / "state").rglob("models/*.safetensors"), key=lambda p: p.stat().st_mtime_ns)
        for k, path in enumerate(kept):
            yield f"{site}: model {k}, {path.stem}", digest(load_file(path))


def _run(name: str, folder: Path, *, named: bool = True) -> Iterator[tuple[str, str]]:
    for what, found in digests_of_run(folder, named=named).items():
        yield f"{name}: {what}", found


GROUPS = {"contract": contract, "demo": demonstration, "phases": phases, "cfft": cfft, "deployed": deployed}


def compute(groups: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for group in groups:
        began = time.monotonic()
        with TemporaryDirectory(prefix="digests-") as place:
            os.environ["POLYSITE_CACHE"] = f"{place}/cache"
            os.environ["POLYSITE_EVIDENCE"] = "off"
            found |= {f"{group}: {name}": value for name, value in GROUPS[group](Path(place))}
        print(f"{group}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return found


def differences(found: Mapping[str, str], before: Mapping[str, str], groups: Sequence[str]) -> Iterator[str]:
    """What is not as before, in the groups that were computed."""
    known = {name: value for name, value in before.items() if name.split(":")[0] in groups}
    for name in sorted({*found, *known}):
        if name not in found:
            yield f"gone      {name}"
        elif name not in known:
            yield f"new       {name}"
        elif found[name] != known[name]:
            yield f"different {name}"


def main() -> int:
    parser = argparse.ArgumentParser(description="What polysite computes, as digests.")
    parser.add_argument("--only", choices=GROUPS, action="append", help="this group; may be given several times")
    parser.add_argument("--out", type=Path, help="write them to this file; without it they are printed")
    parser.add_argument("--add", type=Path, help="add the digests that this file lacks, of a new algorithm, say")
    parser.add_argument("--compare", type=Path, help="say what differs from this file")
    given = parser.parse_args()
    groups = given.only or list(GROUPS)
    if Path(str(ps.__file__)).parents[1] != SOURCE:
        sys.exit(f"this would look at {ps.__file__}, not at {SOURCE}")
    found = compute(groups)
    text = json.dumps(found, indent=1) + "\n"
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    if given.add:
        known = json.loads(given.add.read_text())
        new = {name: value for name, value in found.items() if name not in known}
        given.add.write_text(json.dumps({**known, **new}, indent=1) + "\n", encoding="utf-8")
        print(f"{len(new)} new digests in {given.add}; the others are as they were")
    if given.compare:
        odd = list(differences(found, json.loads(given.compare.read_text()), groups))
        print(*odd, f"{len(odd)} of {len(found)} differ", sep="\n")
        return 1 if odd else 0
    if not given.out:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
