"""The server's work of a round against the number of sites: seconds and peak memory, as ratios to FedAvg.

A round of the server is: send, every reply checked as it arrives, merge, and the record. Sites do not train: a reply is
the sent model plus seeded noise, made when it is asked for, and making it is not counted. Every algorithm and number
of sites runs in a process of its own, so that its peak memory is its own. Of four rounds the slower of the last two
counts: with CFL the last is the round of a split, with pFedNet one is that of the personal parts; of FedAvg the median
round of the fastest of three processes. ``fpfc, all`` fuses all parameters, not just the head; ``fedavg, guard`` has
the guard of deployments, which shortens half of the changes. Memory is what the process takes beyond the network, the
sites' noise and the libraries: at most, and (``held``) while the server waits for a reply.

    python bench/growth.py                                         4 to 400 sites (1.4 M) and 4 to 100 (22.6 M)
    python bench/growth.py --sites 4 16 --parameters 1e5           a small part
    python bench/growth.py --figure docs/results/growth.svg --table growth.csv

What would leave less than ``--leave`` GB of memory free, by the growth from the two numbers of sites before, is not
run; the line says how much it needs.

Prints the table, the exponents of processor seconds and of memory fitted over the number of sites, and the ratios of
seconds and of processor seconds to those of FedAvg with the same sites in the same run (another program on the machine
prolongs a round, but adds less to its processor time). There is a thread for each core, as in a coordinator. Targets,
in seconds: memory of FedAvg constant; pairwise methods at most 20 times FedAvg, or refused with the number of bytes.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

LARGE = {1.4e6: (4, 7, 16, 64, 128, 256, 400), 22.6e6: (4, 7, 16, 32, 64, 100)}
METHODS = ("fedavg", "fedavg, guard", "scaffold", "fedamp", "cfl", "pfednet", "fpfc", "fpfc, all")
REPEATS = {**dict.fromkeys(METHODS, 1), "fedavg": 3}  # of a process; the fastest counts
RATIOS = {"seconds": "ratio", "cpu": "cpu ratio"}  # column -> that of its ratio to FedAvg
ROUNDS, HEAD = 4, 0.01  # share of the parameters in the head
MEMORY, MACHINE = Path("/proc/self/status"), Path("/proc/meminfo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", help="numbers of sites")
    parser.add_argument("--parameters", type=float, nargs="*", default=list(LARGE), help="parameters of the network")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="on a busy machine several wait: use 1")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a measurement is given up")
    parser.add_argument("--leave", type=float, default=4.0, help="GB of memory that stay free for others")
    parser.add_argument("--table", type=Path, help="write the rows to this CSV file")
    parser.add_argument("--earlier", type=Path, nargs="+", default=(), help="CSV files with rows for the figure, too")
    parser.add_argument("--figure", type=Path, help="write a figure to this file")
    parser.add_argument("--measure", nargs=3, metavar=("METHOD", "SITES", "PARAMETERS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        method, sites, parameters = given.measure
        print(json.dumps(measure(method, int(sites), int(float(parameters)))))
        return
    rows: list[dict[str, Any]] = []
    for parameters in given.parameters:
        for sites in given.sites or LARGE.get(parameters, LARGE[1.4e6]):
            for row in compared(given, sites, parameters, rows):
                rows.append(row)
        print_exponents([r for r in rows if r["parameters"] == parameters])
    rows += [row for path in given.earlier for row in read(path)]
    if given.table:
        with given.table.open("w", newline="") as file:
            names = ("parameters", "sites", "method", *RATIOS, *RATIOS.values(), "held", "models", "bytes", "why")
            table = csv.DictWriter(file, names)
            table.writeheader()
            table.writerows(rows)
    if given.figure:
        draw(rows, given.figure)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a table that ``--table`` wrote."""
    with path.open(newline="") as file:
        rows = [{k: x for k, x in row.items() if x} for row in csv.DictReader(file)]
    return [{k: x if k in ("method", "why") else float(x) for k, x in row.items()} for row in rows]


def compared(given: Any, sites: int, parameters: float, before: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Measure FedAvg and then the others, and print a line for each."""
    reference: dict[str, Any] = {}
    for method in ("fedavg", *(m for m in given.methods if m != "fedavg")):
        row: dict[str, Any] = {"method": method, "sites": sites, "parameters": parameters}
        like = [r for r in before if r["method"] == method and r["parameters"] == parameters and "bytes" in r]
        needs, free = expected_bytes(like, sites), memory("MemAvailable", MACHINE)
        if needs > free - given.leave * 1e9:
            row["why"] = f"not run here: needs about {needs / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
        else:
            runs = [in_process(method, sites, parameters, given.limit, given.threads) for _ in range(REPEATS[method])]
            row |= min(runs, key=lambda run: run.get("seconds", 0.0))
        reference = reference or row
        if "seconds" in row:
            row |= {to: row[of] / reference.get(of, float("nan")) for of, to in RATIOS.items()}
            both = f"{row['ratio']:6.1f} x fedavg, {row['cpu ratio']:6.1f} x its cpu;"
            spent = f"{row['seconds']:8.3f} s {row['cpu']:8.3f} s cpu {both}"
            found = (
                f"{spent} {row['held']:7.1f} models held, {row['models']:.1f} or {row['bytes'] / 1e9:.2f} GB at most"
            )
        else:
            found = row["why"]
        print(f"{parameters / 1e6:5.1f} M {sites:4d} sites  {method:13s} {found}", flush=True)
        yield row


def expected_bytes(rows: list[dict[str, Any]], sites: int) -> float:
    """Return the peak memory with so many sites, on the line through the last two measurements; 0 without two."""
    if len(rows) < 2:
        return 0.0
    (few, less), (many, more) = ((r["sites"], r["bytes"]) for r in rows[-2:])
    return float(more + (more - less) / (many - few) * (sites - many))


def in_process(method: str, sites: int, parameters: float, limit: float, threads: int) -> dict[str, Any]:
    """Measure in a process of its own."""
    environment = {**os.environ, **{f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "OPENBLAS", "MKL")}}
    environment["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # memory of arrays that are gone is given back at once
    command = [sys.executable, __file__, "--measure", method, str(sites), str(parameters)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
    except subprocess.TimeoutExpired:
        return {"why": f"not finished after {limit:.0f} s"}
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 else {"why": f"failed: {done.stderr.strip()[-200:]}"}


def measure(method: str, sites: int, parameters: int) -> dict[str, Any]:
    """Return seconds and peak memory, in models, of the server's last round; or why it is refused."""
    import scipy.cluster.hierarchy
    import scipy.sparse  # noqa: F401  # loaded before anything is measured
    import torch

    from polysite.engines.guard_state import Guard
    from polysite.engines.plan import Plan
    from polysite.engines.rounds import run_rounds
    from polysite.errors import ConfigError

    torch.set_grad_enabled(False)
    start, algorithm = network(parameters), chosen(method)
    engine = Noise(algorithm, [f"{k:03d}" for k in range(sites)], max(len(x) for x in start.values()))
    model = sum(x.nbytes for x in start.values())
    plan = Plan(rounds=ROUNDS, guard=Guard(use="on" if method.endswith("guard") else "off", clip=1.0))
    marks = []
    before = memory("VmRSS")
    try:
        for r in run_rounds(algorithm, engine, start, plan, seed=0, keep_replies=False):
            marks.append(now() - engine.making)
            del r  # as in a run
    except ConfigError as refusal:
        return {"why": f"refused: {refusal}"}
    rounds = np.diff(marks, axis=0)
    seconds, cpu = np.median(rounds, 0) if method == "fedavg" else rounds[-2:].max(0)
    return {
        "seconds": seconds,
        "cpu": cpu,
        "held": (engine.held - before) / model,
        "models": (memory("VmHWM") - before) / model,
        "bytes": memory("VmHWM") - before,
    }


def now() -> Any:
    """Return seconds on the wall and of the processor."""
    return np.array([time.perf_counter(), time.process_time()])


def network(parameters: int) -> dict[str, Any]:
    """Return parameters in layers of usual sizes: a head, and blocks that grow with depth."""
    import torch

    shares = {
        "stem": 0.01,
        "encoder.0": 0.04,
        "encoder.1": 0.15,
        "encoder.2": 0.55,
        "decoder.0": 0.2,
        "decoder.1": 0.04,
    }
    draw = torch.Generator().manual_seed(0)
    sizes = {f"{k}.weight": int(parameters * x) for k, x in shares.items()} | {"head.weight": int(parameters * HEAD)}
    return {k: torch.randn(max(n, 1), generator=draw) * 0.05 for k, n in sizes.items()}


def chosen(method: str) -> Any:
    """Return the algorithm with its defaults, as far as these do not depend on the length of training."""
    from polysite.algorithms.cfl import Cfl
    from polysite.algorithms.fedamp import FedAMP
    from polysite.algorithms.fedavg import FedAvg
    from polysite.algorithms.fpfc import Fpfc
    from polysite.algorithms.pfednet import PFedNet
    from polysite.algorithms.scaffold import Scaffold

    return {
        "fedavg": FedAvg(),
        "fedavg, guard": FedAvg(),
        "scaffold": Scaffold(),
        "fedamp": FedAMP(),
        "cfl": Cfl(split_at=(ROUNDS,)),
        "pfednet": PFedNet(),
        "fpfc": Fpfc(relative=True),
        "fpfc, all": Fpfc(relative=True, fused=("*",)),
    }[method]


class Noise:
    """A transport of sites that reply what they were sent, moved towards one of four directions and by noise."""

    audience, can_cross, secret, reported = (), True, 0, dict[str, int]()

    def __init__(self, algorithm: Any, names: list[str], longest: int):
        import torch

        self.algorithm, self.names, self.making, self.held = algorithm, tuple(names), np.zeros(2), 0
        self._noise = 1e-2 * torch.randn(longest + 10_000, generator=torch.Generator().manual_seed(0))

    @property
    def sizes(self) -> Mapping[str, int]:
        return {name: 10 + k for k, name in enumerate(self.names)}

    def train(self, round: int, sent: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, payload in sent.items():
            began = now()
            self.held = max(self.held, memory("VmRSS"))
            reply = self._reply(round, int(name), payload)
            self.making += now() - began
            yield name, reply
            del reply

    def _reply(self, round: int, k: int, got: Any) -> Any:
        import torch

        from polysite.engines.phase_sites import Reply
        from polysite.payload import Payload

        def noise(seed: int, x: Any) -> Any:
            return self._noise[seed % 10_000 :][: len(x)]  # other places of the same numbers

        trained = {n: x + noise(k % 4, x) + noise(7 * (401 * round + k) + 11, x) for n, x in got["model"].items()}
        sketch = np.random.default_rng(k).normal(size=4) * 0.1 + k % 4
        fields = {
            "model": trained,
            "weight": 10 + k if self.algorithm.reply.get("weight") == "count" else 1,
            "cases": 10 + k,
            "time": 0.1,
            "control": {n: 0.1 * x for n, x in trained.items()} if "control" in self.algorithm.reply else {},
            "sketch": {"sketch": torch.as_tensor(sketch)},
        }
        payload = Payload(**{name: fields[name] for name in self.algorithm.reply})
        return Reply(payload, (), 0.0, payload.nbytes)

    repeat = train

    settle = staticmethod(lambda heard: None)
    lift = staticmethod(lambda params: params)


def memory(what: str, where: Path = MEMORY) -> int:
    """Return a line of this process's or this machine's memory in bytes (Linux)."""
    line = next(x for x in where.read_text().splitlines() if x.startswith(what))
    return int(line.split()[1]) * 1024


def print_exponents(rows: list[dict[str, Any]]) -> None:
    """Print the slopes of processor seconds and memory over the number of sites, both on logarithmic scales."""
    print("\n               exponent of seconds   of memory   largest ratio to fedavg")
    for method in dict.fromkeys(r["method"] for r in rows):
        known = [r for r in rows if r["method"] == method and "seconds" in r]
        if len(known) > 1:
            sites = np.log([r["sites"] for r in known])
            slopes = [np.polyfit(sites, np.log([max(r[k], 1e-9) for r in known]), 1)[0] for k in ("cpu", "models")]
            most = max(r["ratio"] for r in known)
            print(f"{method:13s}  {slopes[0]:19.2f} {slopes[1]:11.2f} {most:25.1f}")
    print()


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw seconds and memory over sites, a row of axes for every size of the network."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    sizes = sorted({r["parameters"] for r in rows})
    figure, axes = pyplot.subplots(len(sizes), 2, figsize=(9, 3.4 * len(sizes)), squeeze=False)
    for line, parameters in zip(axes, sizes, strict=True):
        for axis, what, title in zip(line, ("seconds", "bytes"), ("seconds", "peak memory in GB"), strict=True):
            for method in dict.fromkeys(r["method"] for r in rows):
                known = [r for r in rows if r["method"] == method and r["parameters"] == parameters and what in r]
                scale = 1e9 if what == "bytes" else 1.0
                axis.loglog([r["sites"] for r in known], [r[what] / scale for r in known], "o-", ms=3, label=method)
            axis.set(xlabel="sites", title=f"{title}, {parameters / 1e6:g} M parameters")
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"figure: {path}")


if __name__ == "__main__":
    main()
