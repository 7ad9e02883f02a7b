"""What cannot happen to a hospital: that it is exhausted, two studies subtracted, cases moved, a damaged file its end.

The worker is a real one, with scans in files where the cases themselves matter.
"""

import json
import shutil
import time
from dataclasses import replace

import pytest

from polysite import config
from polysite.costs.model import Demand
from polysite.data import phantom
from polysite.data.phantom import Hospital
from polysite.deploy.identity import identity
from polysite.deploy.protocol import PROTOCOL
from polysite.deploy.site import agreement, worker
from polysite.deploy.site.policy import SitePolicy
from polysite.deploy.site.pseudonyms import Pseudonyms
from polysite.deploy.site.studies import Studies, Trace
from polysite.errors import ConfigError, DataError
from polysite.payload import Payload, encode
from polysite.study.estimate import demand

STUDY = """
seed = {seed}
[data]
name = "hospitals"
modalities = ["t1", "t1ce", "t2", "flair"]
labels = ["WT", "TC", "ET"]
[model]
filters = [2, 4, 4]
[train]
patch = [16, 16, 16]
augment = "none"
batch = {batch}
{train}
[split]
{split}
[algorithm]
name = "{algorithm}"
[run]
rounds = 9
"""
GENERATED = """
[data]
name = "phantom"
shape = {shape}
sites.north = {{ cases = {cases} }}
[model]
{model}
[train]
patch = {patch}
{train}
[prepare]
{prepare}
"""
SMALL = {"shape": [24] * 3, "cases": 12, "model": "filters = [2, 4, 4]", "patch": [16] * 3, "train": "", "prepare": ""}


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Fourteen generated patients as files."""
    root = tmp_path_factory.mktemp("scans") / "north"
    cases = (phantom.draw(Hospital(14), site="north", index=k, seed=0, shape=(24, 24, 24)) for k in range(14))
    phantom.write(cases, root.parent)
    return root


def ask(host, kind, body=b"", study="s", **header):
    return host.answer({"protocol": PROTOCOL, "study": study, "kind": kind, **identity(), **header}, body)[0]


def hello(host, study="s", seed=0, batch=4, train="", split="", algorithm="fedavg"):
    text = STUDY.format(seed=seed, batch=batch, train=train, split=split, algorithm=algorithm)
    return ask(host, "hello", study=study, config=text)


def train(host, round=0, version=-1, **more):
    start = {k: v.numpy() for k, v in host.agreed.phases[0][1].start.items()}
    return ask(host, "train", encode(Payload(model=start, **more)), phase=0, round=round, version=version)


HUGE = {
    "parameters": {"model": "filters = [2048, 4096, 4096, 512]"},
    "layers": {"model": "filters = [2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]", "patch": [1 << 20] * 3},
    "width": {"model": "filters = [9000000000000000000, 4, 4]"},
    "phantom": {"shape": [700, 700, 700]},
    "patients": {"cases": 1_000_000_000},
    "many": {"shape": [200, 200, 200], "cases": 200},
    "patch": {"patch": [4096] * 3},
    "batch": {"train": "batch = 1000000000"},
    "window": {"train": "window = [4096, 4096, 4096]"},
    "size": {"prepare": "size = [3000, 3000, 3000]"},
    "spacing": {"prepare": "spacing = [0.01, 0.01, 0.01]"},
}


@pytest.mark.parametrize("what", HUGE)
def test_a_study_that_would_exhaust_the_hospital_is_refused_before_anything_is_allocated(hospital, what, monkeypatch):
    host = hospital()
    monkeypatch.setattr(agreement.study, "build_sites", lambda *_: pytest.fail("the study was begun"))
    monkeypatch.setattr(agreement.study, "cut", lambda *_: pytest.fail("a case was prepared"))
    answer = ask(host, "hello", config=GENERATED.format(**{**SMALL, **HUGE[what]}))
    reason = answer["refused"]
    assert "\n" not in reason and len(reason) < 200 and not (host.site.state / "runs").exists()
    key = {"parameters": "parameters = 100000000", "phantom": "memory = 12", "many": "memory = 12"}.get(what, "")
    assert key in reason


def test_limits_are_those_of_the_policy(hospital):
    assert "parameters = 1000" in ask(hospital(parameters=1000), "hello", config=GENERATED.format(**SMALL))["refused"]
    said = ask(hospital(memory=0.001), "hello", config=GENERATED.format(**SMALL))["refused"]
    assert "GB of memory: policy.toml says memory = 0.001" in said
    assert ask(hospital(), "hello", config=GENERATED.format(**SMALL))["train"] == 8


def test_the_estimate_is_that_of_the_network_itself():
    """The large U-Net has 22.58 million parameters; nothing of its size is allocated."""
    study = config.parse('[data]\nname = "phantom"\n[model]\nname = "unet"\n[train]\ndevice = "cpu"\n')
    found = demand(study, 0)
    assert found.parameters == 22_577_987 and found.gpu == 0 and 1e8 < found.memory < 1e9


DEMAND = Demand(parameters=10, memory=10, gpu=10, disk=10)


@pytest.mark.parametrize(
    "more, room, said",
    [
        ({"parameters": 10**9}, {}, "parameters"),
        ({"memory": 13 * 10**9}, {}, "memory = 12"),
        ({"memory": 9}, {"main_memory": 8}, "more than this computer has"),
        ({"gpu": 11}, {"gpu_memory": 10}, "gpu_share = 1"),
        ({"disk": 200 * 10**9}, {}, "disk = 100"),
        ({"disk": 9}, {"free_disk": 8}, "more than is free here"),
        ({}, {}, None),
    ],
)
def test_every_limit_has_a_sentence(more, room, said):
    places = {"main_memory": 10**12, "gpu_memory": 10**12, "free_disk": 10**12, **room}
    reason = SitePolicy().refuse_demand(replace(DEMAND, **more), **places)
    assert reason is None if said is None else said in reason


def test_a_request_that_takes_too_long_is_stopped_and_the_study_refused_in_the_end(hospital, monkeypatch):
    host, text = hospital(), GENERATED.format(**SMALL)
    assert "train" in ask(host, "hello", config=text)
    host.policy = replace(host.policy, seconds=0.05)
    monkeypatch.setattr(worker, "take_turn", lambda *_: time.sleep(30))
    for _ in range(3):
        host.agreed = host.agreed or host._agree("s", text)
        assert train(host)["refused"] == "train took too long here: policy.toml says seconds = 0.05"
    assert host.agreed is None
    assert "took too long" in ask(host, "hello", config=text)["refused"]
    assert "train" in ask(hospital(), "hello", config=text, study="another")


def test_the_files_of_a_study_are_limited(hospital):
    host = hospital()
    ask(host, "hello", config=GENERATED.format(**SMALL) + '[algorithm]\nname = "ditto"\n')
    host.policy = replace(host.policy, disk=0.00001)
    assert "disk = 1e-05" in train(host)["refused"]
    assert not list(host.site.state.rglob("round-*.safetensors"))


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
    studies = Studies(tmp_path / "studies.jsonl")
    cases = [f"{k}" for k in range(20)]
    studies.add(trace(cases, at=time.time() - 20 * 86400))
    new = trace(cases[1:], "b")
    assert studies.similar(new, 30, 5) == "a" and not studies.similar(new, 10, 5) and not studies.similar(new, 0, 5)
    assert (tmp_path / "studies.jsonl").stat().st_mode & 0o777 == 0o600
    (tmp_path / "studies.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"studies\.jsonl"):
        studies.similar(new, 30, 5)


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
    small = {"fewest": 3}
    assert hello(hospital(scans, **small), train="steps = 4", batch=1)["train"] == 8
    said = hello(hospital(scans, **small), "t", train="steps = 5", batch=1)["refused"]
    assert "similar_days = 30" in said and "fewest = 3" in said
    assert "train" in hello(hospital(scans, **small), "u", train="steps = 4", batch=1)
    assert "train" in hello(hospital(scans, **small), "v", train="steps = 9", batch=1)
    assert "train" in hello(hospital(scans, **small, similar_days=0), "w", train="steps = 5", batch=1)


def test_a_study_with_one_patient_more_is_refused(hospital, scans, tmp_path):
    few, more, many = (manifest(scans, tmp_path / f"{n}.csv", n) for n in (5, 6, 10))
    host = hospital(few)
    assert hello(host)["train"] == 5
    shutil.rmtree(host.site.state / "runs")  # a deleted folder forgets nothing
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
    digest = host.pseudonyms.list_digest("s", before)
    assert "incidents" not in hello(hospital(data)) and "incidents" not in train(host)
    shutil.move(tmp_path / "kept_back", kept_back)  # one more
    again = hospital(data)
    answer = hello(again)
    after = parts(again)
    assert after["test"] == before["test"] and after["validation"] == before["validation"]
    assert after["train"] == before["train"] | {kept_back.name}
    (incident,) = answer["incidents"]
    assert "cases are not those" in incident and kept_back.name not in json.dumps(answer)
    assert again.pseudonyms.list_digest("s", after) != digest
    shutil.rmtree(data / min(before["test"]))  # one gone
    last = hospital(data)
    assert hello(last)["incidents"]
    assert parts(last) == {**after, "test": after["test"] - {min(before["test"])}}
    text = (host.site.state / "runs" / "s" / "split.json").read_text()
    assert not any(name in text for names in before.values() for name in names)


def test_cases_that_a_study_leaves_out_stay_out(hospital, scans, tmp_path):
    """The inner folds of a search have no test cases; a change of the data must not bring them in."""
    data = tmp_path / "north"
    shutil.copytree(scans, data)
    host = hospital(data, fewest=1)
    hello(host, split="inner = 3")
    before = parts(host)
    out = {folder.name for folder in data.iterdir()} - set.union(*before.values())
    assert out and not before["test"]
    for gone in sorted(before["train"])[:2]:
        shutil.rmtree(data / gone)
    again = hospital(data, fewest=1)
    assert hello(again, split="inner = 3")["incidents"]
    after = parts(again)
    assert not out & set.union(*after.values()) and after["validation"] == before["validation"]


def test_without_the_file_of_the_split_no_study_goes_on(hospital, scans):
    host = hospital(scans)
    hello(host)
    (host.site.state / "runs" / "s" / "split.json").write_text("{}")
    answer = hello(hospital(scans))
    assert "error" in answer and "split.json" in answer["local"]


def test_the_digest_of_the_cases_depends_on_the_secret_and_on_nothing_else(tmp_path):
    one, other = (Pseudonyms(tmp_path / name / "secret") for name in "ab")
    cases = {"train": ["x", "y"], "test": ["z"]}
    digest = one.list_digest("s", cases)
    assert digest == Pseudonyms(tmp_path / "a" / "secret").list_digest("s", {"test": ["z"], "train": ["y", "x"]})
    assert digest != other.list_digest("s", cases) and digest != one.list_digest(
        "s", {"train": ["x"], "test": ["y", "z"]}
    )
    assert one.digest("x") != other.digest("x") and one.digest("x")[:10] not in one.of("x")
    sliced = {"train": ["x/z001", "x/z002", "y/z001"], "test": ["z/z009"]}
    assert one.list_digest("s", sliced) == digest and len(digest) == 64
    assert one.list_digest("another study", cases) != digest


# damaged memories


def damage(path):
    content = bytearray(path.read_bytes())
    content[-20] ^= 255
    path.write_bytes(content)


def test_a_damaged_memory_is_set_aside_and_the_site_goes_on(hospital):
    host = hospital()
    ask(host, "hello", config=GENERATED.format(**SMALL) + '[algorithm]\nname = "ditto"\n')
    memory = host.site.state / "runs" / "s" / "memory"
    assert "incidents" not in train(host, 0)
    damage(memory / "round-000000.safetensors")
    answer = train(host, 1, version=0)
    assert answer["incidents"] == ["its memory of round 1 was damaged: it goes on as if it had just joined"]
    assert (memory / "round-000000.safetensors.damaged").exists() and "fit_loss" in answer
    assert "incidents" not in train(host, 2, version=1)  # it has a memory again


def test_the_last_sound_memory_is_used_and_that_of_another_phase_is_not(hospital):
    host = hospital()
    ask(host, "hello", config=GENERATED.format(**SMALL) + '[algorithm]\nname = "ditto"\n')
    memory = host.site.state / "runs" / "s" / "memory"
    train(host, 0)
    header = {"phase": 0, "round": 1, "version": 0, "keep": [0]}
    start = {k: v.numpy() for k, v in host.agreed.phases[0][1].start.items()}
    ask(host, "train", encode(Payload(model=start)), **header)
    damage(memory / "round-000001.safetensors")
    answer = train(host, 2, version=1)
    assert answer["incidents"] == ["its memory of round 2 was damaged: it goes on from that of round 1"]
    other = worker.Memory("north", "scaffold in phase 2", 5, Payload())
    worker.site_memory.save(memory / "round-000005.safetensors", other)
    assert "error" in train(host, 6, version=5)  # sound, and of another owner: still refused
    assert (memory / "round-000005.safetensors").exists()


def test_the_model_that_a_phase_began_from_has_a_copy(hospital):
    host = hospital()
    text = GENERATED.format(**SMALL) + '[[then]]\nalgorithm = "fine_tune"\nrun.rounds = 2\n'
    ask(host, "hello", config=text)
    start = encode(Payload(model={k: v.numpy() for k, v in host.agreed.phases[0][1].start.items()}))
    ask(host, "begin", start, phase=1, begins=3, before=0, round=2, version=-1)
    folder = host.site.state / "runs" / "s"
    damage(folder / "phase-1.safetensors")
    again = hospital()
    answer = ask(again, "train", start, phase=1, round=3, version=-1)
    assert "copy" in answer["incidents"][0] and "error" not in answer
    damage(folder / "phase-1.copy.safetensors")
    assert "error" in ask(hospital(), "train", start, phase=1, round=4, version=-1)


def test_a_limit_that_makes_no_sense_is_refused():
    odd = {"memory": 0.0, "disk": -1.0, "seconds": float("nan"), "similar_days": -1.0, "parameters": 0}
    for key, value in odd.items():
        with pytest.raises(ConfigError, match=key):
            SitePolicy(**{key: value})
