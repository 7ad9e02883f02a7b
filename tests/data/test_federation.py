"""Federations that consist of steps."""

from itertools import product

import pytest

from dealt import MOVES, STAYS, deal, sizes
from polysite.data.case import SPLITS
from polysite.data.federation import (
    ByLabelSize,
    HideModalities,
    Iid,
    LeaveOut,
    Limited,
    Natural,
    Steps,
    hides_modalities,
)
from polysite.data.parts import parts_of
from polysite.data.split import table
from polysite.errors import ConfigError


def cases(dealt):
    return {site: [c for k in SPLITS for c in splits[k]] for site, splits in dealt.items()}


def test_equal_sites_from_which_different_modalities_are_hidden():
    """The federations of paper D, Tables III and IV: five clients, l of the modalities hidden at each."""
    plain = deal(Iid(5, parts="all"))
    assert list(plain) == [f"iid-{k}" for k in range(1, 6)]
    assert max(map(sum, sizes(plain).values())) - min(map(sum, sizes(plain).values())) <= 1
    assert all(all(counts) for counts in sizes(plain).values())  # every client trains, validates and tests
    for count in range(3):
        dealt = deal(Steps((Iid(5, parts="all"), HideModalities(count))))
        assert table(dealt) == table(plain)
        for k, held in enumerate(cases(dealt).values()):
            assert {c.hidden for c in held} == {tuple((k + i) % 3 for i in range(count))}


def test_a_step_deals_what_the_last_one_dealt():
    small = deal(Steps((Limited(6), Iid(3, parts="all"))))
    assert sizes(small) == sizes(deal(Steps((Limited(6), Natural(), Iid(3, parts="all")))))
    assert {s: sum(v) for s, v in sizes(small).items()} == {"iid-1": 6, "iid-2": 6, "iid-3": 6}
    assert parts_of(small) == parts_of(deal(Limited(6)))
    without = deal(Steps((Iid(2), LeaveOut("iid-2"))))
    assert not without["iid-2"]["train"] and len(without["iid-2"]["test"]) == len(deal(Iid(2))["iid-2"]["train"])


@pytest.mark.parametrize(("first", "second"), [*product([*MOVES, *STAYS], repeat=2)], ids=lambda f: type(f).__name__)
def test_any_two_federations_can_follow_one_another(first, second):
    if isinstance(first, Iid) and isinstance(second, Iid):
        second = Iid(3, parts="all")
    before, after = deal(first), deal(Steps((first, second)))
    held = [c.source for each in cases(after).values() for c in each]
    assert held and len(set(held)) == len(held) and set(held) <= parts_of(before).keys()
    assert all(parts_of(before)[source] == part for source, part in parts_of(after).items())
    assert all(c.site == site for site, each in cases(after).items() for c in each)
    assert table(after) == table(deal(Steps((first, second))))


def test_modalities_that_two_steps_hide_add_up():
    dealt = deal(Steps((HideModalities(1), ByLabelSize("WT"), HideModalities(1))))
    assert {len(c.hidden) for each in cases(dealt).values() for c in each} == {1, 2}
    assert hides_modalities(HideModalities(1)) and hides_modalities(Steps((Natural(), HideModalities(0))))
    assert not hides_modalities(Steps((Natural(), Iid(2))))


def test_a_sum_of_labels():
    by = {label: table(deal(ByLabelSize(label))) for label in ("WT", "TC", "WT+TC", " TC + WT")}
    assert by["WT"] == by["WT+TC"] == by[" TC + WT"] != by["TC"]  # TC is the same in all cases


@pytest.mark.parametrize(
    ("federation", "why"),
    [
        (Steps((HideModalities(2), ByLabelSize("WT"), HideModalities(2))), "hide all 3 modalities of case"),
        (ByLabelSize("WT+XT"), r"federation.label names 'XT', which is not in the data; known: TC, WT"),
        (Iid(64, parts="all"), "sites = 64, but there are 63 cases"),
    ],
)
def test_what_cannot_be_dealt_is_refused(federation, why):
    with pytest.raises(ConfigError, match=why):
        deal(federation)


def test_the_parts_that_cases_keep_hold_through_all_steps():
    natural = parts_of(deal(Natural()))
    dealt = parts_of(deal(Steps((ByLabelSize("WT"), Iid(4, parts="all"), HideModalities(1))), keep=True))
    assert dealt == natural
