"""A federation of NVIDIA FLARE on this computer: provisioned keys and certificates, a process for every participant.

Participants are started as their startup kits do, by ``nvflare.private.fed.app``, and may be killed: all of one, or
only its process of the job. ``submit`` is the administrator's command.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import psutil

from consortium import environment, until
from flare_jobs import workspace

ADMIN = "admin@polysite.org"
PROJECT = """\
api_version: 3
name: fed
description: a federation for tests
participants:
  - {{name: {host}, type: server, org: polysite, fed_learn_port: {port}}}
{clients}
  - {{name: {admin}, type: admin, org: polysite, role: project_admin}}
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
  - path: nvflare.lighter.impl.static_file.StaticFileBuilder
    args: {{config_folder: config}}
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""
APPS = {"server": ("server.server_train", "fed_server.json"), "client": ("client.client_train", "fed_client.json")}


class Federation:
    """A server and clients; ``inside`` is what comes before the command of a site, as ``ip netns exec``."""

    def __init__(self, folder, names, *, host="localhost", inside=lambda name: ()):
        self.folder, self.names, self.host, self._inside = folder, tuple(names), host, inside
        self.processes: dict[str, subprocess.Popen] = {}
        port = free_port()
        clients = "\n".join(f"  - {{name: {name}, type: client, org: polysite}}" for name in names)
        folder.mkdir(parents=True)
        (folder / "project.yml").write_text(PROJECT.format(host=host, port=port, clients=clients, admin=ADMIN))
        command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", "made", "--force"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        for kit in (folder / "made" / "fed" / "prod_00").iterdir():
            shutil.move(kit, folder / ("server" if kit.name == host else kit.name))
        for name in ("server", *names):
            workspace(folder / name)
        self._keep_storage_here()

    def _keep_storage_here(self):
        """FLARE would keep jobs and snapshots below /tmp/nvflare, for all federations of the computer."""
        file = self.folder / "server" / "local" / "resources.json"
        found = json.loads(file.read_text())
        found["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(self.folder / "snapshots")
        (jobs,) = (each for each in found["components"] if each["id"] == "job_manager")
        jobs["args"]["uri_root"] = str(self.folder / "jobs")
        file.write_text(json.dumps(found))

    def __enter__(self):
        try:
            for name in ("server", *self.names):
                self.start(name)
            until(lambda: self.connected() == set(self.names), 120)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in (*self.names, "server"):
            self.kill(name)

    def start(self, name):
        """Start a participant, as its startup kit does."""
        module, config = APPS["server" if name == "server" else "client"]
        before, given = ((), []) if name == "server" else (self._inside(name), [f"uid={name}"])
        command = [sys.executable, "-u", "-m", f"nvflare.private.fed.app.{module}", "-m", str(self.folder / name)]
        rest = ["-s", config, "--set", "secure_train=true", *given, "org=polysite", "config_folder=config"]
        path = os.pathsep.join(p for p in sys.path if p)
        with (self.folder / f"{name}.txt").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                [*before, *command, *rest],
                cwd=self.folder / name,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**environment(), "PYTHONPATH": path},
            )

    def tree(self, name):
        """All processes of a participant: its own, that of the job, polysite's worker."""
        with suppress(psutil.NoSuchProcess, KeyError):
            if self.processes[name].poll() is None:
                own = psutil.Process(self.processes[name].pid)
                return [own, *own.children(recursive=True)]
        return []

    def of_job(self, name):
        """The process of a participant that runs the job."""
        return self._find(name, "runner_process") or self._find(name, "worker_process")

    def worker(self, name):
        """The process of polysite's worker at a site."""
        return self._find(name, "polysite.deploy.site.process")

    def _find(self, name, word):
        for each in self.tree(name)[1:]:
            with suppress(psutil.Error):
                if any(word in part for part in each.cmdline()):
                    return each
        return None

    def kill(self, name):
        """Kill all processes of a participant."""
        found = self.tree(name)
        for each in found:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
        psutil.wait_procs(found, 10)
        if name in self.processes:
            self.processes[name].wait()

    def connected(self):
        """Names of the clients that the server knows."""
        try:
            with self.session() as session:
                return {client.name for client in session.get_system_info().client_info}
        except Exception:  # the server has not started yet, or was killed
            return set()

    @contextmanager
    def session(self):
        """The administrator's connection."""
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        with redirect_stdout(StringIO()):  # it says that it connects
            made = new_secure_session(ADMIN, str(self.folder / ADMIN), timeout=5.0, auto_login_max_tries=1)
        try:
            yield made
        finally:
            made.close()

    def submit(self, job):
        """Submit a job folder and return FLARE's number of the job."""
        with self.session() as session:
            return session.submit_job(str(job))

    def status(self, number):
        """What FLARE says of a job; "unknown" while the server is away."""
        try:
            with self.session() as session:
                return session.get_job_meta(number)["status"]
        except Exception:
            return "unknown"

    def run_of(self, job):
        """The run folder of a job."""
        server = json.loads((Path(job) / "app" / "config" / "config_fed_server.json").read_text())
        return self.folder / "server" / "polysite" / server["workflows"][0]["args"]["id"]


def free_port():
    """A port that is free, and the next one, too."""
    while True:
        with socket.socket() as one, socket.socket() as next_one:
            one.bind(("", 0))
            port = one.getsockname()[1]
            with suppress(OSError):
                next_one.bind(("", port + 1))
                return port
