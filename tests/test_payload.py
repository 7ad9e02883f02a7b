"""The codec: exact, and deaf to anything that is not exactly a payload; the memory of messages is used again."""

import contextlib
import gc
import json

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from polysite import buffers
from polysite.buffers import room
from polysite.errors import PayloadError
from polysite.payload import TYPES, LastPayload, Limits, Payload, decode, encode

dtypes = st.sampled_from(
    [np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint8, np.uint16, np.bool_]
)
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
trees = st.dictionaries(st.text(max_size=8), dtypes.flatmap(lambda d: hnp.arrays(d, shapes)), max_size=4)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
payloads = st.dictionaries(names, st.one_of(trees, st.floats()), max_size=4).map(lambda f: Payload(**f))


@given(payloads)
@settings(max_examples=200, deadline=None)
def test_round_trip_is_exact(p):
    def order(p):
        return [(field, None if isinstance(v, float) else list(v)) for field, v in p.items()]

    back = decode(encode(p))
    assert back == p and order(back) == order(p)


def test_tensors_strided_and_big_endian_arrays_become_plain():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for leaf in (torch.from_numpy(x).T, x.T, np.asfortranarray(x.T), x.T.astype(">f4")):
        assert decode(encode(Payload(m={"x": leaf})))["m"]["x"].tolist() == x.T.tolist()


def test_equality_is_bit_equality():
    a = Payload(m={"x": np.zeros(2)}, n=1)
    assert a == Payload(m={"x": np.zeros(2)}, n=1)
    others = ({"x": -np.zeros(2)}, {"x": np.zeros(2, np.float32)}, {"x": np.zeros((2, 1))}, {"y": np.zeros(2)})
    assert not any(a == Payload(m=m, n=1) for m in others)
    assert a != Payload(m={"x": np.zeros(2)}, n=2) and a != Payload(m={"x": np.zeros(2)}) and a != {"n": 1.0}


def test_the_bytes_are_those_of_safetensors():
    shapes = ((2, 3), (), (0,), (1,), (3,))
    tree = {f"{k}é\n/{s}": np.ones(s, kind) for k, kind in enumerate(TYPES.values()) for s in shapes}
    p, index = Payload(m=tree, n=3), [["m", list(tree)], ["n", None]]
    arrays = {**{f"m/{k}": x for k, x in tree.items()}, "n": np.array(3.0)}
    like = safetensors.numpy.save(arrays, metadata={"payload": json.dumps(index)})
    assert bytes(encode(p)) == like and decode(like) == p
    assert Payload(m={"w": np.zeros((3, 5), np.float32)}, n=1).nbytes == 3 * 5 * 4 + 8


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_bytes_are_refused_or_decoded_but_never_crash(data):
    good = bytearray(encode(Payload(model={"w": np.arange(6.0), "v": np.ones((2, 2), np.float32)}, n=3)))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    with contextlib.suppress(PayloadError):
        decode(bytes(good[:cut]))


def hostile(header, size=4, encoding="utf-8"):
    text = json.dumps(header).encode(encoding)
    return len(text).to_bytes(8, "little") + text + bytes(size)


def claims(*, fields=(("m", ["w"]),), **entry):
    """A message with this index and one array, which lies about something."""
    return {"__metadata__": {"payload": json.dumps(fields)}, "m/w": {**ENTRY, **entry}}


def named(field):
    """The index of a message with a single number."""
    return {"__metadata__": {"payload": json.dumps([[field, None]])}}


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
MORE = {"m/hidden": {**ENTRY, "data_offsets": [4, 8]}}
SURROGATE = {"__metadata__": {"payload": '[["m", ["\\ud800"]]]'}, "m/\ud800": ENTRY}


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        (hostile(claims(dtype="F8_E4M3", shape=[4])), "type"),
        (hostile(claims(data_offsets=[0, 1 << 40])), "damaged"),
        (hostile(claims(shape=[1] * 9)), "dimensions"),
        (hostile({**claims(), **MORE}, 8), "does not name"),
        (hostile(claims(fields=[["m", []], ["m", ["w"]]])), "distinct"),
        (hostile({**named("a/b"), "a/b": ENTRY}), "plain names"),
        (hostile({"m/w": ENTRY}), "header"),
        (hostile(named("self")), "damaged"),
        (hostile([1, 2], 0), "header"),
        (hostile(SURROGATE), "surrogates"),
        (hostile(claims(), encoding="utf-16"), "utf-8"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "announces"),
    ],
)
def test_hostile_bytes_are_refused_with_a_reason(attack, says):
    with pytest.raises(PayloadError, match=says):
        decode(attack)


def test_limits():
    good = encode(Payload(m={"w": np.zeros(100), "v": np.zeros(1)}))
    for limits in (Limits(nbytes=100), Limits(header=10), Limits(arrays=1), Limits(dimensions=0)):
        with pytest.raises(PayloadError):
            decode(good, limits)


def test_what_cannot_be_encoded_is_refused():
    for leaf in (np.array([object()]), np.array(["text"]), np.zeros(2, np.complex64)):
        with pytest.raises(PayloadError, match="cannot be encoded"):
            encode(Payload(m={"x": leaf}))


SIZE = 3 << 20


@pytest.fixture(autouse=True)
def none_kept(monkeypatch):
    monkeypatch.setattr(buffers, "_kept", [])


VIEWS = {
    "an array of a part": lambda m: np.ndarray((5,), np.float32, m, 8)[1:].reshape(2, 2),
    "a tensor": lambda m: torch.as_tensor(np.ndarray((5,), np.float32, m, 8))[2:],
    "a decoded payload": lambda m: decode(encode(Payload(m={"x": np.ones(SIZE, np.uint8)})))["m"]["x"][:1],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_memory_is_used_again_once_nothing_refers_to_it(view):
    kept = view(room(SIZE))
    gc.collect()
    others = len(buffers._kept)
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


def test_a_payload_that_is_gone_is_not_taken_for_a_new_one_in_its_place(monkeypatch):
    """Another array may get the address of one that is gone; here both have the same key."""
    monkeypatch.setattr("polysite.payload.likeness", lambda payload: "the same")
    last = LastPayload()
    first = Payload(model={"w": np.ones(4)})
    assert last.replace(first) == 32 and last.replace(first) == 0
    del first
    assert last.replace(Payload(model={"w": np.zeros(4)})) == 32
