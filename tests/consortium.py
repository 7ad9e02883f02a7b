"""Studies over sites for tests, and real ones: a project, unpacked archives, and a process for each hospital."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from zipfile import ZipFile

import numpy as np

from polysite.config import dump, parse
from polysite.deploy import project as projects
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.coordinator.posted import Envelope
from polysite.deploy.identity import identity
from polysite.deploy.project import SiteConfig
from polysite.deploy.protocol import PROTOCOL
from polysite.deploy.site.policy import SitePolicy
from polysite.deploy.site.worker import Worker
from polysite.engines import checkpoint
from polysite.engines.sites import Deadlines

NAMES = ("a", "b", "c")
TRAINING = """
[train]
patch = [16, 16, 16]
batch = 2
patches = 1
lr = 0.1
device = "cpu"
[model]
name = "unet_small"
"""
BASE = f"""
[data]
name = "phantom"
shape = [24, 24, 24]
[data.sites]
a = {{ cases = 7 }}
b = {{ cases = 8, gamma = 1.2 }}
c = {{ cases = 7, noise = 0.2 }}
{TRAINING}filters = [2, 4, 4]
[run]
rounds = 2
validate_every = 2
checkpoint_every = 1
guard.use = "off"
[assess]
projections = 0
"""
# what an algorithm needs besides its name to train this; two phases where it goes on from a model
NEEDS = {
    "feddiv": {"model.name": '"unet_small_sub"'},
    "fedper": {"algorithm.private": '["head.*"]'},
    "lg_fedavg": {"algorithm.private": '["stem.*"]'},
    "fedrep": {"algorithm.head_epochs": "1"},
    "clustered": {"algorithm.groups": '{ one = ["a", "b"], two = ["c"] }'},
    "robust": {"algorithm.beta": "0.34"},
    "trimmed_mean": {"algorithm.beta": "0.34"},
    "krum": {"algorithm.f": "0"},
    "cfl": {"algorithm.split_at": "[1]"},
    "ifca": {"algorithm.k": "2"},
    "pfedme": {"algorithm.outer": "3"},
}
CLUSTERS = "components = 2\nrounds = 1\ndimensions = 2\nrestarts = 1\niterations = 2\n"
AFTER = {"fine_tune": "", "interpolated": "", "cfft": CLUSTERS}


def config_of(name):
    """The study of an algorithm, as TOML."""
    if name not in AFTER:
        return dump(parse(BASE, {"algorithm.name": f'"{name}"', **NEEDS.get(name, {})}))
    phase = f'algorithm.name = "{name}"\nrun.rounds = {40 if name == "cfft" else 2}\n'
    return f"{BASE}\n[[then]]\n{phase}" + "".join(f"algorithm.{line}\n" for line in AFTER[name].splitlines())


def wanted(name):
    return parse(config_of(name))


def states(folder):
    return {p.name: checkpoint.load(p).at.state for p in sorted((folder / "checkpoints").glob("*.safetensors"))}


def values(run):
    """The scores, whatever the cases are called."""
    return {site: sorted(map(str, scores.values())) for site, scores in run.result.test.items()}


def same(one, other):
    """Bit for bit, whatever it is made of."""
    if hasattr(one, "dtype"):
        return np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True)
    if hasattr(one, "items"):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return all(same(getattr(one, f), getattr(other, f)) for f in one.__dataclass_fields__)
    return one == other


def equal_states(run, other):
    """Whether all checkpoints of two runs have the same state, bit for bit; there must be one."""
    one, two = states(run.folder.path), states(other.folder.path)
    return bool(one) and same(one, two)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def consortium(folder, names, *, policy=None, host="localhost"):
    """A project and the unpacked archive of every hospital; small enough for drawn patients."""
    made = projects.init(folder / "project", names, f"{host}:{free_port()}", local=True)
    for name in names:
        with ZipFile(folder / "project" / "sites" / f"{name}.zip") as archive:
            archive.extractall(folder / name)
        change(folder / name / "policy.toml", "fewest = 5", "fewest = 1")
        for old, new in (policy or {}).get(name, {}).items():
            change(folder / name / "policy.toml", old, new)
        change(folder / name / "site.toml", 'device = "auto"', 'device = "cpu"')
    return made


def change(path, old, new):
    text = path.read_text()
    assert old in text, (path, old)
    path.write_text(text.replace(old, new))


class Hospital:
    """``polysite site run`` in a session of its own; its worker has another. ``inside``: the words before it."""

    def __init__(self, folder: Path, inside=()):
        self.folder, self.said, self.inside = folder, folder / "screen.txt", inside
        self.start()

    def start(self):
        command = [*self.inside, sys.executable, "-m", "polysite.cli", "site", "run", str(self.folder)]
        self.before = len(self.screen)
        with self.said.open("ab") as out:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            self.process = subprocess.Popen(command, **streams, start_new_session=True, env=environment())

    def kill(self, *, courier=True, worker=True):
        """Kill the courier, and the worker, whoever started it."""
        command = ["pgrep", "-f", f"polysite.deploy.site.process {self.folder}"]
        for pid in subprocess.run(command, capture_output=True, text=True).stdout.split() if worker else ():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if courier:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def ready(self):
        """Whether it has a worker, since it was last started."""
        return "worker ready" in self.screen[self.before :]

    @property
    def screen(self):
        return self.said.read_text() if self.said.exists() else ""


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@contextmanager
def open_hospitals(folder, names, inside=lambda name: ()):
    found = {name: Hospital(folder / name, inside(name)) for name in names}
    try:
        yield found
    finally:
        for hospital in found.values():
            hospital.kill()


def until(true, seconds=60.0):
    """Wait for something; fail if it does not come."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


FAST = Deadlines(quorum=3, deadline=30, grace=0.2, again=0.1, poll=0.001)


class Inside:
    """A wire without a network: sites answer at once, unless a test has them do otherwise."""

    def __init__(self, workers):
        self.workers, self.tokens, self.waiting = workers, dict.fromkeys(workers, "1"), {}
        self.sent = []  # (site, header, bytes); its length is the name of the last message

    def online(self):
        return dict(self.tokens)

    def send_all(self, messages, ttl, group):
        found = {}
        for site, (header, body) in messages.items():
            self.sent.append((site, header, len(body)))
            found[site] = str(len(self.sent))
            answer = self.answer(site, json.loads(json.dumps(dict(header))), body)
            if answer is not None:
                self.waiting[found[site]] = Envelope(found[site], *answer)
        return found

    def answer(self, site, header, body):
        got, out = self.workers[site].answer(header, body)
        return json.loads(json.dumps(got)), out

    def collect(self, ids):
        return [self.waiting.pop(i) for i in list(ids) if i in self.waiting]

    def wait(self, seconds):
        time.sleep(seconds)

    def forget(self, ids):
        for i in ids:
            self.waiting.pop(i, None)

    def incidents(self):
        return []


def site_of(tmp_path, name):
    folder = tmp_path / "sites" / name
    files = dict.fromkeys(("key", "certificate", "ca", "policy"), folder)
    return SiteConfig(folder / "site.toml", name, "localhost:1", **files, state=folder, device="cpu")


def worker(tmp_path, name, **policy):
    return Worker(site_of(tmp_path, name), SitePolicy(fewest=1, **policy))


def workers(tmp_path, names=NAMES, **policy):
    return {name: worker(tmp_path, name, **policy) for name in names}


def ask(host, kind, body=b"", study="s", **header):
    """Ask a worker as a coordinator could; return header and body of its answer."""
    asked = {"protocol": PROTOCOL, "study": study, "kind": kind, "phase": 0, "round": 0, "version": -1, **identity()}
    return host.answer(asked | header, body)


def start_of(host):
    """The parameters that a study begins with, at a worker that agreed to it."""
    return {k: v.numpy() for k, v in host.agreed.host.phases[0].site.start.items()}


def go(tmp_path, chosen, wire, name="deployed", names=NAMES, **more):
    return coordinator.run(chosen, wire, names, tmp_path / name, **{"deadlines": FAST, "assess": False, **more})


class Stop(Exception): ...


class Fragile(Inside):
    """Ends at the question that ``at`` names."""

    def __init__(self, workers, at=lambda header: False):
        super().__init__(workers)
        self.at = at

    def send_all(self, messages, ttl, group):
        if len(self.sent) > 500 or any(self.at(header) for header, _ in messages.values()):
            raise Stop
        return super().send_all(messages, ttl, group)


class Recording(Inside):
    """Keeps what left the sites, and lets some sites be silent: {site: kind or step}."""

    def __init__(self, workers, silent=None):
        super().__init__(workers)
        self.silent, self.left = silent or {}, []

    def answer(self, site, header, body):
        if site in self.silent and self.silent[site] in (header["kind"], header.get("step")):
            self.tokens.pop(site, None)
            return None
        got, out = super().answer(site, header, body)
        self.left.append((site, header, body, got, out))
        return got, out


class Impatient(Recording):
    """Ends where it would wait for sites to come back: nothing came since the last wait, or a site refused."""

    heard = 0

    def wait(self, seconds):
        new = self.left[self.heard :]
        if not new or any("refused" in got or "error" in got for *_, got, _ in new):
            raise Stop
        self.heard = len(self.left)
