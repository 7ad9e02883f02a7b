"""A coordinator that asks for what it should not have: it gets a sentence, the log has a line, and nothing else is so.

All that a coordinator controls is a header and bytes; here it is worked on by hand, and the worker is a real one.
"""

import json
import socket
import threading
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import studies
from consortium import ask, start_of
from polysite.cli import app
from polysite.cluster.mixture import scaled
from polysite.deploy.identity import identity
from polysite.deploy.protocol import PROTOCOL
from polysite.deploy.site import courier, ipc, ledger, process
from polysite.deploy.site.policy import SitePolicy
from polysite.errors import ConfigError
from polysite.payload import Payload, decode, encode

STUDY = studies.text({"north": 12}, 'augment = "none"\n%s', "rounds = 100\n%s", filters=(4, 8, 8))
SLICED = STUDY.replace("patch = [16, 16, 16]", "patch = [16, 16]") + '[slices]\naxis = "axial"\nmost = 4\n'
CLASSES = """
[data]
name = "phantom_classes"
shape = [24, 24, 24]
sites.north = { cases = 20, healthy = 0.3, low_grade = 0.3 }
[model]
name = "densenet_small"
[train]
patch = [16, 16]
device = "cpu"
"""
WRAPPED = 'name = "clustered"\ngroups.a = ["north"]\ninner = { name = "%s" }\n'


def hello(host, train="", more="", text=STUDY, study="s"):
    return ask(host, "hello", study=study, config=text % (train, more))[0]


def agree(host, train="", more="", text=STUDY):
    """Agree to a study; return the parameters that it begins with."""
    answer = hello(host, train, more, text)
    assert "refused" not in answer and "error" not in answer
    return start_of(host)


def train(host, payload, **header):
    return ask(host, "train", encode(payload), **header)


@pytest.fixture
def line(hospital):
    """The courier and the worker of a hospital, with the socket between them."""
    here, there = socket.socketpair()
    host = hospital()
    thread = threading.Thread(target=process.attend, args=(host, there))
    thread.start()
    resident = courier.WorkerProcess(host.hospital.site, lambda what: None)
    resident._line = here
    yield resident, host
    here.close()
    thread.join()
    there.close()


ODD = [
    {"kind": "stop"},
    {"kind": "train", "courier": "stop"},
    {"kind": "train", "round": 1 << 70},
    {"kind": "serve", "name": "../../more"},
    {"kind": "score", "split": "train"},
    {"kind": "hello", "config": 3},
    {"kind": "hello", "code": "of another version"},
    {"kind": "hello", "study": "x" * 200_000},
    {"kind": "hello", "study": "../up"},
    {},
]


@pytest.mark.parametrize("header", ODD, ids=lambda header: str(header)[:60])
def test_what_is_no_question_is_refused_and_in_the_log(line, header):
    resident, host = line
    shown = []
    asked = {"protocol": PROTOCOL, "study": "s", **identity(), **header}
    answer, body = courier.ask_and_show(resident, asked, b"", shown.append)
    assert answer["refused"] and not body and set(answer) == {"refused", "seconds", "left"}
    assert "brain" not in json.dumps(answer) and len(answer["refused"]) < 200
    (entry,) = ledger.check(host._logged.ledger.path)
    assert entry["refused"] == answer["refused"] and len(json.dumps(entry)) < 1000
    assert not list(host.hospital.site.state.parent.rglob("*.safetensors"))


def test_no_text_of_a_coordinator_moves_a_cursor(line, tmp_path):
    resident, _ = line
    shown, tricks = [], "train\n2026-11-16  ok \x1b[1A\x1b[2K"
    for header in ({"kind": tricks, "study": "s"}, {"kind": "train", "study": tricks}):
        courier.ask_and_show(resident, {"protocol": PROTOCOL, **header}, b"", shown.append)
    (tmp_path / "site.toml").write_text('name = "north"\nserver = "localhost:9443"\n')
    printed = CliRunner().invoke(app, ["site", "log", str(tmp_path)]).output
    assert all(text.isprintable() for text in shown)
    assert len(printed.splitlines()) == 2 + 1 + 2 + 1 and all(text.isprintable() for text in printed.splitlines())


def test_a_folder_that_a_coordinator_names_is_not_opened(hospital, tmp_path):
    """Not even to see whether it is there. A rehearsal is without patients, also where the hospital has named some."""
    (tmp_path / "scans").mkdir()
    text = '[data]\nname = "files"\npath = "%s"\n'
    said = {ask(hospital(), "hello", config=text % (tmp_path / name))[0]["error"] for name in ("scans", "nowhere")}
    assert len(said) == 1 and str(tmp_path) not in said.pop()
    host = hospital()
    host.hospital.site = replace(host.hospital.site, data={"name": "files", "path": "/nowhere"})
    assert hello(host)["train"] == 8
    real = '[data]\nname = "hospitals"\nmodalities = ["t1"]\nlabels = ["WT"]\n'
    assert "error" in ask(host, "hello", config=real, study="real")[0]


@pytest.mark.parametrize(
    ("settings", "algorithm"),
    [
        ("steps = 4\nbatch = 1\n", "fedavg"),
        ("steps = 2\nbatch = 4\npatches = 4\n", "fedavg"),
        ("batch = 4\n", "l2gd"),  # whose local steps may be one
    ],
)
def test_a_study_whose_trainings_may_see_too_few_is_refused_at_once(hospital, settings, algorithm):
    refused = hello(hospital(), settings, f'[algorithm]\nname = "{algorithm}"\n')["refused"]
    assert "too few behind 'model'" in refused and "train.batch" in refused
    agree(hospital(), "steps = 1\nbatch = 1\n", '[algorithm]\nname = "local"\n')  # no model leaves


def test_steps_that_have_faded_do_not_count(hospital):
    """FedProx that pulls all the way back after every step: what leaves is the step on the last patient."""
    host = hospital()
    start = agree(host, "batch = 1\nlr = 0.1\nweight_decay = 0.0\n", '[algorithm]\nname = "fedprox"\nmu = 10.0\n')
    answer, body = train(host, Payload(model=start))
    assert "too few cases" in answer["refused"] and not body and "fit_loss" not in answer
    site = host.agreed.host.phases[0].site
    site._drawn = [(f"{k}",) for k in range(100)]
    found = [len(site._behind(pull)) for pull in (0.0, 0.1, 0.5, 1.0, 2.0, 3.0)]
    assert found == [100, 22, 4, 1, 100, 4]
    assert "99" in site._behind(1.0) and "0" in site._behind(3.0)  # those that are left


def test_mini_batches_of_a_round_count_together_and_tell_one_loss(hospital):
    """That of a mini-batch may be that of one patient."""
    host = hospital(fewest=5, algorithms=("pfedme",))
    start = agree(host, "batch = 1\n", '[algorithm]\nname = "pfedme"\nouter = 8\n')
    answer, body = train(host, Payload(model=start))
    assert len(answer["fit_loss"]) == 1 and answer["fit_steps"] == [8 * 5] and body


@pytest.mark.parametrize("policy", [{}, {"case_scores": False}])
def test_the_cost_of_one_validation_case_is_a_score(hospital, policy):
    host = hospital(**policy)
    start = agree(host, "", '[algorithm]\nname = "fedcostwavg"\n')
    assert ("'cost'" in train(host, Payload(model=start))[0].get("refused", "")) == bool(policy)


def test_rounds_are_counted_through_all_phases_and_only_where_something_left(hospital):
    assert "rounds = 150" in hello(hospital(rounds=150), "", "[[then]]\nrun = { rounds = 80 }\n")["refused"]
    host = hospital(rounds=100)
    start = agree(host)
    for _ in range(250):
        ask(host, "train", b"broken")
    assert "refused" not in train(host, Payload(model=start))[0]


def test_new_studies_are_counted_also_those_that_fail(hospital):
    host = hospital(studies=2)
    assert "does not fit this task" in ask(host, "hello", config=CLASSES + 'loss = "dice"\n', study="s0")[0]["refused"]
    said = [hello(host, study=f"s{k}").get("refused", "") for k in (1, 2, 1)]
    assert ["studies = 2" in text for text in said] == [False, True, False]


def test_a_study_with_small_sums_is_refused_and_never_changed(hospital):
    """Its clusters would be others; the sentence names what the hospital and what the study can set."""
    study = '[algorithm]\nname = "cfft"\ncomponents = [2]\ndimensions = 3\n'

    def asked(host, more=""):
        return hello(host, "", study + more, study=f"s{len(more)}")

    refused = asked(hospital(fewest=3))["refused"]
    assert "algorithm.together = true" in refused and "policy.toml says fewest = 3 and small_sums = false" in refused
    host = hospital(fewest=3, small_sums=True)
    refused = asked(host)["refused"]
    assert "algorithm.least = 3" in refused and refused.endswith("policy.toml says fewest = 3")
    assert "refused" not in asked(host, "least = 3\n")
    assert host.agreed.host.phases[0].algorithm.least == 3  # as the study says


def test_a_site_counts_no_cluster_of_fewer_cases_than_the_study_says(hospital):
    """A cluster around one patient."""
    host = hospital(fewest=3, small_sums=True)
    agree(host, "", '[algorithm]\nname = "cfft"\ncomponents = [2]\ndimensions = 3\nleast = 3\n')
    site = host.agreed.host.phases[0].site
    features = site.radiomics(site.cases("train"), 0.09)
    low, high = features.min(0) - 1, features.max(0) + 1
    table, count = scaled(features, low, high), features.shape[1]
    whole = {"low": low, "high": high, "centre": np.zeros(count)}
    around = np.stack([table[0], table.mean(0)])
    mixture = {"axes": np.eye(count), "weights": np.full(2, 0.5), "means": around, "covariance": np.eye(count) * 1e-3}
    told = decode(train(host, Payload(mixture=whole | mixture), round=1)[1])["counts"]
    assert all(n[0] >= 3 for name, n in told.items() if name.startswith("train "))


def test_what_one_phase_remembers_does_not_leave_through_another(hospital):
    """Ditto's own model stays; FedAMP's is what is exchanged; both hide behind the same name."""
    host = hospital(algorithms=("clustered", "ditto", "fedamp"))
    second = f"[[then]]\nalgorithm = {{ {', '.join((WRAPPED % 'fedamp').strip().splitlines())} }}\n"
    start = agree(host, "", f"[algorithm]\n{WRAPPED % 'ditto'}{second}")
    assert "refused" not in train(host, Payload(model=start))[0]
    ask(host, "begin", encode(Payload(model=start)), phase=1, before=0, begins=1)
    answer, body = train(host, Payload(model=start, pull=0.0), phase=1, round=1, version=0)
    assert answer["error"] and not body
    refused = hello(host, "", "[algorithm]\n" + WRAPPED % "fedamp")["refused"]
    assert "other settings" in refused  # nor under the name of the study before


@pytest.mark.parametrize("outer", [WRAPPED, 'name = "weighted"\ninner = { name = "%s" }\n'])
def test_an_algorithm_that_is_not_allowed_is_not_allowed_within_another(hospital, outer):
    host = hospital(algorithms=("clustered", "weighted", "fedavg"))
    assert "'scaffold' may not train here" in hello(host, "", "[algorithm]\n" + outer % "scaffold")["refused"]
    agree(host, "", "[algorithm]\n" + outer % "fedavg")


@pytest.mark.parametrize(("kinds", "most"), [(("score", "examine"), 8), (("serve",), 8), (("begin",), 4)])
def test_nothing_is_answered_without_end(hospital, kinds, most):
    """An examination counts as scoring."""
    host = hospital(rounds=100)
    start = encode(Payload(model=agree(host)))
    host.hospital.policy = SitePolicy(rounds=2)
    where = {"split": "test", "before": 0, "begins": 0}
    said = [ask(host, kinds[k % len(kinds)], start, **where, keep=[k])[0] for k in range(most + 2)]
    assert ["refused" in answer for answer in said] == [False] * most + [True] * 2
    assert len(list((host.hospital.site.state / "runs").rglob("*.safetensors"))) <= 2


def test_an_examination_reveals_measures_under_pseudonyms_and_what_leaves_twice_is_in_the_log_twice(hospital):
    host = hospital()
    start = encode(Payload(model=agree(host)))
    answer, body = ask(host, "examine", start, split="test", tolerance=2.0)
    cases = json.loads(answer["measures"])
    assert not body and set(answer) == {"measures", "seconds", "left"}
    assert cases.keys() == {host.hospital.pseudonyms.of(case) for case in host.agreed.host.phases[0].site.cases("test")}
    assert all(case.keys() == {"labels", "loss", "counts", "measures", "unit"} for case in cases.values())
    assert ask(host, "examine", start, split="test", tolerance=2.0) == (answer, body)
    first, second = ledger.check(host._logged.ledger.path)[1:]
    assert second["again"] and "again" not in first and first["bytes"] == second["bytes"] > 0
    assert "all measures of 2 test cases" in json.dumps(second["left"])
    host.hospital.policy = SitePolicy(case_scores=False)
    assert "case_scores = false" in ask(host, "examine", start, round=1, split="test")[0]["refused"]


def test_the_state_of_a_later_version_is_refused(hospital, tmp_path):
    hospital()
    assert (tmp_path / "state" / "format").read_text() == "2\n"
    (tmp_path / "state" / "format").write_text("3\n")
    with pytest.raises(ConfigError, match="has format 3, and this polysite reads up to 2"):
        hospital()


def test_true_classes_are_in_the_log_and_running_statistics_are_those_of_the_last_steps(hospital):
    host = hospital()
    ask(host, "hello", config=CLASSES)
    site = host.agreed.host.phases[0].site
    site._drawn = [(name,) for name in "abcdefgh" for _ in range(60)]
    assert site._behind(0.0) == {"h"}
    answer, _ = ask(host, "score", encode(Payload(model=start_of(host))), split="test")
    assert "true" in next(iter(json.loads(answer["scores"]).values()))
    assert "with their true classes" in json.dumps(ledger.check(host._logged.ledger.path)[-1]["left"])


def test_slices_of_a_patient_count_as_one_where_the_policy_counts(hospital):
    host = hospital(fewest=5)
    start = agree(host, "batch = 4\n", text=SLICED)
    site = host.agreed.host.phases[0].site
    assert len(host.agreed.splits["train"]) == 32 and len(host.agreed.volumes["train"]) == 8
    site.train = replace(site.train, steps=1)  # four slices, of at most four patients
    assert "too few cases are behind 'model'" in train(host, Payload(model=start))[0]["refused"]
    site.train = replace(site.train, steps=None)
    assert "refused" not in train(host, Payload(model=start))[0]
    assert "refused" in hello(hospital(fewest=9), text=SLICED)  # 32 slices, but 8 patients
    few = "batch = 4\nsteps = 2\n"  # slices may be of one patient
    assert "may see 2 cases" in hello(hospital(fewest=3), few, text=SLICED, study="few")["refused"]
    assert "refused" not in hello(hospital(fewest=2), few, text=SLICED, study="two")


def test_pseudonyms_of_slices_say_which_belong_together_and_an_assessment_describes_volumes(hospital):
    host = hospital(case_scores=True)
    start = agree(host, "", "[assess]\nprojections = 0\nfewest = 2\n", text=SLICED)
    names = list(json.loads(ask(host, "score", encode(Payload(model=start)), split="test")[0]["scores"]))
    assert len(names) == 8 and len({name.partition("/")[0] for name in names}) == 2
    assert all(name.startswith("case-") and "/z" in name and "north" not in name for name in names)
    assert decode(ask(host, "assess", encode(Payload()))[1])["cases"] == 8


FRAMES = [b"{", b"[]", b"3", b'"x"', b"[" * 100_000, b"\xff\xfe", b"{}", b'{"request": 3}', b'{"incidents": 1}',
          b'{"request": {}, "incidents": {}}', b'{"request": ' + b'{"a":' * 900 + b"1" + b"}" * 901]  # fmt: skip


def test_frames_that_are_no_request_do_not_end_the_listener(line):
    resident, host = line
    for text in FRAMES:
        resident._line.sendall(ipc.LENGTHS.pack(len(text), 0) + text)
        answer, body = ipc.receive(resident._line)
        assert ({"error", "refused"} & answer.keys()) and not body and "brain" not in json.dumps(answer)
    assert hello(host)["train"] == 8
    here, there = socket.socketpair()
    with here, there:  # one that is too large ends the connection
        here.sendall(ipc.LENGTHS.pack(1 << 60, 1 << 60))
        process.attend(host, there)


@pytest.mark.parametrize(
    "asked", [{"phase": 1}, {"phase": -1}, {"kind": "begin", "before": -1}, {"kind": "begin", "before": 7}]
)
def test_a_phase_that_the_study_does_not_have_is_refused(hospital, asked):
    host = hospital()
    start = encode(Payload(model=agree(host)))
    kind = asked.get("kind", "train")
    answer, body = ask(host, kind, start, **{name: number for name, number in asked.items() if name != "kind"})
    assert answer["refused"].startswith("the study has no phase ") and not body
