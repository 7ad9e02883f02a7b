"""Cases that keep their part (training, validation, test) when a federation moves them."""

import csv
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance

from dealt import MOVES, SITES, STAYS, case, deal, sizes, sources
from polysite.data.case import SPLITS, CaseRef
from polysite.data.federation import ByLabelSize, Limited, Natural
from polysite.data.parts import parts_of, splitter
from polysite.data.split import Split

each = pytest.mark.parametrize("federation", [*MOVES, *STAYS], ids=lambda f: type(f).__name__)


@each
@pytest.mark.parametrize("split", [{}, {"folds": 4, "fold": 1}, {"test": 0.0}], ids=["shares", "folds", "no test"])
def test_every_case_keeps_its_part(federation, split):
    natural, dealt = parts_of(deal(Natural(), **split)), deal(federation, keep=True, **split)
    for site, splits in dealt.items():
        home = [natural[c.source] for k in SPLITS for c in splits[k]]
        changed = [(natural[c.source], k) for k in SPLITS for c in splits[k] if natural[c.source] != k]
        # only a site that would have nothing to train on, or to validate with, gets one case for that
        assert not changed or (len(changed) == 1 and changed[0][1] not in home and "test" not in changed[0]), site


@pytest.mark.parametrize("federation", MOVES, ids=lambda f: type(f).__name__)
@given(seed=st.integers(0, 50), share=st.sampled_from([0.0, 0.2]))
@settings(max_examples=15, deadline=None)
def test_with_sizes_the_fewest_cases_change_their_part(federation, seed, share):
    anew, strict, sized = (deal(federation, seed=seed, test=share, keep=keep) for keep in (False, True, "sizes"))
    assert sizes(sized) == sizes(anew)
    natural = parts_of(deal(Natural(), seed=seed, test=share))
    assert parts_of(sized).keys() == parts_of(strict).keys() == parts_of(anew).keys()
    for site, splits in sized.items():
        held = [natural[c.source] for k in SPLITS for c in splits[k]]
        possible = sum(min(held.count(k), len(splits[k])) for k in SPLITS)
        assert sum(natural[c.source] == k for k in SPLITS for c in splits[k]) == possible, site


def test_a_site_of_one_part_gets_a_case_of_the_other():
    """The three smallest cases, of site a now, all validate at home."""
    home = deal(Natural(), test=0.0)
    small = {c.source for s in home for c in home[s]["validation"]}
    sites = {"few": [case(f"few{i}", "few") for i in range(len(small))]}
    for site, cases in SITES.items():
        volumes = [{"WT": float(c.source not in small)} for c in cases]
        sites[site] = [replace(c, volumes=lambda v=v: v) for c, v in zip(cases, volumes, strict=True)]
    first = ByLabelSize("WT").deal(sites, splitter(Split(test=0.0, keep=True), sites, 0), 0)["few"]
    assert (len(first["train"]), len(first["validation"])) == (1, len(small) - 1)


def timed(patients, times):
    """Three hospitals whose patients were scanned several times."""
    every = [(f"{i:02d}-{k}", i, k) for i in range(patients) for k in range(times)]
    return {s: [case(s + n, s, patient=f"{s}{i}", group="g", category="xyz"[k]) for n, i, k in every] for s in "abc"}


@pytest.mark.parametrize("keep", [True, "sizes"])
@pytest.mark.parametrize("federation", [*MOVES, Limited(9), Limited(3)], ids=str)
def test_the_cases_of_a_patient_stay_in_one_part(federation, keep):
    for (patients, times), seed in product(((9, 2), (5, 3)), range(10)):
        parts = {}
        for splits in deal(federation, timed(patients, times), seed=seed, keep=keep).values():
            for part, cases in splits.items():
                assert all(parts.setdefault(c.patient, part) == part for c in cases), (patients, seed)


@pytest.fixture
def kidneys(shared):
    """Sites 0 to 4 of Fed-KiTS2019, with the volumes of label 1 alone as kidney and of label 2 as tumour."""
    sites = {}
    with (shared / "fed_kits" / "volumes.csv").open() as file:
        for r in sorted(csv.DictReader(file), key=lambda r: (r["site"], r["case"])):
            volumes = {"kidney": float(r["kidney_ml"]), "tumour": float(r["tumour_ml"])}
            ref = CaseRef(r["site"], r["case"], lambda: None, lambda volumes=volumes: volumes)
            sites.setdefault(r["site"], []).append(ref)
    return {s: cases for s, cases in sites.items() if s != "5"}


def test_real_kidneys_sorted_by_the_sum_of_both_labels(kidneys):
    """Paper A, Table 1: EMD_maxL 11.62, of the tumour; sorted by either label alone it is another federation."""

    def distance(label, of):
        dealt = deal(ByLabelSize(label), kidneys, test=0.0)
        values = [np.array([c.volumes()[of] for k in SPLITS for c in each[k]]) for each in dealt.values()]
        assert [v.size for v in values] == [12, 14, 12, 12, 16]
        return np.mean([wasserstein_distance(a, b) / a.std() for i, a in enumerate(values) for b in values[i + 1 :]])

    assert distance("kidney+tumour", "tumour") == pytest.approx(11.625, abs=5e-4)
    assert distance("kidney + tumour", "kidney") < 4
    assert abs(distance("kidney", "tumour") - 11.625) > 1 and abs(distance("tumour", "tumour") - 11.625) > 1


def test_real_kidneys_keep_their_part_and_the_sizes_of_table_5(kidneys):
    """Paper A, Table 5 and section 3.1: 9, 11, 9, 9, 12 and 3, 3, 3, 3, 4 cases in the sorted federation too."""
    published = {"test": 0.0, "rounding": "up"}
    wanted = sources(deal(Natural(), kidneys, **published), "validation")
    anew, kept, sized = (
        deal(ByLabelSize("kidney+tumour"), kidneys, keep=k, **published) for k in (False, True, "sizes")
    )
    assert list(sizes(sized).values()) == [[9, 3, 0], [11, 3, 0], [9, 3, 0], [9, 3, 0], [12, 4, 0]]
    shared = [len(wanted & sources(dealt, "validation")) for dealt in (anew, sized, kept)]
    assert len(wanted) == 16 and shared == [3, 12, 16]
