"""Digests of everything that polysite computes: after a change that must not change results, all must be equal.

Each group of GROUPS covers a part: the contract of all algorithms, whole studies, what is made of a finished run, every
reader over its examples and the corpus, every key of a study as TOML, real hospitals over Flower and FLARE, and Ray.

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
import tomllib
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # sums come out the same however many processors there are
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1] / "src")  # for the processes of hospitals
os.environ["RAY_AUTH_MODE"] = "disabled"  # no token below the home folder
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))


import fuzz
import fuzz_readers
import nibabel as nib
import numpy as np
from safetensors.numpy import load_file

import polysite as ps
from polysite import advice, config, demo
from polysite import study as studies
from polysite.algorithms import ALGORITHMS
from polysite.algorithms.base import is_finished, serving_payloads
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.simulator import Simulator
from polysite.engines.watch import Watch
from polysite.errors import PolysiteError
from polysite.models import MODELS
from polysite.models.encoders import ENCODERS
from table import CASES, START, sites

# ---- what is asked of polysite and its tests: a renamed function, field or key is renamed here and nowhere else

SOURCE = Path(os.environ["PYTHONPATH"])
NAMES = ("a", "b", "c")  # hospitals of the deployed runs
ASIDE = ("seconds", "time", "times", "epsilon", "began", "ended", "started", "version", "versions", "folder")


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


def deploy(chosen: Mapping[str, str], names: Sequence[str], folder: Path, policy: Mapping[str, str]) -> None:
    """Studies over hospitals, which are real processes; a run folder for each beside those of the hospitals."""
    from consortium import consortium, open_hospitals
    from polysite.deploy.coordinator import run as coordinator
    from polysite.engines.sites import Deadlines

    deadlines = Deadlines(quorum=len(names), deadline=120, grace=30, again=1, poll=0.02)
    made = consortium(folder, names, policy=dict.fromkeys(names, policy))
    with coordinator.listening(made) as link, open_hospitals(folder, names):
        for name, text in chosen.items():
            coordinator.run(config.parse(text), link, names, folder / name, deadlines=deadlines, assess=False, wait=120)


def over_flare(chosen: Mapping[str, str], folder: Path) -> Iterator[tuple[str, Path]]:
    """Studies over FLARE's simulator, each with the run folder that its server wrote."""
    from flare_jobs import several, workspace
    from flare_simulation import simulate

    job, ids = several(folder, {name: config.parse(text) for name, text in chosen.items()})
    simulate(job, workspace(folder / "ws"), NAMES)
    yield from ((name, folder / "ws" / "server" / "polysite" / ids[name]) for name in chosen)


def deployable(algorithm: str, **more: str) -> str:
    """The study of an algorithm for the hospitals of tests, as TOML."""
    from consortium import config_of

    return config.dump(config.parse(config_of(algorithm), {"model.filters": "[16, 32, 64, 128]", **more}))


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
    told = ("loss", "steps", "lr_sum")
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
algorithm = {{ name = "cfft", components = 2, rounds = 3, dimensions = 3 }}
run.rounds = 80
"""
FILES = """
seed = 5
[data]
name = "files"
path = "{place}/manifest.csv"
[model]
filters = [2, 4, 4]
[train]
patch = [16, 16, 16]
device = "cpu"
mirror = true
clean = {{ largest = true }}
[run]
rounds = 3
[assess]
permutations = 99
resamples = 100
"""
ADVISED = """
[data]
shape = [24, 24, 24]
[data.sites.north]
cases = 6
[data.sites.east]
cases = 6
[data.sites.west]
cases = 6
scanner = 11
contrast = 2.0
[model]
filters = [2, 2, 2]
[train]
lr = 0.5
patch = [8, 8, 8]
window = [24, 24, 24]
batch = 2
device = "cpu"
augment = "none"
[run]
rounds = 2
[assess]
permutations = 99
resamples = 100
projections = 0
"""
POOLED = CLUSTERS.replace("rounds = 3", 'rounds = 3, fit = "pooled"')


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
    """What of a model stays at a hospital is looked at there. Noise is never the same; its account is."""
    noisy = {"train.private": '{ unit = "patient", clip = 1.0, noise = 2.0 }'}
    chosen = {name: deployable(name) for name in ("fedavg", "ditto", "fine_tune")}
    chosen["masked"] = deployable("fedavg", **{"run.secure.use": '"on"'})
    deploy({**chosen, "noise": deployable("fedavg", seed="11", **noisy)}, NAMES, place, {})
    for name in chosen:
        yield from _run(name, place / name, named=False)
    for site in NAMES:
        kept = sorted((place / site / "state").rglob("models/*.safetensors"), key=lambda p: p.stat().st_mtime_ns)
        for k, path in enumerate(kept[:-2]):
            yield f"{site}: model {k}, {path.stem}", digest(load_file(path))
    for k, line in enumerate((place / "noise" / "rounds.jsonl").read_text().splitlines()):
        told = {i: [site[n] for n in ("steps", "epsilon")] for i, site in json.loads(line)["sites"].items()}
        yield f"noise: account, round {k}", digest(told)


def guarded(place: Path) -> Iterator[tuple[str, str]]:
    """Five hospitals, enough for the guard, one of which sends what was scaled."""
    names = ("a", "b", "c", "d", "e")
    sites = {f"data.sites.{name}": f"{{ cases = 7, gamma = 1.{k} }}" for k, name in enumerate(names)}
    study = deployable("fedavg", **sites, **{"run.guard.use": '"on"', "run.rounds": "3"})
    deploy({"guard": study}, names, place, {})
    yield from _run("guard", place / "guard", named=False)


def flare(place: Path) -> Iterator[tuple[str, str]]:
    for name, folder in over_flare({name: deployable(name) for name in ("fedavg", "ditto")}, place):
        yield from _run(name, folder, named=False)


def ray(place: Path) -> Iterator[tuple[str, str]]:
    studies.train(config.parse(TUNED), place / "ray", engine=studies.Engine("ray", workers=2))
    yield from _run("fedavg, fine_tune", place / "ray")


def finished(place: Path) -> Iterator[tuple[str, str]]:
    """A study of files, and all that is made of its run: an assessment, evaluations, predictions, a bundle."""
    study = config.parse(FILES.format(place=_scans(place / "scans")))
    ps.assess(study, place / "assessment")
    studies.train(study, place / "run")
    yield from _run("run", place / "run")
    ps.evaluate(place / "run", "validation")
    ps.predict(place / "run", place / "scans" / "east", place / "predicted", site="north", preview=0)
    studies.train(config.vary(study, {"train.clean.largest": False}), place / "plain")  # MONAI cleans no masks
    ps.serve_model(place / "plain", "north", place / "bundle")
    for name in ("assessment", "run/evaluation", "predicted", "bundle"):
        yield from _made(name, place / name)


def advised(place: Path) -> Iterator[tuple[str, str]]:
    """An advice on phantoms: what it measured, what it decided, the study that it wrote."""
    advice.advise(config.parse(ADVISED), place / "advice", 16, inner=2, only=["clustered"])
    for key, value in json.loads((place / "advice" / "advice.json").read_text()).items():
        yield f"advice.json: {key}", _short(json.dumps(_timeless(value)))
    for path in sorted((place / "advice").glob("*.toml")):
        yield f"{path.name}", digest(list(_keys(tomllib.loads(path.read_text()))))
    for path in sorted((place / "advice").rglob("result.json")):
        yield from _run(f"{path.parent.relative_to(place)}", path.parent)


def codec(_: Path) -> Iterator[tuple[str, str]]:
    """Every key with the values that it has in any study; each study is the same after a round trip."""
    found: dict[str, list[str]] = defaultdict(list)
    texts = [(name, f'preset = "{name}"') for name in config.presets()]
    texts += [(name, deployable(name)) for name in ALGORITHMS]
    texts += [(name, f'model.name = "{name}"\ntrain.patch = [128, 128, 128]') for name in MODELS]
    texts += [(name, f'encoder.name = "{name}"') for name in ENCODERS]
    texts += [("phantom", PHANTOM), ("tuned", TUNED), ("grouped", GROUPED), ("classes", CLASSES), ("cfft", CLUSTERS)]
    for name, text in [*texts, ("files", FILES.format(place="scans")), ("advised", ADVISED)]:
        study = config.parse(text)
        written = config.dump(study)
        if config.parse(written) != study:
            raise ValueError(f"{name} is another study after a round trip")
        for key, value in _keys(tomllib.loads(written)):
            found[key].append(f"{name} {value!r}")
    yield from ((key, _short("\n".join(values))) for key, values in found.items())


def readers(place: Path) -> Iterator[tuple[str, str]]:
    """What every reader makes of its sound examples and of the corpus: numbers and arrays, or a refusal."""
    for reader in fuzz_readers.readers(place):
        corpus = sorted((fuzz.CORPUS / fuzz.place(reader)).glob("*"))
        inputs = {**dict(enumerate(reader.examples)), **{path.name: path.read_bytes() for path in corpus}}
        for name, content in inputs.items():
            yield f"{reader.name}: {name}", _opened(reader.read, content)


def _opened(read: Callable[[bytes], object], content: bytes) -> str:
    try:
        with warnings.catch_warnings(action="ignore"):
            return digest(_timeless(_open(read(content))))
    except PolysiteError:
        return "refused"


def _open(x: object) -> object:
    """Values inside an object of any class."""
    if isinstance(x, Mapping):
        return {key: _open(value) for key, value in x.items()}
    if isinstance(x, tuple | list | set | frozenset):
        return [_open(each) for each in x]
    known = x is None or isinstance(x, str | bool | int | float | np.generic) or hasattr(x, "dtype")
    return x if known else _open(getattr(x, "__dict__", {}))


def _timeless(x: Any) -> Any:
    """JSON without what differs from run to run."""
    if isinstance(x, Mapping):
        return {key: _timeless(value) for key, value in x.items() if key not in ASIDE}
    return [_timeless(each) for each in x] if isinstance(x, list | tuple) else x


def _keys(table: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a TOML table with their values."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def _made(name: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Arrays, tables and numbers in the files of a folder; pages and pictures are left out."""
    read: dict[str, Callable[[Path], Any]] = {
        ".json": lambda path: _timeless(json.loads(path.read_text())),
        ".safetensors": load_file,
        ".npz": lambda path: dict(np.load(path)),
        ".gz": lambda path: {"mask": np.asanyarray(nib.load(path).dataobj), "affine": nib.load(path).affine},
        ".csv": lambda path: [_number(cell) for row in csv.reader(path.read_text().splitlines()) for cell in row],
    }
    for path in sorted(folder.rglob("*")):
        if path.suffix in read:
            yield f"{name}: {path.relative_to(folder)}", digest(read[path.suffix](path))


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def _scans(root: Path) -> Path:
    """Scans of two hospitals as NIfTI, with their label maps and a manifest; oblique, of unequal voxels."""
    root.mkdir(parents=True)
    affine = np.block([[np.diag([1.1, -0.9, 1.7]), np.array([[30.0], [-9], [4]])], [np.zeros(3), 1]])
    rows = ["site,case,t1,flair,label,labels"]
    for k in range(12):
        site, rng = ("east", "north")[k % 2], np.random.default_rng(k)
        truth = np.zeros((21, 18, 17), np.uint8)
        truth[5 : 11 + k % 3, 4:12, 3:11] = 1
        images = {name: rng.normal(100 + 20 * truth, 20).astype(np.float32) for name in ("t1", "flair")}
        (root / site).mkdir(exist_ok=True)
        for name, voxels in {**images, "seg": truth}.items():
            nib.save(nib.Nifti1Image(voxels, affine), root / site / f"p{k}_{name}.nii.gz")
        rows.append(f"{site},p{k},{site}/p{k}_t1.nii.gz,{site}/p{k}_flair.nii.gz,{site}/p{k}_seg.nii.gz,whole=1")
    (root / "manifest.csv").write_text("\n".join(rows) + "\n")
    return root


def _run(name: str, folder: Path, *, named: bool = True) -> Iterator[tuple[str, str]]:
    for what, found in digests_of_run(folder, named=named).items():
        yield f"{name}: {what}", found


GROUPS = {
    "contract": contract, "demo": demonstration, "phases": phases, "cfft": cfft, "codec": codec, "readers": readers,
    "finished": finished, "advice": advised, "deployed": deployed, "guard": guarded, "flare": flare, "ray": ray,
}  # fmt: skip


def compute(groups: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for group in groups:
        began = time.monotonic()
        with TemporaryDirectory(prefix="digests-") as place:
            os.environ["POLYSITE_CACHE"] = f"{place}/cache"
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
