"""Hospitals whose cases federations deal out; no image is behind them."""

from polysite.data.case import SPLITS, CaseRef
from polysite.data.federation import ByLabelSize, Dirichlet, HideModalities, Iid, LabelRatio, Limited, Natural
from polysite.data.parts import splitter
from polysite.data.split import Split


def case(name, site, **facts):
    """A case whose volume has nothing to do with its name."""
    volume = {"WT": float(hash_of(name)), "TC": 1.0}
    return CaseRef(site, name, lambda: None, lambda: volume, modalities=3, **facts)


def hash_of(name):
    return sum(ord(c) * 31**k for k, c in enumerate(name)) % 10007


def hospital(site, n):
    return [case(f"{site}{i:03d}", site, group="hl"[i % 2], category="xyz"[i % 3]) for i in range(n)]


SITES = {s: hospital(s, n) for s, n in (("a", 20), ("b", 12), ("c", 31))}
MOVES = [ByLabelSize("WT"), Iid(4, parts="all"), Dirichlet(0.5, 4), LabelRatio(2, 3)]
STAYS = [Natural(), Iid(4), Limited(9), HideModalities(1)]


def deal(federation, sites=SITES, seed=0, **split):
    return federation.deal(sites, splitter(Split(**split), sites, seed), seed)


def sources(dealt, part):
    return {c.source for splits in dealt.values() for c in splits[part]}


def sizes(dealt):
    return {s: [len(splits[k]) for k in SPLITS] for s, splits in dealt.items()}
