"""Time of a round without training: 22.58 M parameters to five hospitals and back, over TLS on loopback.

polysite runs its real server side (Link, Sites, FedAvg, rounds), real ``polysite site run`` processes and
workers that answer at once, with numbers of their own. It is compared with (a) the same bytes through one bare TLS
socket per site and (b) stock Flower, its FedAvg and a ClientApp that imports torch and MONAI. The script prints
seconds, bytes, the two ratios, processor time and memory. Targets: at most 6 s, bytes within 1 % of the parameters'
own, at least 5 times as fast as stock Flower.

``--engine flare`` also runs polysite's rounds over NVIDIA FLARE (``flare_wire.py``): a provisioned federation with
mutual TLS, polysite's executor and the same workers. FLARE's server has two processes, and bytes between them cross
loopback, too.

``--secure`` has the sites reply under masks (``run.secure``), as real workers do, with the masked reply on disk before
it leaves. Masked replies have twice the bytes, and four short exchanges more.

``--accuracy`` measures the effect of compressed replies on a study, in the simulator. Bytes of other programs on
loopback are counted, too; to avoid that: unshare -rn sh -c 'ip link set lo up && .venv/bin/python bench/wire.py'
"""

import argparse
import os
import shlex
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import numpy as np

SHIFT = np.float32(1e-3)  # what the first site adds to every parameter, the second twice, and so on
PACKET = 66  # bytes of the Ethernet, IP and TCP headers of a packet
BLOCK = 1 << 20  # bytes that a bare socket is given at a time
STUDY = '[model]\nname = "unet"\n[run]\nrounds = {rounds}\ncompress = "{compress}"\nsecure.use = "{secure}"\n'
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parameters", type=float, help="of the model; those of the real one by default")
    options.add_argument("--sites", type=int, default=5)
    options.add_argument("--rounds", type=int, default=5, help="after the first, which is not counted")
    options.add_argument("--compress", choices=["none", "half", "int8"], default="none")
    options.add_argument("--secure", action="store_true", help="replies under masks")
    options.add_argument("--engine", choices=["flower", "flare"], default="flower", help="flare: also over FLARE")
    options.add_argument("--no-stock", dest="stock", action="store_false", help="leave out stock Flower")
    options.add_argument("--stock-rounds", type=int, default=2)
    options.add_argument("--stock-echo", action="store_true", help="stock ClientApps return what they got, unchanged")
    options.add_argument("--accuracy", action="store_true", help="test Dice with compressed replies, and nothing else")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of --accuracy")
    options.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the processes that this one starts
    options.add_argument("--client", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--to", type=int, nargs=3, help=argparse.SUPPRESS)  # port, bytes down, bytes up
    given, words = options.parse_known_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of torch wait for each other actively, if others compute
    if given.worker:
        work(given.worker, given.compress, given.secure, int(words[-1]))
    elif given.client:
        fetch(given.client, *given.to)
    elif given.accuracy:
        accuracy(given.seeds)
    else:
        with tempfile.TemporaryDirectory(prefix="wire") as folder:
            measure(given, Path(folder))


def measure(given: argparse.Namespace, folder: Path) -> None:
    from polysite import config, study
    from polysite.deploy import project

    names = [f"site-{k}" for k in range(1, given.sites + 1)]
    made = project.init(folder / "project", names, f"localhost:{free_port()}")
    for name in names:
        with ZipFile(made.archive(name)) as archive:
            archive.extractall(folder / name)
    secure = "on" if given.secure else "off"
    chosen = config.parse(STUDY.format(rounds=given.rounds + 1, compress=given.compress, secure=secure))
    params = sized(study.initial_params(chosen), given.parameters)
    size = sum(int(x.nbytes) for x in params.values())
    own = 2 * len(names) * size
    print(
        f"{size / 4e6:.2f} M parameters ({size / 1e6:.1f} MB) to {len(names)} sites and back, TLS on loopback, replies "
        f"compressed: {given.compress}; masked: {secure}; load {os.getloadavg()[0]:.1f} before",
        flush=True,
    )
    ours, bare = exchange(chosen, params, made, folder)
    mine, theirs = show("polysite", ours, own), show("bare sockets", bare, own)
    used = {k: statistics.median(each["cpu"][k] for each in ours) for k in ours[0]["cpu"]}
    print(f"polysite's CPU seconds a round: {', '.join(f'{k} {v:.2f}' for k, v in used.items())}")
    print(f"polysite's peak memory: {', '.join(f'{k} {v / 1e9:.2f} GB' for k, v in ours[-1]['memory'].items())}")
    plain = statistics.median(each["cpu"] for each in bare)
    print(f"bare sockets' CPU seconds a round: {plain:.2f}; ratio of all CPU seconds {sum(used.values()) / plain:.2f}")
    each = [o["seconds"] / b["seconds"] for o, b in zip(ours, bare, strict=True)]  # neighbours in time
    print(
        f"ratio polysite / bare sockets {mine / theirs:.2f} (median of the rounds: {statistics.median(each):.2f})",
        flush=True,
    )
    if given.engine == "flare":
        import flare_wire

        found = flare_wire.rounds(chosen, params, names, folder / "flare", given.rounds)
        over = show("over FLARE", found, own)
        print(f"FLARE's peak memory: all together {found[-1]['memory'] / 1e9:.2f} GB")
        print(f"ratio over FLARE / over Flower {over / mine:.2f}, over FLARE / bare sockets {over / theirs:.2f}")
    if given.stock:
        found = stock(folder, made, params, names, given.stock_rounds, given.stock_echo)
        theirs = show("stock Flower", found, own)  # whose processes speak over loopback within a site, too
        print(f"stock Flower's peak memory: all together {found[-1]['memory'] / 1e9:.2f} GB")
        print(f"ratio stock Flower / polysite {theirs / mine:.2f}")
    print(f"load {os.getloadavg()[0]:.1f} after")


def show(who: str, found: list[dict], own: int) -> float:
    seconds = [f["seconds"] for f in found]
    median = statistics.median(seconds)
    carried, packets = np.median([f["carried"] for f in found], axis=0)
    content = carried - PACKET * packets
    print(
        f"{who:13} {median:6.2f} s a round (median of {len(found)}; {min(seconds):.2f} to {max(seconds):.2f}), "
        f"{content / 1e6:.1f} MB, {100 * content / own - 100:+.2f} % to the parameters' own; "
        f"with the headers of packets {100 * carried / own - 100:+.2f} %"
    )
    return median


def sized(params: dict, wanted: float | None) -> dict:
    """The parameters of the model; or so many, in copies of it, of which the last is cut."""
    import torch

    if wanted is None:
        return dict(params)
    found, left, copy = {}, int(wanted), 0
    while left:
        for name, x in params.items():
            if left:
                found[f"copy{copy}.{name}"] = x.clone() if x.numel() <= left else torch.zeros(left)
                left -= min(left, x.numel())
        copy += 1
    return found


# ours


def exchange(chosen, params, made, folder: Path) -> tuple[list[dict], list[dict]]:
    """Rounds of ours and of bare sockets by turns, so that a slow moment of the machine meets both."""
    from polysite.deploy.coordinator import run as coordinator
    from polysite.engines.rounds import run_rounds
    from polysite.engines.sites import Deadlines
    from polysite.engines.watch import Watch

    names, start = list(made.sites), {k: x.clone() for k, x in list(params.items())[:1]}
    ours, bare = [], []
    with ExitStack() as stack:
        link = stack.enter_context(coordinator.listening(made))
        for name in names:
            stand_in(folder / name / "site.toml", folder / name, chosen)
        courier = [sys.executable, "-m", "polysite.cli", "site", "run"]
        couriers = stack.enter_context(running([[*courier, folder / n] for n in names], folder / "couriers.log"))
        hospitals = coordinator._roster(link, "wire", chosen, "", names, Deadlines(quorum=len(names)), Watch())
        until(lambda: len(link.online()) == len(names), 120, folder)
        hospitals.gather(60)
        (phase,) = coordinator._phases(chosen, hospitals)
        workers = [SimpleNamespace(pid=descendants(each.pid)[-1]) for each in couriers]
        Path("/proc/self/clear_refs").write_text("5")  # forget the highest mark of the memory so far
        meter = Meter(workers, couriers)
        for r in run_rounds(phase.algorithm, phase.transport, params, chosen.run, seed=0):
            ours.append(meter.read())
            check(r, start, names)
            if not bare:
                sizes = r.sent[names[0]].nbytes, r.replies[names[0]].nbytes
                sockets, clients = stack.enter_context(bare_sockets(made, folder, *sizes))
            bare.append(one_round(sockets, clients, *sizes))
            del r  # or its replies would be there while the next ones come
            meter = Meter(workers, couriers)
    return ours[1:], bare[1:]


def check(r, start: dict, names: list[str]) -> None:
    """All replies are in the mean, or the seconds mean nothing."""
    if r.refused or sorted(r.replies) != names:
        raise SystemExit(f"round {r.index}: answers of {sorted(r.replies)}, refused {dict(r.refused)}")
    (name, before), moved = next(iter(start.items())), float(SHIFT) * (r.index + 1) * (len(names) + 1) / 2
    apart = float((r.state.model[name] - before - moved).abs().max())
    if not apart < 0.01 * moved:
        raise SystemExit(f"the mean of round {r.index} is wrong by {apart:.2e} after moving {moved:.2e}")


class Meter:
    """What a round took: seconds, bytes on loopback, processor time; and the peak of the memory since the start."""

    def __init__(self, workers: list, couriers: list):
        self.others = {"couriers": couriers, "workers": workers}
        self.began, self.carried, self.cpu = time.perf_counter(), loopback(), self._cpu()

    def read(self) -> dict:
        seconds, carried, now = time.perf_counter() - self.began, loopback() - self.carried, self._cpu()
        others = {k: [status(p.pid, "VmHWM") for p in each] for k, each in self.others.items()}
        peaks = {"server": [status(os.getpid(), "VmHWM")], **others}
        memory = {f"{k}, each" if len(v) > 1 else k: max(v) for k, v in peaks.items()}
        return {
            "seconds": seconds,
            "carried": carried,
            "cpu": {k: v - self.cpu[k] for k, v in now.items()},
            "memory": {**memory, "all together": sum(map(sum, peaks.values()))},
        }

    def _cpu(self) -> dict[str, float]:
        loop = time.thread_time()
        server = {"server's rounds": loop, "server's port": time.process_time() - loop}
        return {**server, **{k: sum(cpu(p.pid) for p in v) for k, v in self.others.items()}}


def stand_in(file: Path, folder: Path, chosen) -> None:
    """Have a hospital start this file instead of its worker, whose command becomes words behind it."""
    masked = ["--secure"] if chosen.run.secure.on else []
    words = [sys.executable, __file__, "--worker", folder, "--compress", chosen.run.compress, *masked, "--"]
    file.parent.mkdir(parents=True, exist_ok=True)
    text = file.read_text() if file.exists() else ""
    file.write_text(f'worker = "{shlex.join(map(str, words))}"\n{text}')


def work(folder: Path, compress: str, secure: bool, handle: int) -> None:
    """In the place of a hospital's worker: decodes, moves every parameter by a number of its own, encodes."""
    from polysite.algorithms.fedavg import FedAvg
    from polysite.deploy.project import SiteConfig
    from polysite.deploy.site import ipc
    from polysite.engines.plan import Plan
    from polysite.engines.secure.member import Mask, open_session, take_step
    from polysite.payload import Payload, decode, encode
    from polysite.storage import write_private

    session = None
    site = SiteConfig.load(folder)
    shift = SHIFT * int(site.name.rpartition("-")[2])
    courier = socket.socket(fileno=handle)
    print("ready", flush=True)
    moved: dict = {}
    kept: dict = {}
    while (frame := ipc.receive(courier)) is not None:
        header, body = frame[0]["request"], frame[1]
        if header["kind"] == "hello":
            ipc.send(courier, {"train": 1, "validation": 0, "test": 0, "seconds": 0.0, "left": "{}"})
        elif header["kind"] == "mask":
            got, step = decode(body), header["step"]
            session, answer = open_session(got, site.name, 3) if step == "keys" else take_step(step, got, session)
            ipc.send(courier, {"seconds": 0.0, "left": "{}"}, encode(answer))
        else:
            began = time.perf_counter()
            got = decode(body)
            moved = moved or {k: np.empty_like(x) for k, x in got["model"].items()}
            reply = Payload(model={k: np.add(x, shift, out=moved[k]) for k, x in got["model"].items()}, weight=1)
            for step in (*Plan(compress=compress).outgoing, *([Mask(session, 32)] if secure else [])):  # type: ignore[arg-type]
                reply = step.apply(FedAvg().reply, got, reply)
            out = encode(reply)
            if secure:
                write_private(folder / "reply", bytes(out))
            kept["last"] = body, out  # as the real one does
            ipc.send(courier, {"seconds": time.perf_counter() - began, "left": "{}"}, out)
            del frame, body, got, reply, out
    if "torch" in sys.modules:
        raise SystemExit("the worker of this benchmark imported torch: its memory means nothing")


# bare sockets


@contextmanager
def bare_sockets(made, folder: Path, down: int, up: int):
    """A connection to a process for each site, with the certificates that we use."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=made.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(made.certificate, made.key)
    with socket.create_server(("127.0.0.1", 0)) as door:
        to = ["--to", door.getsockname()[1], down, up]
        with started([["--client", folder / name, *to] for name in made.sites]) as clients:
            found = [context.wrap_socket(door.accept()[0], server_side=True) for _ in made.sites]
            yield found, clients
            for each in found:
                each.close()


def one_round(sockets: list, clients: list, down: int, up: int) -> dict:
    def used() -> float:
        return time.process_time() + sum(cpu(p.pid) for p in clients)

    def serve(each: ssl.SSLSocket) -> None:
        send(each, down)
        receive(each, up)

    threads = [threading.Thread(target=serve, args=(each,)) for each in sockets]
    before, began, carried = used(), time.perf_counter(), loopback()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"seconds": time.perf_counter() - began, "carried": loopback() - carried, "cpu": used() - before}


def fetch(folder: Path, port: int, down: int, up: int) -> None:
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    context.load_cert_chain(folder / "site.crt", folder / "site.key")
    print("ready", flush=True)
    with context.wrap_socket(socket.create_connection(("localhost", port)), server_hostname="localhost") as line:
        while receive(line, down):
            send(line, up)


def send(to: ssl.SSLSocket, size: int) -> None:
    block = memoryview(os.urandom(min(size, BLOCK)))
    for at in range(0, size, BLOCK):
        to.sendall(block[: size - at])


def receive(of: ssl.SSLSocket, size: int) -> bool:
    """So many bytes, looked at by nobody; false if the other side has gone."""
    block = memoryview(bytearray(BLOCK))
    while size:
        got = of.recv_into(block[:size])
        if not got:
            return False
        size -= got
    return True


# stock Flower

PROJECT = """
[project]
name = "wire"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "polysite"
[tool.flwr.app.components]
serverapp = "wire.server_app:app"
clientapp = "wire.client_app:app"
[tool.flwr.app.config]
"""
CONNECTION = """
[superlink]
default = "here"
[superlink.here]
address = "localhost:{port}"
root-certificates = "{ca}"
"""
SERVER_APP = '''
import time
from pathlib import Path

from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.numpy import load_file

SITES, ROUNDS, FOLDER = {sites}, {rounds}, Path("{folder}")
app = ServerApp()


def stamp(round, arrays):
    """Called before the first round and after each."""
    with (FOLDER / "stamps").open("a") as file:
        file.write(f"{{time.time()}}\\n")


@app.main()
def main(grid, context):
    start = ArrayRecord({{k: Array(x) for k, x in load_file(FOLDER / "start.safetensors").items()}})
    while len(list(grid.get_node_ids())) < SITES:
        time.sleep(0.2)
    FedAvg(fraction_evaluate=0.0, min_train_nodes=SITES, min_available_nodes=SITES).start(
        grid, start, num_rounds=ROUNDS, evaluate_fn=stamp
    )
'''
CLIENT_APP = """
import monai
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    shift, arrays = context.node_config["shift"], message.content["arrays"]
    if shift:
        arrays = ArrayRecord({k: Array(x.numpy() + x.numpy().dtype.type(shift)) for k, x in arrays.items()})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)
"""


def stock(folder: Path, made, params, names: list[str], rounds: int, echo: bool) -> list[dict]:
    """The same with what Flower's own commands start."""
    from safetensors.numpy import save_file

    from polysite.payload import plain

    home, port = folder / "stock", free_port()
    (home / "app" / "wire").mkdir(parents=True)
    (home / "home").mkdir()
    save_file({k: plain(x) for k, x in params.items()}, home / "start.safetensors")
    (home / "app" / "pyproject.toml").write_text(PROJECT)
    (home / "app" / "wire" / "__init__.py").touch()
    (home / "app" / "wire" / "client_app.py").write_text(CLIENT_APP)
    (home / "app" / "wire" / "server_app.py").write_text(
        SERVER_APP.format(sites=len(names), rounds=rounds, folder=home)
    )
    (home / "home" / "config.toml").write_text(CONNECTION.format(port=port, ca=made.ca))
    commands = Path(sys.executable).parent
    there = {"FLWR_HOME": str(home / "home"), "PATH": f"{commands}:{os.environ['PATH']}"}
    tls = ["--ssl-certfile", made.certificate, "--ssl-keyfile", made.key, "--ssl-ca-certfile", made.ca]
    superlink = [commands / "flower-superlink", "--host", "127.0.0.1", "--port", port, *tls]
    superlink.append("--disable-runtime-dependency-installation")
    reach = ["--superlink", f"localhost:{port}", "--root-certificates", made.ca]
    supernodes = [
        [
            commands / "flower-supernode",
            *reach,
            "--port",
            free_port(),
            "--node-config",
            f"shift={0 if echo else k / 1000}",
        ]
        for k, _ in enumerate(names, 1)
    ]
    with running([superlink], home / "superlink.log", there), running(supernodes, home / "supernodes.log", there):
        until(lambda: reachable(port), 60, home)
        command = [commands / "flwr", "run", home / "app"]
        with (home / "run.log").open("ab") as log:
            code = subprocess.run(command, env=environment(there), stdout=log, stderr=log).returncode
        if code:
            raise SystemExit(f"flwr run ended with {code}\n{said(home)}")
        return stamped(home, rounds)


def stamped(home: Path, rounds: int, log: str = "*.log") -> list[dict]:
    """Look at the clock of the server app, at loopback and at the memory until all rounds are done."""
    stamps, carried, memory = home / "stamps", [], 0

    def done() -> bool:
        nonlocal memory
        memory = max(memory, sum(status(pid, "VmRSS") for pid in descendants(os.getpid())))
        count = len(stamps.read_text().splitlines()) if stamps.exists() else 0
        carried.extend([loopback()] * (count - len(carried)))
        return count > rounds

    until(done, 300 + 180 * rounds, home, log)
    times = list(map(float, stamps.read_text().splitlines()))
    return [
        {"seconds": times[k + 1] - times[k], "carried": carried[k + 1] - carried[k], "memory": memory}
        for k in range(rounds)
    ]


# processes


@contextmanager
def started(arguments: list[list]):
    """This file in processes of its own, each of which has said that it is ready."""
    commands = [[sys.executable, __file__, *each] for each in arguments]
    with running(commands, subprocess.PIPE) as found:
        for process in found:
            if process.stdout.readline().strip() != b"ready":
                raise SystemExit(f"a process did not start: {process.args}")
        yield found


@contextmanager
def running(commands: list[list], out, more: dict[str, str] | None = None):
    """Processes, ended with all that they started."""
    with ExitStack() as stack:
        into = stack.enter_context(out.open("ab")) if isinstance(out, Path) else out
        errors = subprocess.STDOUT if isinstance(out, Path) else None
        found = [
            subprocess.Popen(
                list(map(str, c)), stdin=subprocess.DEVNULL, stdout=into, stderr=errors, env=environment(more)
            )
            for c in commands
        ]
        try:
            yield found
        finally:
            below = [pid for p in found for pid in descendants(p.pid)]
            for process in found:
                process.kill()
                process.wait()
            for pid in below:
                if status(pid, "VmRSS"):
                    os.kill(pid, signal.SIGKILL)


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, **QUIET, **(more or {})}


def until(true, seconds: float, logs: Path, names: str = "*.log") -> None:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise SystemExit(f"what was waited for did not come in {seconds:.0f} s\n{said(logs, names)}")
        time.sleep(0.1)


def said(folder: Path, names: str = "*.log") -> str:
    return "\n".join(f"{p.name}:\n{p.read_text(errors='replace')[-3000:]}" for p in sorted(folder.glob(names)))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def reachable(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def loopback() -> np.ndarray:
    """Bytes and packets that have crossed loopback so far."""
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("lo:"))
    return np.array(line.partition(":")[2].split()[:2], dtype=np.int64)


def cpu(pid: int) -> float:
    """Processor seconds of a process so far, by /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status(pid: int, what: str) -> int:
    """Bytes of a process that /proc tells; 0 if it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith(what)), 0)


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    parents = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(each.parent.name)] = int(each.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


# what compression does to a model


COLUMNS = ("none", "half", "int8", "chance")


def accuracy(seeds: list[int]) -> None:
    """The demonstration's four hospitals with FedAvg: mean test Dice, and bytes from all sites in a round.

    ``chance`` is a learning rate that is a millionth higher: how far apart two runs end because of nothing.
    """
    print("seed  " + "".join(f"{c:>9}" for c in COLUMNS) + "".join(f"{c + ' − none':>16}" for c in COLUMNS[1:]))
    dice, carried = [], {}
    for seed in seeds:
        found = {column: trained(column, seed) for column in COLUMNS}
        dice.append({column: mean for column, (mean, _) in found.items()})
        carried = {column: count for column, (_, count) in found.items()}
        line(str(seed), dice[-1])
    line("mean", {c: statistics.fmean(row[c] for row in dice) for c in COLUMNS})
    for how in ("half", "int8"):
        error, part = max(rounding(how, seed) for seed in seeds), carried[how] / carried["none"]
        print(f"{how}: {carried[how]} bytes up in a round, {part:.3f} of all; changes are off by {100 * error:.2g} %")


def federation(seed: int):
    from polysite import demo
    from polysite.config import parse

    return demo.studies(parse(demo.STUDY, {"seed": str(seed)}))["fedavg"]


def trained(column: str, seed: int) -> tuple[float, int]:
    """Mean test Dice, and the bytes that left the sites in the last round."""
    from polysite import study

    base = federation(seed)
    if column == "chance":
        chosen = replace(base, algorithm=replace(base.algorithm, lr=base.algorithm.lr * 1.000001))
    else:
        chosen = replace(base, run=replace(base.run, compress=column))
    with tempfile.TemporaryDirectory() as root:
        done = study.train(chosen, Path(root) / column, page=False)
        return done.mean, sum(done.folder.records()[-1].bytes_up.values())


def line(what: str, row: dict[str, float]) -> None:
    differences = "".join(f"{row[c] - row['none']:>+16.4f}" for c in list(row)[1:])
    print(f"{what:6}" + "".join(f"{value:>9.4f}" for value in row.values()) + differences, flush=True)


def rounding(how: str, seed: int) -> float:
    """By which part of its length a site's change of the model is off, in the first round, at the worst site."""
    from polysite import study, tree
    from polysite.engines.compress import Compress
    from polysite.engines.rounds import run_rounds

    chosen = federation(seed)
    engine, reply, errors = study.simulator(chosen), chosen.algorithm.reply, []
    r = next(run_rounds(chosen.algorithm, engine, study.initial_params(chosen), chosen.run, chosen.seed))
    for site, sent in r.sent.items():
        exact = r.replies[site].payload
        step = Compress(how)
        back = step.restore(reply, sent, step.apply(reply, sent, exact)).each(engine.lift)
        off, change = (tree.sub(exact["model"], other["model"]) for other in (back, sent))
        errors.append(tree.norm(off) / tree.norm(change))
    return max(errors)


if __name__ == "__main__":
    main()
