"""A worker process of the Ray engine: it has the hosts of several sites, which share a network."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import Any, Protocol

from polysite.engines.host import SiteHost
from polysite.engines.messages import Begin, Begun, HostRequest, Measured, Models, Response, Trained
from polysite.engines.site_turn import Turn
from polysite.payload import Payload, SiteId, plain
from polysite.site import Cases
from polysite.tree import Tree


class Holding(Protocol):
    """Sites of a study that a worker process has loaded."""

    def load(self, names: Sequence[SiteId]) -> None:
        """Load the cases of more sites."""
        ...

    def host(self, name: SiteId) -> SiteHost:
        """Return the host of a site."""
        ...

    def describe(self, name: SiteId) -> Mapping[str, Any]:
        """Return facts about a site's cases as plain values."""
        ...

    def radiomics(self, name: SiteId, cases: Cases, bin_width: float) -> Any:
        """Return the radiomic features of cases, one row per case."""
        ...

    def shares(self, name: SiteId, case: str) -> Any:
        """Return the shares of the labels in a case."""
        ...


def packed(params: Tree) -> Tree:
    """Return a model as plain arrays."""
    return {name: plain(x) for name, x in params.items()}


class SiteWorker:
    """Hosts of several sites, which answer one at a time.

    Args:
        opener: Function that opens a recipe, as ``module:function``; it returns a ``Holding``.
        recipe: Text from which the sites are built.
        device: Device of the network.
        threads: Threads of a CPU computation; results depend on their number in the last bits.
        environ: Environment variables of the server that hold here, too.
    """

    def __init__(self, opener: str, recipe: str, device: str, threads: int, environ: Mapping[str, str]):
        from polysite import own_process

        os.environ.update(environ)
        own_process.begin()
        import torch

        torch.set_num_threads(threads)
        self._opener, self._recipe, self._device = opener, recipe, device
        self._hosts: dict[SiteId, SiteHost] = {}

    def load(self, names: Sequence[SiteId]) -> dict[SiteId, Mapping[str, Any]]:
        """Load the cases of more sites; returns facts about them."""
        self._holding.load(names)  # errors of the constructor would reach the server without their kind
        return {name: self._holding.describe(name) for name in names}

    def answer(
        self, name: SiteId, request: HostRequest, got: Payload, memory: Payload | None, start: Tree | None
    ) -> Response:
        """Return a site's response to a request, without what stays here.

        Args:
            name: The site.
            request: The request, without its payload, memory and start.
            got: The payload.
            memory: The memory.
            start: The model that a phase begins from.
        """
        if name not in self._hosts:
            self._hosts[name] = self._holding.host(name)
        host = self._hosts[name]
        payload = got.each(host.phases[request.phase].site.lift)
        request = replace(request, payload=payload, memory=memory)
        if isinstance(request, Begin):
            request = replace(request, start=start)
        return _sendable(host.answer(request), payload)

    @cached_property
    def _holding(self) -> Holding:
        module, _, name = self._opener.partition(":")
        holding: Holding = getattr(import_module(module), name)(self._recipe, self._device)
        return holding

    def radiomics(self, name: SiteId, cases: Cases, bin_width: float) -> Any:
        """Return the radiomic features of cases, one row per case."""
        return self._holding.radiomics(name, cases, bin_width)

    def shares(self, name: SiteId, case: str) -> Any:
        """Return the shares of the labels in a case."""
        return self._holding.shares(name, case)


def _sendable(response: Response, got: Payload) -> Response:
    """Return a response as Ray sends it: models as plain arrays, or by the name of the field in which they arrived."""
    match response:
        case Trained(turn=Turn(memory=memory)):
            fits = tuple(replace(fit, params={}, twin={}, personal={}) for fit in response.fits)
            return replace(response, fits=fits, turn=Turn(Payload(), memory, fits, response.seconds, {}))
        case Begun():
            return Begun()
        case Measured():
            cases = (e if e.prediction is None else replace(e, prediction=plain(e.prediction)) for e in response.cases)
            return Measured(tuple(cases))
        case Models():
            sendable = _once(lambda params: _field_of(got, params) or packed(params))
            return Models(tuple(sendable(m) for m in response.models if not isinstance(m, str)), response.groups)
    return response


def _once(f: Callable[[Tree], str | Tree]) -> Callable[[Tree], str | Tree]:
    """Return a function that makes one result of trees with the same arrays, so that it is sent once."""
    made: dict[tuple[int, ...], tuple[Tree, str | Tree]] = {}  # with the tree, so that the identities stay its own

    def first(params: Tree) -> str | Tree:
        key = tuple(id(x) for x in params.values())
        if key not in made:
            made[key] = params, f(params)
        return made[key][1]

    return first


def _field_of(got: Payload, params: Tree) -> str:
    """Return the field of a payload that holds exactly these arrays, or an empty text."""
    for field, value in got.items():
        same = not isinstance(value, float) and value.keys() == params.keys()
        if same and all(value[k] is params[k] for k in params):
            return field
    return ""
