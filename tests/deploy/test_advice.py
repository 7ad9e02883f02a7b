"""An advice over real processes, against the simulator."""

import pytest

from advices import BASE, GIVEN, advised, differing
from jobs_here import JobsHere
from polysite import advice
from polysite.advice import exceptions
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.project import Project
from polysite.engines.sites import Deadlines


@pytest.mark.slow
@pytest.mark.soak
def test_three_real_hospitals_are_advised_with_the_bits_of_the_simulator(stage, tmp_path, monkeypatch):
    """With second trainings, and own models that go on from a strategy."""
    monkeypatch.setattr(exceptions, "PROMISING", 0.0)
    monkeypatch.setattr(exceptions, "RATE", 99.0)
    with coordinator.listening(Project.load(stage.folder / "project")) as link:
        waiting = Deadlines(quorum=3, deadline=120, grace=30, again=1, poll=0.02)
        found = advised(tmp_path, link, BASE, deadlines=waiting, wait=120)
    whole = advice.advise(BASE, tmp_path / "simulated", **GIVEN, trainer=JobsHere())
    assert found.trained.two and list(differing(found, whole)) == []
