"""A study as a FLARE job: a folder that FLARE's simulator, POC and production accept.

::

    JOB/meta.json                             name, sites, the fewest sites
    JOB/app/config/study.toml                 the study
    JOB/app/config/config_fed_server.json     the controller (``controller.py``) and its settings
    JOB/app/config/config_fed_client.json     the executor (``executor.py``)

There is no code in it: polysite is installed at the server and at every site.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polysite import config, study
from polysite.config import Study
from polysite.deploy.coordinator import run as coordinator
from polysite.engines.sites import Deadlines
from polysite.errors import ConfigError
from polysite.storage import draft_folder, vacant

APP, TASK = "app", "polysite"
ASK = 0.05  # seconds between two questions of a site for a task
SILENCE = 60.0  # seconds without a byte after which FLARE sends a message again
CONTROLLER = "polysite.deploy.flare.controller.StudyController"
EXECUTOR = "polysite.deploy.flare.executor.SiteExecutor"


@dataclass(frozen=True)
class Waiting(Deadlines):
    """How long the server of a job waits for sites, and what it does before training.

    Args:
        lost: Seconds for which fewer sites than the quorum may be there, before the job ends, to be submitted again.
        wait: Seconds to wait for all sites, once there is a quorum.
        assess: Assess the sites before training.
    """

    lost: float = 300.0
    wait: float = 60.0
    assess: bool = True


def export(
    chosen: Study,
    out: Path,
    *,
    sites: Sequence[str] = (),
    **settings: Any,
) -> Path:
    """Write a study as a job folder and return the folder.

    Args:
        chosen: The study.
        out: The new folder.
        sites: FLARE clients that take part; all that are connected when the job starts, if there are none.
        settings: Settings of ``Waiting``; FLARE counts a site as lost after ``grace``, too, and ends the job when fewer
            sites than ``quorum`` are left.
    """
    chosen = coordinator.guarded(chosen)
    coordinator.check(chosen)
    limits = Waiting(**settings)
    if limits.quorum < 1 or (sites and limits.quorum > len(sites)):
        raise ConfigError(
            f"a quorum of {limits.quorum} sites must be from 1 to the number of sites, {len(sites) or 'any'}"
        )
    title = re.sub("[^A-Za-z0-9-]", "-", study.title(chosen))[:48]
    identified = {"study": "study.toml", "id": f"{title}-{secrets.token_hex(4)}", "sites": list(sites)}
    server = {
        "format_version": 2,
        "server": {"heart_beat_timeout": 600, "task_request_interval": ASK},
        "dead_client_grace_period": limits.grace,
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
        "workflows": [{"id": "study", "path": CONTROLLER, "args": {**identified, **asdict(limits)}}],
    }
    client = {
        "format_version": 2,
        "executors": [{"tasks": [TASK], "executor": {"path": EXECUTOR, "args": {}}}],
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
        "get_task_timeout": SILENCE,
        "submit_task_result_timeout": SILENCE,
    }
    meta = {
        "name": title,
        "resource_spec": {},
        "min_clients": limits.quorum,
        "deploy_map": {APP: ["server", *sites] if sites else ["@ALL"]},
    }
    with draft_folder(vacant(out, "a job"), "job", private=False) as draft:
        inside = draft / APP / "config"
        inside.mkdir(parents=True)
        _json(draft / "meta.json", meta)
        _json(inside / "config_fed_server.json", server)
        _json(inside / "config_fed_client.json", client)
        (inside / "study.toml").write_text(config.dump(chosen), encoding="utf-8")
    return out


def _json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
