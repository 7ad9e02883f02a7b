"""Checkpoints that were changed by a person who also computed the digest anew: a sentence, and never another error."""

import json

import numpy as np
import pytest
import safetensors.numpy

from polysite.engines import checkpoint, site_memory
from polysite.engines.phases import Checkpoint
from polysite.engines.rounds import Progress
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
    {"class": "polysite.engines.rounds:Progress", "fields": [1, 2]},
    {"class": 3, "fields": {}},
    {"class": "polysite.engines.rounds:Progress", "fields": {"none": {"is": 1}}},
    {"map": 7},
    {"map": [[1]]},
    {"map": [[[], {"is": 1}]]},
    {"payload": [["model", {"is": "text"}]]},
    {"payload": [[4, {"is": 4}]]},
    {"array": []},
    {"array": "elsewhere"},
    {"tuple": None},
    [],
    3,
    "[" * 50_000,
    '{"tuple": [' * 20_000,
    class_of(Checkpoint, at={"is": None}),
    class_of(Checkpoint, at=class_of(Progress, round={"is": "x"}, state={"is": 1}, memories={"map": []})),
    class_of(Checkpoint, at=class_of(Progress, round={"is": 1}, state={"is": 1}, memories={"is": 5})),
    class_of(Checkpoint, at={"array": "value/w"}),
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
    found = checkpoint.load(path)
    assert found.at.round == 3 and found.at.best_score == 0.5 and found.kept == ("a",)
    site_memory.save(path, Memory("a", "scaffold", 3, Payload(model=state)))
    assert site_memory.load(path, "a", "scaffold", 3) == Payload(model=state)
