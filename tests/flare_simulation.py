"""A study over FLARE's own processes on this computer: its simulator, with a process for the server and each site."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from polysite.deploy.flare.controller import FOLDER
from polysite.deploy.flare.site_folder import admit

MODULE = "nvflare.private.fed.app.simulator.simulator"


def simulate(job: Path, workspace: Path, sites: Sequence[str]) -> list[Path]:
    """Run a job in FLARE's simulator, each site in a process of its own; return the run folders that it wrote.

    FLARE removes everything in the workspace but ``local`` and ``startup``; its log is ``WORKSPACE.log``.
    """
    admit(workspace)
    (workspace / "startup").mkdir(exist_ok=True)
    several = ["-c", ",".join(sites), "-t", str(len(sites))]
    log = workspace.with_name(f"{workspace.name}.log")
    with log.open("wb") as file:
        command = [sys.executable, "-m", MODULE, str(job), "-w", str(workspace), *several]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            process.wait()
        finally:
            process.kill()
            process.wait()
    found = sorted((workspace / "server" / FOLDER).glob("*/result.json"))
    assert found, f"FLARE's simulator ended with code {process.returncode} and no result: {log} says why"
    return [path.parent for path in found]
