"""A hospital's settings where NVIDIA FLARE connects it: the folder ``local/polysite`` of its FLARE client.

::

    WORKSPACE/local/polysite/site.toml     [data], device: the hospital's own; without it only drawn patients are used
    WORKSPACE/local/polysite/policy.toml   what the hospital allows; without it, polysite's careful defaults
    WORKSPACE/polysite/                    state: the ledger, memories, models; never leaves

FLARE builds only the classes that ``class_allow_list`` of ``local/resources.json`` names, at the server and at every
site; ``admit`` adds the two of polysite.

FLARE itself knows the name of the site, the address of the server, keys and certificates. So what polysite's worker
reads is written anew for every job, from these files, into the state folder.
"""

import json
from pathlib import Path
from typing import Any

import tomli_w

from polysite.deploy import templates
from polysite.deploy.flare.job import CONTROLLER, EXECUTOR
from polysite.deploy.project import SiteConfig
from polysite.deploy.site.policy import TEXT, settings
from polysite.errors import ConfigError
from polysite.foreign import parse_json
from polysite.storage import private_folder, write_file, write_private

STATE = "polysite"
OWN = {"device": str, "data": dict, "state": str, "policy": str, "worker": str}  # keys of local/polysite/site.toml


def prepare(workspace: Path, local: Path, name: str) -> SiteConfig:
    """Return the settings of a site, checked.

    Args:
        workspace: Root of the workspace of the FLARE client.
        local: Its folder of settings, ``local``.
        name: Name of the client in FLARE.
    """
    own = local / STATE
    given: dict[str, Any] = settings(own / "site.toml", OWN, "site") if (own / "site.toml").exists() else {}
    state = private_folder((own / given["state"] if "state" in given else workspace / STATE).resolve())
    policy = own / given.get("policy", "policy.toml")
    if not policy.exists() and "policy" not in given:
        policy = state / "policy.toml"
        write_private(policy, TEXT)
    placed = {"name": name, "engine": "flare", "state": str(state), "policy": str(policy.resolve())}
    placed["worker"] = given.get("worker", "")
    data = dict(given.get("data", {}))
    if isinstance(data.get("path"), str):
        data["path"] = str((own / Path(data["path"]).expanduser()).resolve())
    written = {**placed, "device": given.get("device", "auto"), **({"data": data} if data else {})}
    write_private(state / "site.toml", f"# written for every job, from {own}\n{tomli_w.dumps(written)}")
    return SiteConfig.load(state / "site.toml")


def admit(workspace: Path) -> Path:
    """Let FLARE build polysite's classes in a workspace of a server, a client or the simulator; write the hospital's
    ``site.toml`` and ``policy.toml`` where there are none. Return their folder."""
    local = workspace / "local"
    own = local / STATE
    own.mkdir(parents=True, exist_ok=True)
    file = local / "resources.json"
    found = _resources(file if file.exists() else local / "resources.json.default")
    listed = found.setdefault("class_allow_list", [])
    if not isinstance(listed, list):
        raise ConfigError(f"{file}: class_allow_list is not a list; FLARE refuses it, too: mend it first")
    listed += [name for name in (CONTROLLER, EXECUTOR) if name not in listed]
    write_file(file, lambda p: p.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8"))
    site = templates.FLARE_SITE.format(data=templates.DATA.format(name="NAME"))
    for name, text in (("site.toml", site), ("policy.toml", TEXT)):
        if not (own / name).exists():
            write_file(own / name, lambda p, text=text: p.write_text(text, encoding="utf-8"))  # type: ignore[misc]
    return own


def _resources(path: Path) -> dict[str, Any]:
    """Return FLARE's own settings of a workspace; those of a new one are empty."""
    if not path.exists():
        return {"format_version": 2}
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path} cannot be read: {problem}") from problem
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no table of settings; take that of FLARE's startup kit")
    return found
