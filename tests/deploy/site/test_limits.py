"""What cannot happen to a hospital: that it is exhausted, two studies subtracted, cases moved, a damaged file its end.

The worker is a real one, with scans in files where the cases themselves matter.
"""

import json
import shutil
import time
from dataclasses import replace

import pytest

import consortium
import studies
from consortium import start_of
from polysite import config
from polysite.costs.model import Demand
from polysite.data import phantom
from polysite.data.phantom import Hospital
from polysite.deploy.site import agreement
from polysite.deploy.site.policy import SitePolicy
from polysite.deploy.site.pseudonyms import Pseudonyms
from polysite.deploy.site.studies import Studies, Trace
from polysite.engines import host as host_of_a_site
from polysite.engines import site_memory
from polysite.errors import DataError
from polysite.payload import Payload, encode

STUDY = """
[data]
name = "hospitals"
modalities = ["t1", "t1ce", "t2", "flair"]
labels = ["WT", "TC", "ET"]
[model]
filters = [2, 4, 4]
[train]
patch = [16, 16, 16]
augment = "none"
[run]
rounds = 9
"""
REHEARSAL = studies.text({"north": 12})
DITTO = REHEARSAL + '[algorithm]\nname = "ditto"\n'


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Fourteen generated patients as files."""
    root = tmp_path_factory.mktemp("scans") / "north"
    cases = (phantom.draw(Hospital(14), site="north", index=k, seed=0, shape=(24, 24, 24)) for k in range(14))
    phantom.write(cases, root.parent)
    return root


def ask(host, kind, body=b"", **header):
    return consortium.ask(host, kind, body, **header)[0]


def hello(host, study="s", **changes):
    chosen = config.parse(STUDY, {key.replace("_", "."): f"{value}" for key, value in changes.items()})
    return ask(host, "hello", study=study, config=config.dump(chosen))


def train(host, round=0, version=-1, **more):
    return ask(host, "train", encode(Payload(model=start_of(host))), round=round, version=version, **more)


HUGE = [  # what a study asks for, and what is said about it
    ({"model.filters": "[2048, 4096, 4096, 512]"}, "parameters = 100000000"),
    ({"model.filters": f"{[2] * 18}", "train.patch": f"{[1 << 20] * 3}"}, "more or wider layers"),
    ({"model.filters": "[9000000000000000000, 4, 4]"}, "more or wider layers"),
    ({"data.shape": "[700, 700, 700]"}, "memory = 12"),
    ({"data.sites.north.cases": "1_000_000_000"}, "1000000000 generated patients"),
    ({"data.sites.north.cases": "200", "data.shape": "[200, 200, 200]"}, "memory = 12"),
    ({"train.patch": "[4096, 4096, 4096]"}, ""),
    ({"train.batch": "1000000000"}, ""),
    ({"train.window": "[4096, 4096, 4096]"}, ""),
    ({"prepare.size": "[3000, 3000, 3000]"}, ""),
    ({"prepare.spacing": "[0.01, 0.01, 0.01]"}, ""),
]


@pytest.mark.parametrize("changes, said", HUGE)
def test_a_study_that_would_exhaust_the_hospital_is_refused_before_it_begins(hospital, changes, said, monkeypatch):
    host, text = hospital(), config.dump(config.parse(REHEARSAL, changes))
    monkeypatch.setattr(agreement.study, "build_sites", lambda *_: pytest.fail("the study was begun"))
    monkeypatch.setattr(agreement.study, "cut", lambda *_: pytest.fail("a case was prepared"))
    reason = ask(host, "hello", config=text)["refused"]
    assert said in reason and "\n" not in reason and len(reason) < 200
    assert not (host.hospital.site.state / "runs").exists()


@pytest.mark.parametrize(
    "more, room, said",
    [
        ({"memory": 9}, {"main_memory": 8}, "more than this computer has"),
        ({"gpu": 11}, {"gpu_memory": 10}, "gpu_share = 1"),
        ({"disk": 200 * 10**9}, {}, "disk = 100"),
        ({"disk": 9}, {"free_disk": 8}, "more than is free here"),
        ({}, {}, None),
    ],
)
def test_every_limit_has_a_sentence(more, room, said):
    needs = replace(Demand(parameters=10, memory=10, gpu=10, disk=10), **more)
    room = {"main_memory": 10**12, "gpu_memory": 100, "free_disk": 10**12, **room}
    reason = SitePolicy().refuse_demand(needs, **room)
    assert reason is None if said is None else said in reason


def test_a_request_that_takes_too_long_is_stopped_and_the_study_refused_in_the_end(hospital, monkeypatch):
    host = hospital()
    assert "train" in ask(host, "hello", config=REHEARSAL)
    host.hospital.policy = replace(host.hospital.policy, seconds=0.05)
    monkeypatch.setattr(host_of_a_site, "take_turn", lambda *_: time.sleep(30))
    for _ in range(3):
        host._joined._find("s")
        assert train(host)["refused"] == "train took too long here: policy.toml says seconds = 0.05"
    assert host.agreed is None
    assert "took too long" in ask(host, "hello", config=REHEARSAL)["refused"]
    assert "train" in ask(hospital(), "hello", config=REHEARSAL, study="another")


# similar studies


def trace(train, study="a", seed=0, seen=(8,), assessed=(), at=None):
    return Trace(study, time.time() if at is None else at, tuple(train), tuple(assessed), seed, tuple(seen))


def test_studies_are_similar_if_their_difference_is_about_few_cases():
    cases = [f"{k}" for k in range(20)]
    base = trace(cases)
    assert not base.alike(trace(cases), 5)  # the same study again tells nothing new
    assert base.alike(trace(cases[1:]), 5) and base.alike(trace([*cases[:-2], "x", "y"]), 5)
    assert not base.alike(trace(cases[5:]), 5) and not base.alike(trace(cases[1:]), 1)
    assert base.alike(trace(cases, seen=(9,)), 5) and not base.alike(trace(cases, seen=(13,)), 5)
    assert not base.alike(trace(cases, seen=(9,), seed=1), 5)  # other draws
    assert trace(cases, seen=(8, 9)).alike(trace(cases, seen=(8, 9)), 5)  # two phases
    assert trace(cases, assessed=cases).alike(trace(cases, assessed=cases[1:]), 5)


def test_studies_are_remembered_for_some_days_and_a_damaged_list_forgets_nothing(tmp_path):
    known = Studies(tmp_path / "studies.jsonl")
    cases = [f"{k}" for k in range(20)]
    known.add(trace(cases, at=time.time() - 20 * 86400))
    new = trace(cases[1:], "b")
    assert known.similar(new, 30, 5) == "a" and not known.similar(new, 10, 5) and not known.similar(new, 0, 5)
    assert (tmp_path / "studies.jsonl").stat().st_mode & 0o777 == 0o600
    (tmp_path / "studies.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"studies\.jsonl"):
        known.similar(new, 30, 5)


def manifest(scans, file, train):
    """Write a manifest in which so many cases train, and four others validate or are tested."""
    lines = ["site,case,t1,t1ce,t2,flair,label,labels,split"]
    for k, folder in enumerate(sorted(scans.iterdir())[: train + 4]):
        images = ",".join(f"{folder}/{name}.nii.gz" for name in ("t1", "t1ce", "t2", "flair", "seg"))
        part = "train" if k >= 4 else "validation" if k < 2 else "test"
        lines.append(f'north,{folder.name},{images},"WT=1,2,4; TC=1,4; ET=4",{part}')
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_study_with_one_step_more_is_refused(hospital, scans):
    def steps(study, count, **policy):
        return hello(hospital(scans, fewest=3, **policy), study, train_steps=count, train_batch=1)

    assert steps("s", 4)["train"] == 8
    said = steps("t", 5)["refused"]
    assert "similar_days = 30" in said and "fewest = 3" in said
    assert "train" in steps("u", 4) and "train" in steps("v", 9) and "train" in steps("w", 5, similar_days=0)


def test_a_study_with_one_patient_more_is_refused(hospital, scans, tmp_path):
    few, more, many = (manifest(scans, tmp_path / f"{n}.csv", n) for n in (5, 6, 10))
    host = hospital(few)
    assert hello(host)["train"] == 5
    shutil.rmtree(host.hospital.site.state / "runs")  # a deleted folder forgets nothing
    assert "similar_days = 30" in hello(hospital(more), "t")["refused"]
    assert hello(hospital(many), "u")["train"] == 10
    assert hello(hospital(more, similar_days=0), "v")["train"] == 6


# the split


def parts(host):
    return {part: {case.name for case in host.agreed.volumes[part]} for part in ("train", "validation", "test")}


def test_changed_data_move_no_case_and_are_an_incident(hospital, scans, tmp_path):
    data = tmp_path / "north"
    shutil.copytree(scans, data)
    kept_back = sorted(data.iterdir())[0]
    shutil.move(kept_back, tmp_path / "kept_back")
    host = hospital(data)
    assert "incidents" not in hello(host)
    before = parts(host)
    digest = host.hospital.pseudonyms.list_digest("s", before)
    assert "incidents" not in hello(hospital(data)) and "incidents" not in train(host)
    shutil.move(tmp_path / "kept_back", kept_back)  # one more
    again = hospital(data)
    answer = hello(again)
    after = parts(again)
    assert after == {**before, "train": before["train"] | {kept_back.name}}
    (incident,) = answer["incidents"]
    assert "cases are not those" in incident and kept_back.name not in json.dumps(answer)
    assert again.hospital.pseudonyms.list_digest("s", after) != digest
    shutil.rmtree(data / min(before["test"]))  # one gone
    last = hospital(data)
    assert hello(last)["incidents"]
    assert parts(last) == {**after, "test": after["test"] - {min(before["test"])}}
    kept = host.hospital.site.state / "runs" / "s" / "split.json"
    assert not any(name in kept.read_text() for names in before.values() for name in names)
    kept.write_text("{}")  # without it the study does not go on
    answer = hello(hospital(data))
    assert "error" in answer and "split.json" in answer["local"]


def test_cases_that_a_study_leaves_out_stay_out(hospital, scans, tmp_path):
    """The inner folds of a search have no test cases; a change of the data must not bring them in."""
    data = tmp_path / "north"
    shutil.copytree(scans, data)
    host = hospital(data, fewest=1)
    hello(host, split_inner=3)
    before = parts(host)
    out = {folder.name for folder in data.iterdir()} - set.union(*before.values())
    assert out and not before["test"]
    for gone in sorted(before["train"])[:2]:
        shutil.rmtree(data / gone)
    again = hospital(data, fewest=1)
    assert hello(again, split_inner=3)["incidents"]
    after = parts(again)
    assert not out & set.union(*after.values()) and after["validation"] == before["validation"]


def test_the_digest_of_the_cases_depends_on_the_secret_and_on_nothing_else(tmp_path):
    one, other = (Pseudonyms(tmp_path / name / "secret") for name in "ab")
    cases = {"train": ["x", "y"], "test": ["z"]}
    digest = one.list_digest("s", cases)
    assert digest == Pseudonyms(tmp_path / "a" / "secret").list_digest("s", {"test": ["z"], "train": ["y", "x"]})
    assert digest != other.list_digest("s", cases)
    assert digest != one.list_digest("s", {"train": ["x"], "test": ["y", "z"]})
    assert one.digest("x") != other.digest("x") and one.digest("x")[:10] not in one.of("x")
    sliced = {"train": ["x/z001", "x/z002", "y/z001"], "test": ["z/z009"]}
    assert one.list_digest("s", sliced) == digest and len(digest) == 64
    assert one.list_digest("another study", cases) != digest


# damaged memories


def damage(path):
    content = bytearray(path.read_bytes())
    content[-20] ^= 255
    path.write_bytes(content)


def test_a_damaged_memory_is_set_aside_and_the_last_sound_one_of_this_phase_is_used(hospital):
    host = hospital()
    ask(host, "hello", config=DITTO)
    policy, memory = host.hospital.policy, host.hospital.site.state / "runs" / "s" / "memory"
    host.hospital.policy = replace(policy, disk=0.00001)
    assert "disk = 1e-05" in train(host)["refused"] and not list(host.hospital.site.state.rglob("round-*.safetensors"))
    host.hospital.policy = policy
    assert "incidents" not in train(host)
    damage(memory / "round-000000.safetensors")
    answer = train(host, 1, version=0)
    assert answer["incidents"] == ["its memory of round 1 was damaged: it goes on as if it had just joined"]
    assert (memory / "round-000000.safetensors.damaged").exists() and "fit_loss" in answer
    assert "incidents" not in train(host, 2, version=1, keep=[1])  # it has a memory again
    damage(memory / "round-000002.safetensors")
    answer = train(host, 3, version=2)
    assert answer["incidents"] == ["its memory of round 3 was damaged: it goes on from that of round 2"]
    other = site_memory.Memory("north", "scaffold in phase 2", 5, Payload())
    site_memory.save(memory / "round-000005.safetensors", other)
    assert "error" in train(host, 6, version=5)  # sound, and of another owner: still refused
    assert (memory / "round-000005.safetensors").exists()


def test_the_model_that_a_phase_began_from_has_a_copy(hospital):
    host = hospital()
    ask(host, "hello", config=REHEARSAL + '[[then]]\nalgorithm = "fine_tune"\nrun.rounds = 2\n')
    start = encode(Payload(model=start_of(host)))
    ask(host, "begin", start, phase=1, begins=3, before=0, round=2)
    folder = host.hospital.site.state / "runs" / "s"
    damage(folder / "phase-1.safetensors")
    answer = ask(hospital(), "train", start, phase=1, round=3)
    assert "copy" in answer["incidents"][0] and "error" not in answer
    damage(folder / "phase-1.copy.safetensors")
    assert "error" in ask(hospital(), "train", start, phase=1, round=4)
