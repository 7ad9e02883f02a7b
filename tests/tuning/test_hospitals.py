"""A search over sites that keep their cases ends as the simulated one, bit for bit, and asks policies first."""

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import pytest

import polysite as ps
from consortium import FAST, Fragile, Inside, Stop, consortium, environment, open_hospitals, until, worker
from polysite import study
from polysite.config import dump
from polysite.config import load as load_study
from polysite.data.sources import AtHospitals
from polysite.deploy.site.ledger import check
from polysite.engines.guard_state import Guard
from polysite.errors import ConfigError, Paused, RunError
from polysite.tuning import Simulated, load, tune
from polysite.tuning.hospitals import Hospitals
from studies import SEARCHED, tiny

NAMES = ("a", "b")
SITES = {"a": ps.Hospital(cases=5), "b": ps.Hospital(cases=6, noise=0.2)}
# without the guard, as the simulator, which it is compared with
BASE = tiny(SITES, filters=(2, 2, 2), train=SEARCHED, run={"rounds": 6, "guard": Guard(use="off")})
GIVEN = {"trainings": 5.5, "inner": 2}
REMOTE = replace(BASE, data=AtHospitals(BASE.data.modality_names, BASE.data.label_names))  # no case can be listed
DEADLINES = replace(FAST, quorum=2)


@pytest.fixture
def space(tmp_path):
    """Three candidates, of which one goes on beside the reference."""
    file = tmp_path / "space.toml"
    file.write_text(
        "[search]\n'train.lr' = ['x1']\n[methods.fedavg]\nalgorithm = 'fedavg'\n"
        "[methods.ditto]\nalgorithm = 'ditto'\nsearch = { 'algorithm.lam' = [0.5] }\n"
    )
    return load(file)


class Here(Simulated):
    """Runs jobs in this process."""

    def work(self, jobs, step):
        for job in (job for job in jobs if not job.done):
            go = {"evaluate": False, "until": job.until}
            with suppress(Paused):
                study.resume(job.run, **go) if job.run.exists() else study.train(load_study(job.file), job.run, **go)
        return {}


class Greeted(Hospitals):
    """Trains nothing."""

    def work(self, jobs, step):
        raise Stop({job.method for job in jobs})


def hosts(tmp_path, **policies):
    """Workers of hospitals that have the patients of ``BASE``."""
    found = {name: worker(tmp_path, name, **policies.get(name, {})) for name in NAMES}
    for name, each in found.items():
        cases = {"cases": SITES[name].cases, "noise": SITES[name].noise}
        each.site = replace(each.site, data={"name": "phantom", "shape": [24, 24, 24], "sites": {name: cases}})
    return found


def outcome(found):
    return [(row.run, row.share, row.score, row.sites, row.path) for row in found.rows]


def test_a_search_over_hospitals_is_that_of_the_simulator_and_resumes_to_the_same_choice(tmp_path, space):
    simulated = tune(BASE, tmp_path / "simulated", space, **GIVEN, runner=Here())
    assert len(simulated.rows) == 3 and len({row.share for row in simulated.rows}) == 2
    sites, left = hosts(tmp_path), iter(range(22))
    wire = Fragile(sites, lambda header: header["kind"] == "train" and next(left, None) is None)
    with pytest.raises(Stop):  # in the second rung
        tune(REMOTE, tmp_path / "out", space, **GIVEN, runner=Hospitals(wire, NAMES, DEADLINES, wait=0))
    assert wire.sent[-1][1]["kind"] in ("train", "score")
    found = tune(REMOTE, tmp_path / "out", space, **GIVEN, runner=Hospitals(Inside(sites), NAMES, DEADLINES, wait=0))
    assert outcome(found) == outcome(simulated) and found.study == replace(simulated.study, data=REMOTE.data)
    for name in NAMES:
        entries = check(tmp_path / "sites" / name / "ledger.jsonl")
        scored = {field for entry in entries for field in entry["left"] if "scores" in field}
        assert scored and all("validation" in field or " 0 test" in field for field in scored)
        assert len({entry["study"] for entry in entries}) == 1 + GIVEN["inner"] * len(found.rows)
        assert not {"assess", "examine"} & {entry["kind"] for entry in entries}


def test_what_a_policy_forbids_is_known_before_anything_is_trained(tmp_path, space):
    sites = hosts(tmp_path, b={"algorithms": ("fedavg",)})
    with pytest.raises(Stop) as stop:
        tune(REMOTE, tmp_path / "out", space, **GIVEN, runner=Greeted(Inside(sites), NAMES, DEADLINES, wait=0))
    assert stop.value.args == ({"000 fedavg"},)  # ditto is left out
    few = Greeted(Inside(hosts(tmp_path / "few", a={"studies": 6})), NAMES, DEADLINES, wait=0)
    with pytest.raises(RunError, match="6 more studies for every hospital, and a allows 5 more within 24 hours"):
        tune(REMOTE, tmp_path / "few", space, **GIVEN, runner=few)
    assert not (tmp_path / "few" / "runs").exists() and {header["kind"] for _, header, _ in few.wire.sent} == {"hello"}


def test_what_cannot_be_compared_is_refused(tmp_path):
    changed = replace(BASE, data=ps.Phantom(shape=(24, 24, 24), sites={**SITES, "a": ps.Hospital(cases=9)}))
    wire = Inside(hosts(tmp_path))
    Hospitals(wire, NAMES, DEADLINES, wait=0).meet(BASE, tmp_path / "out", lambda *_: None)
    known = json.loads((tmp_path / "out" / "hospitals.json").read_text())
    assert known["cases"]["b"] == {"train": 4, "validation": 1, "test": 1}
    with pytest.raises(RunError, match=r"a has other cases \(5 train, 2 validation, 2 test\) than when the search"):
        Hospitals(wire, NAMES, DEADLINES, wait=0).meet(changed, tmp_path / "out", lambda *_: None)
    small = replace(BASE, data=ps.Phantom(shape=(24, 24, 24), sites={**SITES, "a": ps.Hospital(cases=3)}))
    with pytest.raises(RunError, match="a reports one training case, or hides the number"):
        Hospitals(wire, NAMES, DEADLINES, wait=0).meet(small, tmp_path / "small", lambda *_: None)
    pooled = tmp_path / "pooled.toml"
    pooled.write_text("[methods.fedavg]\nalgorithm = 'fedavg'\n[methods.all]\nrun = { pooled = true }\n")
    with pytest.raises(ConfigError, match=r"001 all cannot run over real hospitals: run\.pooled is centralised"):
        runner = Greeted(wire, NAMES, DEADLINES, wait=0)
        tune(BASE, tmp_path / "pooled", load(pooled), 4, 2, "rounds", runner)


@pytest.mark.soak
@pytest.mark.slow
def test_a_killed_command_over_real_processes_ends_with_the_choice_of_the_simulator(tmp_path, space):
    made = consortium(tmp_path, NAMES)
    (tmp_path / "study.toml").write_text(dump(BASE))
    given = ["--space", str(tmp_path / "space.toml"), "--trainings", "5.5", "--inner", "2"]
    whose = ["--project", str(made.folder), "--out", str(tmp_path / "out"), "--json"]
    command = [sys.executable, "-m", "polysite.cli", "deploy", "tune", str(tmp_path / "study.toml"), *given, *whose]
    with open_hospitals(tmp_path, NAMES), (tmp_path / "screen.txt").open("w") as screen:
        first = subprocess.Popen(command, stdout=screen, stderr=screen, env=environment())
        until(lambda: len(list((tmp_path / "out" / "runs").glob("*/*/rounds.jsonl"))) == 3, 240)  # the third run
        first.kill()
        first.wait()
        again = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=400)
    assert again.returncode == 0, again.stderr
    simulated = tune(BASE, tmp_path / "simulated", space, **GIVEN, runner=Here())
    found = json.loads(again.stdout)
    assert (found["best"], found["score"]) == (simulated.best.candidate.name, simulated.best.score)
    tables = [(tmp_path / name / "candidates.csv").read_text() for name in ("out", "simulated")]
    assert tables[0] == tables[1] and "The search goes on" not in (tmp_path / "out" / "index.html").read_text()
    for name in NAMES:
        check(tmp_path / name / "state" / "ledger.jsonl")
