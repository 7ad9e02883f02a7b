"""The coordinator's end of the wire: messages for hospitals, and their answers.

Flower's SuperLink keeps who is online (``superlink.py``), a port of our own answers the hospitals (``gateway.py``,
``port.py``). Everything is in memory.
"""

import secrets
import socket
import ssl
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from polysite.buffers import Buffer
from polysite.deploy.coordinator.posted import Envelope
from polysite.deploy.flower.admission import Admission
from polysite.deploy.flower.gateway import Gateway, Sent
from polysite.deploy.flower.messages import Header, Letter, digest
from polysite.deploy.flower.port import Pace, Port
from polysite.deploy.flower.superlink import SuperLink
from polysite.deploy.flower.tls import tls_context
from polysite.deploy.protocol import NAME
from polysite.deploy.revocations import Revocations
from polysite.errors import RunError


class Link:
    """The coordinator's port, to which sites connect.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 chooses a free one.
        certificate: The server's certificate.
        key: The server's key.
        ca: Certificate of the federation's authority.
        sites: Public key of every site.
        limit: Largest response in bytes.
        pace: How slow a client may be.
        revoked: List of revoked keys, which is read again whenever it changes.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        certificate: Path,
        key: Path,
        ca: Path,
        sites: Mapping[str, bytes],
        limit: int = 8 << 30,
        pace: Pace = Pace(),
        revoked: Path | None = None,
    ):
        self._sites, self._limit, self._admission = tuple(sites), limit, Admission(sites, Revocations(revoked))
        context = tls_context(ssl.PROTOCOL_TLS_SERVER, certificate, key, ca)
        self._gateway = Gateway(SuperLink(sites), self._admission, limit)
        listener = _listen(host, port)
        self.port: int = listener.getsockname()[1]  # that is listened on
        self._port = Port(listener, context, list(sites), self._admission, pace, self._gateway.answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._port.close()

    def online(self) -> dict[str, str]:
        """Return the connected sites, each with a token that changes whenever the site connects anew."""
        return {site: token for site, token in list(self._gateway.tokens.items()) if self._gateway.online(site)}

    def send_all(
        self, letters: Mapping[str, tuple[Mapping[str, Header], Buffer]], ttl: float, group: str
    ) -> dict[str, str]:
        """Leave a message for each site; return their identifiers. A body for several sites is hashed and kept once."""
        for site in sorted(letters.keys() - self._gateway.tokens.keys()):
            known = "it has not connected yet" if site in self._sites else f"the sites are {', '.join(self._sites)}"
            raise RunError(f"no message can go to {site!r}: {known}")
        bodies = {id(body): (header, body) for header, body in letters.values()}
        digests = {each: str(header.get(NAME) or digest(body)) for each, (header, body) in bodies.items() if body}
        ids = {site: secrets.token_hex(16) for site in letters}
        for site, (header, body) in letters.items():
            letter = Letter(ids[site], header, digests.get(id(body), ""), len(body))
            self._gateway.sent[letter.id] = Sent(site, letter, body, time.monotonic() + ttl)
        with self._gateway.news:
            self._gateway.news.notify_all()
        return ids

    def collect(self, ids: Iterable[str]) -> Iterator[Envelope]:
        """Yield the responses that have arrived, complete or failed; each is yielded once and then forgotten."""
        for each in list(ids):
            envelope = self._envelope(each)
            if envelope is not None:
                self.forget([each])
                yield envelope

    def wait(self, seconds: float) -> None:
        """Return when a response is complete or a site has connected, or else after so many seconds."""
        self._gateway.arrived.wait(seconds)
        self._gateway.arrived.clear()

    def forget(self, ids: Collection[str]) -> None:
        """Drop these messages and their responses; a response that still comes is not accepted."""
        for each in ids:
            self._gateway.sent.pop(each, None)

    def incidents(self) -> list[dict[str, Any]]:
        """Return the refusals since the last call, each with its time, reason, sender address, site and count."""
        return self._admission.incidents()

    def _envelope(self, id: str) -> Envelope | None:
        sent = self._gateway.sent.get(id)
        if sent is None:
            return None
        if sent.excessive:
            return Envelope(id, error=f"the answer is of more than {self._limit} bytes")
        if sent.answered and sent.arrival is not None:
            return Envelope(id, sent.arrival.letter.header, sent.arrival.memory)
        return Envelope(id, error="no answer came in time") if sent.is_over else None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as problem:
        raise RunError(f"the coordinator cannot listen at {host}:{port}: {problem.strerror or problem}") from problem
