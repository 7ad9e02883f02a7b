"""An assessment under secure sums: statistics encrypted for one hospital, which compares all and sends on the results.

The distance of two hospitals is no sum over the federation: the one that computes it has the statistics of both. Here
that is the first hospital by name, which every hospital works out for itself from the keys that it was given. The
others encrypt their statistics for it by the keys of a secure sum (``masks.py``); the coordinator passes on what it
cannot read. It gets distances, tests, groups and recommendations (``heterogeneity/hidden.py``), the same as without
secure sums, and no list of a single hospital.

    step       a site is sent                       it answers
    keys       as in a secure sum
    shares     as in a secure sum; the shares are not used
    (assess)   nothing                              its statistics, encrypted for the first hospital
    analyse    the first hospital: all of these     the comparison
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from polysite.algorithms.base import Kind, facts
from polysite.engines.secure.masks import agreed_key, seal, unseal
from polysite.engines.secure.member import Mask, Session, session_id
from polysite.errors import DataError, PayloadError
from polysite.heterogeneity import hidden
from polysite.heterogeneity.exchange import Assess
from polysite.payload import Limits, Payload, SiteId, decode, encode, natural, plain

FIELD = "sealed"  # the field of a reply that is encrypted
MAX_SEALED = 1 << 24  # bytes of the statistics of a hospital
CONTENT = Limits(nbytes=MAX_SEALED, header=1 << 22, arrays=10_000, dimensions=2)


@dataclass(frozen=True)
class Seal:
    """The last outgoing step of an assessment: the reply encrypted for the hospital that compares."""

    session: Session
    reveals: Literal["sum"] = "sum"

    def apply(self, kinds: Mapping[str, Kind], got: Payload, reply: Payload) -> Payload:
        """Return the encrypted reply."""
        if not self.session.share_keys:
            raise PayloadError("no keys were exchanged, so the statistics cannot be encrypted")
        to = analyst_of(self.session.share_keys)
        key, about = _channel(self.session, to), _about(self.session.id, self.session.site, to)
        return Payload(**{FIELD: {"statistics": _array(seal(key, bytes(encode(reply)), about))}})

    def restore(self, kinds: Mapping[str, Kind], sent: Payload, reply: Payload) -> Payload:
        """Refuse: only the hospital that compares can open it."""
        raise PayloadError("an encrypted reply cannot be restored by the server")


def protecting(algorithm: Any, session: Session, fraction: int) -> Mask | Seal:
    """Return the last outgoing step: a mask if the sum of the replies is enough, else encryption."""
    return Seal(session) if facts(algorithm).needs == "each" else Mask(session, fraction)


def analyst_of(sites: Collection[SiteId]) -> SiteId:
    """Return the hospital that compares all: the first by name."""
    return natural(sites)[0]


def analysed(got: Payload, session: Session, settings: Assess) -> Payload:
    """Step ``analyse``: open the statistics of all hospitals, compare them, return the results."""
    if session_id(got) != session.id or session.site != analyst_of(session.share_keys or {session.site: b""}):
        raise PayloadError("another hospital compares in this assessment, or it has not begun here")
    replies = {}
    for site, blob in sealed_of(got).items():
        if site not in session.share_keys:
            raise PayloadError(f"{site!r} has sent no keys for this assessment")
        content = unseal(_channel(session, site), blob, _about(session.id, site, session.site))
        if content is None:
            raise PayloadError(f"the statistics of {site!r} cannot be opened: they were changed on the way")
        replies[site] = decode(content, CONTENT)
    if len(replies) < session.fewest:
        raise PayloadError(f"{len(replies)} hospitals are described, and {session.fewest} are needed")
    can_change, unseen = (bool(got.get(name, 0.0)) for name in ("can_change", "unseen"))
    try:
        content = hidden.compared(replies, settings, can_change, unseen)
    except (DataError, KeyError, TypeError, ValueError, AttributeError) as problem:
        raise PayloadError(f"the hospitals cannot be compared: {problem!s:.200}") from problem
    return Payload(comparison={"json": np.frombuffer(content, np.uint8)})


def sealed_of(got: Payload) -> dict[SiteId, bytes]:
    """Return the encrypted statistics in a payload, by hospital."""
    arrays = got.get(FIELD, {})
    found = {} if isinstance(arrays, float) else {i: plain(x) for i, x in arrays.items()}
    if any(a.dtype != np.uint8 or a.ndim != 1 or len(a) > MAX_SEALED for a in found.values()):
        raise PayloadError("encrypted statistics are not lists of bytes, or too long")
    return {i: a.tobytes() for i, a in found.items()}


def _array(blob: bytes) -> Any:
    return np.frombuffer(blob, np.uint8)


def _channel(session: Session, other: SiteId) -> bytes:
    return agreed_key(session.share_key, session.share_keys[other], b"statistics " + session.id)


def _about(id: bytes, sender: SiteId, receiver: SiteId) -> bytes:
    return b"\0".join([b"statistics", id, sender.encode(), receiver.encode()])
