"""A coordinator that asks for what it should not have: it gets a sentence, the log has a line, and nothing else is so.

All that a coordinator controls is a header and bytes; here it is worked on by hand, and the worker is a real one.
"""

import json
import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import studies
from polysite.cli import app
from polysite.cluster.mixture import scaled
from polysite.deploy.identity import identity
from polysite.deploy.protocol import PROTOCOL
from polysite.deploy.site import courier, ipc, ledger, process
from polysite.deploy.site.policy import SitePolicy
from polysite.errors import ConfigError, RunError
from polysite.payload import Payload, decode, encode

STUDY = studies.text({"north": 12}, 'augment = "none"\n%s', "rounds = 100\n%s", filters=(4, 8, 8))
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


def ask(host, kind, body=b"", study="s", **header):
    return host.answer({"protocol": PROTOCOL, "study": study, "kind": kind, **identity(), **header}, body)


def train(host, payload, **header):
    return ask(host, "train", encode(payload), **{"phase": 0, "round": 0, "version": -1, **header})


def agree(host, train="", more=""):
    answer, _ = ask(host, "hello", config=STUDY % (train, more))
    assert "refused" not in answer and "error" not in answer
    return {k: v.numpy() for k, v in host.agreed.phases[0][1].start.items()}


@pytest.fixture
def line(hospital):
    """The courier and the worker of a hospital, with the socket between them."""
    here, there = socket.socketpair()
    host = hospital()
    host.words = "18 cases found in /data/brain"
    thread = threading.Thread(target=process.attend, args=(host, there))
    thread.start()
    resident = courier.WorkerProcess(host.site, lambda what: None)
    resident._line = here
    yield resident, host
    here.close()
    thread.join()
    there.close()


ODD = [
    {"kind": "ping"},
    {"kind": "stop"},
    {"kind": "train", "courier": "stop"},
    {"kind": "train", "round": "x"},
    {"kind": "train", "round": 1 << 70},
    {"kind": "train", "phase": [1]},
    {"kind": "serve", "name": "../../more"},
    {"kind": "score", "split": "train"},
    {"kind": "train", "keep": ["x"]},
    {"kind": ["hello"]},
    {"kind": "hello", "config": 3},
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
    (entry,) = ledger.check(host.ledger.path)
    assert entry["refused"] == answer["refused"] and len(json.dumps(entry)) < 1000
    assert not list(host.site.state.parent.rglob("*.safetensors"))


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
    """Not even to see whether it is there: a hospital that has named no data takes part in rehearsals alone."""
    (tmp_path / "scans").mkdir()
    said = set()
    for path in (tmp_path / "scans", tmp_path / "nowhere"):
        answer, _ = ask(hospital(), "hello", config=f'[data]\nname = "files"\npath = "{path}"\n')
        said.add(answer["error"])
    assert len(said) == 1 and str(tmp_path) not in said.pop()


def test_a_rehearsal_is_without_patients(hospital):
    """Also where the hospital has named its own."""
    host = hospital()
    host.site = replace(host.site, data={"name": "files", "path": "/nowhere"})
    assert ask(host, "hello", config=STUDY % ("", ""))[0]["train"] == 8
    real = '[data]\nname = "hospitals"\nmodalities = ["t1"]\nlabels = ["WT"]\n'
    assert "error" in ask(host, "hello", config=real, study="real")[0]


def test_a_step_on_one_patient_does_not_leave(hospital):
    """However many patients the hospital has: those count that were seen."""
    host = hospital(fewest=5)
    start = agree(host, "batch = 1\n")
    host.agreed.phases[0][1].train = replace(host.agreed.phases[0][1].train, steps=1)
    answer, body = train(host, Payload(model=start))
    assert "too few cases are behind 'model'" in answer["refused"] and not body and "fit_loss" not in answer


@pytest.mark.parametrize(
    ("settings", "algorithm"),
    [
        ("steps = 4\nbatch = 1\n", "fedavg"),
        ("steps = 2\nbatch = 4\npatches = 4\n", "fedavg"),
        ("batch = 4\n", "l2gd"),  # whose local steps may be one
    ],
)
def test_a_study_whose_trainings_may_see_too_few_is_refused_at_once(hospital, settings, algorithm):
    answer, _ = ask(hospital(), "hello", config=STUDY % (settings, f'[algorithm]\nname = "{algorithm}"\n'))
    assert "too few behind 'model'" in answer["refused"] and "train.batch" in answer["refused"]


def test_where_no_model_leaves_few_steps_are_no_reason(hospital):
    agree(hospital(), "steps = 1\nbatch = 1\n", '[algorithm]\nname = "local"\n')


def test_steps_that_have_faded_do_not_count(hospital):
    """FedProx that pulls all the way back after every step: what leaves is the step on the last patient."""
    host = hospital()
    start = agree(host, "batch = 1\nlr = 0.1\nweight_decay = 0.0\n", '[algorithm]\nname = "fedprox"\nmu = 10.0\n')
    assert "too few cases" in train(host, Payload(model=start))[0]["refused"]
    site = host.agreed.phases[0][1]
    site._drawn = [(f"{k}",) for k in range(100)]
    found = [len(site._behind(pull)) for pull in (0.0, 0.1, 0.5, 1.0, 2.0, 3.0)]
    assert found == [100, 22, 4, 1, 100, 4]
    assert "99" in site._behind(1.0) and "0" in site._behind(3.0)  # those that are left


def test_running_statistics_are_those_of_the_last_steps(hospital):
    host = hospital()
    ask(host, "hello", config=CLASSES)
    site = host.agreed.phases[0][1]
    site._drawn = [(name,) for name in "abcdefgh" for _ in range(60)]
    assert site._behind(0.0) == {"h"}


def test_mini_batches_tell_one_loss(hospital):
    """That of a mini-batch may be that of one patient."""
    host = hospital()
    start = agree(host, "batch = 1\n", '[algorithm]\nname = "pfedme"\nouter = 8\n')
    answer, _ = train(host, Payload(model=start))
    assert len(answer["fit_loss"]) == 1 and answer["fit_steps"] == [8 * 5]


def test_the_cost_of_one_validation_case_is_a_score(hospital):
    for policy, refused in (({"case_scores": False}, True), ({}, False)):
        host = hospital(**policy)
        start = agree(host, "", '[algorithm]\nname = "fedcostwavg"\n')
        answer, _ = train(host, Payload(model=start))
        assert ("refused" in answer) == refused and (not refused or "'cost'" in answer["refused"])


def test_rounds_are_counted_through_all_phases_and_only_where_something_left(hospital):
    host = hospital(rounds=150)
    answer, _ = ask(host, "hello", config=STUDY % ("", "[[then]]\nrun = { rounds = 80 }\n"))
    assert "rounds = 150" in answer["refused"]
    host = hospital(rounds=100)
    start = agree(host)
    for _ in range(250):
        ask(host, "train", b"broken", phase=0, round=0, version=-1)
    assert "refused" not in train(host, Payload(model=start))[0]


def test_a_study_that_fails_counts_as_one(hospital):
    host = hospital(studies=1)
    odd = CLASSES + 'loss = "dice"\n'
    said = [ask(host, "hello", config=odd, study=f"s{k}")[0]["refused"] for k in range(3)]
    assert "does not fit this task" in said[0] and all("studies = 1" in s for s in said[1:])


def test_mini_batches_of_a_round_count_together(hospital):
    host = hospital(fewest=5, algorithms=("pfedme",))
    start = agree(host, "batch = 2\n", '[algorithm]\nname = "pfedme"\nouter = 4\n')
    answer, body = train(host, Payload(model=start))
    assert "refused" not in answer and body


def test_a_study_with_small_sums_is_refused_and_never_changed(hospital):
    """Its clusters would be others; the sentence names what the hospital and what the study can set."""
    study = '[algorithm]\nname = "cfft"\ncomponents = [2]\ndimensions = 3\n'

    def asked(host, more=""):
        return ask(host, "hello", config=STUDY % ("", study + more), study=f"s{len(more)}")[0]

    refused = asked(hospital(fewest=3))["refused"]
    assert "algorithm.fewest = 3" in refused and "policy.toml says fewest = 3 and small_sums = false" in refused
    host = hospital(fewest=3, small_sums=True)
    refused = asked(host)["refused"]
    assert "algorithm.least = 3" in refused and refused.endswith("policy.toml says fewest = 3")
    assert "refused" not in asked(host, "least = 3\n")
    algorithm = host.agreed.phases[0][0]
    assert (algorithm.fewest, algorithm.least) == (0, 3)  # as the study says
    assert "refused" not in asked(hospital(fewest=3), "fewest = 3\nleast = 3\n")
    assert "refused" not in asked(hospital(fewest=1), "seed = 1\n")


def test_sums_are_of_as_many_cases_as_the_study_says_whatever_is_asked(hospital):
    """A group for every case, by axes stretched along one feature."""
    host = hospital(fewest=3)
    agree(host, "", '[algorithm]\nname = "cfft"\ncomponents = [2]\ndimensions = 3\nfewest = 3\nleast = 3\n')
    site = host.agreed.phases[0][1]
    features = site.radiomics(site.cases("train"), 0.09)
    low, high = features.min(0) - 1, features.max(0) + 1
    table, count = scaled(features, low, high), features.shape[1]
    widest = int(table.std(0).argmax())
    axes, cells = np.eye(count), np.zeros((400, count))
    axes[widest, widest] = 1e4
    cells[:, widest] = np.linspace(0, 1e4, 400)
    wish = {"stage": np.array([3.0]), "fewest": np.array([0.0]), "low": low, "high": high}
    groups = {"centre": np.zeros(count), "axes": axes, "means": cells, "sizes": np.array([400.0])}
    _, body = train(host, Payload(sums={**wish, **groups}))
    counts = decode(body)["sums"]["counts"]
    assert counts.sum() == site.size and min(counts[counts > 0]) >= 3

    fits = {"weights": np.full(800, 1 / 400), "covariances": np.concatenate([np.eye(count)] * 2)}
    twice = {**groups, **fits, "means": np.concatenate([cells, cells]), "sizes": np.array([400.0, 400.0])}
    _, body = train(host, Payload(sums={**wish, **twice, "stage": np.array([5.0])}))
    counts = decode(body)["sums"]["counts"]
    assert not ((counts > 0) & (counts < 3)).any()

    whole = {"low": low, "high": high, "centre": np.zeros(count), "axes": np.eye(count)}
    one = np.stack([table[0], table.mean(0)])  # a cluster around one patient
    mixture = {**whole, "weights": np.full(2, 0.5), "means": one, "covariance": np.eye(count) * 1e-3}
    _, body = train(host, Payload(mixture=mixture), round=1)
    told = decode(body)["counts"]
    assert all(n[0] >= 3 for name, n in told.items() if name.startswith("train "))


def test_what_one_phase_remembers_does_not_leave_through_another(hospital):
    """Ditto's own model stays; FedAMP's is what is exchanged; both hide behind the same name."""
    host = hospital(algorithms=("clustered", "ditto", "fedamp"))
    second = f"[[then]]\nalgorithm = {{ {', '.join((WRAPPED % 'fedamp').strip().splitlines())} }}\n"
    start = agree(host, "", f"[algorithm]\n{WRAPPED % 'ditto'}{second}")
    assert "refused" not in train(host, Payload(model=start))[0]
    ask(host, "begin", encode(Payload(model=start)), phase=1, before=0, begins=1, round=0, version=-1)
    answer, body = train(host, Payload(model=start, pull=0.0), phase=1, round=1, version=0)
    assert answer["error"] and not body
    answer, _ = ask(host, "hello", config=STUDY % ("", "[algorithm]\n" + WRAPPED % "fedamp"))
    assert "other settings" in answer["refused"]  # nor under the name of the study before


@pytest.mark.parametrize("outer", [WRAPPED, 'name = "weighted"\ninner = { name = "%s" }\n'])
def test_an_algorithm_that_is_not_allowed_is_not_allowed_within_another(hospital, outer):
    host = hospital(algorithms=("clustered", "weighted", "fedavg"))
    answer, _ = ask(host, "hello", config=STUDY % ("", "[algorithm]\n" + outer % "scaffold"))
    assert "'scaffold' may not train here" in answer["refused"]
    agree(host, "", "[algorithm]\n" + outer % "fedavg")


@pytest.mark.parametrize(("kind", "most"), [("score", 18), ("examine", 18), ("serve", 8), ("begin", 4)])
def test_nothing_is_answered_without_end(hospital, kind, most):
    host = hospital(rounds=100)
    start = encode(Payload(model=agree(host)))
    host.policy = SitePolicy(rounds=2)
    where = {"phase": 0, "round": 0, "version": -1, "split": "test", "before": 0, "begins": 0}
    said = [ask(host, kind, start, **where, keep=[k]) for k in range(most + 2)]
    assert ["refused" in answer for answer, _ in said] == [False] * most + [True] * 2
    assert len(list((host.site.state / "runs").rglob("*.safetensors"))) <= 2


def test_an_examination_counts_as_scoring(hospital):
    host = hospital(rounds=100)
    start = encode(Payload(model=agree(host)))
    host.policy = SitePolicy(rounds=1)
    where = {"phase": 0, "round": 0, "version": -1, "split": "test"}
    kinds = [*["score", "examine"] * 4, "score", "examine"]
    said = [ask(host, kind, start, **where, keep=[k])[0] for k, kind in enumerate(kinds)]
    assert ["refused" in answer for answer in said] == [False] * 9 + [True]


def test_an_examination_reveals_measures_under_pseudonyms_and_no_prediction(hospital):
    host = hospital()
    start = encode(Payload(model=agree(host)))
    answer, body = ask(host, "examine", start, phase=0, round=0, version=-1, split="test", tolerance=2.0)
    cases = json.loads(answer["measures"])
    assert (
        not body
        and set(answer) == {"measures", "seconds", "left"}
        and cases.keys() == {host.pseudonyms.of(case) for case in host.agreed.phases[0][1].cases("test")}
    )
    assert all(case.keys() == {"labels", "loss", "counts", "measures", "unit"} for case in cases.values())
    assert "all measures of 2 test cases" in json.dumps(ledger.check(host.ledger.path)[-1]["left"])
    host.policy = SitePolicy(case_scores=False)
    answer, _ = ask(host, "examine", start, phase=0, round=1, version=-1, split="test")
    assert "case_scores = false" in answer["refused"]


def test_the_state_of_a_later_version_is_refused(hospital, tmp_path):
    hospital()
    assert (tmp_path / "state" / "format").read_text() == "2\n"
    (tmp_path / "state" / "format").write_text("3\n")
    with pytest.raises(ConfigError, match="has format 3, and this polysite reads up to 2"):
        hospital()


def test_new_studies_are_counted(hospital):
    host = hospital(studies=2)
    said = [ask(host, "hello", config=STUDY % ("", ""), study=f"s{k}")[0] for k in (0, 1, 2, 0, 1)]
    assert ["refused" in answer for answer in said] == [False, False, True, False, False]


def test_the_log_says_that_true_classes_left(hospital):
    host = hospital()
    assert "refused" not in ask(host, "hello", config=CLASSES)[0]
    start = {k: v.numpy() for k, v in host.agreed.phases[0][1].start.items()}
    answer, _ = ask(host, "score", encode(Payload(model=start)), phase=0, round=0, version=-1, split="test")
    assert "true" in next(iter(json.loads(answer["scores"]).values()))
    assert "with their true classes" in json.dumps(ledger.check(host.ledger.path)[-1]["left"])


def test_an_answer_that_leaves_twice_is_in_the_log_twice(hospital):
    host = hospital()
    start = agree(host)
    assert train(host, Payload(model=start)) == train(host, Payload(model=start))
    first, second = ledger.check(host.ledger.path)[1:]
    assert second["again"] and "again" not in first and first["bytes"] == second["bytes"] > 0


def test_a_worker_that_does_not_start_is_not_blamed_on_what_it_said_before(hospital, monkeypatch):
    site = hospital().site
    (site.state / "worker.log").write_text("polysite: an error of yesterday\n")
    killed = Path(site.state / "python")
    killed.write_text("#!/bin/sh\nkill -KILL $$\n")
    killed.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(killed))
    with pytest.raises(RunError, match="it was killed by SIGKILL"):
        courier.WorkerProcess(site, print).line()


SLICED = STUDY.replace("patch = [16, 16, 16]", "patch = [16, 16]") + '[slices]\naxis = "axial"\nmost = 4\n'


def test_slices_of_a_patient_count_as_one_where_the_policy_counts(hospital):
    host = hospital(fewest=5)
    answer, _ = ask(host, "hello", config=SLICED % ("batch = 4\n", ""))
    assert answer["train"] == 32 and len(host.agreed.volumes["train"]) == 8
    site = host.agreed.phases[0][1]
    start = {k: v.numpy() for k, v in site.start.items()}
    site.train = replace(site.train, steps=1)  # four slices, of at most four patients
    assert "too few cases are behind 'model'" in train(host, Payload(model=start))[0]["refused"]
    site.train = replace(site.train, steps=None)
    assert "refused" not in train(host, Payload(model=start))[0]
    strict = hospital(fewest=9)
    assert "refused" in ask(strict, "hello", config=SLICED % ("", ""))[0]  # 32 slices, but 8 patients


def test_a_training_of_few_steps_may_see_the_slices_of_one_patient(hospital):
    words = ask(hospital(fewest=3), "hello", config=SLICED % ("batch = 4\nsteps = 2\n", ""))[0]["refused"]
    assert "may see 2 cases" in words
    assert "refused" not in ask(hospital(fewest=2), "hello", config=SLICED % ("batch = 4\nsteps = 2\n", ""))[0]


def test_pseudonyms_of_slices_say_which_belong_together(hospital):
    host = hospital(case_scores=True)
    ask(host, "hello", config=SLICED % ("", ""))
    start = {k: v.numpy() for k, v in host.agreed.phases[0][1].start.items()}
    answer, _ = ask(host, "score", encode(Payload(model=start)), phase=0, round=0, version=-1, split="test")
    names = list(json.loads(answer["scores"]))
    assert len(names) == 8 and len({name.partition("/")[0] for name in names}) == 2
    assert all(name.startswith("case-") and "/z" in name and "north" not in name for name in names)


def test_an_assessment_of_slices_describes_volumes(hospital):
    host = hospital()
    ask(host, "hello", config=SLICED % ("", "[assess]\nprojections = 0\nfewest = 2\n"))
    answer, body = ask(host, "assess", encode(Payload()), phase=0, round=0, version=-1)
    assert "refused" not in answer and decode(body)["cases"] == 8


FRAMES = [b"{", b"[]", b"3", b'"x"', b"[" * 100_000, b"\xff\xfe", b"{}", b'{"request": 3}', b'{"incidents": 1}',
          b'{"request": {}, "incidents": {}}', b'{"request": ' + b'{"a":' * 900 + b"1" + b"}" * 901]  # fmt: skip


def test_frames_that_are_no_request_do_not_end_the_listener(line):
    resident, host = line
    for text in FRAMES:
        resident._line.sendall(ipc.LENGTHS.pack(len(text), 0) + text)
        answer, body = ipc.receive(resident._line)
        assert ({"error", "refused"} & answer.keys()) and not body and "brain" not in json.dumps(answer)
    ipc.send(resident._line, {"courier": "ping"})
    assert ipc.receive(resident._line)[0]["cases"] == host.words


def test_a_frame_that_is_too_large_ends_the_connection_but_not_the_worker(hospital):
    here, there = socket.socketpair()
    with here, there:
        here.sendall(ipc.LENGTHS.pack(1 << 60, 1 << 60))
        assert not process.attend(hospital(), there)  # and the worker waits for the next courier
