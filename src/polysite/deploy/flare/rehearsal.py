"""A study over FLARE's own processes on this computer: its simulator, with a process for the server and for each site."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from polysite.deploy.flare.controller import FOLDER
from polysite.deploy.flare.site_folder import admit
from polysite.errors import RunError

MODULE = "nvflare.private.fed.app.simulator.simulator"


def simulate(job: Path, workspace: Path, sites: Sequence[str]) -> list[Path]:
    """Run a job in FLARE's simulator and return the run folders that it wrote; FLARE's own log is in the workspace.

    Args:
        job: The job folder.
        workspace: Folder in which FLARE works. It removes everything there but ``local`` and ``startup``.
        sites: Names of the sites; each has a process of its own.
    """
    admit(workspace)
    (workspace / "startup").mkdir(exist_ok=True)
    command = [sys.executable, "-m", MODULE, str(job), "-w", str(workspace), "-c", ",".join(sites), "-t", str(len(sites))]
    log = workspace.with_name(f"{workspace.name}.log")
    with log.open("wb") as file:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False).returncode
    found = sorted((workspace / "server" / FOLDER).glob("*/result.json"))
    if code or not found:
        raise RunError(f"FLARE's simulator ended with code {code} and no result: {log} says why")
    return [path.parent for path in found]
