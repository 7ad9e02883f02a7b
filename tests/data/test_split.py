"""Who trains, validates and tests; and who holds whom."""

import csv
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polysite.data.case import Case, CaseRef
from polysite.data.federation import (
    ByLabelSize,
    Dirichlet,
    HideModalities,
    Iid,
    LabelRatio,
    LeaveOut,
    Limited,
    Natural,
)
from polysite.data.split import Split, table
from polysite.errors import ConfigError, DataError

FETS_2022 = (511, 6, 15, 47, 22, 34, 12, 8, 4, 8, 14, 11, 35, 6, 13, 30, 9, 382, 4, 33, 35, 7, 5)


def patient(name, site="s", volume=1.0, **kwargs):
    def read():
        image = np.ones((3, 2, 2, 2), np.float32)
        return Case(site, name, image, np.ones((1, 2, 2, 2), np.uint8))

    return CaseRef(site, name, read, lambda: {"WT": volume}, modalities=3, **kwargs)


def hospital(n, site="s", **kwargs):
    return [patient(f"{site}{i:04d}", site, **{k: v(i) for k, v in kwargs.items()}) for i in range(n)]


def names(patients):
    return [p.name for p in patients]


@given(st.integers(2, 40), st.floats(0.01, 0.95), st.floats(0, 0.95), st.integers(0, 5), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_case_is_in_one_part_and_both_train_and_validation_have_one(n, validation, test, seed, by_group):
    if validation + test >= 1:
        with pytest.raises(ConfigError):
            Split(validation, test)
        return
    cases = hospital(n, group=lambda i: "ab"[i % 2])
    splits = Split(validation, test, by_group=by_group).apply({"s": cases}, seed)["s"]
    assert sorted(n for p in splits.values() for n in names(p)) == names(cases)
    assert splits["train"] and splits["validation"] and (bool(splits["test"]) == (test > 0 and n >= 3))


def test_a_split_depends_on_seed_and_site_but_not_on_order():
    cases = hospital(12)

    def tested(site, given, study_seed, **kwargs):
        return tuple(names(Split(**kwargs).apply({site: given}, study_seed)[site]["test"]))

    first = tested("a", cases, 0)
    assert first == tested("a", cases[::-1], 0) == tested("a", cases, 7, seed=0)
    assert len({tested(s, cases, k) for s in "ab" for k in range(5)}) > 5


SAME_NAME = [patient("x"), patient("x"), patient("y")]
IN_BOTH = [patient("1", patient="x", split="train"), patient("2", patient="x", split="test"), *hospital(3)]


@pytest.mark.parametrize(
    ("cases", "settings", "why"),
    [
        (SAME_NAME, {}, "two cases called 'x'"),
        (IN_BOTH, {}, "the cases of patient 'x' are in test and train"),
        (hospital(4), {"by_group": True}, "the data name none"),
        (hospital(4), {"file": "nowhere_test_fold_2.csv"}, "cannot be read"),
    ],
)
def test_cases_that_cannot_be_split_are_refused(cases, settings, why):
    with pytest.raises(DataError, match=why):
        split = Split(**settings)
        split.check({"s": cases})
        split.apply({"s": cases}, 0)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"validation": 0.6, "test": 0.5}, "leave cases to train on"),
        ({"validation": 0.0}, r"split.validation = 0 goes with split.file alone"),
        ({"folds": 5, "file": "split.csv"}, "contradict"),
        ({"file": "test_fold_{fold}.csv"}, "contradict"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, why):
    with pytest.raises(ConfigError, match=why):
        Split(**settings)


def folds_of(sites, folds=5, seed=0, **kwargs):
    return [Split(folds=folds, fold=k, **kwargs).apply(sites, seed) for k in range(folds)]


def test_five_folds_of_the_fets_federation_test_each_of_1251_cases_once():
    sites = {f"{k:02d}": hospital(n, f"{k:02d}-") for k, n in enumerate(FETS_2022, start=1)}
    found = folds_of(sites)
    tested = Counter(n for fold in found for splits in fold.values() for n in names(splits["test"]))
    assert len(tested) == 1251 and set(tested.values()) == {1}
    totals = [sum(len(splits["test"]) for splits in fold.values()) for fold in found]
    assert max(totals) - min(totals) < 10  # the remainders of the sites do not all go to the first folds
    for fold in found:
        for site, splits in fold.items():
            n = len(sites[site])
            assert sum(map(len, splits.values())) == n and len(splits["test"]) in (n // 5, -(-n // 5))
            rest = n - len(splits["test"])
            assert len(splits["validation"]) == max(1, round(0.2 * rest)) and splits["train"]
            assert not {*names(splits["test"])} & {*names(splits["train"]), *names(splits["validation"])}


def test_groups_are_spread_evenly_where_asked():
    cases = hospital(50, group=lambda i: "LGG" if i < 10 else "HGG")
    for fold in folds_of({"s": cases}, by_group=True):
        grades = {k: Counter(p.group for p in v) for k, v in fold["s"].items()}
        assert grades["test"] == {"LGG": 2, "HGG": 8}
        assert 1 <= grades["validation"]["LGG"] <= 2 and grades["train"]["LGG"] >= 6
    plain = [Counter(p.group for p in f["s"]["test"])["LGG"] for f in folds_of({"s": cases})]
    assert set(plain) != {2}


def test_what_the_manifest_fixes_stays():
    fixed = {0: "test", 1: "test", 2: "validation", 3: "train"}
    splits = Split().apply({"s": hospital(9, split=lambda i: fixed.get(i, ""))}, 0)["s"]
    assert names(splits["test"]) == ["s0000", "s0001"] and names(splits["validation"]) == ["s0002"]
    assert len(splits["train"]) == 6
    half = Split().apply({"s": hospital(12, split=lambda i: "train" if i < 6 else "")}, 0)["s"]
    assert {f"s{i:04d}" for i in range(6)} <= {*names(half["train"])} and len(half["validation"]) == 2
    splits = Split().apply({"s": hospital(10, split=lambda i: "test" if i < 4 else "train")}, 0)["s"]
    assert [len(splits[k]) for k in ("train", "validation", "test")] == [4, 2, 4]
    splits = Split().apply({"s": hospital(3, split=lambda i: "test")}, 0)["s"]  # an unseen hospital
    assert [len(splits[k]) for k in ("train", "validation", "test")] == [0, 0, 3]


def test_a_split_is_written_and_read_back(tmp_path):
    sites = {s: [patient(f"s{i:04d}", s) for i in range(n)] for s, n in (("a", 9), ("b", 7))}  # the same names at both
    file = tmp_path / "split.csv"
    first = Split().apply(sites, 3)
    file.write_text(table(first))
    assert table(Split(file=str(file)).apply(sites, 99)) == table(first)
    given = {"a": {"train": sites["a"][:4], "validation": [], "test": sites["a"][4:]}}
    file.write_text(table(given))  # a file alone may name no validation case; one is taken otherwise
    assert table(Split(file=str(file), validation=0.0).apply({"a": sites["a"]}, 0)) == table(given)
    assert len(Split(file=str(file)).apply({"a": sites["a"]}, 0)["a"]["validation"]) == 1


def published(folder, tests, rest, name="partitioning_1"):
    """Write published folds, with an index column: names of test and other cases; a name begins with its site."""
    for fold, parts in enumerate(zip(tests, rest, strict=True)):
        for part, cases in zip(("test", "train"), parts, strict=True):
            with (folder / f"{name}_{part}_fold_{fold}.csv").open("w", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(["", "Subject_ID", "Partition_ID"])
                rows.writerows([k, n, n[0]] for k, n in enumerate(cases))
    return str(folder / f"{name}_test_fold_{{fold}}.csv")


def test_published_folds_by_number(tmp_path):
    """NAME_test_fold_K.csv and NAME_train_fold_K.csv with other site names and a subset of cases."""
    sites = {"01": hospital(8, "1"), "02": hospital(4, "2"), "03": hospital(4, "3")}
    listed = [*names(sites["01"])[:6], *names(sites["02"])]
    tests = [["10000", "10001", "20001"], ["10002", "20001", "20003"]]
    file = published(tmp_path, tests, [[n for n in listed if n not in t] for t in tests])
    for fold in (0, 1):
        split = Split(file=file, folds=2, fold=fold)
        split.check(sites)
        found = split.apply(sites, 0)
        assert [n for each in found.values() for n in names(each["test"])] == tests[fold]
        assert sorted(n for cases in held_by(found).values() for n in names(cases)) == listed
        assert list(found) == ["01", "02"] and all(each["validation"] for each in found.values())
        assert split.remarks(sites) == [
            f"site 03 has no case and is left out: partitioning_1_test_fold_{fold}.csv names none",
            "1 case in the test set of more than one of these 2 folds: 20001; a comparison uses the mean of the "
            "scores of such a case",
        ]
    assert not Split(folds=2).remarks(sites)
    with pytest.raises(DataError, match=r"test_fold_1.csv names the case '20001' of site '2', which is not in"):
        split.check({"01": sites["01"]})
    with pytest.raises(DataError, match="no column 'Split'"):
        Split(file=file.format(fold=0).replace("_test_", "_train_")).apply(sites, 0)


def fets(shared):
    """The cases of FeTS 2022 by site, named as a scan of the folder names them."""
    sites = {}
    with (shared / "fets_partitions" / "fets2022_partitioning_1.csv").open() as file:
        for row in csv.DictReader(file):
            site = row["Partition_ID"].zfill(2)
            sites.setdefault(site, []).append(patient(row["Subject_ID"], site))
    return sites


@pytest.mark.parametrize(
    ("folder", "cases", "count", "twice", "trained"),
    [
        ("partitioning_1_folds", 1251, 23, ["FeTS2022_00150", "FeTS2022_01163"], [790, 794, 791, 789, 790]),
        ("partitioning_1_homogeneous_known_tumor_folds", 278, 18, ["FeTS2022_00134", "FeTS2022_01164"],
         [168, 173, 172, 169, 166]),
    ],
    ids=["full", "limited"],
)  # fmt: skip
def test_the_published_folds_of_fets_2022(shared, folder, cases, count, twice, trained):
    """Paper B: 80 % of what is not tested trains, rounded down at every site; 790 and 208 cases in fold 0."""
    sites, tested = fets(shared), Counter()
    file = str(shared / "fets_folds" / folder / "partitioning_1_test_fold_{fold}.csv")
    for fold in range(5):
        split = Split(file=file, folds=5, fold=fold, validation=0.2, rounding="up")
        split.check(sites)
        found = split.apply(sites, 0)
        assert len(found) == count and all(each[k] for each in found.values() for k in each)
        sums = {k: sum(len(each[k]) for each in found.values()) for k in ("train", "validation", "test")}
        assert sums["train"] == trained[fold] and sum(sums.values()) == cases
        assert (cases, fold) != (1251, 0) or sums["validation"] == 208
        tested.update(n for each in found.values() for n in names(each["test"]))
    assert len(tested) == cases and sorted(n for n, times in tested.items() if times > 1) == twice
    said = split.remarks(sites)
    assert said[-1].startswith(f"2 cases in the test set of more than one of these 5 folds: {', '.join(twice)};")
    assert len(said) == 1 or "sites 16, 18, 21, 22, 23 have no case and are left out" in said[0]


def test_the_split_of_paper_c(shared):
    """833, 218 and 200 cases: int(0.85 n) of every site are not tested, and int(0.8 m) of these train."""
    found = Split(validation=0.2, test=0.15, rounding="up", validation_of="rest").apply(fets(shared), 0)
    sums = {k: sum(len(each[k]) for each in found.values()) for k in ("train", "validation", "test")}
    assert sums == {"train": 833, "validation": 218, "test": 200}


def sizes(n, **changes):
    return tuple(len(v) for v in Split(**changes).apply({"s": hospital(n)}, 0)["s"].values())


@pytest.mark.parametrize(
    ("n", "rounding", "validation"), [(12, "up", 3), (16, "up", 4), (39, "down", 7), (12, "nearest", 2),
                                      (35, "up", 7), (10, "up", 2), (10, "down", 2), (5, "up", 1)]
)  # fmt: skip
def test_rounding_as_published(n, rounding, validation):
    """Paper A, Table 5: 12 and 16 cases give 3 and 4 to validate, 39 of the prostate 7."""
    assert sizes(n, validation=0.2, test=0.0, rounding=rounding) == (n - validation, validation, 0)


def test_shares_of_what_is_not_tested():
    assert sizes(40, validation=0.25, test=0.5, validation_of="all") == (10, 10, 20)
    assert sizes(40, validation=0.25, test=0.5, validation_of="rest") == (15, 5, 20)
    assert sizes(40, validation=0.6, test=0.5, validation_of="rest") == (8, 12, 20)  # together more than one
    for n in range(2, 40):  # every part that there can be has a case, whatever the rounding
        for rounding in ("nearest", "up", "down"):
            train, validation, test = sizes(n, rounding=rounding, validation_of="rest")
            assert train and validation and bool(test) == (n > 2)


def deal(federation, sites, seed=0, **kwargs):
    return federation.deal(sites, lambda s: Split(**kwargs).apply(s, seed), seed)


def held_by(dealt):
    """Site -> all its cases."""
    return {s: [c for cases in splits.values() for c in cases] for s, splits in dealt.items()}


THREE = {"a": hospital(9, "a"), "b": hospital(6, "b"), "c": hospital(12, "c")}


def test_by_label_size_sorts_everyone_and_keeps_the_sizes():
    rng = np.random.default_rng(0)
    sites = {s: [patient(c.name, s, rng.random()) for c in cases] for s, cases in THREE.items()}
    held = held_by(deal(ByLabelSize("WT"), sites))
    assert {s: len(cases) for s, cases in held.items()} == {"a": 9, "b": 6, "c": 12}
    span = {s: [c.volumes()["WT"] for c in cases] for s, cases in held.items()}
    assert max(span["a"]) < min(span["b"]) and max(span["b"]) < min(span["c"])
    assert all(c.open().site == s for s, cases in held.items() for c in cases)


def test_iid_moves_training_cases_only():
    natural, dealt = deal(Natural(), THREE), deal(Iid(4), THREE)
    trained = sorted(n for splits in natural.values() for n in names(splits["train"]))
    new = {s: names(splits["train"]) for s, splits in dealt.items() if s.startswith("iid")}
    assert sorted(n for found in new.values() for n in found) == trained
    counts = [len(new[f"iid-{k}"]) for k in (1, 2, 3, 4)]
    assert max(counts) - min(counts) <= 1 and len({n[0] for n in new["iid-1"]}) > 1
    for site, splits in natural.items():
        assert not dealt[site]["train"]
        assert all(names(dealt[site][k]) == names(splits[k]) for k in ("validation", "test"))
    same = deal(Iid(2), {s: [patient(f"{i}", s) for i in range(6)] for s in "ab"})
    moved = [n for s in ("iid-1", "iid-2") for n in names(same[s]["train"])]
    assert len(set(moved)) == len(moved) and {n[:2] for n in moved} == {"a.", "b."}  # told apart
    with pytest.raises(DataError, match="called 'iid-1'"):
        deal(Iid(2), {"iid-1": hospital(6, "iid-1"), "b": hospital(6, "b")})


def test_limited_keeps_known_groups_and_cuts_the_large():
    large, small = hospital(60, "a", group=lambda i: "HGG"), hospital(9, "b", group=lambda i: "LGG" if i < 4 else "")
    held = held_by(deal(Limited(35), {"a": large, "b": small, "c": hospital(5, "c")}))
    assert {s: len(cases) for s, cases in held.items()} == {"a": 35, "b": 4}
    with pytest.raises(DataError, match="no group at all"):
        deal(Limited(), THREE)


def test_dirichlet_goes_from_alike_to_unlike():
    sites = {"a": hospital(300, "a", category=lambda i: "xyz"[i % 3])}

    def skew(alpha):
        held = held_by(deal(Dirichlet(alpha, sites=5), sites, seed=1)).values()
        assert sorted(n for cases in held for n in names(cases)) == names(sites["a"])
        mixes = [Counter(c.category for c in cases) for cases in held]
        return np.mean([max(m.values()) / sum(m.values()) for m in mixes])

    assert skew(1000) < 0.4 < 0.55 < skew(0.3)
    with pytest.raises(ConfigError, match="in 1000 draws"):
        deal(Dirichlet(1e-3, sites=5), sites)


def test_dirichlet_by_hospital_by_volume_and_other_draws():
    rng = np.random.default_rng(0)
    sites = {s: [patient(f"{s}{i}", s, v) for i, v in enumerate(rng.random(12))] for s in "ab"}

    def held(alpha, by, draw=0):
        return list(held_by(deal(Dirichlet(alpha, 2, by=by, draw=draw), sites)).values())

    def largest(alpha):
        return max(max(Counter(c.name[0] for c in cases).values()) / len(cases) for cases in held(alpha, "site"))

    assert largest(1e-3) == 1 and largest(1e4) < 0.6
    ranked = sorted(c.volumes()["WT"] for cases in sites.values() for c in cases)
    for cases in held(0.01, "WT", draw=2):  # of a few sizes
        assert len(cases) >= 3 and len({ranked.index(c.volumes()["WT"]) // 6 for c in cases}) < 4
    first, again, other = ([set(names(cases)) for cases in held(0.5, "site", draw)] for draw in (1, 1, 2))
    assert first == again != other
    with pytest.raises(ConfigError, match=r"federation\.by = 'WX' is neither 'site' nor a label; known: WT, site"):
        held(0.5, "WX")


@pytest.mark.parametrize(("classes", "delta", "count"), [("xy", 7, 4), ("xyz", 4, 6), ("xy", 1, 3)])
def test_label_ratio_gives_every_site_its_majority(classes, delta, count):
    sites = {"a": hospital(600, "a", category=lambda i: classes[i % len(classes)])}
    held = held_by(deal(LabelRatio(delta, count), sites))
    every = [n for cases in held.values() for n in names(cases)]
    assert len(held) == count and len(set(every)) == len(every)
    for k, cases in enumerate(held.values()):
        mix, major = Counter(c.category for c in cases), classes[k % len(classes)]
        for other in set(classes) - {major}:
            assert mix[major] / mix[other] == pytest.approx(delta, rel=0.05)
    with pytest.raises(ConfigError, match="needs more cases"):
        deal(LabelRatio(500, count), sites)


def test_hidden_modalities_vary_by_site_and_are_zero_and_a_left_out_hospital_is_all_test():
    dealt = deal(HideModalities(2), THREE)
    images = {s: splits["train"][0].open().image.any((1, 2, 3)).tolist() for s, splits in dealt.items()}
    assert images == {"a": [False, False, True], "b": [True, False, False], "c": [False, True, False]}
    with pytest.raises(ConfigError, match="hide all of 3"):
        deal(HideModalities(3), THREE)
    dealt = deal(LeaveOut("b"), THREE)
    assert names(dealt["b"]["test"]) == names(THREE["b"]) and not dealt["b"]["train"] + dealt["b"]["validation"]
    assert table({"a": dealt["a"]}) == table(Split().apply({"a": THREE["a"]}, 0))


def visits(site):
    """Three time points of twelve patients each."""
    return [patient(f"{site}{i:02d}-{k}", site, i + k / 10, patient=f"{site}{i:02d}", category="xy"[k % 2])
            for i in range(12) for k in range(3)]  # fmt: skip


@pytest.mark.parametrize("split", [{}, {"folds": 5, "fold": 2}, {"by_group": True}], ids=["shares", "folds", "groups"])
@pytest.mark.parametrize(
    "federation",
    [Natural(), ByLabelSize("WT"), Iid(3), Dirichlet(1.0, 3), LabelRatio(2, 3), LeaveOut("a")],
    ids=lambda f: type(f).__name__,
)
def test_nobody_is_trained_and_tested_on(federation, split):
    homes = {}  # patient -> the splits in which there is a case of that patient
    for splits in deal(federation, {s: visits(s) for s in "abc"}, **split).values():
        for part, cases in splits.items():
            for c in cases:
                homes.setdefault(c.patient, set()).add(part)
    assert len(homes) == 36 and all(len(parts) == 1 for parts in homes.values())
    assert {"train", "validation", "test"} == set.union(*homes.values())


GROUPED = {s: hospital(12, s, group=lambda i: "hl"[i % 2], category=lambda i: "xyz"[i % 3]) for s in "abc"}
EVERY = [Natural(), ByLabelSize("WT"), Iid(2), Limited(5), Dirichlet(5.0, 3), LabelRatio(2, 3), HideModalities(1),
         LeaveOut("b")]  # fmt: skip


@pytest.mark.parametrize("federation", EVERY, ids=lambda f: type(f).__name__)
def test_the_order_of_files_plays_no_part_and_the_split_of_a_run_is_read_back(federation, tmp_path):
    first = deal(federation, GROUPED, seed=4)
    assert table(deal(federation, {s: cases[::-1] for s, cases in GROUPED.items()}, seed=4)) == table(first)
    (tmp_path / "split.csv").write_text(table(first))
    split = Split(file=str(tmp_path / "split.csv"))
    split.check(GROUPED)
    assert table(federation.deal(GROUPED, lambda s: split.apply(s, 4), 4)) == table(first)
