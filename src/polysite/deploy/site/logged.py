"""The outermost wrapper: the ledger has a line about every response before it is handed to the courier.

A request that comes again, because its response was lost on the way, gets that response again, with a line of its own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from polysite.buffers import Buffer
from polysite.deploy.site.answers import Leaving
from polysite.deploy.site.hospital import Hospital
from polysite.deploy.site.ledger import Ledger
from polysite.errors import shown

Header = dict[str, Any]
MAX_INCIDENTS = 16  # that are kept for the coordinator


class Receiver(Protocol):
    """Interface of what answers messages."""

    def answer(self, header: Mapping[str, Any], body: Buffer) -> Leaving:
        """Return what leaves: a response, or a sentence why there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Answered:
    """A request and its response, which is given again if the request comes again."""

    header: str = ""
    body: Buffer = b""
    leaving: Leaving = field(default_factory=Leaving)

    def is_to(self, header: str, body: Buffer) -> bool:
        """Whether this is the response to a request."""
        return self.header == header and (self.body is body or bytes(self.body) == bytes(body))


class Logged:
    """Writes what was asked and what leaves to the ledger. Where that fails, RunError is raised and nothing leaves."""

    def __init__(self, hospital: Hospital, inner: Receiver):
        self.hospital, self.inner = hospital, inner
        self.ledger = Ledger(hospital.site.state / "ledger.jsonl")
        self._last = Answered()

    def answer(self, header: Mapping[str, Any], body: Buffer, incidents: Sequence[str] = ()) -> tuple[Header, Buffer]:
        """Return a response, which is in the ledger.

        Args:
            header: Header of the request.
            body: Body of the request.
            incidents: What the courier has to report, sent along.
        """
        text = json.dumps(dict(header), sort_keys=True)
        again = self._last.is_to(text, body)
        self.hospital.incidents = []
        leaving = self._last.leaving if again else self.inner.answer(header, body)
        noted = [*incidents, *self.hospital.incidents][-MAX_INCIDENTS:]
        extra: Header = {"incidents": noted} if noted else {}
        if leaving.local:
            extra["local"] = leaving.local  # for the screen here; the courier removes it
        self._record(header, body, leaving, {**extra, "again": True} if again else extra)
        if header.get("kind") != "hello" and not {"error", "refused"} & leaving.header.keys():
            self._last = Answered(text, body, leaving)
        return {**leaving.header, "left": json.dumps(dict(leaving.fields)), **extra}, leaving.body

    def _record(self, header: Mapping[str, Any], body: Buffer, leaving: Leaving, extra: Mapping[str, Any]) -> None:
        texts = sum(len(leaving.header.get(name, "")) for name in ("scores", "measures"))
        self.ledger.write(
            {
                **{name: shown(header.get(name, ""), 64) for name in ("study", "kind")},
                "from": self.hospital.site.server,
                **{name: given if type(given := header.get(name)) is int else -1 for name in ("round", "phase")},
                "got": len(body),
                "bytes": len(leaving.body) + texts,
                "left": dict(leaving.fields),
                **{k: leaving.header[k] for k in ("refused", "error") if k in leaving.header},
                **extra,
            }
        )
