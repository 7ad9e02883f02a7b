"""What a coordinator may ask: a few fields. One of another type is refused; one that is not known is not looked at."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from polysite.errors import PayloadError, shown

Request = Literal["hello", "begin", "assess", "train", "score", "serve"]

NUMBERS = range(-1, 1_000_000)
LISTED = 10_000  # numbers of a list, at most
LENGTHS = {"config": 1 << 20}  # characters, at most; of other texts 64
CHOICES: Mapping[str, tuple[str, ...]] = {
    "kind": get_args(Request),
    "split": ("", "validation", "test"),
    "name": ("", "best", "last"),
}
STUDY = re.compile(r"[A-Za-z0-9-]{1,64}")


@dataclass(frozen=True, slots=True)
class Question:
    kind: Request
    study: str  # by which name both sides know it
    phase: int = 0
    round: int = -1
    version: int = -1  # of what the site remembers
    keep: tuple[int, ...] = ()  # versions that may be asked for again
    before: int = 0  # the phase that another begins after
    begins: int = 0  # the round that it begins with
    split: str = ""  # which cases judge
    name: str = ""  # under which the models are kept here
    config: str = ""  # the whole study

    @classmethod
    def parse(cls, header: Mapping[str, Any]) -> "Question":
        """PayloadError says what is wrong with a header."""
        given = {f.name: header[f.name] for f in fields(cls) if f.name in header}
        for name in ("kind", "study"):
            given.setdefault(name, "")
        for name, value in given.items():
            if not _sound(name, value):
                raise PayloadError(f"{name} = {shown(repr(value), 80)} is nothing that can be asked")
        if "keep" in given:
            given["keep"] = tuple(given["keep"])
        return cls(**given)


def _sound(name: str, value: Any) -> bool:
    if name == "keep":
        return isinstance(value, list) and len(value) <= LISTED and all(type(v) is int and v in NUMBERS for v in value)
    if name in ("phase", "round", "version", "before", "begins"):
        return type(value) is int and value in NUMBERS
    if not isinstance(value, str) or len(value) > LENGTHS.get(name, 64):
        return False
    return value in CHOICES[name] if name in CHOICES else name != "study" or bool(STUDY.fullmatch(value))
