"""The best round by voices: one hospital cannot choose it, whatever it claims; sudden changes are incidents."""

import numpy as np
import pytest

from hostile import CLAIMED, Hostile
from polysite.algorithms.fedavg import FedAvg
from polysite.engines.best_round import advantage, surprises
from polysite.engines.guard_state import Guard
from polysite.engines.phases import Phase, find_progress, run_phases
from polysite.engines.plan import Plan
from polysite.engines.run_folder import RunFolder
from polysite.errors import Paused
from quadratic import Quadratic

START = {"w": np.array([3.0])}
NAMES = "abcde"


def test_gains_are_trimmed_at_both_ends():
    best = dict.fromkeys(NAMES, 0.5)
    assert advantage({"a": 0.6, "b": 0.7, "c": 0.65, "d": 1.0, "e": 0.0}, best) == pytest.approx(0.15)
    assert advantage({"a": 0.6, "b": 0.4}, best) == pytest.approx(0.0)  # of two gains, none is trimmed
    assert advantage({"a": 0.4, "b": 0.6, "c": 0.7}, best) == pytest.approx(0.1)  # three: the median
    seven = {i: 0.5 + k / 100 for k, i in enumerate("abcdefg")}
    assert advantage(seven, dict.fromkeys(seven, 0.5)) == pytest.approx(0.03)
    assert advantage({"x": 0.7}, {"y": 0.6}) == pytest.approx(0.1) and advantage({"x": 0.7}, {}) > 0


def test_jumps_and_other_numbers_of_cases_are_told():
    before = dict.fromkeys(NAMES, (4, 0.5))
    now = dict.fromkeys(NAMES, (4, 0.55)) | {"d": (2000, 0.55), "e": (4, 0.95)}
    assert dict(surprises(before, now)) == {
        "d": "scores 2000 validation cases instead of 4",
        "e": "its mean score jumps from 0.500 to 0.950, while that of the other sites changes by +0.050",
    }
    assert not dict(surprises(before, dict.fromkeys(NAMES, (4, 0.9))))  # all of them learnt something


def run(path, use, until=None):
    sites = {i: Quadratic(1.0, np.full(4, 0.1 * k), lr=0.05, start=START) for k, i in enumerate(NAMES)}
    transport = Hostile(FedAvg(), sites).attacked("score lie", "e")
    phases = [Phase(FedAvg(), transport, Plan(rounds=6, guard=Guard(use=use), checkpoint_every=1))]
    folder = RunFolder.open(path) if path.exists() else RunFolder.create(path, "", 0)
    return run_phases(phases, START, 0, folder, resume=find_progress(folder, phases), until=until), folder


def test_a_hospital_that_praises_a_bad_round_does_not_choose_it(tmp_path):
    believed, _ = run(tmp_path / "off", "off")
    assert believed.best_round == 0 and len(believed.validation["e"]) == CLAIMED  # 2000 of 2016 cases
    result, folder = run(tmp_path / "on", "on")
    records = folder.records()
    assert result.best_round == 5 and [r.best_round for r in records] == list(range(6))
    assert records[0].mean_score < 0.6  # every hospital counts once
    jumps = [i for r in records for i in r.incidents if "jumps" in i["what"]]
    assert [i["site"] for i in jumps] == ["e"]


def test_voices_survive_a_pause(tmp_path):
    with pytest.raises(Paused):
        run(tmp_path / "run", "on", until=2)
    result, folder = run(tmp_path / "run", "on")
    assert result.best_round == 5 and sum("jumps" in i["what"] for r in folder.records() for i in r.incidents) == 1
