"""The exceptions of polysite, and two helpers for their messages.

::

    PolysiteError            one sentence: what happened, what was given, what to do
    ├── ConfigError          a configuration that cannot mean anything
    ├── DataError            a file or a case that cannot be used; names it
    ├── PayloadError         bytes or fields that must not cross the wire
    └── RunError             a run folder or checkpoint that cannot be written or continued

    Paused                   no error: training stopped after the round that was asked for

The command line prints the sentence and exits with code 2; a program may catch the branch that it can handle.

>>> issubclass(DataError, PolysiteError)
True
"""

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST = 200  # characters of a name that are compared with known ones


MAX_SENTENCE = 1500  # characters; a longer sentence, because it quotes a long value, is shortened in the middle


class PolysiteError(Exception):
    """Base class of all errors of polysite. Its text is one sentence that a user can act on."""

    def __init__(self, *args: object):
        super().__init__(*(_sentence(given) if isinstance(given, str) else given for given in args))


class ConfigError(PolysiteError):
    """A configuration that cannot mean anything."""


class DataError(PolysiteError):
    """A file or a case that cannot be used."""


class PayloadError(PolysiteError):
    """Bytes or fields that must not cross the wire."""


class RunError(PolysiteError):
    """A run folder or checkpoint that cannot be written or continued."""


class Paused(Exception):
    """Training stopped after the round that ``until`` names; its checkpoint is written, and it can be resumed."""


def _sentence(text: str) -> str:
    """Return a text in one line and of bounded length.

    >>> _sentence("one\\ntwo")
    'one two'
    """
    text = " ".join(text.splitlines()) if len(text.splitlines()) > 1 else text
    return text if len(text) <= MAX_SENTENCE else f"{text[: MAX_SENTENCE - 400]} ... {text[-390:]}"


def nearest(given: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest known name, or all of them.

    >>> nearest("fedavgg", ["fedavg", "scaffold"])
    "did you mean 'fedavg'?"
    >>> nearest("zebra", ["fedavg", "scaffold"])
    'known: fedavg, scaffold'
    """
    known = sorted(known)
    close = get_close_matches(given[:LONGEST], known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def shown(text: object, length: int = 300) -> str:
    """Return foreign text cut to a length and without control characters, safe to print or to record.

    >>> shown("no\\x1b[2J\\nway")
    'no [2J way'
    """
    return "".join(c if c.isprintable() else " " for c in str(text)[:length])
