"""Checkpoints: one that a person changed, digest included, is a sentence; the same content is one file."""

import json
import os
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.numpy

from polysite.engines import checkpoint, site_memory
from polysite.engines.guard_state import GuardState
from polysite.engines.phases import Checkpoint
from polysite.engines.rounds import Progress
from polysite.engines.run_folder import RunFolder
from polysite.engines.site_memory import Memory
from polysite.errors import RunError
from polysite.payload import Payload


def forge(path, shape, arrays=None):
    """Write a file with any structure and a digest that fits it."""
    arrays = {"value/w": np.ones(3, np.float32)} if arrays is None else arrays
    text = shape if isinstance(shape, str) else json.dumps(shape)
    header = {"checkpoint": f"{checkpoint._digest(text, arrays)} {text}"}
    safetensors.numpy.save_file(arrays, path, metadata=header)
    return path


def class_of(kind, **fields):
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": fields}


FORGED = [
    {"class": "os:system", "fields": {}},
    {"class": "polysite.engines.run_folder:RunFolder", "fields": {}},  # no dataclass
    {"class": "polysite.nowhere:Thing", "fields": {}},
    {"class": "polysite.engines.rounds:Progress", "fields": [1, 2]},
    {"class": "polysite.engines.rounds:Progress", "fields": {"none": {"is": 1}}},
    {"map": [[[], {"is": 1}]]},
    {"payload": [["model", {"is": "text"}]]},
    {"array": "elsewhere"},
    {"tuple": None},
    "[" * 50_000,
    '{"tuple": [' * 20_000,
    class_of(Checkpoint, at={"array": "value/w"}),
    class_of(Checkpoint, at=class_of(Progress, round={"is": "x"}, state={"is": 1}, memories={"map": []})),
    class_of(Checkpoint, at=class_of(Progress, round={"is": 1}, state={"is": 1}, memories={"array": "value/w"})),
    class_of(Memory, site={"is": "a"}, algorithm={"is": "b"}, version={"is": 0}, content={"is": None}),
]


@pytest.mark.parametrize("shape", FORGED, ids=lambda shape: str(shape)[:50])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_forged_checkpoint_is_a_sentence(tmp_path, shape, mapped):
    path = forge(tmp_path / "x.safetensors", shape)
    with pytest.raises(RunError, match=r"x\.safetensors") as refusal:
        checkpoint.load(path, mapped=mapped)
    assert "\n" not in str(refusal.value)


def test_what_is_no_memory_is_refused_as_a_memory(tmp_path):
    for k, shape in enumerate(({"is": 3}, {"map": []}, class_of(Checkpoint, at={"is": None}))):
        with pytest.raises(RunError):
            site_memory.load(forge(tmp_path / f"{k}.safetensors", shape), "a", "b", 0)


def test_sound_values_still_pass(tmp_path):
    state = {"w": np.ones(2, np.float32)}
    at = Progress(round=3, state=(state, 1, "x"), memories={}, best_score=np.float64(0.5), versions={"a": 2})
    path = tmp_path / "x.safetensors"
    checkpoint.save(path, Checkpoint(at, kept=("a",)))
    with pytest.raises(TypeError, match="may not hold a set"):
        checkpoint.save(tmp_path / "y.safetensors", {1, 2})
    found = checkpoint.load(path)
    assert found.at.round == 3 and found.at.best_score == 0.5 and found.kept == ("a",)
    site_memory.save(path, Memory("a", "scaffold", 3, Payload(model=state)))
    assert site_memory.load(path, "a", "scaffold", 3) == Payload(model=state)


def test_what_an_earlier_version_kept_and_this_one_does_not_is_left_out(tmp_path):
    gone = {"tuple": [{"class": "polysite.engines.jury:Ballot", "fields": {}}]}
    usual = {"map": [["model", {"is": 2.0}]]}
    path = forge(tmp_path / "x.safetensors", class_of(GuardState, ballots=gone, usual=usual))
    assert checkpoint.load(path) == GuardState(usual={"model": 2.0})


# of one round, the same content is one file with several names


def state(value):
    return Payload(model={"w": np.full(4, value)})


def memory(value):
    return Memory("a", "ditto", 3, state(value))


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run", "", 0)


def test_the_best_and_the_last_checkpoint_of_a_round_are_one_file(folder):
    best, last = folder.best(3), folder.round(3)
    folder.keep(best, state(1.0), [memory(2.0)])
    folder.keep(last, state(1.0), [memory(2.0)])
    assert best.samefile(last) and folder.memory(best, "a").samefile(folder.memory(last, "a"))
    folder.keep(last, state(5.0), [memory(6.0)])  # the round again, with another outcome
    assert not best.samefile(last) and checkpoint.load(best) == state(1.0) and checkpoint.load(last) == state(5.0)
    assert checkpoint.load(folder.memory(best, "a")).content == state(2.0)
    folder.keep(last, state(1.0), [])
    last.unlink()
    assert checkpoint.load(best) == state(1.0)


def test_a_damaged_twin_is_never_linked(folder):
    folder.keep(folder.best(4), state(3.0), [])
    folder.best(4).write_bytes(folder.best(4).read_bytes()[:-3])
    folder.keep(folder.round(4), state(3.0), [])
    assert checkpoint.load(folder.round(4)) == state(3.0)
    with pytest.raises(RunError, match="cannot be read"):
        checkpoint.load(folder.best(4))


def test_without_hard_links_the_file_is_copied(folder, monkeypatch):
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError("no links here")))
    folder.keep(folder.best(3), state(1.0), [memory(2.0)])
    folder.keep(folder.round(3), state(1.0), [memory(2.0)])
    assert not folder.best(3).samefile(folder.round(3))
    assert folder.best(3).read_bytes() == folder.round(3).read_bytes()
    assert not list(folder.path.rglob("*.partial"))


def test_a_run_after_another_shares_its_checkpoints_until_it_replaces_them(folder, tmp_path):
    folder.keep(folder.best(3), state(1.0), [])
    folder.keep(folder.round(3), state(1.0), [])
    after = RunFolder.create(tmp_path / "after", "", 0, after=folder)
    assert after.round(3).samefile(folder.best(3))
    after.keep(after.round(3), state(7.0), [])
    assert checkpoint.load(folder.round(3)) == state(1.0) == checkpoint.load(after.best(3))
