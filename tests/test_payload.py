"""The codec: exact, and deaf to anything that is not exactly a payload."""

import contextlib
import json

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from polysite.errors import PayloadError
from polysite.payload import TYPES, Limits, Payload, decode, encode, mean

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
    back = decode(encode(p))
    assert back == p
    assert [(f, None if isinstance(v, float) else list(v)) for f, v in back.items()] == [
        (f, None if isinstance(v, float) else list(v)) for f, v in p.items()
    ]


def test_special_values_keep_their_bits():
    odd = np.array([np.nan, -np.nan, np.inf, -0.0, 5e-324])
    p = decode(encode(Payload(a={"x": odd}, n=float("nan"), inf=float("inf"))))
    assert p["a"]["x"].tobytes() == odd.tobytes() and np.isnan(p["n"]) and p["inf"] == np.inf


def test_tensors_strided_and_big_endian_arrays_become_plain():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for leaf in (torch.from_numpy(x).T, x.T, np.asfortranarray(x.T), x.T.astype(">f4")):
        assert decode(encode(Payload(m={"x": leaf})))["m"]["x"].tolist() == x.T.tolist()


def test_equality_is_bit_equality():
    a = Payload(m={"x": np.zeros(2)}, n=1)
    assert a == Payload(m={"x": np.zeros(2)}, n=1)
    for other in (
        Payload(m={"x": -np.zeros(2)}, n=1),
        Payload(m={"x": np.zeros(2, np.float32)}, n=1),
        Payload(m={"x": np.zeros((2, 1))}, n=1),
        Payload(m={"y": np.zeros(2)}, n=1),
        Payload(m={"x": np.zeros(2)}, n=2),
        Payload(m={"x": np.zeros(2)}),
        {"n": 1.0},
    ):
        assert a != other


def test_the_bytes_are_those_of_safetensors():
    shapes = ((2, 3), (), (0,), (1,), (3,))
    tree = {f"{k}é\n/{s}": np.ones(s, kind) for k, kind in enumerate(TYPES.values()) for s in shapes}
    p, index = Payload(m=tree, n=3), [["m", list(tree)], ["n", None]]
    arrays = {**{f"m/{k}": x for k, x in tree.items()}, "n": np.array(3.0)}
    like = safetensors.numpy.save(arrays, metadata={"payload": json.dumps(index)})
    assert bytes(encode(p)) == like and decode(like) == p


def test_nbytes_counts_content():
    assert Payload(m={"w": np.zeros((3, 5), np.float32)}, n=1).nbytes == 3 * 5 * 4 + 8


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused(b):
    with pytest.raises(PayloadError):
        decode(b)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_bytes_are_refused_or_decoded_but_never_crash(data):
    good = bytearray(encode(Payload(model={"w": np.arange(6.0), "v": np.ones((2, 2), np.float32)}, n=3)))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    with contextlib.suppress(PayloadError):
        decode(bytes(good[:cut]))


def hostile(header, body=b""):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def in_utf16(header, body):
    text = json.dumps(header).encode("utf-16")
    return len(text).to_bytes(8, "little") + text + body


def entry(dtype="F32", shape=(1,), at=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(at)}


INDEX = {"payload": json.dumps([["m", ["w"]]])}


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        (hostile({"__metadata__": INDEX, "m/w": entry("F8_E4M3", (4,))}, bytes(4)), "type"),
        (hostile({"__metadata__": INDEX, "m/w": entry(shape=(1 << 60, 1 << 60))}, bytes(4)), "damaged"),
        (hostile({"__metadata__": INDEX, "m/w": entry(at=(0, 1 << 40))}, bytes(4)), "damaged"),
        (hostile({"__metadata__": INDEX, "m/w": entry(shape=(1,) * 9)}, bytes(4)), "dimensions"),
        (hostile({"__metadata__": INDEX, "m/w": entry(), "m/hidden": entry(at=(4, 8))}, bytes(8)), "does not name"),
        (hostile({"__metadata__": {"payload": json.dumps([["m", ["v"]]])}, "m/w": entry()}, bytes(4)), "damaged"),
        (
            hostile({"__metadata__": {"payload": json.dumps([["m", []], ["m", ["w"]]])}, "m/w": entry()}, bytes(4)),
            "distinct",
        ),
        (hostile({"__metadata__": {"payload": json.dumps([["a/b", None]])}, "a/b": entry()}, bytes(4)), "plain names"),
        (hostile({"m/w": entry()}, bytes(4)), "header"),
        (hostile({"__metadata__": {"payload": json.dumps([["self", None]])}}), "damaged"),
        (hostile([1, 2]), "header"),
        (hostile({"__metadata__": {"payload": '[["m", ["\\ud800"]]]'}, "m/\ud800": entry()}, bytes(4)), "surrogates"),
        (in_utf16({"__metadata__": INDEX, "m/w": entry()}, bytes(4)), "utf-8"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "announces"),
        (b"\x80\x04\x95pickle", "announces"),
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


def test_mean_of_replies_does_not_depend_on_arrival():
    rng = np.random.default_rng(0)
    replies = {i: Payload(model={"w": rng.normal(size=50)}, n=rng.integers(1, 9)) for i in "abcdefg"}
    first = mean(replies, "model", "n")["w"]
    assert (first == mean(dict(reversed(replies.items())), "model", "n")["w"]).all()
    n = [replies[i]["n"] for i in "abcdefg"]
    assert first == pytest.approx(np.average([replies[i]["model"]["w"] for i in "abcdefg"], axis=0, weights=n))
