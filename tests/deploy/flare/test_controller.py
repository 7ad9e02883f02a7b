"""A job of FLARE without its processes: a study runs, goes on where it ended, and says why it cannot."""

import json
import threading

import pytest
from nvflare.apis.signal import Signal

from consortium import NAMES, change, same, states, wanted, workers
from flare_fake import Job
from polysite.deploy.flare import controller as controllers
from polysite.deploy.flare.job import export
from polysite.engines.run_folder import RunFolder


@pytest.fixture
def here(monkeypatch):
    """All sites are there from the start."""

    def begin(job):
        original = controllers.FlareWire

        def made(controller, context, *more):
            wire = original(controller, context, *more)
            for name in job.workers:
                context.engine.say_here(name)
            return wire

        monkeypatch.setattr(controllers, "FlareWire", made)
        return job

    return begin


@pytest.mark.slow
def test_a_job_that_is_submitted_again_goes_on_after_its_last_round(tmp_path, here, trained):
    chosen = wanted("scaffold")
    folder = export(chosen, tmp_path / "job", sites=NAMES, quorum=3, assess=False)
    sites, root = workers(tmp_path), tmp_path / "server"
    first = here(Job(folder, sites, lambda header: header["kind"] == "train" and header["round"] == 1))
    first.run(root, folder, Signal())
    run = RunFolder(root / "polysite" / first.id)
    assert "submit the same job again" in first.problems[0] and not run.finished and len(run.records()) == 1
    second = here(Job(folder, sites))
    second.run(root, folder, Signal())
    assert second.problems == [] and [kind for _, kind in second.asked].count("train") == 3
    assert same(states(trained(chosen).folder.path), states(run.path))
    assert any("started again" in i["what"] for r in (*run.records(), run.result) for i in r.incidents)
    # the copy that "nvflare job download" brings has the page, and no checkpoints
    copy = root / "job" / "polysite" / first.id
    assert (copy / "index.html").is_file() and (copy / "result.json").is_file() and not (copy / "checkpoints").exists()
    third = here(Job(folder, {}))  # nothing is left to do
    third.run(root, folder, Signal())
    assert third.problems == [] and third.asked == []


def test_a_study_that_cannot_be_run_ends_the_job_with_its_sentence(tmp_path, here):
    folder = export(wanted("fedavg"), tmp_path / "job", sites=NAMES, quorum=3, assess=False)
    change(folder / "app" / "config" / "study.toml", "rounds = 2", "rounds = 0")
    job = here(Job(folder, workers(tmp_path)))
    job.run(tmp_path / "server", folder, Signal())
    (problem,) = job.problems
    assert "rounds" in problem and threading.active_count() < 50


def test_the_sites_are_those_of_the_job_if_it_names_none(tmp_path, here):
    folder = export(wanted("fedavg"), tmp_path / "job", quorum=3, assess=False)
    job = here(Job(folder, workers(tmp_path)))
    job.run(tmp_path / "server", folder, Signal())
    assert job.problems == []
    known = json.loads((tmp_path / "server" / "polysite" / job.id / "deployment.json").read_text())
    assert sorted(known["sites"]) == list(NAMES) and known["study"] == job.id
