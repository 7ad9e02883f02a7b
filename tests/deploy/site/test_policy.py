"""What a hospital refuses, and how it says so."""

import tomllib
from dataclasses import fields, replace
from datetime import datetime

import pytest

from polysite.algorithms import ALGORITHMS, find
from polysite.deploy.site.policy import TEXT, Intent, SitePolicy
from polysite.errors import ConfigError

NOON = datetime(2026, 3, 2, 12, 0)
MODEL = {"model": "model", "weight": "count"}
TRAIN = Intent("train", "fedavg", round=7, cases=77, leaves=MODEL)
FEATURES = replace(TRAIN, leaves={"features": "cases"})
SCORE = Intent("score", "fedavg", cases=3, leaves={"dice": "number"})


def test_the_file_of_init_has_every_key_at_its_default_and_one_of_0_1_0_is_version_1(tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text(TEXT)
    assert SitePolicy.load(file) == SitePolicy() and not SitePolicy().remarks
    assert list(tomllib.loads(TEXT)) == [f.name for f in fields(SitePolicy)]
    file.write_text(TEXT.replace("version = 2", ""))
    assert "all measures of a case" in SitePolicy.load(file).remarks[0]
    file.write_text("\ufefffewest = 9\ngpu_share = 1\nalgorithms = []\n", encoding="utf-8")
    assert SitePolicy.load(file) == SitePolicy(version=1, fewest=9, algorithms=())


def test_by_default_every_algorithm_may_train():
    for name in ALGORITHMS:
        reply = getattr(find(name, ALGORITHMS, "algorithm"), "reply", {})
        leaves = reply if hasattr(reply, "items") else {}  # a combinator has that of what is inside
        assert SitePolicy().refuse(Intent("train", name, 99, 5, leaves), NOON) is None, name


REFUSED = {  # what is asked, under which policy -> key of policy.toml
    "algorithms": (TRAIN, {"algorithms": ("fedprox", "scaf*")}),
    "algorithms, hello": (Intent("hello", "cfft"), {"algorithms": ("fed*",)}),
    "kinds": (TRAIN, {"kinds": ("update", "count")}),
    "kinds, unknown": (replace(TRAIN, leaves={"diary": "text"}), {}),
    "fewest": (TRAIN, {"fewest": 78}),
    "fewest, model beside scores": (replace(SCORE, leaves=MODEL, case_scores=True), {}),
    "rounds": (TRAIN, {"rounds": 7}),
    "rounds, negative": (replace(TRAIN, round=-1), {}),
    "hours": (TRAIN, {"hours": "20:00-06:00"}),
    "case_vectors, kind": (FEATURES, {}),
    "case_scores": (replace(SCORE, case_scores=True), {"case_scores": False}),
    "assess": (Intent("assess", cases=9), {"assess": False}),
    "studies": (Intent("hello", cases=9, studies=3), {"studies": 3}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_a_sentence_that_names_the_key(case):
    ask, policy = REFUSED[case]
    reason, key = SitePolicy(**policy).refuse(ask, NOON), case.partition(",")[0]
    assert reason and "policy.toml" in reason and key in reason and "\n" not in reason
    assert str(ask.cases) not in reason  # the reason leaves, too


@pytest.mark.parametrize(
    "ask, policy",
    [
        (TRAIN, {"algorithms": ("scaffold", "fed*"), "kinds": ("model", "count"), "fewest": 77, "rounds": 8}),
        (FEATURES, {"case_vectors": True, "kinds": ()}),
        (Intent("train", "local", cases=2), {}),  # nothing leaves
        (replace(TRAIN, leaves={"weight": "one", "time": "rate"}, cases=1), {}),  # nothing about cases
        (replace(SCORE, case_scores=True), {}),
        (Intent("hello"), {"hours": "20:00-06:00", "assess": False, "algorithms": ()}),
        (Intent("serve", "ditto", cases=9), {"hours": "20:00-06:00"}),
        (Intent("assess", "", cases=9, leaves={"quantiles": "statistics"}), {"algorithms": ()}),
    ],
)
def test_what_is_allowed_is_not_refused(ask, policy):
    assert SitePolicy(**policy).refuse(ask, NOON) is None


@pytest.mark.parametrize(
    "hours, inside, outside",
    [
        ("20:00-06:00", ["20:00", "23:59", "00:00", "05:59"], ["06:00", "12:00", "19:59"]),
        ("08:30-17:15", ["08:30", "12:00", "17:14"], ["17:15", "00:00", "08:29"]),
        ("22:00-24:00", ["22:00", "23:59"], ["00:00", "21:59"]),
        ("", ["00:00", "12:00"], []),
    ],
)
def test_hours_may_pass_midnight(hours, inside, outside):
    policy, day = SitePolicy(hours=hours), "2026-03-02"
    allowed = [t for t in inside + outside if not policy.refuse(TRAIN, datetime.fromisoformat(f"{day} {t}"))]
    assert allowed == inside


TWO = {"cluster_0": "model", "cluster_1": "model"}


@pytest.mark.parametrize(
    "said, reply, cases, more",
    [
        (None, MODEL, 5, {}),
        (None, {}, 0, {}),
        ("kinds", {"model": "model", "diary": "text"}, 5, {}),
        ("fewest", MODEL, 4, {}),
        ("few cases are behind 'cluster_1': policy.toml says fewest", TWO, 9, {"behind": {"cluster_1": 4}}),
        (None, TWO, 9, {"behind": {"cluster_1": 5}}),
        ("fewest", MODEL, 4, {"behind": {"model": 9}}),
        ("fewest", {"dice": "number"}, 1, {}),
        ("kinds", {"diary?": "text"}, 9, {}),  # there, whatever it is called
        ("case_vectors", {"features": "cases"}, 20, {}),
        (None, {"sums": "statistics"}, 20, {}),
    ],
)
def test_the_reply_itself_is_checked_again(said, reply, cases, more):
    reason = SitePolicy().refuse_reply(reply, cases, **more)
    assert reason is None if said is None else said in reason and "policy.toml" in reason


@pytest.mark.parametrize(
    "text, said",
    [
        ("version = 3", "version = 3, and this polysite reads up to 2"),
        ("fewset = 3", "did you mean 'fewest'?"),
        ("fewest = 0", "fewest = 0 must be at least 1"),
        ("fewest = true", "fewest = True must be a whole number"),
        ("kinds = ['modle']", "did you mean 'model'?"),
        ("kinds = ['cases']", "case_vectors"),
        ("algorithms = [1]", "must be a list of texts"),
        ("hours = '8-17'", 'of the form "20:00-06:00"'),
        ("hours = '24:00-06:00'", 'of the form "20:00-06:00"'),
        ("hours = '06:00-06:00'", 'or "" for always'),
        ("gpu_share = nan", "at most 1"),
        ("case_vectors = 1", "must be true or false"),
        ("packages = ['my_lab']", "write a package and its digest"),
        ("memory = 0.0", "memory = 0.0 must be more than 0"),
        ("seconds = nan", "seconds = nan must be more than 0"),
        ("similar_days = -1.0", "similar_days = -1.0 must lie between"),
        ("masked_sites = 2", "masked_sites = 2 must be at least 3"),
        ("masked_peers = ['north']", "which is no fingerprint"),
        ("epsilon = -1.0", "epsilon = -1.0 must not be negative"),
        ("delta = 0.5", "delta = 0.5 must be"),
        ("assess = ", "not valid TOML"),
        ("# \xff", "cannot be read"),
        (None, "is missing"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_with_its_file(tmp_path, text, said):
    file = tmp_path / "policy.toml"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as problem:
        SitePolicy.load(file)
    assert said in str(problem.value) and str(file) in str(problem.value)
