"""Cases that keep their part (training, validation, test) when a federation moves them."""

import csv
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance

from dealt import MOVES, SITES, STAYS, case, deal, sizes, sources
from polysite.data.case import SPLITS, CaseRef
from polysite.data.federation import ByLabelSize, Dirichlet, Iid, Limited, Natural
from polysite.data.files import Files
from polysite.data.parts import parts_of, splitter
from polysite.data.split import Split, table

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


@each
def test_without_the_setting_a_moved_case_is_split_anew(federation):
    natural, dealt = parts_of(deal(Natural())), parts_of(deal(federation))
    changed = sum(natural[source] != part for source, part in dealt.items())
    assert changed > 5 if federation in MOVES or isinstance(federation, Limited) else changed == 0


@pytest.mark.parametrize("keep", [True, "sizes"])
def test_the_natural_sites_are_split_as_ever(keep):
    assert table(deal(Natural(), keep=keep)) == table(deal(Natural()))
    turned = {s: cases[::-1] for s, cases in SITES.items()}
    assert table(deal(Natural(), turned, keep=keep)) == table(deal(Natural()))


def test_federations_of_all_cases_test_the_same_ones():
    wanted = sources(deal(Natural()), "test")
    for federation in (ByLabelSize("WT"), ByLabelSize("TC"), Iid(5), Iid(5, parts="all"), Dirichlet(0.3, 3)):
        assert sources(deal(federation, keep=True), "test") == wanted


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

    def sized(c, volume):
        return CaseRef(c.site, c.name, c.read, lambda: {"WT": volume}, modalities=3)

    sites = {s: [sized(c, float(c.source not in small)) for c in cases] for s, cases in SITES.items()}
    count = len(small)
    sites = {"few": [case(f"few{i}", "few") for i in range(count)], **sites}
    first = ByLabelSize("WT").deal(sites, splitter(Split(test=0.0, keep=True), sites, 0), 0)["few"]
    assert (len(first["train"]), len(first["validation"])) == (1, count - 1)


def timed(patients, times):
    """Three hospitals whose patients were scanned several times."""
    return {
        s: [
            case(f"{s}{i:02d}-{k}", s, patient=f"{s}{i}", group="g", category="xyz"[k])
            for i in range(patients)
            for k in range(times)
        ]
        for s in "abc"
    }


def parts_of_patients(dealt):
    found = {}
    for splits in dealt.values():
        for k in SPLITS:
            for c in splits[k]:
                found.setdefault(c.patient, set()).add(k)
    return found


@pytest.mark.parametrize("keep", [True, "sizes"])
@pytest.mark.parametrize("federation", [*MOVES, Limited(9), Limited(3)], ids=str)
def test_the_cases_of_a_patient_stay_in_one_part(federation, keep):
    for patients, times in ((9, 2), (5, 3)):
        for seed in range(10):
            found = parts_of_patients(deal(federation, timed(patients, times), seed=seed, keep=keep))
            assert all(len(parts) == 1 for parts in found.values()), (patients, seed)


def test_a_site_of_one_part_gets_all_cases_of_one_patient_or_none():
    seen = set()
    for seed in range(30):
        for splits in deal(Limited(2), timed(5, 3), seed=seed, keep=True, test=0.0).values():
            patients = len({c.patient for k in SPLITS for c in splits[k]})
            seen.add((patients, bool(splits["train"]) and bool(splits["validation"])))
    assert seen == {(2, True), (1, False)}


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
    dealt = deal(ByLabelSize("kidney+tumour"), kidneys, test=0.0)
    sums = [[sum(c.volumes().values()) for k in SPLITS for c in each[k]] for each in dealt.values()]
    assert all(max(a) <= min(b) for a, b in pairwise(sums))


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


def test_real_hospitals_keep_their_part(shared):
    """TCGA-LGG: no image is opened to decide on the parts, only label maps to sort the cases."""
    sites = Files(str(shared / "tcga_lgg"), exclude=("EZ",)).case_refs(0)
    (label,) = sites["CS"][0].volumes()
    natural, dealt = deal(Natural(), sites), deal(ByLabelSize(label), sites, keep=True)
    assert sources(dealt, "test") == sources(natural, "test") and {s: sum(v) for s, v in sizes(dealt).items()} == {
        "CS": 14, "DU": 14, "FG": 12, "HT": 14
    }  # fmt: skip
