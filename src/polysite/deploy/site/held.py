"""Keeps the body of the last request: a coordinator that asks with the same payload again names it by its digest.

So scoring a model and then training from it is one download, whatever carries the messages. The coordinator gives the
name; a wrong name affects this study alone. A worker that was started again holds nothing, and the coordinator sends
the body again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from polysite.buffers import Buffer
from polysite.deploy.protocol import HOLDS, MISSING, NAME
from polysite.deploy.site.logged import Logged


class Held:
    """Answers messages of which the body may be named only."""

    def __init__(self, inner: Logged):
        self.inner = inner
        self._name = ""
        self._body: Buffer = b""

    def answer(
        self, header: Mapping[str, Any], body: Buffer, incidents: Sequence[str] = ()
    ) -> tuple[dict[str, Any], Buffer]:
        """Return header and body of the response; the header names the body that is held, or says that it is not."""
        name = header.get(NAME)
        if isinstance(name, str) and len(body):
            self._name, self._body = name, body
        elif name and name == self._name:
            body = self._body
        elif name:
            return {MISSING: True, "incidents": list(incidents)}, b""
        answer, out = self.inner.answer(header, body, incidents)
        return {**answer, HOLDS: self._name} if self._name else answer, out
