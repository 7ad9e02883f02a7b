"""One federation of real processes for all tests over Flower: five hospitals that stay, each in a network of its own
where that is permitted. And what real processes of either engine have in common with the simulator."""

import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import faults

import wire_ends
from consortium import NAMES, change, equal_states, open_hospitals, values
from consortium import consortium as federation
from polysite.deploy.certificates import public_line, read_key
from polysite.deploy.enrolment import fingerprint
from polysite.payload import Payload


@pytest.fixture(scope="session")
def stage(tmp_path_factory):
    """Three of the hospitals accept secure sums with each other."""
    folder = tmp_path_factory.mktemp("consortium")
    with faults.network() as wires:
        federation(folder, faults.NAMES, host=wires.host)
        for name in faults.NAMES:
            change(folder / name / "policy.toml", "studies = 20", "studies = 1000")
        keys = {i: fingerprint(public_line(read_key(folder / i / "site.key").public_key())) for i in NAMES}
        for name in NAMES:
            peers = [keys[i] for i in NAMES if i != name]
            change(folder / name / "policy.toml", "masked_peers = []", f"masked_peers = {peers}")
        with open_hospitals(folder, faults.NAMES, wires.inside) as hospitals:
            yield faults.Stage(folder, hospitals, wires)


@pytest.fixture(scope="session")
def consortium(tmp_path_factory):
    """Keys and certificates for all tests of the wire."""
    return wire_ends.Consortium(tmp_path_factory.mktemp("wire"))


@pytest.fixture
def differences():
    """A function that lists what is not bit for bit as in the simulation: states, scores, models."""

    def found(simulated, deployed, kept):
        """``kept(site, name)`` is a model that the server could not tell from what it sent: it stays at a hospital."""
        if not equal_states(simulated, deployed):
            yield "states"
        if (values(simulated), simulated.result.best_round) != (values(deployed), deployed.result.best_round):
            yield "scores"
        for path in (simulated.folder.path / "models").glob("*.safetensors"):
            there = deployed.folder.path / "models" / path.name
            kind, _, site = path.stem.partition(".")
            there = there if there.exists() else kept(site or NAMES[0], f"{kind}.safetensors")
            if Payload(model=load_file(path)) != Payload(model=load_file(there)):
                yield path.name

    return lambda *runs: list(found(*runs))
