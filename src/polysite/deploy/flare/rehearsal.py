"""A study over FLARE's own processes on this computer: its simulator, with a process for the server and each site."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from polysite.deploy.flare.controller import FOLDER
from polysite.deploy.flare.site_folder import admit
from polysite.errors import RunError

MODULE = "nvflare.private.fed.app.simulator.simulator"


def simulate(job: Path, workspace: Path, sites: Sequence[str]) -> list[Path]:
    """Run a job in FLARE's simulator and return the run folders that it wrote. FLARE's log is ``WORKSPACE.log``.

    Args:
        job: The job folder.
        workspace: Folder in which FLARE works. It removes everything there but ``local`` and ``startup``.
        sites: Names of the sites; each has a process of its own.
    """
    admit(workspace)
    (workspace / "startup").mkdir(exist_ok=True)
    several = ["-c", ",".join(sites), "-t", str(len(sites))]
    log, runs = workspace.with_name(f"{workspace.name}.log"), workspace / "server" / FOLDER
    with log.open("wb") as file:
        command = [sys.executable, "-m", MODULE, str(job), "-w", str(workspace), *several]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False)
    found = sorted(runs.glob("*/result.json"))
    if not found:
        raise RunError(f"FLARE's simulator ended with code {done.returncode} and no result: {log} says why")
    return [path.parent for path in found]
