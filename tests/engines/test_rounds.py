"""The rounds: sampling, validation, the best round, early stopping, records, checkpoints."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from polysite import storage
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.local import Local
from polysite.engines import checkpoint
from polysite.engines.phases import Phase, _keep, find_best, find_progress, run_phases
from polysite.engines.plan import Plan, cohort
from polysite.engines.rounds import Progress, run_rounds
from polysite.engines.run_folder import RunFolder
from polysite.engines.simulator import Simulator
from polysite.errors import RunError
from polysite.payload import Payload
from polysite.site import CaseScore
from quadratic import Quadratic

START = {"w": np.array([3.0])}


def sites():
    return {"a": Quadratic(1.0, np.array([0.0])), "b": Quadratic(4.0, np.array([1.0, 1.2]))}


def study(tmp_path, algorithm=None, name="run", guests=None, **plan):
    algorithm = algorithm or FedAvg()
    engine = Simulator(algorithm, sites(), guests=guests)
    folder = RunFolder.create(tmp_path / name, "seed = 0\n", 0)
    return run_phases([Phase(algorithm, engine, Plan(**plan))], START, 0, folder), folder


def test_the_folder_tells_everything(tmp_path):
    result, folder = study(tmp_path, rounds=7, checkpoint_every=2)
    names = {str(p.relative_to(folder.path)) for p in folder.path.rglob("*") if p.is_file()}
    best = folder.best(result.best_round).name
    assert names == {
        *("config.toml", "split.csv", "versions.json", "rounds.jsonl", "result.json"),
        *("models/best.safetensors", "models/last.safetensors", f"checkpoints/{best}"),
        *("checkpoints/round-000005.safetensors", "checkpoints/round-000006.safetensors"),
    }
    assert [r.round for r in folder.records()] == list(range(7))
    a = folder.records()[0].sites["a"]
    assert a.steps == 5 and a.lr_sum == pytest.approx(0.25) and a.bytes_down == 8 and a.bytes_up == 16 and a.loss > 0
    assert folder.records()[0].validation["b"].cases == 2
    assert result.best_round == folder.result.best_round
    assert json.loads((folder.path / "versions.json").read_text())["seed"] == 0


def test_the_best_round_is_kept_and_not_the_last(tmp_path):
    class Wanders(Quadratic):
        def score(self, params, cases):
            return {n: CaseScore({"L": float(np.exp(-abs(params["w"].item() - 1.5)))}, 0.0) for n in cases}

    algorithm, all_sites = FedAvg(), {"a": Wanders(1.0, np.array([0.0]))}
    folder = RunFolder.create(tmp_path / "run", "", 0)
    result = run_phases([Phase(algorithm, Simulator(algorithm, all_sites), Plan(rounds=12))], START, 0, folder)
    path = [3 * (1 - all_sites["a"].pull) ** (r + 1) for r in range(12)]
    best = int(np.argmin(np.abs(np.array(path) - 1.5)))
    assert 0 < best < 11 and result.best_round == best
    assert load_file(folder.path / "models" / "best.safetensors")["w"] == pytest.approx(path[best])
    assert load_file(folder.path / "models" / "last.safetensors")["w"] == pytest.approx(path[-1])


class Dull(Quadratic):
    """A site where no model is better than another."""

    def score(self, params, cases):
        return {n: CaseScore({"L": 0.5}, 0.5) for n in cases}


def test_early_stopping_waits_as_long_as_told(tmp_path):
    folder = RunFolder.create(tmp_path / "run", "", 0)
    plan, dull = Plan(rounds=50, patience=3, validate_every=2), {"a": Dull(1.0, np.array([0.0]))}
    result = run_phases([Phase(FedAvg(), Simulator(FedAvg(), dull), plan)], START, 0, folder)
    assert result.best_round == 1 and result.rounds == 8  # best at the first look, then three without a better


def test_a_run_that_had_stopped_early_does_not_go_on_when_resumed(tmp_path):
    plan, dull = Plan(rounds=50, patience=3), {"a": Dull(1.0, np.array([0.0]))}
    folder = RunFolder.create(tmp_path / "run", "", 0)
    run_phases([Phase(FedAvg(), Simulator(FedAvg(), dull), plan)], START, 0, folder)
    before = last_model(folder)
    (folder.path / "result.json").unlink()
    (folder.path / "checkpoints" / ".round-000009.safetensors.partial").write_bytes(b"half")
    again = [Phase(FedAvg(), Simulator(FedAvg(), dull), plan)]
    at = find_progress(folder, again)
    assert run_phases(again, START, 0, folder, resume=at).rounds == 4
    assert last_model(folder) == before and len(folder.records()) == 4
    assert not list((folder.path / "checkpoints").glob(".*"))


def test_personal_models_are_exported_one_by_one(tmp_path):
    _, folder = study(tmp_path, Local(), rounds=3)
    assert sorted(p.name for p in (folder.path / "models").iterdir()) == [
        f"{k}.{s}.safetensors" for k in ("best", "last") for s in "ab"
    ]


def test_guests_judge_but_do_not_train(tmp_path):
    result, folder = study(tmp_path, guests={"g": Quadratic(1.0, np.array([2.0]))}, rounds=2)
    assert set(result.validation) == {"g"} and set(folder.records()[0].sites) == {"a", "b"}


def test_cohorts_are_fixed_by_seed_and_round():
    names = [f"s{i}" for i in range(10)]
    draws = [cohort(names, 0.3, 0, r) for r in range(200)]
    assert all(len(d) == 3 for d in draws) and draws[5] == cohort(names, 0.3, 0, 5) and len(set(draws)) > 50
    assert {n for d in draws for n in d} == set(names)
    assert cohort(names, 0.01, 0, 0) and cohort(names, 1.0, 0, 0) == tuple(names)


def test_a_new_run_never_overwrites(tmp_path):
    study(tmp_path, rounds=1)
    before = (tmp_path / "run" / "result.json").read_bytes()
    with pytest.raises(RunError, match="never overwrites"):
        study(tmp_path, rounds=2)
    assert (tmp_path / "run" / "result.json").read_bytes() == before
    first = RunFolder.fresh(tmp_path, "x")
    first.mkdir()
    assert RunFolder.fresh(tmp_path, "x") != first


def interrupted(tmp_path, rounds_done):
    """A folder as it stands after some rounds of twelve, with checkpoints every two."""
    _, folder = study(tmp_path, name="half", rounds=rounds_done, checkpoint_every=2)
    (folder.path / "result.json").unlink()
    return folder


def finish(folder):
    engine = Simulator(FedAvg(), sites())
    again = [Phase(FedAvg(), engine, Plan(rounds=12, checkpoint_every=2))]
    at = find_progress(folder, again)
    run_phases(again, START, 0, folder, resume=at)
    return at


def last_model(folder):
    return load_file(folder.path / "models" / "last.safetensors")["w"].tobytes()


def harm(path, damage):
    content = bytearray(path.read_bytes())
    if damage == "altered":
        content[-1] ^= 1
    path.write_bytes(b"" if damage == "empty" else content if damage == "altered" else content[: len(content) // 2])


@pytest.mark.parametrize("damage", ["none", "truncated", "altered", "empty", "best"])
def test_resume_uses_the_newest_checkpoint_that_is_whole(tmp_path, damage, caplog):
    _, whole = study(tmp_path, name="whole", rounds=12, checkpoint_every=2)
    half = interrupted(tmp_path, 8)
    newest, before = half.checkpoints()
    if damage == "best":  # of the newest alone: the one before keeps its own
        progress = [checkpoint.load(p).at.best_round for p in (newest, before)]
        shutil.copy(half.best(progress[0]), half.best(6))
        later = checkpoint.load(newest)
        checkpoint.save(newest, replace(later, at=replace(later.at, best_round=6)))
        harm(half.best(6), "truncated")
    elif damage != "none":
        harm(newest, damage)
    at = finish(half)
    assert at.round == (7 if damage == "none" else 5)
    assert ("trying the checkpoint before" in caplog.text) == (damage != "none")  # it is said
    assert len(list((half.path / "checkpoints").glob("*.damaged"))) == (damage != "none")  # and nothing thrown away
    assert last_model(half) == last_model(whole)
    assert [r.round for r in half.records()] == list(range(12))
    timeless = [[replace(r, elapsed=0, sites={}) for r in folder.records()] for folder in (half, whole)]
    assert timeless[0] == timeless[1]


def test_a_run_whose_checkpoints_are_all_unreadable_is_left_alone(tmp_path):
    half = interrupted(tmp_path, 8)
    for path in half.checkpoints():
        harm(path, "truncated")
    before = {p: p.read_bytes() for p in half.path.rglob("*") if p.is_file()}
    with pytest.raises(RunError, match="nothing was changed"):
        finish(half)
    assert {p: p.read_bytes() for p in half.path.rglob("*") if p.is_file()} == before


def test_two_processes_cannot_write_one_run(tmp_path):
    _, folder = study(tmp_path, rounds=1)
    with (
        folder.alone(),
        pytest.raises(RunError, match="in use by another process"),
        RunFolder.open(folder.path).alone(),
    ):
        pass
    with folder.alone():
        pass


def test_a_record_cut_short_is_forgotten(tmp_path):
    half = interrupted(tmp_path, 5)
    with (half.path / "rounds.jsonl").open("a") as f:
        f.write('{"round": 5, "sit')
    finish(half)
    assert [r.round for r in half.records()] == list(range(12))


def test_disk_full_while_writing_a_checkpoint(tmp_path, monkeypatch):
    half = interrupted(tmp_path, 4)
    before = {p.name: p.read_bytes() for p in (half.path / "checkpoints").iterdir()}

    def full(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(storage.os, "fsync", full)
        with pytest.raises(
            RunError, match=r"round-000009.safetensors could not be written: .*No space left.*untouched"
        ):
            half.keep(half.round(9), Payload(m=START), [])
    assert {p.name: p.read_bytes() for p in (half.path / "checkpoints").iterdir()} == before  # not even a partial file
    finish(half)


def test_a_checkpoint_cannot_name_a_foreign_class(tmp_path):
    path = tmp_path / "evil.safetensors"
    checkpoint.save(path, Plan())
    assert checkpoint.load(path) == Plan()
    for name in ("os:system", "polysite.engines.run_folder:RunFolder", "polysite.nowhere:Thing"):
        with pytest.raises(ValueError, match="class"):
            checkpoint._dataclass(name, "polysite")
    with pytest.raises(TypeError, match="may not hold a set"):
        checkpoint.save(path, {1, 2})


def test_the_bare_rounds_are_an_iterator():
    engine = Simulator(FedAvg(), sites())
    seen = [r.index for r in run_rounds(FedAvg(), engine, START, Plan(rounds=3), seed=0)]
    assert seen == [0, 1, 2]


def test_what_sites_remember_lies_apart_and_has_a_version(tmp_path):
    """Of every checkpoint that is kept, a file for every site; who is not asked keeps the version it has."""
    _, folder = study(tmp_path, Local(), rounds=9, share=0.5, checkpoint_every=1)
    assert {p.name for p in folder.path.glob("sites/*/*")} == {p.name for p in folder.path.glob("checkpoints/*")}
    heard = [next(iter(r.sites)) for r in folder.records()]  # one of two in every round
    for path in folder.checkpoints():
        for site in ("a", "b"):
            found = checkpoint.load(folder.memory(path, site))
            last = max(k for k, i in enumerate(heard[: int(path.stem[-6:]) + 1]) if i == site)
            assert (found.site, found.algorithm, found.version) == (site, "local", last)
    assert heard[-1] == heard[-2]  # so one version is older than both checkpoints


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 3}, "is the memory of another version: 3 instead of 7"),
        ({"site": "b"}, "is the memory of another site: 'b' instead of 'a'"),
        ({"algorithm": "ditto"}, "is the memory of another algorithm: 'ditto' instead of 'local'"),
        ({"format": 2}, "holds no memory of a site that this version of polysite can read"),
        (None, "cannot be read as a checkpoint"),
    ],
    ids=["version", "site", "algorithm", "format", "gone"],
)
def test_a_memory_that_does_not_fit_is_not_mixed_in(tmp_path, changes, sentence, caplog):
    _, whole = study(tmp_path, Local(), rounds=12, checkpoint_every=2, name="whole")
    _, folder = study(tmp_path, Local(), rounds=8, checkpoint_every=2)
    (folder.path / "result.json").unlink()
    path = folder.memory(folder.checkpoints()[0], "a")
    if changes is None:
        path.unlink()
    else:
        checkpoint.save(path, replace(checkpoint.load(path), **changes))
    again = [Phase(Local(), Simulator(Local(), sites()), Plan(rounds=12, checkpoint_every=2))]
    at = find_progress(folder, again)
    assert sentence in caplog.text and at.round == 5  # the one before
    run_phases(again, START, 0, folder, resume=at)
    for site in ("a", "b"):
        assert load_file(folder.path / "models" / f"last.{site}.safetensors") == load_file(
            whole.path / "models" / f"last.{site}.safetensors"
        )


def test_going_back_to_the_best_round_forgets_what_came_after(tmp_path):
    """A site that had not been heard until then remembers nothing."""
    algorithm = Local()
    folder = RunFolder.create(tmp_path / "run", "", 0)
    phases = [Phase(algorithm, Simulator(algorithm, sites()), Plan(rounds=6, share=0.5))]
    run_phases(phases, START, 0, folder)
    first = next(iter(folder.records()[0].sites))
    other = {"a": "b", "b": "a"}[first]
    at = Progress(0, None, {first: Payload(model=START)}, 0, 1.0, versions={first: 0})
    _keep(folder, folder.best(9), phases[0], at)
    assert phases[0].transport.memories()[other]
    find_best(folder, phases, 9)
    assert phases[0].transport.memories() == {first: Payload(model=START), other: Payload()}
