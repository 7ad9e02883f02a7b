"""A study over FLARE's own processes on this computer: its simulator, with a process for the server and each site."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from polysite.deploy.flare.controller import FOLDER
from polysite.deploy.flare.site_folder import admit
from polysite.engines.run_folder import RunFolder
from polysite.errors import RunError

MODULE = "nvflare.private.fed.app.simulator.simulator"


def simulate(
    job: Path, workspace: Path, sites: Sequence[str], say: Callable[[str], None] = lambda what: None
) -> list[Path]:
    """Run a job in FLARE's simulator and return the run folders that it wrote. FLARE's log is ``WORKSPACE.log``.

    Args:
        job: The job folder.
        workspace: Folder in which FLARE works. It removes everything there but ``local`` and ``startup``.
        sites: Names of the sites; each has a process of its own.
        say: Gets a sentence about every round.
    """
    admit(workspace)
    (workspace / "startup").mkdir(exist_ok=True)
    several = ["-c", ",".join(sites), "-t", str(len(sites))]
    log, runs = workspace.with_name(f"{workspace.name}.log"), workspace / "server" / FOLDER
    with log.open("wb") as file:
        command = [sys.executable, "-m", MODULE, str(job), "-w", str(workspace), *several]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            _follow(process, runs, say)
        finally:
            process.kill()
            process.wait()
    found = sorted(runs.glob("*/result.json"))
    if not found:
        raise RunError(f"FLARE's simulator ended with code {process.returncode} and no result: {log} says why")
    return [path.parent for path in found]


def _follow(process: "subprocess.Popen[bytes]", runs: Path, say: Callable[[str], None]) -> None:
    """Report rounds until the process ends."""
    said: dict[Path, int] = {}
    while process.poll() is None:
        time.sleep(0.5)
        for path in sorted(runs.glob("*/rounds.jsonl")):
            for record in RunFolder(path.parent).records()[said.get(path, 0) :]:
                said[path] = said.get(path, 0) + 1
                say(f"{path.parent.name}: round {record.round + 1} with {', '.join(sorted(record.sites))}")
