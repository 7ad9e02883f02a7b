"""One federation of real processes for all tests over Flower: five hospitals that stay, each in a network of its own
where that is permitted."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import faults

from consortium import NAMES, change, consortium, open_hospitals
from polysite.deploy.certificates import public_line, read_key
from polysite.deploy.enrolment import fingerprint


@pytest.fixture(scope="session")
def stage(tmp_path_factory):
    """Three of the hospitals accept secure sums with each other."""
    folder = tmp_path_factory.mktemp("consortium")
    with faults.network() as wires:
        consortium(folder, faults.NAMES, host=wires.host)
        for name in faults.NAMES:
            change(folder / name / "policy.toml", "studies = 20", "studies = 1000")
        keys = {i: fingerprint(public_line(read_key(folder / i / "site.key").public_key())) for i in NAMES}
        for name in NAMES:
            peers = [keys[i] for i in NAMES if i != name]
            change(folder / name / "policy.toml", "masked_peers = []", f"masked_peers = {peers}")
        with open_hospitals(folder, faults.NAMES, wires.inside) as hospitals:
            yield faults.Stage(folder, hospitals, wires)
