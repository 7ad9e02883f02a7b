"""Two honest sites and one that says what it likes: the study goes on with the two, and the record says why.

No site trains here: each sends back what it was sent, and says what sites say.
"""

import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from consortium import BASE, FAST, NAMES, Envelope, Fragile, Inside, Stop
from polysite.algorithms.pfednet import PFedNet
from polysite.config import parse
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.coordinator.roster import Roster
from polysite.deploy.protocol import (
    MEASURES,
    Digests,
    Failed,
    Greeting,
    Measured,
    Refused,
    Request,
    Scored,
    Subject,
    Trained,
    model_digest,
)
from polysite.engines.compress import Compress
from polysite.engines.rounds import Watch
from polysite.errors import PayloadError, RunError
from polysite.payload import Payload, decode, encode
from polysite.report import progress
from polysite.report.runs import read

TEXT = 300  # characters of what a site says that are kept
DEADLINES = replace(FAST, quorum=2, deadline=5, again=0.05)
SMALL = {"run.rounds": "2", "run.validate_every": "1"}
UNET = {"model.filters": "[2, 2, 2]"}
CLASSES = {
    "data.name": '"phantom_classes"',
    "data.shape": "[24, 24, 24]",
    "train.patch": "[16, 16]",
    "model.name": '"densenet_small"',
}
HELLO = {"train": 5, "validation": 2, "test": 2, "may_score": True, "may_assess": True, "torch": "2", "device": "cpu"}
FITS = {"fit_loss": [0.5], "fit_steps": [2.0], "fit_lr_sum": [0.1], "fit_reach": [0.1], "seconds": 1.0}
LABELS = ("WT", "TC", "ET")
ZEROS = "0" * 64


def scores(values=(0.5, 0.5), labels=LABELS, **more):
    return json.dumps(
        {f"case-{k}": {"labels": dict.fromkeys(labels, v), "loss": 1.0, **more} for k, v in enumerate(values)}
    )


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


class Site:
    """Says of ``kind`` what it is told to say, for ``times`` questions; otherwise what an honest site says."""

    def __init__(self, kind="", lie=None, times=1):
        self.kind, self.lie, self.left, self.payload = kind, lie, times, {}

    def answer(self, header, body):
        got, out = self.honest(header, body)
        if header["kind"] != self.kind or not self.left:
            return got, out
        self.left -= 1
        said = {**got, **self.lie} if isinstance(self.lie, dict) else self.lie(got)
        return {k: v for k, v in said.items() if v is not ...}, out

    def honest(self, header, body):
        match header["kind"]:
            case "hello":
                return HELLO, b""
            case "train":
                return FITS, encode(Payload(**{"model": decode(body)["model"], "weight": 5, **self.payload}))
            case "score":
                return {"scores": scores()}, b""
            case "examine":
                return {"measures": measures()}, b""
            case "serve":
                return {"digests": [model_digest(decode(body)["model"])]}, b""
        return {}, b""


def study(tmp_path, liar, changes=(), text=BASE, wire=Fragile, watch=Watch(), **more):
    sites = {"a": Site(), "b": Site(), "c": liar}
    chosen = parse(text, SMALL | UNET | dict(changes))
    settings = {"deadlines": DEADLINES, "assess": False, "wait": 0, **more}
    run = coordinator.run(chosen, wire(sites), NAMES, tmp_path / "run", watch, **settings)
    strictly(run.folder.path)
    return run


def strictly(path):
    """What other programs read is JSON: it has no word for what is not a number."""

    def refuse(word):
        raise AssertionError(word)

    for line in [*(path / "rounds.jsonl").read_text().splitlines(), (path / "result.json").read_text()]:
        json.loads(line, parse_constant=refuse)


def incidents(run, site="c"):
    return [i["what"] for r in (*run.folder.records(), run.result) for i in r.incidents if i.get("site") == site]


@pytest.mark.parametrize(
    "lie, said",
    [
        ({"train": ...}, "train: None is not a number of cases"),
        ({"train": "x"}, "train: 'x' is not"),
        ({"train": True}, "train: True is not"),
        ({"train": 3.0}, "train: 3.0 is not"),
        ({"test": -1}, "test: -1 is not"),
        ({"validation": 10**9}, "validation: 1000000000 is not"),
        ({"validation": [2]}, r"validation: \[2\] is not"),
        ({"may_score": "yes"}, "may_score: 'yes' is neither"),
        ({"may_assess": 1}, "may_assess: 1 is neither"),
        ({"error": "[/oops]\x1b[2J"}, r"could not be greeted: \[/oops\] \[2J"),
        ({"refused": ["no", "no"]}, r"does not take part: \['no', 'no'\]"),
    ],
)
def test_a_greeting_that_makes_no_sense_is_not_taken(lie, said, tmp_path):
    run = study(tmp_path, Site("hello", lie, times=10**6))
    assert [sorted(r.sites) for r in run.folder.records()] == [["a", "b"]] * 2
    (noted,) = [i for i in incidents(run) if "no answer" not in i]
    assert re.search(said, noted), noted


def test_what_a_site_says_it_runs_on_is_cut_and_printable(tmp_path):
    run = study(tmp_path, Site("hello", {"torch": "2\x1b[2J" + "x" * 10**6, "device": ["a"], "more": "y"}))
    told = json.loads((run.folder.path / "deployment.json").read_text())["sites"]["c"]
    assert told["torch"].startswith("2 [2Jxxx") and len(told["torch"]) == 80 and told["device"] == "['a']"
    assert told.keys() == {"train", "validation", "test", "torch", "device"}


ODD = [
    ("train", {"fit_loss": ["x"]}, "loss: 'x' is not a number"),
    ("train", {"fit_loss": [0.5, 0.5]}, "not lists of one length"),
    ("train", {"fit_loss": 3.0}, "not lists of one length"),
    ("train", {"fit_steps": [float("inf")]}, "steps: inf is not a number"),
    ("train", {"fit_steps": [float("nan")]}, "steps: nan is not a number"),
    ("train", {"fit_lr_sum": [-1.0]}, "learning rates: -1.0 is not a number"),
    ("train", {"fit_reach": [1e300]}, "reach: 1e.300 is not a number"),
    ("train", {"seconds": [1.0]}, r"seconds: \[1.0\] is not a number"),
    ("train", {"seconds": ""}, "seconds: '' is not a number"),
    ("score", {"scores": ...}, "not a text"),
    ("score", {"scores": 3}, "not a text"),
    ("score", {"scores": "[" * 10**5}, "cannot be read"),
    ("score", {"scores": "[1]"}, "not those of at most 2 cases"),
    ("score", {"scores": scores([0.5] * 3)}, "not those of at most 2 cases"),
    ("score", {"scores": '{"c": 1}'}, "'c' is not scored by WT, TC, ET and the loss"),
    ("score", {"scores": '{"c": {}}'}, "'c' is not scored by"),
    ("score", {"scores": '{"c": {"loss": 1.0}}'}, "'c' is not scored by"),
    ("score", {"scores": '{"c": {"labels": 3, "loss": 1.0}}'}, "'c' is not scored by"),
    ("score", {"scores": scores(predicted=1, true=1)}, "'case-0' is not scored by"),
    ("score", {"scores": scores([None])}, "WT of 'case-0': None is not a number from 0 to 1"),
    ("score", {"scores": scores(labels=("WT", "TC"))}, "'case-0' is not scored by"),
    ("score", {"scores": scores(more=1.0)}, "'case-0' is not scored by"),
    ("score", {"scores": scores([0.5, float("nan")])}, "WT of 'case-1': nan is not a number from 0 to 1"),
    ("score", {"scores": scores([1e6, 1e6])}, "WT of 'case-0': 1000000.0 is not a number from 0 to 1"),
    ("score", {"scores": scores([1e308, 1e308])}, "is not a number from 0 to 1"),
    ("score", {"scores": scores([10**400])}, "is not a number from 0 to 1"),
    ("score", {"scores": scores([-0.1])}, "is not a number from 0 to 1"),
    ("score", {"scores": scores([True])}, "is not a number from 0 to 1"),
    ("score", {"scores": scores(loss="low")}, "loss of 'case-0': 'low' is not a number"),
    ("score", {"scores": scores().replace("case-1", "case\\u001b")}, "is not the name of a case"),
    ("examine", {"measures": ...}, "not a text"),
    ("examine", {"measures": "[1]"}, "not those of at most 2 cases"),
    ("examine", {"measures": '{"c": 1}'}, "'c' has no measures"),
    ("examine", {"measures": measures([0.5] * 3)}, "not those of at most 2 cases"),
    ("examine", {"measures": measures(labels=("WT", "TC"))}, "'case-0' is not scored by"),
    ("examine", {"measures": measures(counts={"WT": [1, 2, 3, 4]})}, "the counts of 'case-0' are not those of"),
    ("examine", {"measures": measures(counts=counts([1, 2, 3]))}, "is not four whole numbers"),
    ("examine", {"measures": measures(counts=counts([1, 2, 3, 0.5]))}, "is not four whole numbers"),
    ("examine", {"measures": measures(counts=counts([1, 2, 3, -1]))}, "is not a number from 0 to"),
    ("examine", {"measures": measures(measures={})}, "the measures of 'case-0' are not those of WT, TC, ET"),
    ("examine", {"measures": measures(per_label={"hd95": ...})}, "WT of 'case-0' is not measured by dice"),
    ("examine", {"measures": measures(per_label={"volume": 3})}, "WT of 'case-0' is not measured by dice"),
    ("examine", {"measures": measures(per_label={"dice": 2})}, "dice of WT of 'case-0': 2 is not a number from 0 to 1"),
    ("examine", {"measures": measures(per_label={"dice": "inf"})}, "dice of WT of 'case-0': 'inf' is not"),
    ("examine", {"measures": measures(per_label={"hd95": -1.0})}, "hd95 of WT of 'case-0': -1.0 is not"),
    ("examine", {"measures": measures(per_label={"hd95": "-inf"})}, "hd95 of WT of 'case-0': '-inf' is not"),
    ("examine", {"measures": measures(per_label={"hd95": float("nan")})}, "hd95 of WT of 'case-0': nan is not"),
    ("examine", {"measures": measures(per_label={"truth": None})}, "truth of WT of 'case-0': None is not"),
    ("examine", {"measures": measures(unit="mm\x1b")}, "'case-0' has no measures, or no unit"),
    ("examine", {"measures": measures(unit=3)}, "'case-0' has no measures, or no unit"),
    ("examine", {"measures": measures(more=1)}, "'case-0' is not scored by"),
    ("serve", {"digests": ...}, "digests: None are not"),
    ("serve", {"digests": 3}, "digests: 3 are not"),
    ("serve", {"digests": []}, r"digests: \[\] are not"),
    ("serve", {"digests": [ZEROS] * 65}, "are not those of 1 to 64 models"),
    ("serve", {"digests": ["x"]}, "digests: 'x' is not a digest"),
    ("serve", {"digests": [3]}, "digests: 3 is not a digest"),
]


@pytest.mark.parametrize("kind, lie, said", ODD)
def test_an_answer_that_makes_no_sense_is_one_that_failed(kind, lie, said, tmp_path):
    """The round, or the validation, goes on without the site; in the next one it is asked again."""
    run = study(tmp_path, Site(kind, lie))
    one, two = run.folder.records()
    where = {"train": "sites", "score": "validation"}.get(kind)
    if where:
        assert (sorted(getattr(one, where)), sorted(getattr(two, where))) == (["a", "b"], ["a", "b", "c"])
    if kind == "examine":
        assert sorted(i for i, cases in run.result.test.items() if cases) == ["a", "b"]
    assert run.result.best_round == 0 and one.mean_score == two.mean_score == 0.5
    (noted,) = incidents(run)
    assert noted.startswith("fails: its response to ") and re.search(said, noted), noted


@pytest.mark.parametrize(
    "lie", [{"predicted": 3}, {"true": -1}, {"true": 1.0}, {"true": None}, {"true": ...}, {"values": [2.0]}]
)
def test_classes_are_those_of_the_study(lie, tmp_path):
    base = BASE.replace("filters = [2, 4, 4]\n", "")  # of another network
    label = parse(base, CLASSES).data.label_names[1]
    classes = {"predicted": 1, "true": 1}
    each = {label: {"accuracy": 1.0, "predicted": 1.0, "true": 1.0}}

    def said(values=(1.0, 1.0), **more):
        return scores(values, ("accuracy",), **{k: v for k, v in (classes | more).items() if v is not ...})

    class Classifier(Site):
        def honest(self, header, body):
            got, out = super().honest(header, body)
            extra = {"score": {"scores": said()}, "examine": {"measures": said(measures=each, unit="")}}
            return extra.get(header["kind"], got), out

    sites = {
        "a": Classifier(),
        "b": Classifier(),
        "c": Classifier("score", {"scores": said(**lie)}),
    }
    chosen = parse(base, {**SMALL, **CLASSES})
    run = coordinator.run(chosen, Fragile(sites), NAMES, tmp_path / "run", deadlines=DEADLINES, assess=False, wait=0)
    one, two = run.folder.records()
    assert (sorted(one.validation), sorted(two.validation)) == (["a", "b"], ["a", "b", "c"])
    assert two.measure == "accuracy" and re.search(r"not one of the \d classes|not scored by|0 to 1", incidents(run)[0])
    assert (run.folder.path / "evaluation" / "test" / "cases.csv").is_file()


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


def test_numbers_of_cases_stay_those_of_the_first_greeting(tmp_path):
    roster = Roster(Fragile({"a": Site()}), "x", "", ["a"], DEADLINES, {})
    for train, listed in ((5, "ab"), (5, "ab"), (4000, "cd")):
        greeting = Greeting.parse({**HELLO, "train": train, "listed": listed})
        roster._fix_cases("a", greeting)
        roster.sites["a"].greeting = greeting
    assert roster.sites["a"].cases["train"] == 5
    first, second = (i["what"] for i in roster.incidents())
    assert "its data have changed" in first and "reports 4000 train cases instead of 5" in second
    with pytest.raises(PayloadError, match="listed: 7 is not a digest"):
        Greeting.parse({**HELLO, "listed": 7})


def test_a_model_that_has_come_apart_has_no_loss_in_the_record(tmp_path):
    """An honest site's training may diverge; that is its reply's fault, which is screened, and no lie."""
    liar = Site("train", {"fit_loss": [float("inf")]})
    liar.payload = {"weight": float("nan")}
    run = study(tmp_path, liar)
    one = run.folder.records()[0]
    assert one.sites["c"].loss is None and one.sites["c"].numbers == {"weight": None}
    assert "'weight' is nan" in one.refused["c"]
    (tmp_path / "again").mkdir()
    run = study(tmp_path / "again", Site("score", {"scores": scores(loss=float("-inf"))}, times=9))
    assert run.folder.records()[0].validation["c"].loss is None and not incidents(run)
    assert np.isnan(run.result.validation["c"]["case-0"].loss)


PHASES = f'{BASE}\n[[then]]\nalgorithm.name = "fedprox"\nrun.rounds = 1\n'


@pytest.mark.parametrize("lie", [[ZEROS], [ZEROS, ZEROS]])
def test_a_false_digest_of_a_model_that_all_share_ends_nothing(lie, tmp_path):
    run = study(tmp_path, Site("serve", {"digests": lie}), text=PHASES)
    assert [r.phase for r in run.folder.records()] == [0, 0, 1]
    assert incidents(run) == ["reports another model than was sent; the study continues with what was sent"]
    assert sorted(p.name for p in (run.folder.path / "models").iterdir()) == ["best.safetensors", "last.safetensors"]


@pytest.mark.parametrize("kind", ["hello", "begin", "train", "score", "examine", "serve"])
@pytest.mark.parametrize("word", ["refused", "error"])
def test_what_a_site_writes_is_no_markup_and_is_cut_before_it_is_shown_or_kept(kind, word, tmp_path, monkeypatch):
    lie = {word: "[/oops] \x1b[2J\u202e" + "x" * 10**6, "incidents": ["[/bold]\x07" + "y" * 10**6]}
    screen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=200))
    with progress.progress() as watch:
        run = study(tmp_path, Site(kind, lie), text=PHASES, watch=watch)
    assert any("[/oops]  [2J xxx" in i for i in incidents(run)) and "[/bold] yyy" in "".join(incidents(run))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())  # without what rich itself makes of it
    assert "[/oops]" in plain and not any(odd in screen.getvalue() for odd in ("\x1b[2J", "\x07", "\u202e"))
    for name in ("incidents.jsonl", "rounds.jsonl", "log.txt", "deployment.json"):
        text = (run.folder.path / name).read_text()
        assert "\x1b" not in text and "\\u001b" not in text and "x" * TEXT not in text and "y" * TEXT not in text


def test_a_refusal_of_all_is_told_in_a_sentence(tmp_path):
    class Refusing(Fragile):
        def answer(self, site, header, body):
            return {"refused": "\x1b[2J" + "x" * 10**6}, b""

    with pytest.raises(RunError, match=r"0 of 3 sites take part.*a:  \[2Jx") as told:
        study(tmp_path, Site(), wire=Refusing)
    assert len(str(told.value)) < 4 * TEXT


def test_without_an_assessment_a_study_goes_on(tmp_path):
    run = study(tmp_path, Site(), assess=True)  # these sites do not know what that is
    assert "no assessment: an assessment compares hospitals, and there is only one" in incidents(run, None)
    assert incidents(run)[0].startswith("its reply is refused") and not (run.folder.path / "assessment").exists()


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["{}", ZEROS])
FIELDS = [*HELLO, *FITS, "scores", "measures", "digests", "refused", "error", "incidents"]
HEADERS = st.dictionaries(st.sampled_from(FIELDS), plain | st.lists(plain, max_size=2))


@given(
    st.sampled_from(["hello", "begin", "assess", "train", "score", "examine", "serve"]), HEADERS, st.text(max_size=3)
)
def test_whatever_a_site_says_is_understood_or_refused(kind, header, error):
    found = Roster(None, "", "", NAMES, DEADLINES, {}, subject=Subject(LABELS))
    answer = Envelope("1", header, b"", error)
    found._hear("c", answer)
    said = found._take("c", Request(kind, "s", split="test"), answer)
    site = found.sites["c"]
    assert (said is None and kind in ("hello", "begin")) or isinstance(
        said, Refused | Failed | Trained | Scored | Measured | Digests
    )
    assert kind != "hello" or site.refused or site.greeting_failed or type(site.cases["train"]) is int


# Compressed replies


def packed(shape=(3, 1), step=(1,), kind="float32", size=1.0, dtype="int8"):
    return {"w": np.ones(shape, dtype), "w step": np.full(step, size, kind)}


@pytest.mark.parametrize(
    "kind, value, said",
    [
        ("model", packed((4000, 1), (1, 4000)), "shape"),
        ("update", packed((4000, 1), (1, 4000)), "not one number"),
        ("update", packed((4000, 1), (4000,)), "not one number"),
        ("update", packed(step=(0,)), "not one number"),
        ("update", packed(step=()), "not one number"),
        ("update", packed(kind="float64"), "not one number"),
        ("model", packed((3, 3)), "of shape"),
        ("model", packed((1,)), "of shape"),
        ("model", packed((1, 3), dtype="float16"), "of shape"),
        ("update", {"w": np.ones(3, "int8")}, "w step"),
        ("model", 3.0, "does not fit"),
    ],
)
def test_a_compressed_reply_is_no_larger_than_what_was_sent(kind, value, said):
    sent = Payload(model={"w": np.ones((3, 1), "float32")})
    with pytest.raises(PayloadError, match=said):
        Compress("int8").restore({"model": kind}, sent, Payload(model=value))


@pytest.mark.parametrize("size", [np.inf, np.nan, 3e38])
def test_steps_beyond_all_numbers_are_left_to_the_screen(size):
    sent = Payload(model={"w": np.ones((3, 1), "float32")})
    found = Compress("int8").restore(
        {"model": "model"}, sent, Payload(model=packed(size=size) | {"w": np.full((3, 1), 2, "int8")})
    )
    assert not np.isfinite(found["model"]["w"]).any()


# The journal


def test_a_journal_that_was_cut_short_is_read_and_written_on(tmp_path):
    wire = Fragile({i: Site() for i in NAMES}, lambda h: h["kind"] == "train" and h["round"] == 1)
    chosen, path = parse(BASE, SMALL | UNET), tmp_path / "run"
    with pytest.raises(Stop):
        coordinator.run(chosen, wire, NAMES, path, deadlines=FAST, assess=False)
    with (path / "incidents.jsonl").open("ab") as file:
        file.write(b'3\n{"what": "whole"}\n{"time": "2026-11-16T10:15:00+00:00", "wh\xc3')
    run = coordinator.resume(path, Inside(wire.workers), deadlines=FAST)
    noted = incidents(run, None)
    assert noted.count("the server was started again") == 1 and "whole" in noted
    last = (path / "incidents.jsonl").read_text(errors="replace").splitlines()[-1]
    assert json.loads(last)["what"] == "the server was started again"


def test_a_journal_that_cannot_be_written_is_no_reason_to_stop(tmp_path, caplog):
    class Full(Site):
        def answer(self, header, body):
            (tmp_path / "run" / "incidents.jsonl").mkdir(exist_ok=True) if header["kind"] == "train" else None
            return super().answer(header, body)

    run = study(tmp_path, Full("train", {"error": "no"}, times=2))
    assert incidents(run) == ["fails: no"] * 2
    assert sum("incidents cannot be kept" in r.message for r in caplog.records) == 1


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


@pytest.mark.parametrize(
    "first, judged, said",
    [
        (lambda h: h["kind"] == "train", [False] * 3, "no site judged any round of"),
        (lambda h: h["kind"] == "train" and h["round"] == 1, [True, False, False], "no site judged the best model of"),
        (lambda h: h["kind"] == "score" and h["round"] == 1, [True, False, False], "no site judged the best model of"),
    ],
)
@pytest.mark.parametrize("text, changes", [(BASE, {"run.rounds": "3"}), (PHASES, {})])
def test_a_round_that_nobody_judges_is_not_the_best_and_ends_nothing(first, judged, said, text, changes, tmp_path):
    chosen, path = parse(text, SMALL | UNET | changes), tmp_path / "run"
    sites = {i: Site() for i in NAMES}
    with pytest.raises(RunError, match=f"{said}.*nothing is lost.*resume"):
        coordinator.run(chosen, Silenced(sites, first), NAMES, path, deadlines=DEADLINES, assess=False)
    records = read(path).records
    assert (
        [r.mean_score is not None for r in records] == judged[: len(records)] == [bool(r.validation) for r in records]
    )
    what = [i["what"] for r in records for i in r.incidents]
    assert sum("no site scored" in w for w in what) == judged[: len(records)].count(False)
    run = coordinator.resume(path, Inside(sites), deadlines=DEADLINES)  # they judge again
    assert len(run.folder.records()) == 3 and run.result.test.keys() == set(NAMES)


@pytest.mark.parametrize("text, changes", [(BASE, {"run.rounds": "3"}), (PHASES, {})])
def test_without_scores_of_test_cases_a_run_reports_its_validation_cases(text, changes, tmp_path):
    class Silent(Inside):
        def answer(self, site, header, body):
            silent = header.get("split") == "test"
            return ({"refused": "case_scores = false"}, b"") if silent else super().answer(site, header, body)

    chosen, path, sites = parse(text, SMALL | UNET | changes), tmp_path / "run", {i: Site() for i in NAMES}
    run = coordinator.run(chosen, Silent(sites), NAMES, path, deadlines=replace(DEADLINES, quorum=0), assess=False)
    assert run.split == "validation" and all(r.mean_score == 0.5 for r in run.folder.records())
    assert "no site scored the model of round 1 on test cases" in incidents(run, None)
    assert [p.name for p in (path / "evaluation").iterdir()] == ["validation"]


def test_a_study_whose_sites_have_test_cases_alone_does_not_begin(tmp_path):
    sites = {i: Site("hello", {"validation": 0}, 9) for i in NAMES}
    with pytest.raises(RunError, match="no best round could be chosen"):
        coordinator.run(
            parse(BASE, SMALL | UNET), Inside(sites), NAMES, tmp_path / "run", deadlines=DEADLINES, assess=False
        )


def test_a_sketch_that_is_none_is_refused():
    """pFedNet finds neighbours by it."""
    algorithm, w = PFedNet(personal=("head.*",)), np.ones(2)
    state = algorithm.init({"head.w": w, "stem.w": w}, NAMES)
    told = {"a": {"sketch": np.ones(3)}, "b": {"x": np.ones(3)}, "c": {}, "d": {"sketch": np.ones(3)}}
    replies = {i: Payload(model={"stem.w": w}, sketch=sketch, time=1.0) for i, sketch in told.items()}
    assert algorithm.objections(state, replies).keys() == {"b", "c"}
    state = algorithm.merge(state, {"a": replies["a"]})
    assert algorithm.objections(state, {"b": Payload(model={}, sketch={"sketch": np.ones(2)}, time=1.0)}).keys() == {
        "b"
    }
