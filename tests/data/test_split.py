"""Who trains, validates and tests; and who holds whom."""

import csv
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fets import write as write_fets
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
from polysite.data.files import Files
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
    assert first == tested("a", cases[::-1], 0)
    assert len({tested(s, cases, k) for s in "ab" for k in range(5)}) > 5
    assert tested("a", cases, 7, seed=0) == first


def test_two_cases_of_one_name_are_refused():
    with pytest.raises(DataError, match="two cases called 'x'"):
        Split().apply({"s": [patient("x"), patient("x"), patient("y")]}, 0)


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


def test_a_site_of_four_is_tested_in_four_folds():
    assert sorted(len(f["s"]["test"]) for f in folds_of({"s": hospital(4)})) == [0, 1, 1, 1, 1]


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
    file.write_text(table(first).replace("s0004,a,", "s0004,z,"))
    with pytest.raises(DataError, match="names the case 's0004' of site 'z', which is not in the data"):
        Split(file=str(file)).check(sites)


def test_a_file_alone_may_name_the_validation_cases(tmp_path):
    sites = {"a": hospital(6, "a")}
    given = {"a": {"train": sites["a"][:4], "validation": [], "test": sites["a"][4:]}}
    (tmp_path / "split.csv").write_text(table(given))
    assert table(Split(file=str(tmp_path / "split.csv"), validation=0.0).apply(sites, 0)) == table(given)
    assert (
        len(Split(file=str(tmp_path / "split.csv")).apply(sites, 0)["a"]["validation"]) == 1
    )  # one is taken otherwise
    with pytest.raises(ConfigError, match=r"split.validation = 0 goes with split.file alone"):
        Split(validation=0.0)


def test_the_published_fold_files_are_read(tmp_path):
    """NAME_test_fold_K.csv and NAME_train_fold_K.csv with an index column, other site names and a subset of cases."""
    sites = {"01": hospital(10, "x"), "02": hospital(4, "y")}
    for split, cases in (
        ("test", ["x0003", "x0007", "y0001"]),
        ("train", ["x0000", "x0001", "x0002", "y0000", "y0002"]),
    ):
        with (tmp_path / f"partitioning_1_{split}_fold_2.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["", "Subject_ID", "Partition_ID"])
            rows.writerows([k, n, "1" if n[0] == "x" else "2"] for k, n in enumerate(cases))
    found = Split(file=str(tmp_path / "partitioning_1_test_fold_2.csv")).apply(sites, 0)
    assert names(found["01"]["test"]) == ["x0003", "x0007"] and names(found["02"]["test"]) == ["y0001"]
    rest = [*found["01"]["train"], *found["01"]["validation"]]
    assert sorted(names(rest)) == ["x0000", "x0001", "x0002"] and len(found["01"]["validation"]) == 1
    with pytest.raises(DataError, match="no column 'Split'"):
        Split(file=str(tmp_path / "partitioning_1_train_fold_2.csv")).apply(sites, 0)
    with pytest.raises(DataError, match="cannot be read"):
        Split(file=str(tmp_path / "nowhere_test_fold_2.csv")).apply(sites, 0)


def published(folder, tests, rest, name="partitioning_1"):
    """Write published folds: the names of test and other cases of each; a name begins with its site."""
    for fold, parts in enumerate(zip(tests, rest, strict=True)):
        for part, cases in zip(("test", "train"), parts, strict=True):
            with (folder / f"{name}_{part}_fold_{fold}.csv").open("w", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(["", "Subject_ID", "Partition_ID"])
                rows.writerows([k, n, n[0]] for k, n in enumerate(cases))
    return str(folder / f"{name}_test_fold_{{fold}}.csv")


def test_published_folds_by_number(tmp_path):
    sites = {"x": hospital(8, "x"), "y": hospital(4, "y"), "z": hospital(4, "z")}
    everyone = [*names(sites["x"]), *names(sites["y"])]
    tests = [["x0000", "x0001", "y0001"], ["x0002", "y0001", "y0003"]]
    file = published(tmp_path, tests, [[n for n in everyone if n not in t] for t in tests])
    for fold in (0, 1):
        split = Split(file=file, folds=2, fold=fold)
        split.check(sites)
        found = split.apply(sites, 0)
        assert [n for each in found.values() for n in names(each["test"])] == tests[fold]
        assert list(found) == ["x", "y"]  # no fold names a case of z
        assert split.remarks(sites) == [
            f"site z has no case and is left out: partitioning_1_test_fold_{fold}.csv names none",
            "1 case in the test set of more than one of these 2 folds: y0001; a comparison uses the mean of the "
            "scores of such a case",
        ]
    assert not Split(folds=2).remarks(sites)
    with pytest.raises(DataError, match=r"test_fold_1.csv names the case 'y0001' of site 'y', which is not in"):
        Split(file=file, folds=2, fold=1).check({"x": sites["x"]})
    for wrong in ({"file": file}, {"file": file.replace("{fold}", "0"), "folds": 2}):
        with pytest.raises(ConfigError, match="contradict"):
            Split(**wrong)


FOLDS = ("partitioning_1_folds", 1251, 23, ["FeTS2022_00150", "FeTS2022_01163"], [790, 794, 791, 789, 790])
LIMITED = (
    "partitioning_1_homogeneous_known_tumor_folds", 278, 18, ["FeTS2022_00134", "FeTS2022_01164"],
    [168, 173, 172, 169, 166],
)  # fmt: skip


def fets(shared):
    """The cases of FeTS 2022 by site, named as a scan of the folder names them."""
    sites = {}
    with (shared / "fets_partitions" / "fets2022_partitioning_1.csv").open() as file:
        for row in csv.DictReader(file):
            site = row["Partition_ID"].zfill(2)
            sites.setdefault(site, []).append(patient(row["Subject_ID"], site))
    return sites


@pytest.mark.parametrize(("folder", "cases", "count", "twice", "trained"), [FOLDS, LIMITED], ids=["full", "limited"])
def test_the_published_folds_of_fets_2022(shared, folder, cases, count, twice, trained):
    """Paper B: 80 % of what is not tested trains, rounded down at every site; 790 and 208 cases in fold 0."""
    sites, tested = fets(shared), Counter()
    file = str(shared / "fets_folds" / folder / "partitioning_1_test_fold_{fold}.csv")
    for fold in range(5):
        split = Split(file=file, folds=5, fold=fold, validation=0.2, rounding="up")
        split.check(sites)
        found = split.apply(sites, 0)
        assert len(found) == count and all(each[k] for each in found.values() for k in each)
        assert sum(len(each["train"]) for each in found.values()) == trained[fold]
        assert sum(len(v) for each in found.values() for v in each.values()) == cases
        if (cases, fold) == (1251, 0):
            assert sum(len(each["validation"]) for each in found.values()) == 208
        tested.update(n for each in found.values() for n in names(each["test"]))
    assert len(tested) == cases and sorted(n for n, times in tested.items() if times > 1) == twice
    said = split.remarks(sites)
    assert said[-1].startswith(f"2 cases in the test set of more than one of these 5 folds: {', '.join(twice)};")
    assert len(said) == 1 or "sites 16, 18, 21, 22, 23 have no case and are left out" in said[0]
    own = Counter(n for fold in folds_of(sites) for each in fold.values() for n in names(each["test"]))
    assert len(own) == 1251 and set(own.values()) == {1}  # its own folds test every case once


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
    with pytest.raises(ConfigError, match="leave cases to train on"):
        Split(validation=0.6, test=0.5)
    for n in range(2, 40):  # every part that there can be has a case, whatever the rounding
        for rounding in ("nearest", "up", "down"):
            train, validation, test = sizes(n, rounding=rounding, validation_of="rest")
            assert train and validation and bool(test) == (n > 2)


def deal(federation, sites, seed=0, **kwargs):
    return federation.deal(sites, lambda s: Split(**kwargs).apply(s, seed), seed)


def everyone(dealt):
    return sorted(p.name for splits in dealt.values() for split in splits.values() for p in split)


THREE = {"a": hospital(9, "a"), "b": hospital(6, "b"), "c": hospital(12, "c")}


def test_natural_is_the_split_itself():
    assert table(deal(Natural(), THREE)) == table(Split().apply(THREE, 0))


def test_by_label_size_sorts_everyone_and_keeps_the_sizes():
    rng = np.random.default_rng(0)
    sites = {
        s: [patient(f"{s}{i}", s, v) for i, v in enumerate(rng.random(n))] for s, n in (("a", 9), ("b", 6), ("c", 12))
    }
    dealt = deal(ByLabelSize("WT"), sites)
    held = {s: [p for split in splits.values() for p in split] for s, splits in dealt.items()}
    assert {s: len(p) for s, p in held.items()} == {"a": 9, "b": 6, "c": 12}
    span = {s: [p.volumes()["WT"] for p in patients] for s, patients in held.items()}
    assert max(span["a"]) < min(span["b"]) and max(span["b"]) < min(span["c"])
    assert all(p.open().site == s for s, patients in held.items() for p in patients)


def test_iid_moves_training_cases_only():
    natural, dealt = deal(Natural(), THREE), deal(Iid(4), THREE)
    trained = sorted(n for splits in natural.values() for n in names(splits["train"]))
    assert sorted(n for s in dealt if s.startswith("iid") for n in names(dealt[s]["train"])) == trained
    counts = [len(dealt[f"iid-{k}"]["train"]) for k in (1, 2, 3, 4)]
    assert max(counts) - min(counts) <= 1
    for site, splits in natural.items():
        assert not dealt[site]["train"]
        assert all(names(dealt[site][k]) == names(splits[k]) for k in ("validation", "test"))
    assert len({p.name[0] for p in dealt["iid-1"]["train"]}) > 1


def test_limited_keeps_known_groups_and_cuts_the_large():
    sites = {
        "a": hospital(60, "a", group=lambda i: "HGG"),
        "b": hospital(9, "b", group=lambda i: "LGG" if i < 4 else ""),
    }
    dealt = deal(Limited(35), {**sites, "c": hospital(5, "c")})
    assert {s: sum(map(len, splits.values())) for s, splits in dealt.items()} == {"a": 35, "b": 4}
    with pytest.raises(DataError, match="no group at all"):
        deal(Limited(), THREE)


def test_dirichlet_goes_from_alike_to_unlike():
    sites = {"a": hospital(300, "a", category=lambda i: "xyz"[i % 3])}

    def skew(alpha):
        dealt = deal(Dirichlet(alpha, sites=5), sites, seed=1)
        assert everyone(dealt) == names(sites["a"])
        mixes = [Counter(p.category for split in splits.values() for p in split) for splits in dealt.values()]
        return np.mean([max(m.values()) / sum(m.values()) for m in mixes])

    assert skew(1000) < 0.4 < 0.55 < skew(0.3)
    with pytest.raises(ConfigError, match="in 1000 draws"):
        deal(Dirichlet(1e-3, sites=5), sites)


@pytest.mark.parametrize(("classes", "delta", "count"), [("xy", 2, 5), ("xy", 7, 4), ("xyz", 4, 6), ("xy", 1, 3)])
def test_label_ratio_gives_every_site_its_majority(classes, delta, count):
    sites = {"a": hospital(600, "a", category=lambda i: classes[i % len(classes)])}
    dealt = deal(LabelRatio(delta, count), sites)
    assert len(dealt) == count and len(set(everyone(dealt))) == len(everyone(dealt))
    for k, splits in enumerate(dealt.values()):
        mix = Counter(p.category for split in splits.values() for p in split)
        major = classes[k % len(classes)]
        for other in set(classes) - {major}:
            assert mix[major] / mix[other] == pytest.approx(delta, rel=0.05)
    with pytest.raises(ConfigError, match="needs more cases"):
        deal(LabelRatio(500, count), sites)


def test_hidden_modalities_vary_by_site_and_are_zero():
    dealt = deal(HideModalities(2), THREE)
    images = {s: splits["train"][0].open().image.any((1, 2, 3)).tolist() for s, splits in dealt.items()}
    assert images == {"a": [False, False, True], "b": [True, False, False], "c": [False, True, False]}
    with pytest.raises(ConfigError, match="hide all of 3"):
        deal(HideModalities(3), THREE)


def test_a_left_out_hospital_is_all_test():
    dealt = deal(LeaveOut("b"), THREE)
    assert names(dealt["b"]["test"]) == names(THREE["b"]) and not dealt["b"]["train"] + dealt["b"]["validation"]
    assert table({"a": dealt["a"]}) == table(Split().apply({"a": THREE["a"]}, 0))


def test_patients_of_one_name_are_told_apart_when_they_move():
    sites = {s: [patient(f"{i}", s) for i in range(6)] for s in "ab"}
    dealt = deal(Iid(2), sites)
    moved = [n for s in ("iid-1", "iid-2") for n in names(dealt[s]["train"])]
    assert len(set(moved)) == len(moved) and {n[:2] for n in moved} == {"a.", "b."}


def test_the_real_partition_of_fets_2022_in_five_folds(shared, tmp_path):
    """From the published table and the names on disk to the folds; no image is opened for that."""
    text = (shared / "fets_partitions" / "fets2022_partitioning_1.csv").read_text()
    (tmp_path / "partitioning_1.csv").write_text(text)
    listed = {r["Subject_ID"]: r["Partition_ID"] for r in csv.DictReader(text.splitlines())}
    for case in listed:
        (tmp_path / case).mkdir()
        for kind in ("flair", "seg"):
            (tmp_path / case / f"{case}_{kind}.nii.gz").touch()
    sites = Files(path=str(tmp_path)).case_refs(0)
    assert tuple(map(len, sites.values())) == FETS_2022 and [int(s) for s in sites] == list(range(1, 24))
    tested = [(s, n) for fold in folds_of(sites) for s, splits in fold.items() for n in names(splits["test"])]
    assert len(tested) == 1251 and {n: str(int(s)) for s, n in tested} == listed


def visits(site, patients=12, each=3):
    """Several time points of every patient."""
    return [patient(f"{site}{i:02d}-{k}", site, i + k / 10, patient=f"{site}{i:02d}", category="xy"[k % 2])
            for i in range(patients) for k in range(each)]  # fmt: skip


def homes(dealt):
    """patient -> the splits in which there is a case of that patient."""
    found = {}
    for splits in dealt.values():
        for split, patients in splits.items():
            for p in patients:
                found.setdefault(p.patient, set()).add(split)
    return found


@pytest.mark.parametrize("split", [{}, {"folds": 5, "fold": 2}, {"by_group": True}], ids=["shares", "folds", "groups"])
@pytest.mark.parametrize(
    "federation",
    [Natural(), ByLabelSize("WT"), Iid(3), Dirichlet(1.0, 3), LabelRatio(2, 3), LeaveOut("a")],
    ids=lambda f: type(f).__name__,
)
def test_nobody_is_trained_and_tested_on(federation, split):
    sites = {s: visits(s) for s in "abc"}
    found = homes(deal(federation, sites, **split))
    assert len(found) == 36 and all(len(splits) == 1 for splits in found.values())
    assert {"train", "validation", "test"} == {k for splits in found.values() for k in splits}


def test_every_patient_is_tested_in_one_fold():
    tested = Counter(n for fold in folds_of({"a": visits("a")}) for n in names(fold["a"]["test"]))
    assert len(tested) == 36 and set(tested.values()) == {1}


def test_a_patient_in_two_fixed_splits_is_refused():
    both = [patient("1", patient="x", split="train"), patient("2", patient="x", split="test"), *hospital(3)]
    with pytest.raises(DataError, match="the cases of patient 'x' are in test and train"):
        Split().apply({"s": both}, 0)


GROUPED = {s: hospital(12, s, group=lambda i: "hl"[i % 2], category=lambda i: "xyz"[i % 3]) for s in "abc"}
EVERY = [Natural(), ByLabelSize("WT"), Iid(2), Limited(5), Dirichlet(5.0, 3), LabelRatio(2, 3), HideModalities(1),
         LeaveOut("b")]  # fmt: skip


@pytest.mark.parametrize("federation", EVERY, ids=lambda f: type(f).__name__)
def test_who_is_where_does_not_depend_on_the_order_of_files(federation):
    turned = {s: patients[::-1] for s, patients in GROUPED.items()}
    assert table(deal(federation, turned)) == table(deal(federation, GROUPED))


@pytest.mark.parametrize("federation", EVERY, ids=lambda f: type(f).__name__)
def test_the_split_of_a_run_gives_the_same_parts_again(federation, tmp_path):
    first = deal(federation, GROUPED, seed=4)
    (tmp_path / "split.csv").write_text(table(first))
    split = Split(file=str(tmp_path / "split.csv"))
    split.check(GROUPED)
    again = federation.deal(GROUPED, lambda s: split.apply(s, 4), 4)
    assert table(again) == table(first)


def test_a_site_that_is_called_like_a_synthetic_one_is_refused():
    with pytest.raises(DataError, match="called 'iid-1'"):
        deal(Iid(2), {"iid-1": hospital(6, "iid-1"), "b": hospital(6, "b")})


def test_groups_that_are_not_there_cannot_be_spread():
    with pytest.raises(DataError, match="the data name none"):
        Split(by_group=True).check({"s": hospital(4)})
    with pytest.raises(ConfigError, match="contradict"):
        Split(folds=5, file="split.csv")


@pytest.mark.parametrize("folds", ["folds", "folds_limited"])
def test_a_part_of_fets_2022_keeps_its_sites_and_folds(shared, tmp_path, folds):
    """The drawn scans that whole benchmarks are tested with."""
    root = write_fets(tmp_path / "fets", shared, share=0.01)
    files = Files(str(root))
    assert files.label_names == ("WT", "TC", "ET") and list(files.manifest.sites) == [f"{k:02d}" for k in range(1, 24)]
    sites, tested = files.case_refs(0), Counter()
    for fold in range(5):
        split = Split(file=str(root / folds / "partitioning_1_test_fold_{fold}.csv"), folds=5, fold=fold)
        split.check(sites)
        found = split.apply(sites, 0)
        assert len(found) == (23 if folds == "folds" else 18)
        assert all(each[k] for each in found.values() for k in ("train", "validation", "test"))
        tested.update(n for each in found.values() for n in names(each["test"]))
    assert sum(times > 1 for times in tested.values()) == 2 and len(tested) < 150
    case = found["01"]["test"][0].open()
    whole, core, enhancing = case.label.sum((1, 2, 3))
    assert case.image.shape == (4, 16, 16, 16) and whole > core > enhancing > 0
    assert not case.label[:, ~(case.image > 0).all(0)].any()
