"""The process behind ``workers.Worker``: it reads one JSON order per line, runs it, and replies with the exit code.
A task on a cluster (``cluster.py``) runs orders, too.

What a job prints goes to the file that its order names. After a crash the process ends: the device may be in a state
that the next job would inherit. After a refusal it goes on. When the process that gives the orders is gone, it ends at
once: the command that continues the benchmark would find the run folder in use.
"""

import gc
import json
import os
import select
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polysite import config, study
from polysite.benchmark.jobs import REFUSED
from polysite.benchmark.last_run import LastRun
from polysite.errors import Paused, PolysiteError
from polysite.evaluation import evaluate

# paths (output, study, run, and perhaps the run to continue from, after), the number of runs that this process expects
# (runs), the number of rounds after which to pause (until; None: at the end), and whether to evaluate, or only score
Order = Mapping[str, Any]


def main() -> None:
    """Run orders until standard input ends or one fails."""
    threading.Thread(target=end_with_input, daemon=True).start()
    last = LastRun()
    with os.fdopen(os.dup(1), "w") as replies:
        for line in sys.stdin:
            code = perform(json.loads(line), last)
            replies.write(f"{code}\n")
            replies.flush()
            if code not in (0, REFUSED):
                return
            release()


def end_with_input() -> None:
    """Wait until the other end of standard input is closed, and end this process."""
    watched = select.poll()
    watched.register(0, 0)  # no event but that the other end is closed
    watched.poll()
    os._exit(1)


def perform(order: Order, last: LastRun) -> int:
    """Run an order; what it prints goes to its file. Return the exit code.

    ``last`` keeps cases and network from one order to the next.
    """
    output = Path(order["output"])
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    code = _run(order, last)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _run(order: Order, last: LastRun) -> int:
    """Return the exit code that ``polysite train`` has for the same study: 2 for a refusal, 1 for a crash."""
    last.runs, until, measured = order["runs"], order["until"], order["evaluate"]
    run, before = Path(order["run"]), Path(order["after"]) if "after" in order else None
    try:
        if (run / "config.toml").exists():
            done = study.resume(run, page=False, evaluate=measured, materials=last, until=until)
            if measured and not (done.folder.path / "evaluation" / done.split).exists():
                evaluate(done.folder.path, done.split)
        else:
            after = before if before and (before / "result.json").exists() else None  # it may have failed
            chosen = config.load(Path(order["study"]))
            study.train(chosen, run, after=after, page=False, evaluate=measured, materials=last, until=until)
    except Paused:
        return 0
    except (PolysiteError, OSError) as problem:
        print(f"polysite: {problem}", file=sys.stderr)
        return REFUSED
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def release() -> None:
    """Give the memory of the last job back to the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
