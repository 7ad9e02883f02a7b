"""The wire between a server and its sites: all in which engines differ. Here are those without a network."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from polysite.engines.host import SiteHost
from polysite.engines.messages import Answer, Join, Request
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
            assert not isinstance(request, Join)  # sites in this process are known
            host = self.hosts[site]
            yield site, request, _coded(host.answer(_coded(request))) if self.coded else host.answer(request)

    def online(self) -> Mapping[SiteId, str]:
        """Return all sites."""
        return dict.fromkeys(self.hosts, "here")


def _coded(message: Any) -> Any:
    """Return a request or response with its payload passed through the codec."""
    payload = getattr(message, "payload", None)
    return message if payload is None else replace(message, payload=decode(encode(payload)))
