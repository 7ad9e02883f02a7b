"""A hospital leaves: what is deleted at both ends, what is listed, the study without it; backups of a coordinator."""

import json
import shutil

import pytest
from safetensors.numpy import load_file

from consortium import BASE, FAST, NAMES, Fragile, Inside, Stop, consortium, same, states, values
from polysite import study
from polysite.config import parse
from polysite.deploy import leaving
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.project import Project, SiteConfig
from polysite.deploy.site import courier, ledger
from polysite.deploy.site.policy import SitePolicy
from polysite.deploy.site.worker import Worker
from polysite.engines.run_folder import RunFolder
from polysite.errors import DataError, RunError
from polysite.payload import Payload

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


def test_a_hospital_leaves_and_what_remains_of_it_is_listed(place):
    run, state = place / "runs" / "first", place / "c" / "state"
    (id,) = (p.name for p in (state / "runs").iterdir())
    assert any((state / "runs" / id / "memory").iterdir())
    own = {f"models/{kind}.c.safetensors" for kind in ("best", "last")}
    assert own <= files(run)
    done = leaving.leave(place / "c")
    assert files(state / "runs") == {f"{id}/left", f"{id}/study.toml"}
    assert {t.kind: t.requests for t in done.sent}["train"] == 2
    assert ledger.check(state / "ledger.jsonl")[-1]["kind"] == "leave"
    with pytest.raises(RunError, match="has left the federation"):
        courier.run(SiteConfig.load(place / "c"), print)

    statement, (found,) = leaving.accept(place / "project", done.path, place / "runs")
    assert (statement.site, statement.studies, statement.federation) == ("c", (id,), True)
    assert found.rounds == (1, 2) and set(found.deleted) == own and not own & files(run)
    assert {"best.a.safetensors", "last.b.safetensors"} <= set(found.models) and found.checkpoints
    assert found.scores == 2 and "evaluation/test/cases.csv" in found.evaluations
    assert json.loads((run / "left.json").read_text())[0]["rounds"] == [1, 2]
    assert any("was merged into rounds 1-2" in line for line in leaving.sentences(found))
    assert Project.load(place / "project").invited == ("c",)  # its key is revoked
    with RunFolder.open(run).alone(), pytest.raises(RunError, match="is in use"):
        leaving.accept(place / "project", done.path, place / "runs")
    assert leaving.accept(place / "project", done.path, place / "runs")[1] == [found]  # it can be repeated


def test_a_study_is_repeated_without_a_hospital_as_if_it_had_never_been_there(place, tmp_path):
    hosts = opened(place)
    wire = Inside({name: hosts[name] for name in ("a", "b")})
    run = place / "runs" / "first"
    before = {name: (run / name).read_bytes() for name in files(run)}
    again = coordinator.retrain(run, ["c"], wire, ("a", "b"), tmp_path / "again", deadlines=FAST)
    known = json.loads((tmp_path / "again" / "deployment.json").read_text())
    assert known["without"] == ["c"] and known["repeats"] == str(run) and list(known["sites"]) == ["a", "b"]
    text = BASE.replace("[data.sites.c]\ncases = 7\nnoise = 0.2\n", "")
    alone = study.train(parse(text, CHOSEN), tmp_path / "simulated")
    one, other = states(alone.folder.path), states(again.folder.path)
    assert one.keys() == other.keys() and one and all(same(one[k], other[k]) for k in one)
    assert values(again) == values(alone)
    assert {name: (run / name).read_bytes() for name in files(run) if name != ".lock"} == {
        name: content for name, content in before.items() if name != ".lock"
    }
    for without, enrolled, said in ((["x"], NAMES, "has no site 'x'"), (["c"], ("a",), "b would take part")):
        with pytest.raises(RunError, match=said):
            coordinator.retrain(run, without, wire, enrolled, tmp_path / "no", deadlines=FAST)


def test_one_study_can_be_left_and_a_case_be_withdrawn(place):
    host = opened(place)["a"]
    (id,) = (p.name for p in (host.site.state / "runs").iterdir())
    with pytest.raises(RunError, match="is not a study of this site"):
        leaving.leave(place / "a", "other")
    config = (host.site.state / "runs" / id / "study.toml").read_text()
    case = next(iter(host._agree(id, config).splits["train"])).name
    done = leaving.withdraw(place / "a", case)
    assert done.statement.studies == (id,) and not done.statement.federation
    assert done.statement.cases == (host.pseudonyms.of(case),) and case not in done.path.read_text()
    anew = opened(place)["a"]
    names = [c.name for split in anew._agree("another", config).splits.values() for c in split]
    assert case not in names and len(names) == 6
    refused, _ = anew.answer({"kind": "hello", "study": id, "config": config, "protocol": 2}, b"")
    assert "has left this study" in refused["refused"]
    with pytest.raises(RunError, match="was withdrawn before"):
        leaving.withdraw(place / "a", case)
    _, (found,) = leaving.accept(place / "project", done.path, place / "runs")
    assert found.rounds == (1, 2) and Project.load(place / "project").sites.keys() == set(NAMES)


def test_a_statement_that_another_signed_or_changed_does_nothing(place):
    done, other = leaving.leave(place / "c"), leaving.leave(place / "a")
    before = files(place / "runs")
    text = done.path.read_text()
    mixed = json.dumps({**json.loads(text), "signature": json.loads(other.path.read_text())["signature"]})
    for wrong, said in (
        (mixed, "was not signed with the key of c"),
        (text.replace(r"\"c\"", r"\"b\""), "was not signed with the key of b"),
        (text.replace(r"\"c\"", r"\"x\""), "has no key in this project"),
        ("{}", "is not a statement"),
        ("[" * 100_000, "is not a statement"),
    ):
        done.path.write_text(wrong)
        with pytest.raises(DataError, match=said):
            leaving.accept(place / "project", done.path, place / "runs")
    assert files(place / "runs") == before and Project.load(place / "project").sites.keys() == set(NAMES)


def test_nobody_leaves_while_the_site_runs(place):
    with courier.alone(place / "c" / "state"), pytest.raises(RunError, match="stop it first"):
        leaving.leave(place / "c")


# backups


def test_a_coordinator_is_restored_from_a_backup_elsewhere(place, tmp_path):
    """The project and the run folder are copied while the server stands still; the rest of that server is lost."""
    hosts, chosen = opened(place), parse(BASE, {**CHOSEN, "run.rounds": "3"})
    stopping = Fragile(hosts, lambda header: header["kind"] == "train" and header["round"] == 2)
    with pytest.raises(Stop):
        coordinator.run(chosen, stopping, NAMES, place / "runs" / "second", deadlines=FAST, assess=False)
    backup = tmp_path / "backup"
    shutil.copytree(place / "project", backup / "project")
    shutil.copytree(place / "runs" / "second", backup / "run")
    shutil.rmtree(place / "project")
    shutil.rmtree(place / "runs")
    restored = Project.load(backup / "project")
    assert list(restored.sites) == list(NAMES) and restored.remarks == ()
    done = coordinator.resume(backup / "run", Inside(hosts), deadlines=FAST)
    whole = study.train(chosen, tmp_path / "simulated")
    assert values(done) == values(whole) and len(done.folder.records()) == 3
    for path in (whole.folder.path / "models").glob("*.safetensors"):
        assert Payload(model=load_file(path)) == Payload(model=load_file(done.folder.path / "models" / path.name))
