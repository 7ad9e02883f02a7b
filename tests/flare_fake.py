"""FLARE without its processes: a context, an engine and a workspace, and a job whose tasks are done at once."""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply
from nvflare.fuel.utils import fobs
from nvflare.private.fed.utils.fed_utils import nvflare_fobs_initialize

from polysite.deploy.flare.controller import StudyController
from polysite.deploy.flare.messages import pack, unpack


def crossed(message):
    """A message after FLARE's own serialisation."""
    nvflare_fobs_initialize()
    return fobs.loads(fobs.dumps(message))


class Context:
    """FLARE's context, as far as it is used; the one of a peer if it has a name."""

    def __init__(self, engine=None, name="server", peer=None):
        self.props, self.engine = {}, engine
        self.get_engine = lambda: engine
        self.get_identity_name = lambda: name
        self.get_peer_context = lambda: peer
        self.get_job_id = lambda: "job"
        self.get_prop = self.props.get

    def set_prop(self, key, value, private=False, sticky=False):
        self.props[key] = value


class Engine:
    """FLARE's engine at a server or a site; a workspace lies below ``root``."""

    def __init__(self, root: Path, clients=()):
        self.root, self.clients, self.handlers, self.sent = root, clients, {}, []

    def get_workspace(self):
        root = self.root
        return SimpleNamespace(
            get_root_dir=lambda: str(root),
            get_site_config_dir=lambda: str(root / "local"),
            get_app_config_dir=lambda job: str(root / job / "app" / "config"),
            get_run_dir=lambda job: str(root / job),
        )

    def get_clients(self):
        return [SimpleNamespace(name=name) for name in self.clients]

    def register_aux_message_handler(self, topic, message_handle_func):
        assert topic not in self.handlers, "FLARE refuses a second handler"
        self.handlers[topic] = message_handle_func
        for name in self.clients:  # they are there from the start
            self.say_here(name)

    @contextmanager
    def new_context(self):
        yield Context(self)

    def send_aux_request(self, targets, topic, request, timeout, fl_ctx, optional=False):
        self.sent.append((targets, topic, dict(request)))

    def say_here(self, site):
        """A site says that it is there."""
        (handler,) = self.handlers.values()
        context = Context(self, peer=Context(self, site))
        return handler(topic="polysite.here", request=make_reply(ReturnCode.OK), fl_ctx=context)


class Job(StudyController):
    """The controller of an exported job, whose tasks are done at once by these workers, unless ``stop`` ends it."""

    def __init__(self, job: Path, workers, stop=lambda header: False):
        server = json.loads((job / "app" / "config" / "config_fed_server.json").read_text())
        super().__init__(**server["workflows"][0]["args"])
        self.workers, self.stop, self.asked, self.problems = workers, stop, [], []
        self.cancel_task = lambda task: None

    def run(self, root: Path, job: Path, abort):
        """Run as FLARE would, in a workspace that has the job."""
        context = Context(Engine(root, tuple(self.workers)))
        target = root / "job" / "app" / "config"
        target.mkdir(parents=True, exist_ok=True)
        (target / "study.toml").write_text((job / "app" / "config" / "study.toml").read_text())
        self.abort, self.engine = abort, context.engine
        self.control_flow(abort, context)

    def send(self, task, fl_ctx, targets):
        """Do a task."""
        (site,) = targets
        header, body = unpack(crossed(task.data))
        if self.stop(header):
            self.abort.trigger(True)
            return
        self.asked.append((site, header["kind"]))
        answer, out = self.workers[site].answer(header, body)
        done = SimpleNamespace(task=task, result=crossed(pack(answer, out)))
        task.result_received_cb(client_task=done, fl_ctx=fl_ctx)

    def system_panic(self, reason, fl_ctx):
        self.problems.append(reason)

    def log_warning(self, fl_ctx, msg):
        self.problems.append(msg)
