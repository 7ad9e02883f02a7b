"""Memory that is used again, but never while anything refers to it."""

import gc

import numpy as np
import pytest
import torch

from polysite import buffers
from polysite.buffers import room
from polysite.payload import Payload, decode, encode

SIZE = 3 << 20


@pytest.fixture(autouse=True)
def none_kept(monkeypatch):
    monkeypatch.setattr(buffers, "_kept", [])


VIEWS = {
    "memory": lambda m: m,
    "a part": lambda m: m[10:20],
    "an array": lambda m: np.asarray(m),
    "an array of a part": lambda m: np.ndarray((5,), np.float32, m, 8)[1:].reshape(2, 2),
    "a tensor": lambda m: torch.as_tensor(np.ndarray((5,), np.float32, m, 8))[2:],
    "a decoded payload": lambda m: decode(encode(Payload(m={"x": np.ones(SIZE, np.uint8)})))["m"]["x"][:1],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_memory_is_used_again_once_nothing_refers_to_it(view):
    kept = view(room(SIZE))
    gc.collect()
    others = len(buffers._kept)
    assert all(len(m) >= SIZE for m in buffers._kept)
    del kept
    gc.collect()
    assert len(buffers._kept) == others + 1
    again = room(SIZE - 1)
    assert len(buffers._kept) == others and len(again) == SIZE - 1


def test_memory_in_a_cycle_is_not_used_again_before_the_finalizers_have_run():
    found = []

    class Last:
        def __init__(self):
            self.memory, self.itself = room(SIZE), self
            self.memory[0] = 1

        def __del__(self):
            room(SIZE)[0] = 2
            found.append(self.memory[0])

    Last()
    gc.collect()
    assert found == [1] and len(buffers._kept) == 2


def test_memory_of_another_size_or_beyond_the_limit_is_not_kept(monkeypatch):
    del (first := [room(SIZE)])[:]
    assert not first and len(buffers._kept) == 1
    assert len(room(20 * SIZE)) == 20 * SIZE and len(room(100)) == 100
    monkeypatch.setattr(buffers, "MAX_KEPT", 0)
    several = [room(SIZE), room(SIZE)]
    several.clear()
    assert len(buffers._kept) == 1  # the large one; these two came too late
