"""The command line. Heavy imports wait inside the commands, so that ``polysite --help`` answers at once."""

import sys

from polysite import own_process
from polysite.cli import advise, audit, bench, data, deploy, predict, results, training, tune
from polysite.cli.base import app, say
from polysite.errors import PolysiteError

__all__ = [
    "advise", "app", "audit", "bench", "data", "deploy", "main", "predict", "results", "training", "tune",
]  # fmt: skip


def main() -> None:
    """Run the command line. An error that the user can correct is printed as one sentence, with exit code 2."""
    own_process.begin()
    try:
        app()
    except (PolysiteError, OSError) as problem:  # an OSError names its file, too
        say(f"polysite: {problem}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as problem:
        if problem.name != "fcntl":
            raise
        say("polysite: this command needs Linux: Python has no module 'fcntl' here", file=sys.stderr)
        sys.exit(2)
