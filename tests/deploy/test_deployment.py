"""Real processes over Flower's own transport, with TLS and node authentication, against the simulator."""

import pytest

from consortium import NAMES, wanted
from polysite import config
from polysite.algorithms import ALGORITHMS
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.project import Project
from polysite.engines.sites import Deadlines

pytestmark = pytest.mark.slow
DEADLINES = Deadlines(quorum=3, deadline=120, grace=30, again=1, poll=0.02)


@pytest.fixture(scope="module")
def link(stage):
    with coordinator.listening(Project.load(stage.folder / "project")) as link:
        yield link


@pytest.fixture
def compared(stage, link, tmp_path, trained, differences):
    """What of a study is not as in the simulation, and a function that finds the newest file of a hospital's runs."""

    def newest(site, name):
        found = (stage.folder / site / "state" / "runs").glob(f"*/{name}")
        return max(found, key=lambda path: path.stat().st_mtime_ns)

    def compare(chosen):
        deployed = coordinator.run(
            chosen, link, NAMES, tmp_path / "deployed", deadlines=DEADLINES, assess=False, wait=120
        )
        return differences(trained(chosen), deployed, lambda site, name: newest(site, f"models/{name}")), newest

    return compare


# shared models and then private ones, partial models and memories in every full run
SLICE = ("fine_tune", "scaffold")
EVERY = [pytest.param(name, marks=() if name in SLICE else pytest.mark.soak) for name in sorted(ALGORITHMS)]


@pytest.mark.parametrize("name", EVERY)
def test_every_algorithm_over_flower_comes_to_the_state_of_the_simulator(name, compared):
    assert compared(wanted(name))[0] == []


def test_replies_under_masks_cross_flower_and_are_signed_by_the_keys_of_the_hospitals(compared):
    """Real couriers and workers, whose policies name the keys of the others, come to the state of the simulator."""
    different, newest = compared(config.vary(wanted("fedavg"), {"run": {"secure": {"use": "on"}}}))
    assert different == []
    kept = newest("a", "secure/session.json")
    assert kept.stat().st_mode & 0o077 == 0 and '"round": 1' in kept.read_text()
