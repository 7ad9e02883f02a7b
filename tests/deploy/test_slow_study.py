"""A study over real processes where one hospital has 256 kbit/s and 300 ms, and its link is cut: as the simulator."""

import threading

import pytest

from consortium import BASE, NAMES, change, consortium, open_hospitals, same, states, values
from polysite import study
from polysite.config import parse
from polysite.deploy.coordinator import run as coordinator
from polysite.engines.sites import Deadlines
from slow_link import SlowLink

pytestmark = [pytest.mark.slow, pytest.mark.soak]
DEADLINES = Deadlines(quorum=3, deadline=600, grace=60, again=1, poll=0.02)


def test_a_hospital_behind_a_slow_link_that_is_cut_takes_part(tmp_path):
    chosen = parse(BASE, {"model.filters": "[8, 16, 32]"})  # 342 732 bytes: 11 seconds each way
    simulated = study.train(chosen, tmp_path / "simulated")
    made = consortium(tmp_path, NAMES)
    with coordinator.listening(made) as link, SlowLink(link.port, 256e3 / 8, 0.3) as slow:
        change(tmp_path / "a" / "site.toml", f"localhost:{link.port}", f"localhost:{slow.port}")
        cuts = [threading.Timer(seconds, slow.cut) for seconds in (45, 70)]
        with open_hospitals(tmp_path, NAMES):
            for cut in cuts:
                cut.start()
            deployed = coordinator.run(
                chosen, link, NAMES, tmp_path / "deployed", deadlines=DEADLINES, assess=False, wait=120
            )
            for cut in cuts:
                cut.cancel()
    one, other = states(simulated.folder.path), states(deployed.folder.path)
    assert one.keys() == other.keys() and one and all(same(one[k], other[k]) for k in one)
    assert values(deployed) == values(simulated)
    assert all(set(record.sites) == set(NAMES) for record in deployed.folder.records())
    assert slow.carried["up"] > 2 * 342_732
