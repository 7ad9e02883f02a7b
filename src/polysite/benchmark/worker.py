"""The process behind ``workers.Worker``: it reads one JSON order per line, runs it, and replies with the exit code.

What a job prints goes to the file that its order names. After a crash the process ends: the device may be in a state
that the next job would inherit. After a refusal it goes on.
"""

import gc
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polysite import config, study
from polysite.benchmark.jobs import REFUSED
from polysite.errors import PolysiteError
from polysite.evaluation import evaluate


def main() -> None:
    """Run orders until standard input ends or one fails."""
    with os.fdopen(os.dup(1), "w") as replies:
        for line in sys.stdin:
            order = json.loads(line)
            with Path(order["output"]).open("ab") as output:
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
            code = _run(order)
            sys.stdout.flush()
            sys.stderr.flush()
            replies.write(f"{code}\n")
            replies.flush()
            if code not in (0, REFUSED):
                return
            _release()


def _run(order: Mapping[str, Any]) -> int:
    """Return the exit code that ``polysite train`` has for the same study: 2 for a refusal, 1 for a crash."""
    try:
        if order["resume"]:
            done = study.resume(order["run"])
            if not (done.folder.path / "evaluation" / done.split).exists():
                evaluate(done.folder.path, done.split)
        else:
            study.train(config.load(Path(order["study"])), order["run"], after=order["after"])
    except (PolysiteError, OSError) as problem:
        print(f"polysite: {problem}", file=sys.stderr)
        return REFUSED
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _release() -> None:
    """Give the memory of the last job back to the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
