"""Real processes over Flower's own transport, with TLS and node authentication, against the simulator."""

import pytest
from safetensors.numpy import load_file

from consortium import NAMES, consortium, open_hospitals, same, states, values, wanted
from polysite import study
from polysite.algorithms import ALGORITHMS
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.coordinator.roster import Deadlines
from polysite.payload import Payload

pytestmark = pytest.mark.slow
DEADLINES = Deadlines(quorum=3, deadline=120, grace=30, again=1, poll=0.02)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Three hospitals that stay, and the link to them."""
    folder = tmp_path_factory.mktemp("consortium")
    made = consortium(folder, NAMES)
    with coordinator.listening(made) as link, open_hospitals(folder, NAMES) as hospitals:
        yield folder, link, hospitals


# one of each kind in every full run: shared, partial and private models, memories, phases
SLICE = ("fedavg", "fine_tune", "scaffold")
EVERY = [pytest.param(name, marks=() if name in SLICE else pytest.mark.soak) for name in sorted(ALGORITHMS)]


@pytest.mark.parametrize("name", EVERY)
def test_every_algorithm_over_flower_comes_to_the_state_of_the_simulator(name, federation, tmp_path):
    folder, link, _ = federation
    chosen = wanted(name)
    simulated = study.train(chosen, tmp_path / "simulated")
    deployed = coordinator.run(chosen, link, NAMES, tmp_path / "deployed", deadlines=DEADLINES, assess=False, wait=120)
    one, other = states(simulated.folder.path), states(deployed.folder.path)
    assert one.keys() == other.keys() and one and all(same(one[k], other[k]) for k in one)
    assert deployed.result.best_round == simulated.result.best_round and values(deployed) == values(simulated)
    for path in (simulated.folder.path / "models").glob("*.safetensors"):
        there = deployed.folder.path / "models" / path.name
        kind, _, site = path.stem.partition(".")
        if not there.exists():  # what the server could not tell from what it sent: it stays at the hospital
            found = (folder / (site or "a") / "state" / "runs").glob(f"*/models/{kind}.safetensors")
            there = max(found, key=lambda p: p.stat().st_mtime_ns)
        assert Payload(model=load_file(path)) == Payload(model=load_file(there))
