"""The wire between a server and its sites: all in which engines differ. Here are those without a network."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from polysite.engines.host import SiteHost
from polysite.engines.messages import Answer, Request
from polysite.payload import SiteId, decode, encode


class Wire(Protocol):
    """Interface between a server and the sites that it can reach."""

    def ask(self, requests: Mapping[SiteId, Request], wait: float) -> Iterator[Answer]:
        """Send requests, and yield the responses that have arrived, to these and to earlier requests.

        Args:
            requests: At most one for each site, which has none to answer.
            wait: Seconds to wait, at most, if none has arrived.
        """
        ...

    def online(self) -> Mapping[SiteId, str]:
        """Return the connected sites, each with a token that changes when the site connects anew.

        A site that has connected anew answers no earlier request any more.
        """
        ...


class InProcess:
    """Hosts in this process, which answer one after the other, each when its response is taken.

    Args:
        hosts: The hosts.
        coded: Pass every payload through the codec, as a network would.
    """

    def __init__(self, hosts: dict[SiteId, SiteHost], coded: bool = False):
        self.hosts, self.coded = hosts, coded

    def ask(self, requests: Mapping[SiteId, Request], wait: float) -> Iterator[Answer]:
        """Yield the response to every request, in their order."""
        for site, request in requests.items():
            yield site, request, self._carried(self.hosts[site].answer(self._carried(request)))

    def online(self) -> Mapping[SiteId, str]:
        """Return all sites."""
        return dict.fromkeys(self.hosts, "here")

    def _carried(self, message: Any) -> Any:
        payload = getattr(message, "payload", None)
        if not self.coded or payload is None:
            return message
        return replace(message, payload=decode(encode(payload)))
