"""Reads requests and turns errors into sentences: the coordinator learns no file and no case of them."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from polysite.buffers import Buffer
from polysite.deploy.identity import difference
from polysite.deploy.protocol import parse_request
from polysite.deploy.site.answers import Leaving
from polysite.deploy.site.hospital import Hospital
from polysite.deploy.site.policy import Refusal, obey
from polysite.deploy.site.withdrawn import why_left
from polysite.engines.messages import Join, Request
from polysite.errors import ConfigError, PayloadError, PolysiteError, shown

log = logging.getLogger("polysite")


class Desk(Protocol):
    """Interface of what answers requests about any study."""

    def answer(self, study: str, request: Request) -> Leaving:
        """Do what is asked; raise ``Refusal`` where this hospital does not."""
        ...


class Received:
    """Answers a message, whatever it is."""

    def __init__(self, hospital: Hospital, inner: Desk):
        self.hospital, self.inner = hospital, inner

    def answer(self, header: Mapping[str, Any], body: Buffer) -> Leaving:
        """Return what leaves: a response, or a sentence why there is none."""
        began, kind = time.perf_counter(), shown(header.get("kind"), 40)
        try:
            study, request = parse_request(header, body)
            obey(why_left(self.hospital.site.state, self.hospital.folder(study)))
            if isinstance(request, Join):
                obey(difference(header))
            found = self.inner.answer(study, request)
        except (Refusal, ConfigError, PayloadError) as problem:
            found = Leaving({"refused": str(problem)})
        except PolysiteError as problem:  # it may name files and cases, which stay here
            log.error("%s: %s", kind, problem)
            found = Leaving(
                {"error": "its data or its disk are not in order; its own log says why"}, local=str(problem)
            )
        except Exception as problem:
            log.exception("%s", kind)
            found = Leaving({"error": f"it failed ({type(problem).__name__}); its own log says why"})
        return replace(found, header={**found.header, "seconds": time.perf_counter() - began})
