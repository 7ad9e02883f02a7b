"""How far the clock of a hospital may be off: as the documentation says, and not a second more."""

from base64 import b64encode
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from polysite.deploy.flower import admission

DOCS = Path(__file__).parents[2] / "docs"
BEHIND, AHEAD = 305, 5  # seconds


@pytest.fixture
def guard():
    """What authenticates requests, with the key of one hospital."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = public_key_to_bytes(key.public_key())
    made = admission.Admission({"north": public}, {"north": key.public_key()})

    def request(seconds):
        """Authenticate a request that was signed when the hospital's clock was so many seconds behind."""
        signed = (admission.now() - timedelta(seconds=seconds)).isoformat()
        values = {
            admission.FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public),
            admission.FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, signed.encode())),
            admission.TIMESTAMP_HEADER: signed.encode(),
        }
        return made.authenticate({name.lower().encode(): value for name, value in values.items()})

    return request


@pytest.mark.parametrize("seconds", [0, 120, BEHIND - 2, 2 - AHEAD])
def test_a_clock_within_the_limits_is_accepted(guard, seconds):
    assert guard(seconds) == "north"


@pytest.mark.parametrize("seconds", [BEHIND + 1, 3600, -AHEAD - 1, -3600])
def test_a_clock_beyond_them_is_refused(guard, seconds):
    with pytest.raises(admission.Refusal) as refusal:
        guard(seconds)
    assert refusal.value.word == "clock"


@pytest.mark.parametrize("page", ["deploy.md", "hospital.md"])
def test_the_documentation_says_so(page):
    text = " ".join((DOCS / page).read_text().split())
    assert f"{BEHIND // 60} minutes behind" in text and f"{AHEAD} seconds ahead" in text
    assert "within the last seconds" not in text
