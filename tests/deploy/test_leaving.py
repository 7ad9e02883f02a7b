"""A hospital leaves: what is deleted at both ends, the study without it; backups of a coordinator."""

import json
import shutil
from dataclasses import replace

import pytest

from consortium import BASE, FAST, NAMES, Inside, consortium, equal_states, values
from polysite import study
from polysite.config import parse
from polysite.deploy import leaving
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.project import Project, SiteConfig
from polysite.deploy.site import courier, ledger
from polysite.deploy.site.agreement import agree
from polysite.deploy.site.policy import SitePolicy
from polysite.deploy.site.worker import Worker
from polysite.deploy.site.worker_process import alone
from polysite.engines.run_folder import RunFolder
from polysite.errors import DataError, RunError

# two clusters of hospitals from the second round on: the server knows the model of each hospital
CHOSEN = {"algorithm.name": '"cfl"', "algorithm.split_at": "[1]"}


def opened(folder):
    """The workers of all hospitals, in this process."""
    sites = {name: SiteConfig.load(folder / name) for name in NAMES}
    return {name: Worker(site, SitePolicy.load(site.policy)) for name, site in sites.items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A project, its hospitals, and a study that all of them took part in."""
    folder = tmp_path_factory.mktemp("consortium")
    consortium(folder, NAMES)
    wire = Inside(opened(folder))
    coordinator.run(parse(BASE, CHOSEN), wire, NAMES, folder / "runs" / "first", deadlines=FAST, assess=False)
    return folder


@pytest.fixture
def place(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "c", symlinks=True)
    return tmp_path / "c"


def files(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def contents(folder):
    return {name: (folder / name).read_bytes() for name in files(folder) if name != ".lock"}


def test_a_hospital_leaves_and_what_is_of_it_alone_is_deleted(place):
    run, state, project = place / "runs" / "first", place / "c" / "state", place / "project"
    (id,) = (p.name for p in (state / "runs").iterdir())
    assert any((state / "runs" / id / "memory").iterdir())
    own = {f"models/{kind}.c.safetensors" for kind in ("best", "last")}
    before = files(run)
    assert own <= before
    with alone(state), pytest.raises(RunError, match="stop it first"):
        leaving.leave(place / "c")
    assert leaving.leave(place / "c") == [id]
    assert files(state / "runs") == {f"{id}/left", f"{id}/study.toml"}
    assert ledger.check(state / "ledger.jsonl")[-1]["kind"] == "leave"
    with pytest.raises(RunError, match="has left the federation"):
        courier.run(SiteConfig.load(place / "c"), print)

    with pytest.raises(DataError, match="'x' is no hospital of"):
        leaving.remove(project, "x", place / "runs")
    (place / "runs" / "stray").mkdir()
    (place / "runs" / "stray" / "deployment.json").write_text("[]")
    other = shutil.copytree(run, place / "runs" / "another")  # a study without this hospital, that trains now
    known = json.loads((other / "deployment.json").read_text())
    (other / "deployment.json").write_text(json.dumps({**known, "sites": {"a": known["sites"]["a"]}}))
    with RunFolder.open(run).alone(), pytest.raises(RunError, match="is in use"):
        leaving.remove(project, "c", place / "runs")
    assert Project.load(project).invited == ("c",)  # its key is revoked
    with RunFolder.open(other).alone():
        found = leaving.remove(project, "c", place / "runs")
    assert {str(p.relative_to(run)) for p in found} == own and files(run) == before - own
    assert leaving.remove(project, "c", place / "runs") == []  # it can be repeated


def test_a_study_is_repeated_without_a_hospital_as_if_it_had_never_been_there(place, tmp_path):
    hosts = opened(place)
    wire = Inside({name: hosts[name] for name in ("a", "b")})
    run = place / "runs" / "first"
    before = contents(run)
    again = coordinator.retrain(run, ["c"], wire, ("a", "b"), tmp_path / "again", deadlines=FAST)
    known = json.loads((tmp_path / "again" / "deployment.json").read_text())
    assert known["without"] == ["c"] and known["repeats"] == str(run) and list(known["sites"]) == ["a", "b"]
    chosen = parse(BASE, CHOSEN)
    data = replace(chosen.data, sites={name: chosen.data.sites[name] for name in ("a", "b")})
    simulated = study.train(replace(chosen, data=data), tmp_path / "simulated")
    assert equal_states(simulated, again) and values(again) == values(simulated)
    assert before == contents(run)
    for without, enrolled, said in ((["x"], NAMES, "has no site 'x'"), (["c"], ("a",), "b would take part")):
        with pytest.raises(RunError, match=said):
            coordinator.retrain(run, without, wire, enrolled, tmp_path / "no", deadlines=FAST)


def test_one_study_can_be_left_and_a_case_be_withdrawn(place):
    host = opened(place)["a"]
    (id,) = (p.name for p in (host.hospital.site.state / "runs").iterdir())
    with pytest.raises(RunError, match="is not a study of this site"):
        leaving.leave(place / "a", "other")
    config = (host.hospital.site.state / "runs" / id / "study.toml").read_text()
    case = next(iter(agree(host.hospital, id, config).splits["train"])).name
    assert leaving.withdraw(place / "a", case) == [id]
    anew = opened(place)["a"]
    names = [c.name for split in agree(anew.hospital, "another", config).splits.values() for c in split]
    assert case not in names and len(names) == 6
    refused, _ = anew.answer({"kind": "hello", "study": id, "config": config, "protocol": 2}, b"")
    assert "has left this study" in refused["refused"]
    with pytest.raises(RunError, match="was withdrawn before"):
        leaving.withdraw(place / "a", case)
    assert not (host.hospital.site.state / "left").exists()  # it stays in the federation
