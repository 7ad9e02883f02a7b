"""Everything that polysite refuses, as one small tree.

::

    PolysiteError            one sentence: what happened, what was given, what to do
    ├── ConfigError          a configuration that cannot mean anything
    ├── DataError            a file or a case that cannot be used; names it
    ├── PayloadError         bytes or fields that must not cross the wire
    └── RunError             a run folder or checkpoint that cannot be written or continued

The command line prints the sentence and leaves with exit code 2; a program may catch the branch it can mend.

>>> issubclass(DataError, PolysiteError)
True
"""

from collections.abc import Iterable
from difflib import get_close_matches


class PolysiteError(Exception):
    """The root: its text is one sentence for a person."""


class ConfigError(PolysiteError):
    """A configuration that cannot mean anything."""


class DataError(PolysiteError):
    """A file or a case that cannot be used."""


class PayloadError(PolysiteError):
    """Bytes or fields that must not cross the wire."""


class RunError(PolysiteError):
    """A run folder or checkpoint that cannot be written or continued."""


def nearest(given: str, known: Iterable[str]) -> str:
    """A hint for a name that does not exist.

    >>> nearest("fedavgg", ["fedavg", "scaffold"])
    "did you mean 'fedavg'?"
    >>> nearest("zebra", ["fedavg", "scaffold"])
    'known: fedavg, scaffold'
    """
    known = sorted(known)
    close = get_close_matches(given, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def shown(text: object, most: int = 300) -> str:
    """What somebody else wrote, for a screen or a record: not long, and nothing that a terminal would act on.

    >>> shown("no\\x1b[2J\\nway")
    'no [2J way'
    """
    return "".join(c if c.isprintable() else " " for c in str(text)[:most])
