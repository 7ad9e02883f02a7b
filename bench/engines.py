"""The same FedAvg job in three engines: polysite's simulator, its Ray engine, and Flower's simulation engine.

Eight hospitals train the small U-Net on CPUs; every engine runs the same local training (``TorchSite.fit``), each in a
process of its own. The simulator trains one site after the other, with all cores (``--threads``); the two others have
two workers with one thread each. Prints the median seconds of a round, without the first one, and the peak memory of
all processes (their proportional shares, so that shared pages count once), as ratios to the simulator. Flower pins
another Ray, which is installed into .cache/; where that fails, Flower is said to be absent.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import requires
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "bench-engines"
WORKERS = 2
STUDY = """
[data]
shape = [32, 32, 32]
[split]
test = 0.0
[train]
batch = 2
steps = 2
lr = 0.01
device = "cpu"
[run]
validate_every = 1000
checkpoint_every = 1000
"""


def chosen(rounds, sites):
    from polysite import config

    hospitals = "".join(f"[data.sites.s{k}]\ncases = 4\n" for k in range(sites))
    return config.parse(STUDY + hospitals, {"run.rounds": str(rounds)})


def polysite(engine, rounds, sites):
    """The moments at which rounds ended."""
    from polysite import study
    from polysite.engines.watch import Watch

    class Clock(Watch):
        def __init__(self):
            self.ends = []

        def round(self, record):
            self.ends.append(time.perf_counter())

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        where = study.Engine(engine, workers=WORKERS if engine == "ray" else 0)
        study.train(chosen(rounds, sites), Path(folder) / "run", clock, evaluate=False, engine=where, page=False)
    return clock.ends[:-1]  # the last one also validates


def flower(rounds, sites):
    """The same rounds in Flower's simulation engine, with its own FedAvg."""
    from flwr.client import ClientApp, NumPyClient
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    from polysite import study

    start = study.initial_params(chosen(rounds, sites))
    ends = []

    class Timed(FedAvg):
        def aggregate_fit(self, *given):
            merged = super().aggregate_fit(*given)
            if len(given[1]) < sites:
                raise SystemExit(f"{sites - len(given[1])} clients of Flower failed")
            ends.append(time.perf_counter())
            return merged

    class Client(NumPyClient):
        def __init__(self, index):
            self.index = index

        def fit(self, parameters, settings):
            site = loaded(rounds, sites, self.index).at(int(settings["round"]))
            params = site.lift(dict(zip(start, parameters, strict=True)))
            model = site.fit(params).params
            return [model[k].numpy() for k in start], site.size, {}

    def server(context):
        strategy = Timed(
            fraction_evaluate=0.0,
            min_fit_clients=sites,
            min_available_clients=sites,
            initial_parameters=ndarrays_to_parameters([v.numpy() for v in start.values()]),
            on_fit_config_fn=lambda index: {"round": index - 1},
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds))

    run_simulation(
        server_app=ServerApp(server_fn=server),
        client_app=ClientApp(client_fn=lambda context: Client(context.node_config["partition-id"]).to_client()),
        num_supernodes=sites,
        backend_config={
            "client_resources": {"num_cpus": 1},
            "init_args": {"address": "local", "num_cpus": WORKERS, "include_dashboard": False},
        },
    )
    return ends[:-1]


def loaded(rounds, sites, index, held={}):  # noqa: B006  # one network and the sites so far, as long as the process lives
    """A site in a worker of Flower, which any site may visit: its cases are loaded on its first visit."""
    import torch

    from polysite import study
    from polysite.training.network import Network

    torch.set_num_threads(1)
    if not held:
        held["study"] = chosen(rounds, sites)
        held["dealt"] = study.deal_cases(held["study"])
        held["network"] = Network(study.build_module(held["study"]), held["study"].train)
    name = sorted(held["dealt"])[index]
    if name not in held:
        held |= study.build_sites(held["study"], {name: held["dealt"][name]}, network=held["network"])
    return held[name]


def memory(root):
    """Proportional share of memory of a process and all that it started, in bytes."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    tree, new = {root}, {root}
    while new := {pid for pid, parent in parents.items() if parent in new} - tree:
        tree |= new
    total = 0
    for pid in tree:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def measured(engine, given, environment):
    """Median seconds of a round and peak memory of an engine, in a process of its own."""
    words = [sys.executable, __file__, "--only", engine, "--rounds", str(given.rounds), "--sites", str(given.sites)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, stdout=out, stderr=errors, env={**os.environ, **environment})
        peak, done = [0], threading.Event()

        def watch():
            while not done.wait(0.3):
                peak[0] = max(peak[0], memory(process.pid))

        watching = threading.Thread(target=watch)
        watching.start()
        process.wait()
        done.set()
        watching.join()
        out.seek(0), errors.seek(0)
        if process.returncode:
            raise RuntimeError("\n".join(errors.read().splitlines()[-3:]))
        ends = json.loads(out.read().splitlines()[-1])
        if len(ends) < 2:
            errors.seek(0)
            raise RuntimeError("no round has ended\n" + "\n".join(errors.read().splitlines()[-3:]))
    return statistics.median(b - a for a, b in pairwise(ends)), peak[0]


def ray_of_flower():
    """The folder with the version of Ray that Flower's simulation takes."""
    pin = next(r.split(";")[0].strip() for r in requires("flwr") or () if r.startswith("ray=="))
    folder = CACHE / pin
    if not folder.exists():
        words = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), pin]
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return folder


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--sites", type=int, default=8)
    options.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the simulator")
    options.add_argument("--only", choices=("simulator", "ray", "flower"), help="one engine, in this process")
    given = options.parse_args()
    if given.only:
        ends = (flower if given.only == "flower" else lambda *a: polysite(given.only, *a))(given.rounds, given.sites)
        print(json.dumps(ends))
        return
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "FLWR_TELEMETRY_ENABLED": "0"}
    one = {**quiet, "OMP_NUM_THREADS": "1"}
    base = show("simulator", measured("simulator", given, {**quiet, "OMP_NUM_THREADS": str(given.threads)}))
    show("ray", measured("ray", given, one), base)
    try:
        path = os.pathsep.join([str(ray_of_flower()), os.environ.get("PYTHONPATH", "")])
        show("flower", measured("flower", given, {**one, "PYTHONPATH": path, "FLWR_DISABLE_UPDATE_CHECK": "1"}), base)
    except (subprocess.CalledProcessError, RuntimeError) as problem:
        print(f"Flower's simulation engine is absent: {problem}")


def show(engine, figures, base=None):
    """Print the figures of an engine and their ratios to those of the simulator."""
    (seconds, peak), (first, most) = figures, base or figures
    print(
        f"{engine:10} {seconds:7.2f} s a round, ratio {seconds / first:.2f}; peak memory {peak / 1e9:.2f} GB, "
        f"ratio {peak / most:.2f}",
        flush=True,
    )
    return figures


if __name__ == "__main__":
    main()
