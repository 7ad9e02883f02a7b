"""What crosses FLARE: text and bytes, and nothing else, whatever a peer sends."""

import numpy as np
import pytest
from nvflare.apis.shareable import Shareable

from flare_fake import crossed
from polysite.deploy.flare import messages
from polysite.deploy.flare.messages import BODY, HEADER, cut, pack, unpack
from polysite.errors import PayloadError
from polysite.payload import Payload, decode, encode


@pytest.mark.parametrize("part", [messages.PART, 100])
def test_a_payload_is_the_same_after_flares_own_serialisation(part, monkeypatch):
    monkeypatch.setattr(messages, "PART", part)
    payload = Payload(model={"w": np.arange(60.0, dtype=np.float32).reshape(2, 30)}, weight=3.0)
    header, parts = {"kind": "train", "round": 3, "keep": [1, 2], "tolerance": 0.5}, cut(encode(payload))
    assert (len(parts) > 1) == (part == 100) and max(map(len, parts)) <= part and cut(b"") == []
    got, body = unpack(crossed(pack(header, parts)))
    assert got == header and decode(body) == payload


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "no header"),
        ({}, "no header"),
        ({HEADER: b"{}", BODY: []}, "no header"),
        ({HEADER: "{}"}, "not a list of bytes"),
        ({HEADER: "{}", BODY: b"x"}, "not a list of bytes"),
        ({HEADER: "{}", BODY: [np.zeros(3)]}, "not a list of bytes"),
        ({HEADER: "{", BODY: []}, "cannot be read"),
        ({HEADER: "[" * 100_000, BODY: []}, "cannot be read"),
        ({HEADER: "[1]", BODY: []}, "not a table"),
    ],
)
def test_anything_else_is_refused(content, why):
    message = Shareable()
    message.update(content or {})
    with pytest.raises(PayloadError, match=why):
        unpack("text" if content is None else message)
