"""A job of FLARE without its processes: a study runs, goes on where it ended, and says why it cannot."""

import json
import threading

import pytest
from nvflare.apis.signal import Signal

from consortium import NAMES, change, same, states, wanted, workers
from flare_fake import Job
from polysite.deploy.flare.job import export
from polysite.engines.run_folder import RunFolder


@pytest.fixture
def run(tmp_path):
    """A function that runs a job folder on a server, at which all sites are from the start."""

    def ran(folder, sites, stop=lambda header: False):
        job = Job(folder, sites, stop)
        job.run(tmp_path / "server", folder, Signal())
        return job, tmp_path / "server" / "polysite" / job.id

    return ran


@pytest.mark.slow
def test_a_job_that_is_submitted_again_goes_on_after_its_last_round(tmp_path, run, trained):
    chosen = wanted("scaffold")
    folder = export(chosen, tmp_path / "job", quorum=3, assess=False)  # without sites: those of the job take part
    sites = workers(tmp_path)
    first, place = run(folder, sites, lambda header: header["kind"] == "train" and header["round"] == 1)
    kept = RunFolder(place)
    assert "submit the same job again" in first.problems[0] and not kept.finished and len(kept.records()) == 1
    known = json.loads((place / "deployment.json").read_text())
    assert sorted(known["sites"]) == list(NAMES) and known["study"] == first.id
    second, _ = run(folder, sites)
    assert second.problems == [] and [kind for _, kind in second.asked].count("train") == 3
    assert same(states(trained(chosen).folder.path), states(place))
    assert any("started again" in i["what"] for r in (*kept.records(), kept.result) for i in r.incidents)
    # the copy that "nvflare job download" brings has the page, and no checkpoints
    copy = tmp_path / "server" / "job" / "polysite" / first.id
    assert (copy / "index.html").is_file() and (copy / "result.json").is_file() and not (copy / "checkpoints").exists()
    third, _ = run(folder, {})  # nothing is left to do
    assert third.problems == [] and third.asked == []


def test_a_study_that_cannot_be_run_ends_the_job_with_its_sentence(tmp_path, run):
    folder = export(wanted("fedavg"), tmp_path / "job", sites=NAMES, quorum=3, assess=False)
    change(folder / "app" / "config" / "study.toml", "rounds = 2", "rounds = 0")
    (problem,) = run(folder, workers(tmp_path))[0].problems
    assert "rounds" in problem and threading.active_count() < 50
