"""The guard over real sites: on by default, the bits of the simulator's, an alarm that names a hostile site."""

import json

import numpy as np
import pytest

from consortium import Inside, equal_states, go, wanted, workers
from polysite import config, study
from polysite.deploy.coordinator import run as coordinator
from polysite.payload import Payload, decode, encode
from polysite.report.page import build
from polysite.report.runs import methods, read

ON = {"run": {"rounds": 3, "guard": {"use": "on", "clip": 1.0}}}  # half of the changes are shortened


class Reversed(Inside):
    """Site c replies the opposite of its change, ten times as long."""

    def answer(self, site, header, body):
        got, out = super().answer(site, header, body)
        if site == "c" and header["kind"] == "train":
            sent, reply = decode(body)["model"], decode(out)
            model = {k: sent[k] - np.float32(10) * (x - sent[k]) for k, x in reply["model"].items()}
            out = encode(Payload(**{**reply, "model": model}))
        return got, out


@pytest.mark.parametrize("name", ["fedavg", pytest.param("scaffold", marks=pytest.mark.soak)])
def test_with_a_guard_sites_come_to_the_bits_of_the_simulator(name, tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator.secrets, "randbits", lambda bits: 0)
    chosen = config.vary(wanted(name), ON)
    simulated = study.train(chosen, tmp_path / "simulated", evaluate=False)
    deployed = go(tmp_path, chosen, Inside(workers(tmp_path)), evaluate=False)
    assert equal_states(simulated, deployed)
    assert simulated.result.best_round == deployed.result.best_round
    seen = [[r.guard for r in run.folder.records()] for run in (simulated, deployed)]
    assert seen[0] == seen[1] and any(g.clipped for r in seen[0] for g in r.values())


def test_a_deployment_is_guarded_unless_it_is_switched_off_and_the_page_names_who_attacks(tmp_path):
    chosen = config.vary(wanted("fedavg"), {"run": {"guard": {"use": "auto"}}})
    run = go(tmp_path, chosen, Reversed(workers(tmp_path)))
    assert config.parse(run.folder.config).run.guard.use == "on"
    first = run.folder.records()[0]
    assert first.guard["c"].clipped and first.guard["c"].lengths["model"] > 5 * first.guard["a"].lengths["model"]
    assert "c" in {i.get("site") for i in first.incidents}
    secret = json.loads((run.folder.path / "deployment.json").read_text())["secret"]
    assert secret and str(secret) not in run.folder.config
    page = build("run", methods([read(run.folder.path)]), lead="x")
    assert "Alarm: changes of c were shortened in 2 of 2 rounds" in page and "Alarm: changes of a" not in page
    honest = go(tmp_path / "honest", chosen, Inside(workers(tmp_path / "honest")))
    assert not any(r.incidents for r in honest.folder.records())
    assert {g.factor for r in honest.folder.records() for g in r.guard.values()} == {1.0}
