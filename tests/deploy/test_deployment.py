"""Real processes over Flower's own transport, with TLS and node authentication, against the simulator."""

import pytest
from safetensors.numpy import load_file

from consortium import NAMES, equal_states, values, wanted
from polysite import config
from polysite.algorithms import ALGORITHMS
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.coordinator.roster import Deadlines
from polysite.deploy.project import Project
from polysite.deploy.site.privacy_budget import PrivacyBudget
from polysite.payload import Payload

pytestmark = pytest.mark.slow
DEADLINES = Deadlines(quorum=3, deadline=120, grace=30, again=1, poll=0.02)


@pytest.fixture(scope="module")
def federation(stage):
    """The folder of the hospitals, and the link to them."""
    with coordinator.listening(Project.load(stage.folder / "project")) as link:
        yield stage.folder, link


# one of each kind in every full run: shared, partial and private models, memories, phases
SLICE = ("fedavg", "fine_tune", "scaffold")
EVERY = [pytest.param(name, marks=() if name in SLICE else pytest.mark.soak) for name in sorted(ALGORITHMS)]


@pytest.mark.parametrize("name", EVERY)
def test_every_algorithm_over_flower_comes_to_the_state_of_the_simulator(name, federation, tmp_path, trained):
    folder, link = federation
    chosen = wanted(name)
    simulated = trained(chosen)
    deployed = coordinator.run(chosen, link, NAMES, tmp_path / "deployed", deadlines=DEADLINES, assess=False, wait=120)
    assert equal_states(simulated, deployed)
    assert deployed.result.best_round == simulated.result.best_round and values(deployed) == values(simulated)
    for path in (simulated.folder.path / "models").glob("*.safetensors"):
        there = deployed.folder.path / "models" / path.name
        kind, _, site = path.stem.partition(".")
        if not there.exists():  # what the server could not tell from what it sent: it stays at the hospital
            found = (folder / (site or "a") / "state" / "runs").glob(f"*/models/{kind}.safetensors")
            there = max(found, key=lambda p: p.stat().st_mtime_ns)
        assert Payload(model=load_file(path)) == Payload(model=load_file(there))


def test_replies_under_masks_cross_flower_and_are_signed_by_the_keys_of_the_hospitals(federation, tmp_path, trained):
    """Real couriers and workers, whose policies name the keys of the others, come to the state of the simulator."""
    folder, link = federation
    chosen = config.vary(wanted("fedavg"), {"run": {"secure": {"use": "on"}}})
    simulated = trained(chosen)
    deployed = coordinator.run(chosen, link, NAMES, tmp_path / "deployed", deadlines=DEADLINES, assess=False, wait=120)
    assert equal_states(simulated, deployed)
    kept = max((folder / "a" / "state" / "runs").glob("*/secure/session.json"), key=lambda p: p.stat().st_mtime_ns)
    assert kept.stat().st_mode & 0o077 == 0 and '"round": 1' in kept.read_text()


def test_noise_for_patients_crosses_flower_and_every_hospital_keeps_account(federation, tmp_path):
    folder, link = federation
    private = {"private": {"unit": "patient", "clip": 1.0, "noise": 2.0}}
    chosen = config.vary(wanted("fedavg"), {"seed": 11, "train": private, "run": {"secure": {"use": "on"}}})
    run = coordinator.run(chosen, link, NAMES, tmp_path / "deployed", deadlines=DEADLINES, assess=False, wait=120)
    last = run.folder.records()[-1]
    for name in NAMES:
        spent = PrivacyBudget(folder / name / "state").spent(1e-5)
        assert last.sites[name].epsilon == pytest.approx(spent) and 0 < spent < 10
