"""An advice over hospitals that keep their cases: as in the simulator, and what it cannot do is said beforehand."""

import json
from dataclasses import replace

import pytest

import consortium
from advices import BASE, ELSEWHERE, GIVEN, SITES, advised, differing
from consortium import FAST, NAMES, Fragile, Inside, Stop
from jobs_here import JobsHere
from polysite import advice, config
from polysite.advice.connected import Connected, check
from polysite.benchmark.jobs import inner_jobs, silent
from polysite.data.sources import AtHospitals
from polysite.deploy.site.policy import SitePolicy
from polysite.deploy.site.worker import Worker
from polysite.engines.messages import Greeting
from polysite.engines.run_folder import RunFolder
from polysite.engines.sites import Sites
from polysite.errors import ConfigError, RunError
from studies import SHAPE


def hospitals(folder, sites=SITES, **policy):
    """Hospitals whose own settings name their cases."""
    data = {"name": "phantom", "shape": list(SHAPE), "sites": sites, "seed": 0}
    settings = {n: replace(consortium.site_of(folder, n), data=data) for n in NAMES}
    return {n: Worker(site, SitePolicy(fewest=1, **{"studies": 100, **policy})) for n, site in settings.items()}


def own(found):
    """The name by which hospitals know the training of own models on the last inner fold."""
    run = found.trained.one["own 1 after fedavg"].jobs[-1].run
    return json.loads((run / "deployment.json").read_text())["study"]


def test_an_advice_over_hospitals_has_the_bits_of_the_simulator_and_goes_on_after_an_interruption(tmp_path):
    """The coordinator has numbers of cases only, and is interrupted in a round of the third training."""
    asked = []

    def third(header):
        asked.append(header["kind"] == "train" and header["study"])
        return len({*asked} - {False}) == 3

    said = []
    with pytest.raises(Stop):
        advised(tmp_path, Fragile(hospitals(tmp_path), third), step=lambda note, done=1: said.append(note))
    close = [note for note in said if "fewest = 3 or more" in note]
    assert [note.split(":")[0] for note in close] == [
        f"at {n}, two trainings of this advice differ by 2 cases" for n in NAMES
    ]
    post = Inside(hospitals(tmp_path))
    found = advised(tmp_path, post)
    whole = advice.advise(BASE, tmp_path / "simulated", **GIVEN, trainer=JobsHere())
    assert list(differing(found, whole)) == []
    again = {
        header["round"] for _, header, _ in post.sent if header["kind"] == "train" and header["study"] == own(found)
    }
    assert again == {2}  # the first phase was taken over
    page = advice.write_page(found).read_text()
    assert all(site in page for site in NAMES) and "-00" not in page.split("</style>")[-1].split("<svg")[0]
    for each, data in ((found, ELSEWHERE.data), (whole, BASE.data)):
        assert config.load(each.folder / "study.toml").data == data
    for each in {name: played.jobs for name, played in found.trained.one.items()}.values():
        assert all(isinstance(config.parse(RunFolder(job.run).config).data, AtHospitals) for job in each)
    moved = {**SITES, "b": {"cases": 7}}
    with pytest.raises(RunError, match="the cases of a hospital have changed since this advice began"):
        advised(tmp_path, Inside(hospitals(tmp_path, moved)))


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"case_scores": False}, "the policy of a says case_scores = false"),
        ({"kinds": ("model", "update", "one", "cost", "statistics", "number")}, "'weight' is of the kind 'count'"),
        ({"studies": 8}, "takes 10 to 37 studies at every hospital; policies allow so many .*: a 7, b 7, c 7"),
        ({"assess": False}, "an advice begins with an assessment: no assessment: the policies of fewer than two sites"),
    ],
)
def test_what_policies_do_not_allow_is_said_before_anything_is_trained(policy, words, tmp_path):
    post = Inside(hospitals(tmp_path, **policy))
    with pytest.raises((ConfigError, RunError), match=words):
        advised(tmp_path, post)
    assert {header["kind"] for _, header, _ in post.sent} <= {"hello", "assess"}
    assert not (tmp_path / "advice").exists()


def test_an_advice_waits_for_another_day_when_the_policies_allow_no_more_studies_today(tmp_path):
    two = Sites(None, ["a"])
    two.status["a"].greeting = Greeting({}, studies=1)
    jobs = inner_jobs(tmp_path, {"fedavg": BASE}, 2)["fedavg"]
    with pytest.raises(RunError, match=r"the next 2 trainings are a study each; .*: a 1. Ask .* again tomorrow"):
        Connected(BASE, None, two, "id", tmp_path, silent, FAST, 0).train(jobs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slices": {"axis": "axial"}, "train": {"patch": [8, 8], "window": []}}, "known at the hospitals alone"),
        ({"train": {"private": {"unit": "hospital", "noise": 1.0}}}, "assess.private.epsilon"),
        ({"run": {"pooled": True}}, "scans would have to leave"),
    ],
)
def test_what_cannot_be_advised_over_hospitals_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        check(config.vary(BASE, changes))
