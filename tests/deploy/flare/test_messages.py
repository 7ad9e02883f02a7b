"""What crosses FLARE: text and bytes, and nothing else, whatever a peer sends."""

import numpy as np
import pytest
from nvflare.apis.shareable import Shareable

from flare_fake import crossed
from polysite.deploy.flare import messages
from polysite.deploy.flare.messages import BODY, HEADER, cut, pack, unpack
from polysite.errors import PayloadError
from polysite.payload import Payload, decode, encode


def test_a_payload_is_the_same_after_flares_own_serialisation():
    payload = Payload(model={"w": np.arange(6.0, dtype=np.float32).reshape(2, 3)}, weight=3.0)
    header = {"kind": "train", "round": 3, "keep": [1, 2], "tolerance": 0.5}
    got, body = unpack(crossed(pack(header, cut(encode(payload)))))
    assert got == header and decode(body) == payload


def test_a_large_body_comes_in_parts(monkeypatch):
    monkeypatch.setattr(messages, "PART", 4)
    parts = cut(b"0123456789")
    assert [len(part) for part in parts] == [4, 4, 2]
    assert bytes(unpack(crossed(pack({}, parts)))[1]) == b"0123456789" and cut(b"") == []


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({}, "no header"),
        ({HEADER: b"{}", BODY: []}, "no header"),
        ({HEADER: "{}"}, "not a list of bytes"),
        ({HEADER: "{}", BODY: b"x"}, "not a list of bytes"),
        ({HEADER: "{}", BODY: [np.zeros(3)]}, "not a list of bytes"),
        ({HEADER: "{}", BODY: [b"x", "x"]}, "not a list of bytes"),
        ({HEADER: "{", BODY: []}, "cannot be read"),
        ({HEADER: "[" * 100_000, BODY: []}, "cannot be read"),
        ({HEADER: "[1]", BODY: []}, "not a table"),
    ],
)
def test_anything_else_is_refused(content, why):
    message = Shareable()
    message.update(content)
    with pytest.raises(PayloadError, match=why):
        unpack(message)


def test_what_is_no_message_is_refused():
    with pytest.raises(PayloadError, match="no header"):
        unpack("text")
