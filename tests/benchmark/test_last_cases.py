"""Cases kept from one run to the next: the same objects where nothing changed, new ones where something did."""

import os
from dataclasses import replace

import numpy as np
import pytest

import polysite as ps
from polysite import study
from polysite.benchmark.last_cases import LastCases
from polysite.data.phantom import write
from polysite.errors import DataError

FEW = {"east": ps.Hospital(cases=4), "west": ps.Hospital(cases=3)}
PHANTOM = ps.Phantom(shape=(24, 24, 24), sites=FEW)
TRAIN = ps.Train(patch=(16, 16, 16), device="cpu")


@pytest.fixture
def files(tmp_path):
    write([ref.open() for refs in PHANTOM.case_refs(0).values() for ref in refs], tmp_path / "scans")
    return ps.Study(data=ps.Files(path=str(tmp_path / "scans")), train=TRAIN)


def cases(load, chosen):
    ready = load(chosen, study.deal_cases(chosen))
    return {(s, c.name): c for s, splits in ready.items() for k in splits for c in splits[k]}, ready


def test_another_method_or_fold_has_the_same_cases(files):
    load = LastCases()
    first, _ = cases(load, files)
    again, ready = cases(load, replace(files, split=replace(files.split, seed=5), run=ps.Plan(rounds=7)))
    assert len(first) == 7 and all(again[key] is case for key, case in first.items())
    fresh = study.load_cases(files, study.deal_cases(replace(files, split=replace(files.split, seed=5))))
    for site, splits in fresh.items():
        for k, listed in splits.items():
            assert [c.name for c in listed] == [c.name for c in ready[site][k]]
            assert all(np.array_equal(a.image, b.image) for a, b in zip(listed, ready[site][k], strict=True))


def test_another_preparation_or_a_changed_file_is_loaded_anew(files, tmp_path):
    load = LastCases()
    first, _ = cases(load, files)
    other, _ = cases(load, replace(files, train=replace(TRAIN, patch=(24, 24, 24))))
    assert not any(other[key] is case for key, case in first.items())
    first, _ = cases(load, files)
    ref = study.deal_cases(files)["east"]["train"][0]
    os.utime(ref.files[0], ns=(1, 1))
    again, _ = cases(load, files)
    assert [key for key, case in first.items() if again[key] is not case] == [(ref.site, ref.name)]


def test_phantoms_of_another_seed_are_drawn_anew():
    load, chosen = LastCases(), ps.Study(data=PHANTOM, train=TRAIN)
    first, _ = cases(load, chosen)
    assert all(cases(load, chosen)[0][key] is case for key, case in first.items())
    assert not any(cases(load, replace(chosen, seed=1))[0][key] is case for key, case in first.items())


def test_a_scan_that_appears_twice_is_noticed_when_only_one_of_them_is_new(files, tmp_path):
    load = LastCases()
    cases(load, files)
    dealt = study.deal_cases(files)
    ref = dealt["east"]["train"][0]
    twin = replace(ref, name="twin")
    with pytest.raises(DataError, match="is the same scan as"):
        load(files, {**dealt, "west": {**dealt["west"], "test": [twin]}})
