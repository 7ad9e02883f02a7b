"""The server's half of a FLARE job: a controller that runs a study over the sites of the job, or goes on with it.

The run folder lies below the server's workspace, in ``polysite/STUDY``, and not in the folder of the job, which FLARE
removes. A job that is submitted again, after the server or too many sites were lost, finds it there and goes on after
its last round. A finished run is copied into the folder of the job, without checkpoints, so that ``nvflare job
download`` brings it.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polysite import config
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.flare.job import Waiting
from polysite.deploy.flare.messages import TASK
from polysite.deploy.flare.wire import FlareWire, Stopped
from polysite.engines.run_folder import file_name
from polysite.errors import PolysiteError
from polysite.report import publish
from polysite.storage import draft_folder
from polysite.study import Run

from nvflare.apis.client import Client  # isort: skip  # after the hint of messages.py
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

FOLDER = "polysite"  # below the workspace of the server, and of a site
CHECK = 0.05  # seconds between two looks of FLARE at its tasks


class StudyController(Controller):  # type: ignore[misc]  # nvflare has no types
    """Runs a study over the sites of a job.

    Args:
        study: File of the study in the folder ``config`` of the job.
        id: Name by which the sites know the study; a job with the same name goes on with the same run.
        sites: Names of the sites; those of the job if there are none.
        settings: Settings of ``Waiting``.
    """

    def __init__(self, study: str, id: str, sites: Sequence[str] = (), **settings: Any):
        super().__init__(task_check_period=CHECK)
        self.study, self.id, self.sites, self.limits = study, id, tuple(sites), Waiting(**settings)

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing: all work is done in ``control_flow``."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the study, or go on with it; an error ends the job with its sentence."""
        workspace, job = fl_ctx.get_engine().get_workspace(), fl_ctx.get_job_id()
        try:
            done = self._run(
                FlareWire(self, fl_ctx, abort_signal, self.limits.quorum, self.limits.lost),
                Path(workspace.get_root_dir()) / FOLDER / file_name(self.id),
                Path(workspace.get_app_config_dir(job)) / self.study,
                self.sites or sorted(client.name for client in fl_ctx.get_engine().get_clients()),
            )
            publish.run_page(done.folder.path)
            _copy(done.folder.path, Path(workspace.get_run_dir(job)) / FOLDER / file_name(self.id))
        except Stopped as problem:
            self.log_warning(fl_ctx, str(problem))
        except PolysiteError as problem:
            self.system_panic(str(problem), fl_ctx)

    def _run(self, wire: FlareWire, path: Path, study: Path, names: Sequence[str]) -> Run:
        if path.exists():
            return coordinator.resume(path, wire, deadlines=self.limits, wait=self.limits.wait)
        limits = self.limits
        chosen = config.parse(study.read_text(encoding="utf-8"), where=str(study))
        path.parent.mkdir(parents=True, exist_ok=True)
        return coordinator.run(
            chosen, wire, names, path, deadlines=limits, assess=limits.assess, wait=limits.wait, id=self.id
        )

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Drop a result that came after its deadline."""
        self.log_info(fl_ctx, f"a late result of {client.name} for {TASK} was dropped")


def _copy(run: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    with draft_folder(to, "run") as draft:
        shutil.copytree(run, draft, ignore=shutil.ignore_patterns("checkpoints", "*.lock", ".lock"), dirs_exist_ok=True)
