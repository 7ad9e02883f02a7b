"""Who may ask the coordinator for something: authentication of requests, and a record of refusals.

A request needs a registered key that was not revoked, and a signature that is not old and was not seen before. Every
refusal is recorded as an incident.
"""

import logging
import threading
import time
from base64 import b64decode
from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Any, cast

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from polysite.deploy.certificates import SIGNATURE_OF_REQUEST, SOON
from polysite.deploy.flower.messages import KEY, SIGNATURE, TIME
from polysite.deploy.revocations import Revocations

BEHIND, AHEAD = 305.0, 5.0  # seconds by which the clock of a site may differ
MAX_INCIDENTS = 255  # different ones between two calls of ``incidents``
log = logging.getLogger("polysite.link")


class Refusal(Exception):
    """A request that does not pass: status and word for the client, and a sentence for the incidents."""

    def __init__(self, status: int, word: str, what: str = "", site: str = ""):
        super().__init__(what)
        self.status, self.word, self.what, self.site = status, word, what, site


class Admission:
    """Authenticates requests and records refusals.

    Args:
        sites: Public key of every site, which the project has checked.
        revoked: Keys that are not accepted any more.
    """

    def __init__(self, sites: Mapping[str, bytes], revoked: Revocations):
        self._public, self.revoked = dict(sites), revoked
        self._keys = {site: cast(EllipticCurvePublicKey, load_pem_public_key(pem)) for site, pem in sites.items()}
        self._sites = {key: site for site, key in sites.items()}
        self._seen: dict[tuple[str, str], float] = {}  # signed times, oldest first
        self._noted_expiry: dict[str, date] = {}  # of certificates, and the day on which it was noted
        self._incidents: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._lock = threading.Lock()

    def authenticate(self, headers: Mapping[str, str]) -> str:
        """Return the site that signed this request; refuse an old signature, or one that was seen before."""
        try:
            key, signature = (b64decode(headers[name], validate=True) for name in (KEY, SIGNATURE))
            signed = headers[TIME]
            age = (datetime.now(UTC) - datetime.fromisoformat(signed)).total_seconds()
        except (KeyError, ValueError, TypeError) as problem:
            raise Refusal(401, "unsigned", "a request without a signature") from problem
        site = self._sites.get(key)
        if site is None:
            raise Refusal(401, "unregistered", "a key that is not registered")
        if not -AHEAD < age < BEHIND:
            raise Refusal(401, "clock", f"a request signed {age:.0f} s ago", site)
        try:
            self._keys[site].verify(signature, signed.encode("latin-1"), SIGNATURE_OF_REQUEST)
        except InvalidSignature as problem:
            raise Refusal(401, "signature", "a signature that is not of this key", site) from problem
        self._first(site, signed)
        if key in self.revoked:
            raise Refusal(403, "revoked", "a key that was revoked", site)
        return site

    def is_revoked(self, site: str) -> bool:
        """Return whether the key of a site was revoked."""
        return self._public[site] in self.revoked

    def _first(self, site: str, signed: str) -> None:
        """Refuse a replayed request: a site may use each signed time only once.

        Signatures are not compared, because a signature can be altered and stay valid.
        """
        with self._lock:
            clock = time.monotonic()
            while self._seen and clock - self._seen[oldest := next(iter(self._seen))] > BEHIND + AHEAD:
                del self._seen[oldest]
            if (site, signed) in self._seen:
                raise Refusal(401, "replayed", "a request that was seen before", site)
            self._seen[site, signed] = clock

    def note(self, what: str, client: Any, site: str = "") -> None:
        """Record a refusal. Equal ones are counted, so that a flood fills neither memory nor the record."""
        if not what:
            return
        host = client[0] if client else ""
        log.debug("refused from %s (%s): %s", host, site or "unknown", what)
        with self._lock:
            at = what, host, site
            if at not in self._incidents and len(self._incidents) >= MAX_INCIDENTS:
                at = "many more", "", ""
            if at not in self._incidents:
                found = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "what": at[0], "from": at[1]}
                self._incidents[at] = {**found, "site": at[2], "count": 0}
            self._incidents[at]["count"] += 1

    def note_expiry(self, site: str, end: datetime) -> None:
        """Record once a day that the certificate of a site expires soon."""
        today = datetime.now(UTC)
        if end - today < SOON and self._noted_expiry.get(site) != today.date():
            self._noted_expiry[site] = today.date()
            self.note(f"its certificate expires on {end:%Y-%m-%d}", None, site)

    def incidents(self) -> list[dict[str, Any]]:
        """Return the refusals since the last call."""
        with self._lock:
            found, self._incidents = list(self._incidents.values()), {}
        return found
