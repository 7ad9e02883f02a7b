"""What a hospital refuses, and how it says so."""

import time
import tomllib
from dataclasses import fields, replace
from datetime import UTC, datetime

import pytest

from polysite.algorithms import ALGORITHMS, find
from polysite.algorithms.cfft import Cfft
from polysite.deploy.site.policy import KINDS, TEXT, Intent, SitePolicy
from polysite.errors import ConfigError

NOON = datetime(2026, 3, 2, 12, 0)
MODEL = {"model": "model", "weight": "count"}
TRAIN = Intent("train", "fedavg", round=7, cases=77, leaves=MODEL)


def at(clock):
    return datetime(2026, 3, 2, *map(int, clock.split(":")))


def test_the_file_of_init_has_every_key_at_its_default_and_explains_it(tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text(TEXT)
    assert SitePolicy.load(file) == SitePolicy()
    assert list(tomllib.loads(TEXT)) == [f.name for f in fields(SitePolicy)]
    parts = TEXT.split("\n\n")
    assert len(parts) == 1 + len(fields(SitePolicy)) and all(p.startswith("# ") for p in parts)


def test_keys_that_are_not_there_have_their_default(tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text("\ufefffewest = 9\ngpu_share = 1\nalgorithms = []\n", encoding="utf-8")
    assert SitePolicy.load(file) == SitePolicy(version=1, fewest=9, algorithms=())


def test_a_policy_of_0_1_0_is_version_1_and_a_later_one_is_refused(tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text(TEXT)
    assert SitePolicy.load(file) == SitePolicy() and not SitePolicy().remarks
    file.write_text(TEXT.replace("version = 2", ""))
    assert "all measures of a case" in SitePolicy.load(file).remarks[0]
    file.write_text(TEXT.replace("version = 2", "version = 3"))
    with pytest.raises(ConfigError, match="version = 3, and this polysite reads up to 2"):
        SitePolicy.load(file)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_by_default_every_algorithm_may_train(name):
    algorithm = find(name, ALGORITHMS, "algorithm")
    reply = getattr(algorithm, "reply", {})
    leaves = reply if hasattr(reply, "items") else {}  # a combinator has that of what is inside
    assert SitePolicy().refuse(Intent("train", name, 99, 5, leaves), NOON) is None


LIMITS = ("similar_days", "parameters", "memory", "disk", "seconds")  # test_limits.py has these
REFUSED = {  # what is asked, under which policy -> key of policy.toml
    "algorithms": (TRAIN, {"algorithms": ("fedprox", "scaf*")}),
    "algorithms, none": (TRAIN, {"algorithms": ()}),
    "algorithms, begin": (Intent("begin", "cfft"), {"algorithms": ("fed*",)}),
    "algorithms, hello": (Intent("hello", "cfft"), {"algorithms": ("fed*",)}),
    "kinds": (TRAIN, {"kinds": ("update", "count")}),
    "kinds, none": (TRAIN, {"kinds": ()}),
    "kinds, unknown": (replace(TRAIN, leaves={"diary": "text"}), {}),
    "fewest": (TRAIN, {"fewest": 78}),
    "fewest, scores": (Intent("score", "fedavg", cases=3, leaves={"dice": "number"}), {}),
    "fewest, model beside scores": (Intent("score", "fedavg", cases=3, leaves=MODEL, case_scores=True), {}),
    "rounds": (TRAIN, {"rounds": 7}),
    "rounds, negative": (replace(TRAIN, round=-1), {}),
    "hours": (TRAIN, {"hours": "20:00-06:00"}),
    "hours, assess": (Intent("assess", cases=9), {"hours": "20:00-06:00"}),
    "case_vectors": (replace(TRAIN, case_vectors=True), {}),
    "case_vectors, kind": (replace(TRAIN, leaves={"features": "cases"}), {}),
    "case_scores": (Intent("score", "fedavg", cases=9, case_scores=True), {"case_scores": False}),
    "assess": (Intent("assess", cases=9), {"assess": False}),
    "studies": (Intent("hello", cases=9, studies=3), {"studies": 3}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_a_sentence_that_names_the_key(case):
    ask, policy = REFUSED[case]
    reason, key = SitePolicy(**policy).refuse(ask, NOON), case.partition(",")[0]
    assert reason and "policy.toml" in reason and key in reason and "\n" not in reason
    assert str(ask.cases) not in reason  # the reason leaves, too


def test_small_sums_and_small_models_are_refused_by_their_key():
    bound, free = SitePolicy(fewest=9), SitePolicy(fewest=9, small_sums=True)
    assert bound.refuse_small("", "") is None is free.refuse_small("it sums few", "")
    assert bound.refuse_small("it sums few", "") == "it sums few: policy.toml says fewest = 9 and small_sums = false"
    for policy in (bound, free):
        assert policy.refuse_small("", "it trains few") == "it trains few: policy.toml says fewest = 9"


def test_every_key_that_can_refuse_is_tested():
    keys = {case.partition(",")[0] for case in REFUSED}
    # tests/deploy/coordinator/test_secure.py, tests/deploy/site/test_privacy_budget.py, tests/test_plugins.py
    elsewhere = {"masked", "masked_sites", "masked_peers", "epsilon", "delta", "packages"}
    elsewhere |= {"gpu_share", "version", "small_sums", *LIMITS}
    assert keys == {f.name for f in fields(SitePolicy)} - elsewhere


def test_packages_have_a_digest():
    assert SitePolicy(packages=(f"my_lab {'0a' * 32}",)).digests == {"my_lab": "0a" * 32}
    for odd in ("my_lab", f"my lab {'0' * 64}", "my_lab 0a", f"../lab {'0' * 64}"):
        with pytest.raises(ConfigError, match="write a package and its digest"):
            SitePolicy(packages=(odd,))


@pytest.mark.parametrize(
    "ask, policy",
    [
        (TRAIN, {"algorithms": ("scaffold", "fed*")}),
        (TRAIN, {"kinds": ("model", "count")}),
        (TRAIN, {"fewest": 77}),
        (TRAIN, {"rounds": 8}),
        (replace(TRAIN, case_vectors=True), {"case_vectors": True}),
        (replace(TRAIN, leaves={"features": "cases"}), {"case_vectors": True, "kinds": ()}),
        (Intent("train", "local", cases=2), {}),  # nothing leaves
        (replace(TRAIN, leaves={"weight": "one", "time": "rate"}, cases=1), {}),  # nothing about cases
        (Intent("score", "fedavg", cases=2, leaves={"dice": "number"}, case_scores=True), {}),
        (Intent("hello"), {"hours": "20:00-06:00", "assess": False, "algorithms": ()}),
        (Intent("serve", "ditto", cases=9), {"hours": "20:00-06:00"}),
        (Intent("assess", "", cases=9, leaves={"quantiles": "statistics"}), {"algorithms": ()}),
    ],
)
def test_what_is_allowed_is_not_refused(ask, policy):
    assert SitePolicy(**policy).refuse(ask, NOON) is None


def test_what_no_policy_knows_is_refused():
    assert "'diary'" in SitePolicy().refuse(Intent("diary", "fedavg", cases=99), NOON)


@pytest.mark.parametrize(
    "hours, inside, outside",
    [
        ("20:00-06:00", ["20:00", "23:59", "00:00", "05:59"], ["06:00", "12:00", "19:59"]),
        ("08:30-17:15", ["08:30", "12:00", "17:14"], ["17:15", "00:00", "08:29"]),
        ("22:00-24:00", ["22:00", "23:59"], ["00:00", "21:59"]),
        ("00:00-24:00", ["00:00", "23:59"], []),
        ("23:59-00:00", ["23:59"], ["00:00", "23:58"]),
        ("", ["00:00", "12:00"], []),
    ],
)
def test_hours_may_pass_midnight(hours, inside, outside):
    policy = SitePolicy(hours=hours)
    assert [t for t in inside + outside if policy.refuse(TRAIN, at(t)) is None] == inside


def test_hours_are_local(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        policy = SitePolicy(hours="20:00-06:00")
        assert policy.refuse(TRAIN, datetime(2026, 3, 2, 12, 0, tzinfo=UTC)) is None  # 21:00 there
        assert "it is 08:30 here" in policy.refuse(TRAIN, datetime(2026, 3, 1, 23, 30, tzinfo=UTC))
    finally:
        monkeypatch.undo()
        time.tzset()


def test_the_features_of_every_case_stay_and_their_sums_may_leave():
    ask, policy = Intent("train", "cfft", cases=20, leaves=Cfft.reply), SitePolicy()
    assert policy.refuse(ask, NOON) is None
    assert "case_vectors" in policy.refuse(replace(ask, case_vectors=True), NOON)  # as with fit = "pooled"
    assert "case_vectors" in policy.refuse_reply({"features": "statistics"}, 20, case_vectors=True)
    assert "case_vectors" in policy.refuse_reply({"features": "cases"}, 20)
    assert policy.refuse_reply({"sums": "statistics"}, 20) is None


@pytest.mark.parametrize(
    "key, reply, cases, more",
    [
        (None, MODEL, 5, {}),
        (None, {}, 0, {}),
        ("kinds", {"model": "model", "diary": "text"}, 5, {}),
        ("fewest", MODEL, 4, {}),
        ("fewest", {"cluster_0": "model", "cluster_1": "model"}, 9, {"behind": {"cluster_1": 4}}),
        (None, {"cluster_0": "model", "cluster_1": "model"}, 9, {"behind": {"cluster_1": 5}}),
        ("fewest", MODEL, 4, {"behind": {"model": 9}}),
        (None, {"dice": "number"}, 1, {"case_scores": True}),
        ("fewest", {"dice": "number"}, 1, {}),
        ("kinds", {"diary?": "text"}, 9, {}),  # there, whatever it is called
    ],
)
def test_the_reply_itself_is_checked_again(key, reply, cases, more):
    reason = SitePolicy().refuse_reply(reply, cases, **more)
    assert (reason is None) if key is None else (reason and f"{key}" in reason and "policy.toml" in reason)
    if "behind" in more and reason and cases == 9:
        assert "'cluster_1'" in reason


@pytest.mark.parametrize(
    "text, said",
    [
        ("fewset = 3", "did you mean 'fewest'?"),
        ("fewest = 0", "fewest = 0 must be at least 1"),
        ("fewest = true", "fewest = True must be a whole number"),
        ("rounds = -1", "rounds = -1 must be at least 1"),
        ("rounds = 1.5", "must be a whole number"),
        ("kinds = ['modle']", "did you mean 'model'?"),
        ("kinds = ['cases']", "case_vectors"),
        ("kinds = 'model'", "must be a list of texts"),
        ("algorithms = [1]", "must be a list of texts"),
        ("hours = '8-17'", 'of the form "20:00-06:00"'),
        ("hours = '24:00-06:00'", 'of the form "20:00-06:00"'),
        ("hours = '20:60-06:00'", 'of the form "20:00-06:00"'),
        ("hours = '06:00-06:00'", 'or "" for always'),
        ("hours = 20", "must be a text"),
        ("gpu_share = 0", "gpu_share = 0.0 must be more than 0"),
        ("gpu_share = 1.01", "at most 1"),
        ("gpu_share = nan", "at most 1"),
        ("case_vectors = 1", "must be true or false"),
        ("case_scores = 'yes'", "must be true or false"),
        ("assess = []", "must be true or false"),
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


def test_the_kinds_are_all_but_single_cases():
    assert "cases" not in KINDS and {"model", "statistics", "number"} <= set(KINDS)
