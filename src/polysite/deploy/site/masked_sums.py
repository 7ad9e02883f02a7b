"""Secure sums at a hospital: the session of the current sum, kept in the state folder, and what must not be done twice.

::

    STATE/runs/STUDY/secure/session.json     keys and shares of the current sum; replaced when the next one begins
    STATE/runs/STUDY/secure/reply            the masked reply that left, given again if the same request comes again
    STATE/runs/STUDY/secure/sums.jsonl       phase, round, and the hospitals of every sum that a reply left for
                                             (``members``) or that was opened (``sites``)

A worker that is killed goes on with the same keys. Two masked replies under the same masks would reveal their
difference, so there is one for each sum. Several sums of one round, which a coordinator may ask for under the pretext
of a restart, reveal what their hospitals differ by, and three sums of many hospitals each can reveal a single one: A, B
and C; D, E and F; and these six with G. So in a round a reply leaves for sums of the same hospitals alone, and shares
are revealed for the same answers alone. Each opened sum takes the shares of more than half of its hospitals, so two
different ones cannot be opened by different halves.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.hashes import SHA256

from polysite.deploy.certificates import public_line, read_key, read_public
from polysite.deploy.enrolment import fingerprint
from polysite.deploy.project import SiteConfig
from polysite.deploy.site.answers import Leaving
from polysite.deploy.site.policy import Refusal, SitePolicy
from polysite.engines.messages import Asked, MaskTurn, Train
from polysite.engines.secure.member import Identity, Session, open_session, take_step
from polysite.engines.secure.settings import Secure
from polysite.errors import PayloadError
from polysite.payload import Payload, SiteId, encode
from polysite.storage import Journal, private_folder, write_private

BYTES = ("id", "mask_key", "share_key", "seed", "own")
TABLES = ("mask_keys", "share_keys", "sealed")


class MaskedSums:
    """The secure sums of one study at this hospital.

    Args:
        folder: Folder of the study.
        site: The site's configuration.
        policy: What the hospital allows.
    """

    def __init__(self, folder: Path, site: SiteConfig, policy: SitePolicy):
        self.folder, self.site, self.policy = folder / "secure", site, policy
        self._sums = Journal[dict[str, Any]](self.folder / "sums.jsonl", dict)
        self._signers: dict[str, SiteId] = {}  # fingerprint of a key -> the hospital whose keys it has signed

    def step(self, request: MaskTurn, secure: Secure) -> Payload:
        """Take a step of a sum with the study's settings; the session is on disk before the answer leaves."""
        got, identity = request.payload, Identity(self._sign, self._check)
        fewest = max(secure.fewest, self.policy.masked_sites)
        private_folder(self.folder)
        try:
            if request.step == "keys":
                session, answer = open_session(got, self.site.name, fewest, identity, secure.reveal)
                for name in ("reply", "reply.json"):
                    (self.folder / name).unlink(missing_ok=True)
            else:
                session, answer = take_step(request.step, got, self.session(request), identity)
        except KeyError as problem:
            raise PayloadError(f"a step of a secure sum is incomplete: {problem}") from problem
        if request.step == "reveal":
            self._refuse_difference(request, session.answered)
            self._note(request, "sites", session.answered)
        self._write(request, session)
        return answer

    def session(self, request: Asked) -> Session:
        """Return the session of the sum that a request belongs to."""
        try:
            known = json.loads((self.folder / "session.json").read_text())
            if (known["phase"], known["round"]) != (request.phase, request.round):
                raise Refusal("no keys were agreed on for this round: only masked replies leave in this study")
            return _session(known["session"])
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise Refusal(
                "no keys were agreed on for this round, or they were lost: only masked replies leave in this study"
            ) from problem

    def joined(self, request: Train) -> Session:
        """Return the session for a masked reply; refuse if one has left in this round for a sum of other hospitals."""
        session = self.session(request)
        if any(set(session.members) != before for before in self._known(request, "members")):
            raise Refusal(
                "a masked reply has left in this round for a sum of other hospitals, and the sums could be subtracted: "
                "ask again when the same take part, or go on with the next round"
            )
        return session

    def _write(self, request: Asked, session: Session) -> None:
        known = {"phase": request.phase, "round": request.round, "session": _plain(session)}
        write_private(self.folder / "session.json", json.dumps(known))

    # one masked reply, one story

    def kept_reply(self, request: Train) -> Leaving | None:
        """Return the reply that left in this sum; None if none did."""
        about = self.folder / "reply.json"
        if not about.exists():
            return None
        known = json.loads(about.read_text())
        if known["request"] != _digest(request):
            raise Refusal("a masked reply has left in this secure sum, and another one would reveal the difference")
        return Leaving(known["header"], (self.folder / "reply").read_bytes(), known["fields"])

    def keep_reply(self, request: Train, reply: Leaving) -> None:
        """Write a masked reply, and for which hospitals it is, before it leaves."""
        self._note(request, "members", self.session(request).members)
        write_private(self.folder / "reply", reply.body)
        known = {"request": _digest(request), "header": reply.header, "fields": dict(reply.fields)}
        write_private(self.folder / "reply.json", json.dumps(known))

    def _refuse_difference(self, request: Asked, answered: tuple[SiteId, ...]) -> None:
        """Refuse to open a second sum of a round that is not over the same hospitals."""
        for before in self._known(request, "sites"):
            count = len(before.symmetric_difference(answered))
            if count:
                raise Refusal(
                    f"a sum of this round was opened before, and this one differs from it by {count} hospitals: ask "
                    "again when the same take part, or go on with the next round"
                )

    def _known(self, request: Asked, what: str) -> list[set[SiteId]]:
        """Return the hospitals of the sums of this round that a reply left for, or that were opened."""
        here = (request.phase, request.round)
        return [set(k[what]) for k in self._sums.read() if what in k and (k["phase"], k["round"]) == here]

    def _note(self, request: Asked, what: str, sites: tuple[SiteId, ...]) -> None:
        if set(sites) in self._known(request, what):
            return
        more = {"phase": request.phase, "round": request.round, what: list(sites)}
        self._sums.replace(map(json.dumps, [*self._sums.read(), more]))

    # whose keys

    def _sign(self, text: bytes) -> Mapping[str, bytes]:
        """Return the public key of this hospital and its signature under keys of a sum."""
        if not self.site.key.is_file():
            return {}
        key = read_key(self.site.key)
        return {"key": public_line(key.public_key()).encode(), "signature": key.sign(text, ECDSA(SHA256()))}

    def _check(self, site: SiteId, text: bytes, parts: Mapping[str, bytes]) -> None:
        """Refuse keys that no hospital of ``masked_peers`` has signed, or one for two, if the policy names any."""
        accepted = {"".join(peer.split()) for peer in self.policy.masked_peers}
        if not accepted:
            return
        if not _is_signed(text, parts, accepted):
            raise PayloadError(f"the keys of {site!r} are not signed by a hospital of masked_peers in policy.toml")
        signer = fingerprint(parts["key"].decode())
        mine = self.site.key.is_file() and signer == fingerprint(public_line(read_key(self.site.key).public_key()))
        if mine or self._signers.setdefault(signer, site) != site:
            other = self.site.name if mine else self._signers[signer]
            raise PayloadError(f"the keys of {site!r} and {other!r} are signed by one hospital, which counts once")


def _is_signed(text: bytes, parts: Mapping[str, bytes], accepted: set[str]) -> bool:
    try:
        line = parts["key"].decode()
        key = read_public(line)
        if key is None or "".join(fingerprint(line).split()) not in accepted:
            return False
        key.verify(parts["signature"], text, ECDSA(SHA256()))
    except (KeyError, TypeError, ValueError, InvalidSignature):
        return False
    return True


def _digest(request: Asked) -> str:
    about = f"{request.phase} {request.round} {request.version} ".encode()
    return hashlib.sha256(about + encode(request.payload)).hexdigest()


def _plain(session: Session) -> dict[str, Any]:
    values = {f.name: getattr(session, f.name) for f in fields(session)}
    texts = {name: values[name].hex() for name in BYTES}
    tables = {name: {site: blob.hex() for site, blob in values[name].items()} for name in TABLES}
    return {**values, **texts, **tables, "answered": list(session.answered)}


def _session(known: Mapping[str, Any]) -> Session:
    texts = {name: bytes.fromhex(known[name]) for name in BYTES}
    tables = {name: {site: bytes.fromhex(blob) for site, blob in known[name].items()} for name in TABLES}
    return Session(**{**known, **texts, **tables, "answered": tuple(known["answered"])})
