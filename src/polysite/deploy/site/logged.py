"""The outermost wrapper: the ledger has a line about every response before it is handed to the courier.

A request that comes again, because its response was lost on the way, gets that response again, with a line of its own.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from polysite.buffers import Buffer
from polysite.deploy.site.answers import Leaving
from polysite.deploy.site.hospital import Hospital
from polysite.deploy.site.ledger import Ledger
from polysite.deploy.site.received import Received
from polysite.errors import shown

Header = dict[str, Any]
MAX_INCIDENTS = 16  # that are kept for the coordinator


class Logged:
    """Writes what was asked and what leaves to the ledger. Where that fails, RunError is raised and nothing leaves."""

    def __init__(self, hospital: Hospital, inner: Received):
        self.hospital, self.inner = hospital, inner
        self.ledger = Ledger(hospital.site.state / "ledger.jsonl")
        self._last: tuple[str, Buffer] = "", b""  # the last request that was answered
        self._left = Leaving()  # the response to it

    def answer(self, header: Mapping[str, Any], body: Buffer, incidents: Sequence[str] = ()) -> tuple[Header, Buffer]:
        """Return a response, which is in the ledger.

        Args:
            header: Header of the request.
            body: Body of the request.
            incidents: What the courier has to report, sent along.
        """
        text = json.dumps(dict(header), sort_keys=True)
        again = self._last[0] == text and (self._last[1] is body or bytes(self._last[1]) == bytes(body))
        self.hospital.incidents = []
        leaving = self._left if again else self.inner.answer(header, body)
        noted = [*incidents, *self.hospital.incidents][-MAX_INCIDENTS:]
        extra: Header = {"incidents": noted} if noted else {}
        if leaving.local:
            extra["local"] = leaving.local  # for the screen here; the courier removes it
        self._record(header, body, leaving, {**extra, "again": True} if again else extra)
        if header.get("kind") != "hello" and not {"error", "refused"} & leaving.header.keys():
            self._last, self._left = (text, body), leaving
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
