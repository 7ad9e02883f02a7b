"""Two sides work together where their code is the same."""

import json

import numpy as np
import pytest

from polysite.deploy import identity, protocol
from polysite.metrics.measures import MEASURES, measure


def digest_of(folder):
    identity.identity.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity.polysite, "__file__", str(folder / "__init__.py"))
        found = identity.identity()["code"]
    identity.identity.cache_clear()
    return found


def test_any_change_of_the_code_changes_the_digest_and_its_place_does_not(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        (folder / "inside").mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "inside" / "a.py").write_text("LIMIT = 3\n")
    before = digest_of(one)
    assert digest_of(two) == before
    (two / "inside" / "a.py").write_bytes(b"LIMIT = 3\r\n")  # as a system checks files out
    assert digest_of(two) == before
    (two / "inside" / "a.py").write_text("LIMIT = 4\n")
    assert digest_of(two) != before
    (one / "inside" / "a.py").rename(one / "a.py")
    assert digest_of(one) != before


def test_another_version_with_the_same_code_is_accepted():
    own = identity.identity()
    assert identity.difference({**own, "polysite": "9.9"}) is None
    assert "install the same" in str(identity.difference({**own, "code": "other"}))
    assert "unknown" in str(identity.difference({}))


def test_every_measure_of_a_case_has_a_name_in_the_protocol():
    mask, empty = np.eye(4, dtype=bool), np.zeros((4, 4), bool)
    for predicted, truth in ((mask, mask), (mask, empty), (empty, mask), (empty, empty)):  # NaN and infinity, too
        row = measure(predicted, truth, (1.0, 1.0))
        sent = json.loads(json.dumps({k: protocol._packed(v) for k, v in row.items()}))
        received = protocol._measures("case", sent, MEASURES, protocol.Subject(("WT",), False))
        assert received == pytest.approx(row, nan_ok=True) and tuple(row) == tuple(MEASURES)
