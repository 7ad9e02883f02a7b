"""Dirichlet federations by hospital and by the volume of a label, and their draws."""

import pytest

from polysite import study
from polysite.config import build
from polysite.errors import ConfigError

DATA = {"name": "phantom", "shape": [24, 24, 24], "sites": {"east": {"cases": 12}, "west": {"cases": 12, "scanner": 5}}}


def sites(**federation):
    given = {"name": "dirichlet", "sites": 2, **federation}
    dealt = study.deal_cases(build({"data": DATA, "federation": given}))
    return [[c for k in splits for c in splits[k]] for splits in dealt.values()]


def test_a_small_alpha_keeps_hospitals_together_and_a_large_one_mixes_them():
    def largest(alpha):
        return [max(sum(c.source[0] == h for c in cases) / len(cases) for h in ("east", "west")) for cases in alpha]

    assert max(largest(sites(by="site", alpha=1e-3))) == 1
    assert max(largest(sites(by="site", alpha=1e4))) < 0.6


def test_a_small_alpha_gives_sites_tumours_of_a_few_sizes():
    small = sites(by="WT", alpha=0.01, draw=2)
    ranked = sorted((c for cases in small for c in cases), key=lambda c: c.volumes()["WT"])
    for cases in small:
        quarters = {ranked.index(c) // 6 for c in cases}
        assert len(cases) >= 3 and len(quarters) < 4


def test_draws_are_different_federations_and_repeat():
    first, again, other = (sites(by="site", draw=k) for k in (1, 1, 2))
    named = [[{c.source for c in cases} for cases in dealt] for dealt in (first, again, other)]
    assert named[0] == named[1] != named[2]


def test_an_unknown_label_is_named():
    with pytest.raises(
        ConfigError, match=r"federation\.by = 'WX' is neither 'site' nor a label; known: ET, TC, WT, site"
    ):
        sites(by="WX")
