"""Identity of the running code, so that two sides can tell whether they compute the same: a digest of its sources."""

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polysite


@cache
def identity() -> dict[str, str]:
    """Return the version of polysite and the digest of the code that both sides must share."""
    root, digest = Path(str(polysite.__file__)).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0{path.read_text(encoding='utf-8')}\0".encode())
    return {"polysite": version("polysite"), "code": digest.hexdigest()[:12]}


def difference(other: Mapping[str, Any]) -> str | None:
    """Return a sentence about different code, or None if the coordinator has the same."""
    own = identity()
    if other.get("code") == own["code"]:
        return None
    given = {k: other.get(k, "unknown") for k in own}
    return (
        f"this site runs polysite {own['polysite']} (code {own['code']}), the coordinator {given['polysite']} "
        f"(code {given['code']}): install the same on both sides"
    )
