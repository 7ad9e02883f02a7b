"""What crosses FLARE: text and bytes, and nothing else, whatever a peer sends."""

import numpy as np
import pytest
from nvflare.apis.shareable import Shareable

from flare_fake import crossed
from polysite.deploy.flare import messages
from polysite.deploy.flare.messages import BODY, HEADER, pack, unpack
from polysite.errors import PayloadError
from polysite.payload import Payload, decode, encode


def test_a_payload_is_the_same_after_flares_own_serialisation():
    payload = Payload(model={"w": np.arange(60.0, dtype=np.float32).reshape(2, 30)}, weight=3.0)
    header = {"kind": "train", "round": 3, "keep": [1, 2], "tolerance": 0.5}
    got, body = unpack(crossed(pack(header, encode(payload))))
    assert got == header and decode(body) == payload and unpack(crossed(pack(header))) == (header, b"")


def test_a_body_that_flares_format_does_not_hold_is_refused(monkeypatch):
    monkeypatch.setattr(messages, "MAX_BODY", 100)
    with pytest.raises(PayloadError, match="may hold 100 bytes, not 101"):
        pack({}, bytes(101))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "no header"),
        ({}, "no header"),
        ({HEADER: b"{}", BODY: b""}, "no header"),
        ({HEADER: "{}"}, "not bytes"),
        ({HEADER: "{}", BODY: [b"x"]}, "not bytes"),
        ({HEADER: "{}", BODY: np.zeros(3)}, "not bytes"),
        ({HEADER: "{", BODY: b""}, "cannot be read"),
        ({HEADER: "[" * 100_000, BODY: b""}, "cannot be read"),
        ({HEADER: "[1]", BODY: b""}, "not a table"),
    ],
)
def test_anything_else_is_refused(content, why):
    message = Shareable()
    message.update(content or {})
    with pytest.raises(PayloadError, match=why):
        unpack("text" if content is None else message)
