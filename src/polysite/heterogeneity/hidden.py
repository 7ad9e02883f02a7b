"""An assessment without the lists of numbers of single hospitals: what the hospital that compares sends on.

Under secure sums the statistics of the hospitals go, encrypted, to one of them, which compares all (``analyse``,
``judge``) and sends the coordinator the results. What is left out are the quantiles and the angles of every hospital,
and the standard deviations of single hospitals (``assess.scale = "first"``). What remains concerns pairs of hospitals
(distances, p-values, angles between means), all of them together (groups, pooled deviations, the recommendations), or
is a count (cases without a modality or label). A finding about a hospital that stands out has its median.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from polysite.errors import DataError
from polysite.foreign import parse_json
from polysite.heterogeneity.assessment import Assessment, Distance, Noise, Quantity
from polysite.heterogeneity.exchange import Assess
from polysite.heterogeneity.noisy import analyse
from polysite.heterogeneity.verdict import Verdict, judge
from polysite.payload import Payload, SiteId

ARRAYS = ("matrix", "low", "high", "p", "adjusted", "chance")
NUMBERS = ("alone", "sums", "graded", "named")  # of every site


def compared(replies: Mapping[SiteId, Payload], settings: Assess, modalities_can_change: bool, unseen: bool) -> bytes:
    """Return the comparison of the hospitals as JSON, without their lists."""
    whole = analyse(replies, settings)
    verdict = judge(whole, modalities_can_change, unseen)
    plain = _concealed(whole).plain()
    del plain["settings"], plain["left"]
    return json.dumps({"assessment": plain, "verdict": asdict(verdict)}).encode()


def _concealed(found: Assessment) -> Assessment:
    quantities = {
        name: replace(q, values={}, divisors=q.divisors if len({*q.divisors.values()}) == 1 else {})
        for name, q in found.quantities.items()
    }
    return replace(found, quantities=quantities, alignment={})


def read(content: bytes, settings: Assess, asked: Sequence[SiteId]) -> tuple[Assessment, Verdict]:
    """Return the assessment and the recommendations that a hospital has sent; DataError if they are not valid."""
    try:
        whole = parse_json(content)
        verdict, plain = Verdict.of(whole["verdict"]), whole["assessment"]
        sites = tuple(plain["sites"])
        if not 2 <= len(sites) == len(set(sites)) or not set(sites) <= set(asked):
            raise ValueError("it is about other hospitals")
        return Assessment(
            sites=sites,
            cases={i: int(plain["cases"][i]) for i in plain["cases"] if i in asked},
            quantities={n: _quantity(n, q, sites) for n, q in plain["quantities"].items()},
            distances={n: _distance(n, d, sites) for n, d in plain["distances"].items()},
            angles={n: _matrix(m, len(sites)) for n, m in plain["angles"].items()},
            unlabelled={i: int(plain["unlabelled"][i]) for i in sites},
            silent=tuple(i for i in plain["silent"] if i in asked),
            refused={str(i): str(why)[:300] for i, why in plain["refused"].items() if i in asked},
            settings=settings,
            alternatives={
                str(n): {str(k): str(i) for k, i in each.items()} for n, each in plain["alternatives"].items()
            },
            noise=_noise(plain["noise"]) if plain.get("noise") else None,
        ), verdict
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as problem:
        raise DataError(f"the comparison of the hospitals cannot be read: {problem!r:.200}") from problem


def _noise(plain: Mapping[str, Any]) -> Noise:
    hidden = tuple(str(name)[:200] for name in plain["hidden"])
    return Noise(float(plain["epsilon"]), float(plain["delta"]), float(plain["noise"]), hidden)


def _quantity(name: str, plain: Mapping[str, Any], sites: Sequence[SiteId]) -> Quantity:
    kind, _, of = name.partition(" ")
    return Quantity(
        name, kind, of, str(plain["unit"]),
        {str(i): float(x) for i, x in plain["divisors"].items()}, {},
        {i: int(plain["absent"][i]) for i in sites},
        _matrix(plain["matrix"], len(sites)), _matrix(plain["p"], len(sites)),
        {i: float(plain["alone"][i]) for i in sites},
    )  # fmt: skip


def _distance(name: str, plain: Mapping[str, Any], sites: Sequence[SiteId]) -> Distance:
    def groups(value: Any) -> tuple[tuple[SiteId, ...], ...]:
        found = tuple(tuple(map(str, group)) for group in value)
        if not {i for group in found for i in group} <= set(sites):
            raise ValueError("a group has other hospitals")
        return found

    outlier = str(plain["outlier"])
    if outlier not in sites:
        raise ValueError("the most distant hospital is another one")
    rest: dict[str, Any] = {k: _matrix(plain[k], len(sites)) for k in ARRAYS}
    rest["error"] = None if plain.get("error") is None else _matrix(plain["error"], len(sites))
    rest |= {k: {i: float(x) for i, x in plain[k].items() if i in sites} for k in NUMBERS}
    return Distance(
        name=name,
        outlier=outlier,
        silhouette=float(plain["silhouette"]),
        clusters=groups(plain["clusters"]),
        linked=groups(plain["linked"]),
        against={i: tuple(j for j in of if j in sites) for i, of in plain["against"].items() if i in sites},
        **rest,
    )


def _matrix(rows: Any, count: int) -> np.ndarray:
    found = np.array(rows, np.float64)
    if found.shape != (count, count) or not np.isfinite(found).all():
        raise ValueError(f"a table has not {count} rows and columns of numbers")
    return found
