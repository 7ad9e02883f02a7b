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

from polysite.algorithms.base import Kind, facts
from polysite.engines.secure.masks import seal, unseal
from polysite.engines.secure.member import Mask, Session, channel, packed, session_id, unpacked
from polysite.errors import DataError, PayloadError
from polysite.heterogeneity import hidden
from polysite.heterogeneity.exchange import Assess
from polysite.payload import Limits, Payload, SiteId, decode, encode, natural

PURPOSE = b"statistics "  # of keys by which statistics are encrypted
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
        key, about = channel(self.session, to, PURPOSE), _about(self.session.id, self.session.site, to)
        return Payload(**{FIELD: packed({"statistics": seal(key, bytes(encode(reply)), about)})})

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
        content = unseal(channel(session, site, PURPOSE), blob, _about(session.id, site, session.site))
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
    return Payload(comparison=packed({"json": content}))


def sealed_of(got: Payload) -> dict[SiteId, bytes]:
    """Return the encrypted statistics in a payload, by hospital."""
    return unpacked(got.get(FIELD, {}), MAX_SEALED, "an assessment")


def _about(id: bytes, sender: SiteId, receiver: SiteId) -> bytes:
    return b"\0".join([b"statistics", id, sender.encode(), receiver.encode()])
