"""What runs here, so that two sides can tell whether they compute the same: versions, and the code itself."""

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polysite

# whose code decides what a number means, on either side
CODE = ("algorithms", "assess", "cluster", "data", "metrics", "models", "radiomics", "train")
FILES = ("config.py", "payload.py", "site.py", "tree.py", "engines/flower.py")


@cache
def identity() -> dict[str, str]:
    """The version of polysite, and a digest of the code that both sides must share."""
    root = Path(str(polysite.__file__)).parent
    files = [*(f for part in CODE for f in sorted((root / part).rglob("*.py"))), *(root / f for f in FILES)]
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.relative_to(root)} ".encode() + file.read_bytes())
    return {"polysite": version("polysite"), "code": found.hexdigest()[:12]}


def difference(theirs: Mapping[str, Any]) -> str | None:
    """What differs, in a sentence for both sides."""
    mine = identity()
    if all(theirs.get(k) == v for k, v in mine.items()):
        return None
    their = {k: theirs.get(k, "unknown") for k in mine}
    return (
        f"this site runs polysite {mine['polysite']} (code {mine['code']}), the coordinator {their['polysite']} "
        f"(code {their['code']}): install the same on both sides"
    )
