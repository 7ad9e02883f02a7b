"""The start of a process that runs polysite alone: the command line, a worker of a benchmark, a hospital's worker.

``python -m polysite.own_process MODULE ...`` starts a worker: it calls ``main(...)`` of the module.
"""

import sys
import warnings
from importlib import import_module


def begin() -> None:
    """Ignore warnings that polysite reports itself, and keep MONAI from importing MLflow: a fifth of the start."""
    warnings.filterwarnings("ignore", module=r"PIL\.")  # polysite reports a damaged picture itself, with its file
    if "mlflow" not in sys.modules:
        sys.modules["mlflow"] = None  # type: ignore[assignment]  # importing it raises an ImportError


def worker_command(module: str, *words: str) -> list[str]:
    """Return the command line of a worker process, whose module has a function ``main``."""
    return [sys.executable, "-m", "polysite.own_process", module, *words]


if __name__ == "__main__":
    begin()
    import_module(sys.argv[1]).main(*sys.argv[2:])
