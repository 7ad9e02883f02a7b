"""Two honest sites and one that says what it likes: the study goes on with the two, and the record says why.

No site trains here: each sends back what it was sent, and says what sites say.
"""

import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from consortium import BASE, FAST, NAMES, Fragile, Inside, Stop, go
from polysite.config import parse
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.protocol import MEASURES, Subject, parse_greeting, parse_response
from polysite.engines.compress import Compress
from polysite.engines.messages import Examine, Failed, Join, Score, Serve, Train
from polysite.engines.sites import Sites
from polysite.engines.watch import Watch
from polysite.engines.wire import InProcess
from polysite.errors import PayloadError, RunError
from polysite.payload import Payload, decode, encode, model_digest
from polysite.report import progress
from polysite.report.runs import read

TEXT = 300  # characters of what a site says that are kept
DEADLINES = replace(FAST, quorum=2, deadline=5, again=0.05)
SMALL = {"run.rounds": "2", "run.validate_every": "1", "model.filters": "[2, 2, 2]"}
PHASES = f'{BASE}\n[[then]]\nalgorithm.name = "fedprox"\nrun.rounds = 1\n'
HELLO = {"train": 5, "validation": 2, "test": 2, "may_score": True, "may_assess": True, "torch": "2", "device": "cpu"}
FITS = {"fit_loss": [0.5], "fit_steps": [2.0], "fit_lr_sum": [0.1], "fit_reach": [0.1], "seconds": 1.0}
LABELS = ("WT", "TC", "ET")
ZEROS = "0" * 64


def scores(values=(0.5, 0.5), labels=LABELS, **more):
    cases = {f"case-{k}": {"labels": dict.fromkeys(labels, v), "loss": 1.0, **more} for k, v in enumerate(values)}
    return json.dumps(cases)


def counts(count):
    """Voxels of every label and of the background."""
    return dict.fromkeys((*LABELS, "background"), count)


def measures(values=(0.5, 0.5), labels=LABELS, unit="mm", per_label=(), **more):
    """The answer to an examination: all measures of every case, equal for all labels."""
    cases = json.loads(scores(values, labels))
    for case in cases.values():
        each = {**dict.fromkeys(MEASURES, 1.0), "dice": case["labels"][labels[0]], "hd95": None, **dict(per_label)}
        case |= {"measures": {k: {n: v for n, v in each.items() if v is not ...} for k in labels}, "unit": unit, **more}
    return json.dumps(cases)


HONEST = {
    "hello": HELLO,
    "train": FITS,
    "score": {"scores": scores()},
    "examine": {"measures": measures()},
    "serve": {"digests": [ZEROS]},
}


def changed(answer, lie):
    """An answer in which something is otherwise, or left out."""
    return {k: v for k, v in {**answer, **lie}.items() if v is not ...}


class Site:
    """Says of ``kind`` what it is told to say, for ``times`` questions; otherwise what an honest site says."""

    def __init__(self, kind="", lie=(), times=1):
        self.kind, self.lie, self.left, self.payload = kind, dict(lie), times, {}

    def answer(self, header, body):
        kind, out = header["kind"], b""
        got = HONEST.get(kind, {})
        if kind == "train":
            out = encode(Payload(**{"model": decode(body)["model"], "weight": 5, **self.payload}))
        if kind == "serve":
            got = {"digests": [model_digest(decode(body)["model"])]}
        if kind != self.kind or not self.left:
            return got, out
        self.left -= 1
        return changed(got, self.lie), out


def study(tmp_path, liar, text=BASE, wire=Fragile, watch=Watch(), **more):
    settings = {"deadlines": DEADLINES, "wait": 0, "watch": watch, **more}
    run = go(tmp_path, parse(text, SMALL), wire({"a": Site(), "b": Site(), "c": liar}), "run", **settings)

    path = run.folder.path
    for text in [*(path / "rounds.jsonl").read_text().splitlines(), (path / "result.json").read_text()]:
        json.loads(text, parse_constant=pytest.fail)  # other programs have no word for what is not a number
    return run


def incidents(run, site="c"):
    return [i["what"] for r in (*run.folder.records(), run.result) for i in r.incidents if i.get("site") == site]


ODD = [
    ("hello", {"train": ...}, "train: None is not a number of cases"),
    ("hello", {"test": -1}, "test: -1 is not"),
    ("hello", {"may_score": "yes"}, "may_score: 'yes' is neither"),
    ("hello", {"listed": 7}, "listed: 7 is not a digest"),
    ("train", {"fit_loss": ["x"]}, "loss: 'x' is not a number"),
    ("train", {"fit_loss": [0.5, 0.5]}, "not lists of one length"),
    ("train", {"fit_steps": [float("nan")]}, "steps: nan is not a number"),
    ("score", {"scores": 3}, "not a text"),
    ("score", {"scores": "[" * 10**5}, "cannot be read"),
    ("score", {"scores": scores([0.5] * 3)}, "not those of at most 2 cases"),
    ("score", {"scores": '{"c": 1}'}, "'c' is not scored by WT, TC, ET and the loss"),
    ("score", {"scores": scores([0.5, float("nan")])}, "WT of 'case-1': nan is not a number from 0 to 1"),
    ("score", {"scores": scores([True])}, "is not a number from 0 to 1"),
    ("score", {"scores": scores(loss="low")}, "loss of 'case-0': 'low' is not a number"),
    ("score", {"scores": scores().replace("case-1", "case\\u001b")}, "is not the name of a case"),
    ("examine", {"measures": ...}, "not a text"),
    ("examine", {"measures": '{"c": 1}'}, "'c' has no measures"),
    ("examine", {"measures": measures(counts={"WT": [1, 2, 3, 4]})}, "the counts of 'case-0' are not those of"),
    ("examine", {"measures": measures(counts=counts([1, 2, 3, 0.5]))}, "is not four whole numbers"),
    ("examine", {"measures": measures(counts=counts([1, 2, 3, -1]))}, "is not a number from 0 to"),
    ("examine", {"measures": measures(measures={})}, "the measures of 'case-0' are not those of WT, TC, ET"),
    ("examine", {"measures": measures(per_label={"hd95": ...})}, "WT of 'case-0' is not measured by dice"),
    ("examine", {"measures": measures(per_label={"truth": None})}, "truth of WT of 'case-0': None is not"),
    ("examine", {"measures": measures(unit="mm\x1b")}, "'case-0' has no measures, or no unit"),
    ("serve", {"digests": [ZEROS] * 65}, "are not those of 1 to 64 models"),
    ("serve", {"digests": ["x"]}, "digests: 'x' is not a digest"),
]


REQUESTS = {
    "hello": Join(),
    "train": Train(),
    "score": Score(split="test"),
    "examine": Examine(split="test"),
    "serve": Serve(),
}


def parsed(kind, answer, subject=Subject(LABELS)):
    return parse_response(REQUESTS[kind], answer, lambda: encode(Payload()), HELLO, subject)


@pytest.mark.parametrize("kind, lie, said", ODD)
def test_an_answer_that_makes_no_sense_is_one_that_failed(kind, lie, said):
    assert not isinstance(parsed(kind, HONEST[kind]), Failed)
    found = parsed(kind, changed(HONEST[kind], lie))
    assert isinstance(found, Failed) and found.reason.startswith("its response to ") and said in found.reason


@pytest.mark.parametrize("kind, lie", {kind: lie for kind, lie, _ in ODD if kind != "hello"}.items())
def test_a_round_goes_on_without_an_answer_that_makes_no_sense(kind, lie, tmp_path):
    """And so does the validation; in the next one the site is asked again."""
    run = study(tmp_path, Site(kind, lie))
    one, two = run.folder.records()
    heard = [sorted(set(r.sites if kind == "train" else r.validation)) for r in (one, two)]
    assert heard == [["a", "b"] if kind in ("train", "score") else ["a", "b", "c"], ["a", "b", "c"]]
    assert (
        sorted(i for i, cases in run.result.test.items() if cases) == ["a", "b", "c"][: 2 if kind == "examine" else 3]
    )
    assert run.result.best_round == 0 and one.mean_score == two.mean_score == 0.5
    (noted,) = incidents(run)
    assert noted.startswith("fails: its response to ")


@pytest.mark.parametrize(
    "lie, said",
    [
        ({"train": "x"}, "train: 'x' is not"),
        ({"error": "[/oops]\x1b[2J"}, "could not be greeted: [/oops] [2J"),
        ({"refused": ["no", "no"]}, "does not take part: ['no', 'no']"),
    ],
)
def test_a_greeting_that_makes_no_sense_is_not_taken(lie, said, tmp_path):
    run = study(tmp_path, Site("hello", lie, times=10**6))
    assert [sorted(r.sites) for r in run.folder.records()] == [["a", "b"]] * 2
    (noted,) = [i for i in incidents(run) if "no answer" not in i]
    assert said in noted


def test_a_site_whose_data_are_mended_joins_later(tmp_path):
    run = study(tmp_path, Site("hello", {"error": "its data or its disk are not in order"}, times=2), wait=5)
    assert "c" in run.folder.records()[-1].sites
    assert sum("could not be greeted" in what for what in incidents(run)) == 1


def test_what_a_site_says_it_runs_on_is_cut_and_printable(tmp_path):
    run = study(tmp_path, Site("hello", {"torch": "2\x1b[2J" + "x" * 10**6, "device": ["a"], "more": "y"}))
    told = json.loads((run.folder.path / "deployment.json").read_text())["sites"]["c"]
    assert told["torch"].startswith("2 [2Jxxx") and len(told["torch"]) == 80 and told["device"] == "['a']"
    assert told.keys() == {"train", "validation", "test", "torch", "device"}


@pytest.mark.parametrize(
    "lie", [{}, {"predicted": 3}, {"true": -1}, {"true": 1.0}, {"true": None}, {"true": ...}, {"values": [2.0]}]
)
def test_classes_are_those_of_the_study(lie):
    subject = Subject(("low", "high"), classification=True)
    each = {"high": {"accuracy": 1.0, "predicted": 1.0, "true": 1.0}}

    def said(values=(1.0, 1.0), predicted=1, true=1, **more):
        return scores(values, ("accuracy",), **changed({"predicted": predicted, "true": true}, more))

    for kind, answer in (("score", {"scores": said(**lie)}), ("examine", {"measures": said(measures=each, unit="")})):
        found = parsed(kind, answer, subject)
        odd = bool(lie) and kind == "score"
        assert isinstance(found, Failed) == odd
        assert not odd or re.search(r"not one of the 2 classes|not scored by|0 to 1", found.reason)


def test_numbers_of_cases_that_a_policy_keeps_back_are_not_held_against_a_site(tmp_path):
    """A policy that hides numbers of cases refuses to send them as weights, so a weight other than 1 is a lie."""
    run = study(tmp_path, Site("hello", {"train": 5, "validation": 1, "test": 1}))
    assert not incidents(run) and len(run.result.validation["c"]) == 2


def test_a_claimed_weight_that_is_not_the_number_of_cases_at_hello_is_refused(tmp_path):
    liar = Site()
    liar.payload = {"weight": 4000.0}
    one = study(tmp_path, liar).folder.records()[0]
    assert one.refused["c"] == "'weight' claims 4000 training cases, but the site reported 5 when it joined"
    assert [i["site"] for i in one.incidents] == ["c"] and one.shares == {"a": 0.5, "b": 0.5}


def test_numbers_of_cases_stay_those_of_the_first_greeting():
    sites = Sites(InProcess({}), ["a"])
    for train, listed in ((5, "ab"), (5, "ab"), (4000, "cd")):
        greeting = parse_greeting({**HELLO, "train": train, "listed": listed})
        sites.fix_cases("a", greeting)
        sites.status["a"].greeting = greeting
    assert sites.status["a"].cases["train"] == 5
    first, second = (i["what"] for i in sites.incidents())
    assert "its data have changed" in first and "reports 4000 train cases instead of 5" in second


def test_a_model_that_has_come_apart_has_no_loss_in_the_record(tmp_path):
    """An honest site's training may diverge; that is its reply's fault, which is screened, and no lie."""
    liar = Site("train", {"fit_loss": [float("inf")]})
    liar.payload = {"weight": float("nan")}
    one = study(tmp_path / "one", liar).folder.records()[0]
    assert one.sites["c"].loss is None and one.sites["c"].numbers == {"weight": None}
    assert "'weight' is nan" in one.refused["c"]
    run = study(tmp_path / "two", Site("score", {"scores": scores(loss=float("-inf"))}, times=9))
    assert run.folder.records()[0].validation["c"].loss is None and not incidents(run)
    assert np.isnan(run.result.validation["c"]["case-0"].loss)


@pytest.mark.parametrize("lie", [[ZEROS], [ZEROS, ZEROS]])
def test_a_false_digest_of_a_model_that_all_share_ends_nothing(lie, tmp_path):
    run = study(tmp_path, Site("serve", {"digests": lie}), text=PHASES)
    assert [r.phase for r in run.folder.records()] == [0, 0, 1]
    assert incidents(run) == ["reports another model than was sent; the study continues with what was sent"]
    assert sorted(p.name for p in (run.folder.path / "models").iterdir()) == ["best.safetensors", "last.safetensors"]


@pytest.mark.parametrize("word, kinds", [("refused", ["hello", "train", "examine"]), ("error", ["begin", "serve"])])
def test_what_a_site_writes_is_no_markup_and_is_cut_before_it_is_shown_or_kept(word, kinds, tmp_path, monkeypatch):
    lie = {word: "[/oops] \x1b[2J\u202e" + "x" * 10**6, "incidents": ["[/bold]\x07" + "y" * 10**6]}
    for kind in kinds:
        screen = io.StringIO()
        terminal = Console(file=screen, force_terminal=True, width=200)
        monkeypatch.setattr(progress, "Console", lambda stderr, terminal=terminal: terminal)
        with progress.progress() as watch:
            run = study(tmp_path / kind, Site(kind, lie), text=PHASES, watch=watch)
        assert any("[/oops]  [2J xxx" in i for i in incidents(run)) and "[/bold] yyy" in "".join(incidents(run))
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())  # without what rich itself makes of it
        assert "[/oops]" in plain and not any(odd in screen.getvalue() for odd in ("\x1b[2J", "\x07", "\u202e"))
        for name in ("incidents.jsonl", "rounds.jsonl", "log.txt", "deployment.json"):
            text = (run.folder.path / name).read_text()
            assert not any(odd in text for odd in ("\x1b", "\\u001b", "x" * TEXT, "y" * TEXT))


def test_without_an_assessment_a_study_goes_on(tmp_path):
    run = study(tmp_path, Site(), assess=True)  # these sites do not know what that is
    assert "no assessment: an assessment compares hospitals, and there is only one" in incidents(run, None)
    assert incidents(run)[0].startswith("its reply is refused") and not (run.folder.path / "assessment").exists()


# Compressed replies


def packed(shape=(3, 1), step=(1,), kind="float32", size=1.0, dtype="int8"):
    return {"w": np.ones(shape, dtype), "w step": np.full(step, size, kind)}


@pytest.mark.parametrize(
    "kind, value, said",
    [
        ("model", packed((4000, 1), (1, 4000)), "shape"),
        ("update", packed((4000, 1), (1, 4000)), "not one number"),
        ("update", packed(step=(0,)), "not one number"),
        ("update", packed(kind="float64"), "not one number"),
        ("model", packed((1, 3), dtype="float16"), "of shape"),
        ("update", {"w": np.ones(3, "int8")}, "w step"),
        ("model", 3.0, "does not fit"),
    ],
)
def test_a_compressed_reply_is_no_larger_than_what_was_sent(kind, value, said):
    sent = Payload(model={"w": np.ones((3, 1), "float32")})
    with pytest.raises(PayloadError, match=said):
        Compress("int8").restore({"model": kind}, sent, Payload(model=value))


# The journal


def test_a_journal_that_was_cut_short_is_read_and_written_on(tmp_path):
    wire = Fragile({i: Site() for i in NAMES}, lambda h: h["kind"] == "train" and h["round"] == 1)
    path = tmp_path / "deployed"
    with pytest.raises(Stop):
        go(tmp_path, parse(BASE, SMALL), wire)
    with (path / "incidents.jsonl").open("ab") as file:
        file.write(b'3\n{"what": "whole"}\n{"time": "2026-11-16T10:15:00+00:00", "wh\xc3')
    run = coordinator.resume(path, Inside(wire.workers), deadlines=FAST)
    noted = incidents(run, None)
    assert noted.count("the server was started again") == 1 and "whole" in noted
    last = (path / "incidents.jsonl").read_text(errors="replace").splitlines()[-1]
    assert json.loads(last)["what"] == "the server was started again"


# Nobody judges


class Silenced(Inside):
    """From a question on, all sites are there anew and do not let their cases be scored, though they may be asked."""

    def __init__(self, workers, at):
        super().__init__(workers)
        self.at = at

    def answer(self, site, header, body):
        if self.tokens[site] == "1" and self.at(header):
            self.tokens[site] = "2"
        got, out = super().answer(site, header, body)
        if self.tokens[site] == "2" and header["kind"] == "hello":
            return {**got, "may_score": False}, out
        silent = self.tokens[site] == "2" and got.keys() & {"scores", "measures"}
        return ({"refused": "case_scores = false"}, b"") if silent else (got, out)


LONG = [(BASE, {"run.rounds": "3"}), (PHASES, {})]  # three rounds, in one phase or two


@pytest.mark.parametrize(
    "first, judged, said",
    [
        (lambda h: h["kind"] == "train", [False] * 3, "no site judged any round of"),
        (lambda h: h["kind"] == "train" and h["round"] == 1, [True, False, False], "no site judged the best model of"),
        (lambda h: h["kind"] == "score" and h["round"] == 1, [True, False, False], "no site judged the best model of"),
    ],
)
@pytest.mark.parametrize("text, changes", LONG)
def test_a_round_that_nobody_judges_is_not_the_best_and_ends_nothing(first, judged, said, text, changes, tmp_path):
    path, sites = tmp_path / "deployed", {i: Site() for i in NAMES}
    with pytest.raises(RunError, match=f"{said}.*nothing is lost.*resume"):
        go(tmp_path, parse(text, SMALL | changes), Silenced(sites, first), deadlines=DEADLINES)
    records = read(path).records
    judged = judged[: len(records)]
    assert [r.mean_score is not None for r in records] == judged == [bool(r.validation) for r in records]
    what = [i["what"] for r in records for i in r.incidents]
    assert sum("no site scored" in w for w in what) == judged.count(False)
    run = coordinator.resume(path, Inside(sites), deadlines=DEADLINES)  # they judge again
    assert len(run.folder.records()) == 3 and run.result.test.keys() == set(NAMES)


def test_without_scores_of_test_cases_a_run_reports_its_validation_cases(tmp_path):
    class Silent(Inside):
        def answer(self, site, header, body):
            silent = header.get("split") == "test"
            return ({"refused": "case_scores = false"}, b"") if silent else super().answer(site, header, body)

    wire = Silent({i: Site() for i in NAMES})
    run = go(tmp_path, parse(PHASES, SMALL), wire, deadlines=replace(DEADLINES, quorum=0))
    assert run.split == "validation" and all(r.mean_score == 0.5 for r in run.folder.records())
    assert "no site scored the model of round 1 on test cases" in incidents(run, None)
    assert [p.name for p in (run.folder.path / "evaluation").iterdir()] == ["validation"]


def test_a_study_whose_sites_have_test_cases_alone_does_not_begin(tmp_path):
    wire = Inside({i: Site("hello", {"validation": 0}, 9) for i in NAMES})
    with pytest.raises(RunError, match="no best round could be chosen"):
        go(tmp_path, parse(BASE, SMALL), wire, deadlines=DEADLINES)
