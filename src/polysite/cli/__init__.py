"""The command line. Heavy imports wait inside the commands, so that help answers at once."""

import sys
import warnings

from polysite.cli import training, results, deploy, audit, data  # isort: skip: the order of the help
from polysite.cli.base import app
from polysite.errors import PolysiteError

__all__ = ["app", "audit", "data", "deploy", "main", "results", "training"]


def main() -> None:
    """Run the command line: a refusal is one sentence and exit code 2."""
    warnings.filterwarnings("ignore", module=r"PIL\.")  # what it says about a damaged picture, we say with its name
    try:
        app()
    except (PolysiteError, OSError) as problem:  # the system's own refusals name the file, too
        print(f"polysite: {problem}", file=sys.stderr)
        sys.exit(2)
