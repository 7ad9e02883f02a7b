"""The server's half of an assessment under secure sums: it passes on what it cannot read (``sealed.py``)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from polysite.engines.replies import Exchange
from polysite.engines.secure.member import packed
from polysite.engines.secure.sealed import FIELD, analyst_of, sealed_of
from polysite.engines.secure.server import Collector, TooFew
from polysite.engines.secure.settings import Secure
from polysite.errors import DataError, PayloadError
from polysite.payload import Payload, SiteId, plain


@dataclass(frozen=True)
class Comparison:
    """What came of an assessment under secure sums.

    Args:
        content: The comparison, as the hospital that made it has sent it.
        analyst: That hospital.
        sent: Bytes that left every hospital.
        refused: Hospitals that were left out, and why.
    """

    content: bytes
    analyst: SiteId
    sent: Mapping[SiteId, int]
    refused: Mapping[SiteId, str]


def gather_comparison(exchange: Exchange, settings: Secure, *, can_change: bool, unseen: bool) -> Comparison:
    """Have the hospitals encrypt their statistics, and one of them compare; DataError if too few answer.

    Args:
        exchange: The assessment.
        settings: Settings of secure sums.
        can_change: Whether a study can use fewer modalities.
        unseen: Whether some hospitals do not train.
    """
    collector = Collector(exchange, settings)
    try:
        collector.exchange_keys()
        return _compared(collector, float(can_change), float(unseen))
    except TooFew as problem:
        raise DataError(f"there is no comparison under secure sums: {problem}") from problem


def _compared(collector: Collector, can_change: float, unseen: float) -> Comparison:
    exchange, least = collector.exchange, collector.settings.fewest
    analyst = analyst_of(collector.keys)
    blobs: dict[SiteId, bytes] = {}
    sent = {i: p for i, p in exchange.sent.items() if i in collector.sealed}
    for site, reply in exchange.transport.train(exchange.round, sent):
        try:
            blobs[site] = sealed_of(reply.payload)["statistics"]
        except (PayloadError, KeyError):
            collector.refused[site] = "its statistics are not encrypted"
            continue
        exchange.arrived(site, len(blobs))
    if len(blobs) < least or analyst not in collector.sealed:
        raise TooFew(f"{len(blobs)} of {len(sent)} hospitals sent statistics, and {least} are needed")
    told: dict[str, Any] = {FIELD: packed(blobs)}
    told |= {"can_change": can_change, "unseen": unseen}
    answers = collector.ask("analyse", {analyst: told}, _checked, 1)
    sizes = {i: len(b) for i, b in blobs.items()}
    sizes[analyst] = sizes.get(analyst, 0) + len(answers[analyst])
    return Comparison(answers[analyst], analyst, sizes, dict(collector.refused))


def _checked(site: SiteId, answer: Payload) -> bytes:
    content = plain(answer["comparison"]["json"])
    if content.dtype != np.uint8:
        raise PayloadError("the comparison is no text")
    return bytes(content.tobytes())
