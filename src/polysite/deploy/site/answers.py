"""The two interfaces between the wrappers around a hospital's host, and what leaves.

Every wrapper has one subject and the method ``answer``. The inner ones see responses as the host gives them; from
``Packed`` outwards they see what leaves the hospital: a header, bytes, and words about both for the ledger.
``worker.py`` has the whole chain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from polysite.buffers import Buffer
from polysite.deploy.protocol import response_message
from polysite.engines import messages
from polysite.engines.site_turn import Turn
from polysite.payload import Payload
from polysite.site import CaseScore


@dataclass(frozen=True, slots=True)
class Leaving:
    """A response as it leaves: header, body, and what it holds, for the ledger.

    Args:
        header: Its header.
        body: Its body.
        fields: What it holds, in words.
        local: A sentence for the hospital's own screen and ledger.
    """

    header: dict[str, Any] = field(default_factory=dict)
    body: Buffer = b""
    fields: Mapping[str, str] = field(default_factory=dict)
    local: str = ""


class Host(Protocol):
    """Interface of a study's host, and of a wrapper around it."""

    def answer(self, request: messages.HostRequest) -> messages.Response:
        """Do what is asked; raise ``Refusal`` where this hospital does not."""
        ...


class Sender(Protocol):
    """Interface of a wrapper that answers with what leaves."""

    def answer(self, request: messages.HostRequest) -> Leaving:
        """Do what is asked; raise ``Refusal`` where this hospital does not."""
        ...


class Packed:
    """Makes messages of responses."""

    def __init__(self, inner: Host):
        self.inner = inner

    def answer(self, request: messages.HostRequest) -> Leaving:
        """Return a response as it leaves."""
        return leaving(request, self.inner.answer(request))


def leaving(request: messages.Request, response: messages.Response) -> Leaving:
    """Return a response as it leaves."""
    header, body = response_message(response)
    return Leaving(header, body, _words(request, response))


def _words(request: messages.Request, response: messages.Response) -> dict[str, str]:
    """Return what a response holds, and of which kind each part is."""
    match request, response:
        case _, messages.Greeting(cases=counts):
            texts = dict.fromkeys(("torch and device", "policy", "keyed digest of the list of cases"), "text")
            return {**{split: f"count, {n}" for split, n in counts.items()}, **texts}
        case messages.Score(split=split), messages.Scored(scores=scores):
            return _listed("scores", split, list(scores.values()))
        case messages.Examine(split=split), messages.Measured(cases=cases):
            return _listed("all measures", split, [each.score for each in cases])
        case _, messages.Models():
            return {"digest of the model": "number"}
        case _, messages.MaskTaken(payload=answer):
            return dict.fromkeys(answer, "keys of a secure sum")
        case _, messages.Trained(payload=reply, turn=Turn() as turn):
            effort = "steps, learning rates, noise" if response.releases else "loss, steps, learning rates"
            told = {effort: "cost and number"} if response.fits or response.releases else {}
            return {**_sizes(reply, turn), **told}
    return {}


def _listed(what: str, split: str, scores: Sequence[CaseScore]) -> dict[str, str]:
    classes = ", with their true classes" if any(score.true is not None for score in scores) else ""
    return {f"{what} of {len(scores)} {split} cases{classes}": "number, under pseudonyms"}


def _sizes(reply: Payload, turn: Turn) -> dict[str, str]:
    """Return kind and size of every field of a reply."""
    under = ", masked" if is_masked(turn) else ""
    sizes = {
        name: 8 if isinstance(value, float) else sum(int(x.nbytes) for x in value.values())
        for name, value in reply.items()
    }
    return {name: f"{turn.kinds.get(name, 'one')}{under}, {size} bytes" for name, size in sizes.items()}


def is_masked(turn: Turn) -> bool:
    """Return whether the reply of a turn leaves under masks."""
    return any(step.reveals == "sum" for step in turn.steps)
