"""A site's half of a secure sum: its keys, the shares it deals and holds, its masks, what it reveals.

A ``Session`` is all that a site keeps during one sum. A site that was started again goes on from it; the coordinator
never gets it. Steps that would reveal a single reply are refused: too few sites, a second story about who answered.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from polysite.algorithms.base import Kind
from polysite.engines.secure import fixed_point, shamir
from polysite.engines.secure.masks import SEED, add_masks, agreed_key, new_seed, public_key, require, seal, unseal
from polysite.errors import PayloadError
from polysite.payload import Payload, SiteId, plain

MaskStep = Literal["keys", "shares", "members", "reveal"]
Reveal = Literal["majority", "two_thirds"]
STEPS: tuple[MaskStep, ...] = ("keys", "shares", "members", "reveal")
SESSION = 16  # bytes of the name of a sum
MAX_BLOB = 1 << 12  # bytes of a key, a signature or an encrypted pair of shares

Bytes = Mapping[SiteId, bytes]


@dataclass(frozen=True)
class Session:
    """What a site keeps during one secure sum.

    Args:
        id: Name of the sum.
        site: The site.
        fewest: Fewest sites in the sum.
        mask_key: Private key by which masks are agreed on with every other site.
        share_key: Private key by which shares are encrypted.
        seed: Seed of the site's own mask.
        mask_keys: Public keys of all sites that began.
        share_keys: Their other public keys.
        own: The shares of its seed and its key that it keeps itself.
        sealed: Encrypted shares of the sites with which it masks, itself left out.
        answered: Sites for whose seeds it has revealed shares.
        reveal: How many sites reveal a seed or a key.
    """

    id: bytes
    site: SiteId
    fewest: int
    mask_key: bytes = field(default_factory=new_seed, repr=False)
    share_key: bytes = field(default_factory=new_seed, repr=False)
    seed: bytes = field(default_factory=new_seed, repr=False)
    mask_keys: Bytes = field(default_factory=dict, repr=False)
    share_keys: Bytes = field(default_factory=dict, repr=False)
    own: bytes = field(default=b"", repr=False)
    sealed: Bytes = field(default_factory=dict, repr=False)
    answered: tuple[SiteId, ...] = ()
    reveal: Reveal = "majority"

    @property
    def members(self) -> tuple[SiteId, ...]:
        """Sites that mask with one another; empty before they are known."""
        return tuple(sorted({*self.sealed, self.site})) if self.sealed else ()

    @property
    def threshold(self) -> int:
        """Number of shares that reveal a seed or a key, of those who began."""
        return threshold(len(self.mask_keys), self.reveal)

    @property
    def fewest_answers(self) -> int:
        """Fewest sites whose replies are in the sum when it is opened."""
        return max(self.fewest, self.threshold)

    def place(self, site: SiteId) -> int:
        """Return the place of a site's shares."""
        return places(self.mask_keys)[site]


def threshold(sites: int, reveal: Reveal = "majority") -> int:
    """Return the number of shares that reveal a secret: more than half of them, or more than two thirds.

    >>> [threshold(n) for n in (3, 4, 5, 6)], [threshold(n, "two_thirds") for n in (3, 4, 5, 6)]
    ([2, 3, 3, 4], [3, 3, 4, 5])
    """
    return sites // 2 + 1 if reveal == "majority" else 2 * sites // 3 + 1


def places(sites: Collection[SiteId]) -> dict[SiteId, int]:
    """Return the places of the shares of these sites."""
    return {site: k for k, site in enumerate(sorted(sites), 1)}


@dataclass(frozen=True)
class Identity:
    """How a site signs its keys, and which keys of others it accepts. By default nothing is signed."""

    sign: Callable[[bytes], Mapping[str, bytes]] = lambda text: {}  # returns the parts of a signature, by name
    check: Callable[[SiteId, bytes, Mapping[str, bytes]], None] = lambda site, text, parts: None  # raises PayloadError


def open_session(
    got: Payload, site: SiteId, fewest: int, identity: Identity = Identity(), reveal: Reveal = "majority"
) -> tuple[Session, Payload]:
    """Step ``keys``: begin a sum; return its session and the answer."""
    require()
    session = Session(_session_id(got), site, fewest, reveal=reveal)
    keys = {
        "mask": public_key(session.mask_key),
        "share": public_key(session.share_key),
        "digest": hashlib.sha256(session.seed).digest(),
    }
    keys |= identity.sign(signed_text(session.id, site, keys))
    return session, Payload(keys=packed(keys))


def take_step(
    step: MaskStep, got: Payload, session: Session, identity: Identity = Identity()
) -> tuple[Session, Payload]:
    """Take any other step of a sum; return the session to keep and the answer, or raise PayloadError."""
    if _session_id(got) != session.id:
        raise PayloadError("this secure sum has not begun here, or another one has begun since")
    if step == "shares":
        return _shares(got, session, identity)
    if step == "members":
        return _members(got, session), Payload()
    if step == "reveal":
        return _reveal(got, session)
    raise PayloadError(f"{step!r} is no step of a secure sum")


def _shares(got: Payload, session: Session, identity: Identity) -> tuple[Session, Payload]:
    """Deal shares of the seed and the key to all sites."""
    names = ("mask", "share", "digest")
    known = {name: unpacked(got[f"{name}_keys"] if name != "digest" else got["digests"]) for name in names}
    extra = {name: unpacked(got[name]) for name in got if name.startswith("signed_")}
    sites = known["mask"].keys()
    if any(keys.keys() != sites for keys in known.values()) or any(
        len(key) != SEED for keys in known.values() for key in keys.values()
    ):
        raise PayloadError("the public keys of the sites are incomplete")
    _enough(len(sites), session.fewest, "have sent their keys")
    mine = {"mask": public_key(session.mask_key), "share": public_key(session.share_key)}
    if any(known[name].get(session.site) != key for name, key in mine.items()):
        raise PayloadError("the public keys of this site are not those that it sent")
    if session.mask_keys:
        raise PayloadError("shares were dealt already")
    for site in sorted(sites - {session.site}):
        keys = {name: known[name][site] for name in names}
        parts = {name.removeprefix("signed_"): of[site] for name, of in extra.items() if site in of}
        identity.check(site, signed_text(session.id, site, keys), parts)
    session = replace(session, mask_keys=known["mask"], share_keys=known["share"])
    at = places(sites)
    dealt = [shamir.split(s, session.threshold, at.values()) for s in (session.seed, session.mask_key)]
    pairs = {site: dealt[0][x] + dealt[1][x] for site, x in at.items()}
    sealed = {
        site: seal(_channel(session, site), pairs[site], _about(session.id, session.site, site))
        for site in sorted(sites - {session.site})
    }
    return replace(session, own=pairs[session.site]), Payload(sealed=packed(sealed))


def _members(got: Payload, session: Session) -> Session:
    """Keep the shares that the other sites of this sum have sent."""
    sealed = unpacked(got["sealed"])
    if not session.own or session.sealed:
        raise PayloadError("the sites of this sum are known already, or no shares were dealt")
    if not sealed.keys() <= session.mask_keys.keys() - {session.site}:
        raise PayloadError("shares came from sites that have sent no keys")
    _enough(len(sealed) + 1, session.fewest_answers, "have dealt shares")
    session = replace(session, sealed=sealed)
    for site in sealed:
        _pair(session, site)
    return session


def _reveal(got: Payload, session: Session) -> tuple[Session, Payload]:
    """Reveal shares of the seeds of sites that answered, and of the keys of those that did not."""
    answered = tuple(sorted(got["answered"]))
    members = set(session.members)
    if session.site not in answered or not members.issuperset(answered):
        raise PayloadError("the list of sites that answered is not one of this sum")
    _enough(len(answered), session.fewest_answers, "have answered")
    if session.answered and session.answered != answered:
        raise PayloadError("shares were revealed already, for another list of sites")
    pairs = {site: session.own if site == session.site else _pair(session, site) for site in sorted(members)}
    size = shamir.SHARE
    return replace(session, answered=answered), Payload(
        seeds=packed({site: pairs[site][:size] for site in answered}),
        keys=packed({site: pairs[site][size:] for site in sorted(members.difference(answered))}),
    )


def _enough(count: int, fewest: int, what: str) -> None:
    if count < fewest:
        raise PayloadError(f"{count} sites {what}, and a secure sum needs {fewest}")


def _pair(session: Session, sender: SiteId) -> bytes:
    """Return the shares that a site dealt to this one: of its seed, then of its key."""
    pair = unseal(_channel(session, sender), session.sealed[sender], _about(session.id, sender, session.site))
    if pair is None or len(pair) != 2 * shamir.SHARE:
        raise PayloadError(f"the shares of {sender!r} cannot be opened: they were changed on the way")
    return pair


def _channel(session: Session, other: SiteId) -> bytes:
    """Return the key by which two sites encrypt shares for one another."""
    return agreed_key(session.share_key, session.share_keys[other], b"shares " + session.id)


def pair_seed(private: bytes, public: bytes, id: bytes) -> bytes:
    """Return the seed of the mask that two sites share."""
    return agreed_key(private, public, b"mask " + id)


def sign_of(site: SiteId, other: SiteId) -> int:
    """Return whether a site adds (1) or subtracts (-1) the mask that it shares with another."""
    return 1 if site < other else -1


@dataclass(frozen=True)
class Mask:
    """The last outgoing step: the reply as whole numbers under the masks of a session."""

    session: Session
    fraction: int
    reveals: Literal["sum"] = "sum"

    def apply(self, kinds: Mapping[str, Kind], got: Payload, reply: Payload) -> Payload:
        """Return the masked reply."""
        session, members = self.session, self.session.members
        if not members:
            raise PayloadError("the sites of this secure sum are not known yet")
        if session.answered:
            raise PayloadError("this secure sum is closed: shares were revealed already")
        encoded = fixed_point.encode(kinds, reply, self.fraction, len(members))
        masks = [
            (pair_seed(session.mask_key, session.mask_keys[other], session.id), sign_of(session.site, other))
            for other in session.sealed
        ]
        add_masks(fixed_point.flat(encoded), [*masks, (session.seed, 1)])
        return encoded

    def restore(self, kinds: Mapping[str, Kind], sent: Payload, reply: Payload) -> Payload:
        """Refuse: only the sum of all replies can be restored (``server.py``)."""
        raise PayloadError("a masked reply cannot be restored by itself")


def signed_text(id: bytes, site: SiteId, keys: Mapping[str, bytes]) -> bytes:
    """Return what a site signs: the sum, its name, its public keys."""
    return b"\0".join([b"polysite secure sum", id, site.encode(), *(keys[k] for k in ("mask", "share", "digest"))])


def _about(id: bytes, sender: SiteId, receiver: SiteId) -> bytes:
    return b"\0".join([id, sender.encode(), receiver.encode()])


def _session_id(got: Payload) -> bytes:
    """Return the name of the sum that a step belongs to."""
    found = unpacked(got.get("session", {})).get("id", b"")
    if len(found) != SESSION:
        raise PayloadError("a step of a secure sum has no name")
    return found


def packed(blobs: Mapping[str, bytes]) -> dict[str, Any]:
    """Return bytes as arrays, as a payload carries them."""
    return {name: np.frombuffer(blob, np.uint8) for name, blob in blobs.items()}


def unpacked(arrays: Any) -> dict[str, bytes]:
    """Return arrays as bytes; refuse any that are not short lists of bytes."""
    if isinstance(arrays, float):
        raise PayloadError("a step of a secure sum has a number instead of bytes")
    found = {name: plain(array) for name, array in arrays.items()}
    if any(a.dtype != np.uint8 or a.ndim != 1 or len(a) > MAX_BLOB for a in found.values()):
        raise PayloadError("a step of a secure sum has arrays that are not short lists of bytes")
    return {name: a.tobytes() for name, a in found.items()}
