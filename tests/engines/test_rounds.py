"""The rounds: sampling, validation, the best round, early stopping, records, checkpoints."""

import json
import shutil
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import load_file

import polysite as ps
from phased import START, phases, play, timeless
from polysite import storage
from polysite.engines import checkpoint
from polysite.engines.messages import Scored, bytes_of
from polysite.engines.plan import cohort
from polysite.engines.run_folder import RunFolder
from polysite.errors import RunError
from polysite.payload import Payload
from polysite.site import CaseScore, Examined
from quadratic import Quadratic


def sites():
    return {"a": Quadratic(1.0, np.array([0.0])), "b": Quadratic(4.0, np.array([1.0, 1.2]))}


def study(tmp_path, algorithm=ps.FedAvg(), name="run", sites=sites, guests=None, **plan):
    return play(tmp_path / name, phases([(algorithm, plan)], sites, guests=guests))


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
    assert a.steps == 5 and a.lr_sum == pytest.approx(0.25) and a.loss > 0
    assert folder.records()[0].validation["b"].cases == 2
    assert result.best_round == folder.result.best_round
    assert json.loads((folder.path / "versions.json").read_text())["seed"] == 0


def test_a_model_crosses_once_and_everything_that_crosses_is_counted(tmp_path):
    """A model of one number: to be scored after a round, and not again to be trained in the next one. Back come the
    reply with its weight, and a label and a loss for each case, of which b has two."""
    result, folder = study(tmp_path, rounds=3)
    first, *later = folder.records()
    assert first.bytes_down == {"a": 16, "b": 16} and first.bytes_up == {"a": 16 + 16, "b": 16 + 32}
    assert all((r.bytes_down, r.bytes_up) == ({"a": 8, "b": 8}, first.bytes_up) for r in later)
    assert result.bytes_down == {"a": 8, "b": 8}  # the best model; the last one is there
    assert result.bytes_up == {"a": 2 * 32 + 2 * 16, "b": 2 * 32 + 2 * 32}  # digests of both models, two splits


def test_the_best_round_is_kept_and_not_the_last(tmp_path):
    class Wanders(Quadratic):
        def score(self, params, cases):
            return {n: CaseScore({"L": float(np.exp(-abs(params["w"].item() - 1.5)))}, 0.0) for n in cases}

    wandering = Wanders(1.0, np.array([0.0]))
    result, folder = study(tmp_path, sites=lambda: {"a": wandering}, rounds=12)
    path = [3 * (1 - wandering.pull) ** (r + 1) for r in range(12)]
    best = int(np.argmin(np.abs(np.array(path) - 1.5)))
    assert 0 < best < 11 and result.best_round == best
    assert load_file(folder.path / "models" / "best.safetensors")["w"] == pytest.approx(path[best])
    assert load_file(folder.path / "models" / "last.safetensors")["w"] == pytest.approx(path[-1])


class Dull(Quadratic):
    """A site where no model is better than another."""

    def score(self, params, cases):
        return {n: CaseScore({"L": 0.5}, 0.5) for n in cases}


def test_early_stopping_waits_as_long_as_told_and_a_resumed_run_does_not_go_on(tmp_path):
    plan = {"sites": lambda: {"a": Dull(1.0, np.array([0.0]))}, "rounds": 50, "patience": 3, "validate_every": 2}
    result, folder = study(tmp_path, **plan)
    assert result.best_round == 1 and result.rounds == 8  # best at the first look, then three without a better
    before = last_model(folder)
    (folder.path / "result.json").unlink()
    (folder.path / "checkpoints" / ".round-000009.safetensors.partial").write_bytes(b"half")
    assert study(tmp_path, **plan)[0] == result
    assert last_model(folder) == before and len(folder.records()) == 8
    assert not list((folder.path / "checkpoints").glob(".*"))


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
    with pytest.raises(RunError, match="never overwrites"):
        RunFolder.create(tmp_path / "run", "", 0)
    first = RunFolder.fresh(tmp_path, "x")
    first.mkdir()
    assert RunFolder.fresh(tmp_path, "x") != first


def interrupted(tmp_path, rounds_done):
    """A folder as it stands after some rounds of twelve, with checkpoints every two."""
    _, folder = study(tmp_path, name="half", rounds=rounds_done, checkpoint_every=2)
    (folder.path / "result.json").unlink()
    return folder


def finish(folder):
    return study(folder.path.parent, name=folder.path.name, rounds=12, checkpoint_every=2)


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
    newest, _ = half.checkpoints()
    if damage == "best":  # of the newest alone: the one before keeps its own
        shutil.copy(half.best(checkpoint.load(newest).at.best_round), half.best(6))
        later = checkpoint.load(newest)
        checkpoint.save(newest, replace(later, at=replace(later.at, best_round=6)))
        harm(half.best(6), "truncated")
    elif damage != "none":
        harm(newest, damage)
    with (half.path / "rounds.jsonl").open("a") as f:
        f.write('{"round": 8, "sit')  # a record cut short is forgotten
    finish(half)
    assert ("trying the checkpoint before" in caplog.text) == (damage != "none")  # it is said
    assert len(list((half.path / "checkpoints").glob("*.damaged"))) == (damage != "none")  # and nothing thrown away
    assert last_model(half) == last_model(whole)
    assert timeless(half) == timeless(whole) and [r.round for r in half.records()] == list(range(12))


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
    with folder.alone(), pytest.raises(RunError, match="in use by another process"):
        RunFolder.open(folder.path).alone().__enter__()
    with folder.alone():
        pass


def test_disk_full_while_writing_a_checkpoint(tmp_path, monkeypatch):
    half = interrupted(tmp_path, 4)
    before = {p.name: p.read_bytes() for p in (half.path / "checkpoints").iterdir()}
    sentence = r"round-000009.safetensors could not be written: .*No space left.*untouched"
    with monkeypatch.context() as m, pytest.raises(RunError, match=sentence):
        m.setattr(storage.os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
        half.keep(half.round(9), Payload(m=START), [])
    assert {p.name: p.read_bytes() for p in (half.path / "checkpoints").iterdir()} == before  # not even a partial file
    finish(half)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 3}, "is the memory of another version: 3 instead of 7"),
        ({"site": "b"}, "is the memory of another site: 'b' instead of 'a'"),
        ({"format": 2}, "holds no memory of a site that this version of polysite can read"),
        (None, "cannot be read as a checkpoint"),
    ],
    ids=["version", "site", "format", "gone"],
)
def test_a_memory_that_does_not_fit_is_not_mixed_in(tmp_path, changes, sentence, caplog):
    """Of every checkpoint that is kept, a file for every site; who is not asked keeps the version it has."""
    plan = {"rounds": 12, "checkpoint_every": 2, "share": 0.5}
    _, whole = study(tmp_path, ps.Local(), name="whole", **plan)
    _, folder = study(tmp_path, ps.Local(), **{**plan, "rounds": 8})
    assert {p.name for p in folder.path.glob("sites/*/*")} == {p.name for p in folder.path.glob("checkpoints/*")}
    (folder.path / "result.json").unlink()
    path = folder.memory(folder.checkpoints()[0], "a")
    if changes is None:
        path.unlink()
    else:
        checkpoint.save(path, replace(checkpoint.load(path), **changes))
    study(tmp_path, ps.Local(), **plan)
    assert sentence in caplog.text  # the checkpoint before was used
    for name in ("last.a.safetensors", "last.b.safetensors"):
        assert load_file(folder.path / "models" / name) == load_file(whole.path / "models" / name)


def test_measures_of_a_case_weigh_as_many_numbers_as_they_are():
    """A label and the loss, two measures, and four counts; in a classification also both classes."""
    score = CaseScore({"L": 0.5}, 0.1, counts={"L": (1, 2, 3, 4)})
    assert bytes_of(Examined("case", score, {"L": {"dice": 0.5, "hd95": 3.0}})) == 8 * (2 + 2 + 4)
    assert bytes_of(Scored({"one": CaseScore({"accuracy": 1.0}, 0.1, 2, 2)})) == 8 * 4
