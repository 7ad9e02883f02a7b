"""Texts from outside, in TOML and JSON, parsed within bounds of size, depth and numbers.

The parsers of Python recurse into nested values and take time that grows with the square of the length of a dotted key;
a number may have any length. A file of a stranger could therefore end a process, or occupy it for hours. Everything
that this module accepts can be read, copied, printed and written again without such surprises.

Files of earlier versions may have keys that no longer exist: ``REMOVED`` has them.
"""

import json
import logging
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polysite.errors import ConfigError, shown

MAX_TOML = 4 << 20  # characters
MAX_DEPTH = 40  # of nested lists, tables and parts of a dotted key
WHOLE = range(-(2**63), 2**63)  # whole numbers that TOML has
# a token that has to do with depth, or a text or comment, in which brackets and dots mean nothing. A text without an
# end reaches as far as it can, since the parser stops there; so no token is read twice
TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*+)
    | (?P<text>\"\"\"(?:[^"\\]|\\.|"(?!""))*+\"{0,5} | '''(?:[^']|'(?!''))*+'{0,5}
        | "(?:[^"\\\n]|\\[^\n])*+"? | '[^'\n]*+'? | [A-Za-z0-9_+:-]++)
    | (?P<space>[ \t]++)
    | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
log = logging.getLogger("polysite")


@dataclass(frozen=True)
class Removed:
    """A key of earlier versions that no longer exists.

    Args:
        instead: What to use instead, for a sentence: "choose ...", "set ...".
        idle: Value with which the key changed nothing. A study that asks for another one is refused.
    """

    instead: str
    idle: Any = None


# by dotted key: of a study, or with site., policy. or server. before it, of the file with this name
REMOVED = {
    "ensembles": Removed("leave it out; 'polysite train --trainings' averages several trainings of a study", idle={}),
    "train.clean.auto": Removed("choose a fixed cleaning, such as train.clean.largest = true", idle=False),
    "algorithm.freeze": Removed("leave it out: distances are measured in every round", idle=False),
    "algorithm.fewest": Removed("choose run.secure.use = 'on' with algorithm.together = true", idle=0),
    "assess.other_encoders": Removed("assess again with another [encoder]", idle=["bundled"]),
    "cost.watts": Removed("leave it out: energy is not estimated any more", idle=300.0),
    "cost.kwh_per_gb": Removed("leave it out: energy is not estimated any more", idle=0.01),
    "site.proxy.ca": Removed("have the proxy let the coordinator's address pass unopened"),
    "run.guard.jury": Removed("leave it out, or choose a robust rule (docs/algorithms.md#attacks)", idle=0),
}
_reported: set[str] = set()


def without_removed(given: Mapping[str, Any], where: str = "", at: str = "") -> dict[str, Any]:
    """Return parsed TOML without keys that no longer exist; the first time in this process, each is reported.

    Args:
        given: What was parsed, whose keys begin with ``at``.
        where: The file, if an earlier version wrote it or may have read it. Without it, a person asks for these values
            now, and one that changed something is refused.
        at: Dotted keys above, with a dot at the end.
    """
    kept: dict[str, Any] = {}
    for key, value in given.items():
        gone = REMOVED.get(at + key)
        if gone is None and at + key == "then" and isinstance(value, list):  # phases have the keys of a study
            kept[key] = [without_removed(phase, where) if isinstance(phase, Mapping) else phase for phase in value]
            continue
        if gone is None:
            kept[key] = without_removed(value, where, f"{at}{key}.") if isinstance(value, Mapping) else value
            continue
        if not where and value != gone.idle:
            raise ConfigError(f"{at}{key} = {shown(repr(value), 80)}: this key no longer exists; {gone.instead}")
        if at + key not in _reported:
            log.warning("%s: %s%s no longer exists and is ignored; %s", where or "the study", at, key, gone.instead)
            _reported.add(at + key)
    return kept


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML; ConfigError with one sentence about ``where`` if it is not valid or not within bounds.

    >>> parse_toml("a.b = 3", "the file")
    {'a': {'b': 3}}
    """
    if len(text) > MAX_TOML:
        raise ConfigError(f"{where} has {len(text)} characters; at most {MAX_TOML} are read: make it shorter")
    if not _is_shallow(text):
        raise ConfigError(f"{where} is nested more than {MAX_DEPTH} levels deep: write it with fewer levels")
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError, OverflowError) as problem:  # ValueError: also of a number that is too long
        raise ConfigError(f"{where} is not valid TOML: {shown(problem, 200)}") from problem
    for key, value in _leaves(found):
        if type(value) is int and value not in WHOLE:
            raise ConfigError(f"{where}: {shown(key, 80)} is a whole number that does not fit into 64 bits")
    return found


def read_toml(path: Path, what: str = "") -> dict[str, Any]:
    """Read a TOML file; ConfigError if it cannot be read or parsed. ``what`` comes before its path in the sentence."""
    where = f"{what} {path}".strip()
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{where} cannot be read: {problem}") from problem
    return parse_toml(text, where)


def parse_json(text: str | bytes | memoryview) -> Any:
    """Parse JSON; ValueError if it is not valid, and also if it is nested too deeply.

    >>> parse_json("[1, 2]")
    [1, 2]
    """
    try:
        return json.loads(bytes(text) if isinstance(text, memoryview) else text)
    except RecursionError as problem:
        raise ValueError("the JSON is nested too deeply") from problem


def _is_shallow(text: str) -> bool:
    """Whether no bracket and no dotted key of a TOML text is deeper than ``MAX_DEPTH``, in one pass over the text."""
    depth = dots = 0
    for token in TOKEN.finditer(text):
        if token.lastgroup == "comment":
            dots = 0
        if token.lastgroup != "other":
            continue
        sign = token[0]
        if sign == ".":
            dots += 1
        else:
            dots = 0
            depth += (sign in "[{") - (sign in "]}")
        if dots + max(depth, 0) > MAX_DEPTH:
            return False
    return True


def _leaves(found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every value that is no list and no table, with the key at the top under which it stands."""
    queue: list[tuple[str, Any]] = list(found.items())
    while queue:
        key, value = queue.pop()
        if isinstance(value, dict):
            queue += [(key, inside) for inside in value.values()]
        elif isinstance(value, list):
            queue += [(key, inside) for inside in value]
        else:
            yield key, value
