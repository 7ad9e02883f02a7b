"""Copy the records of a run to TensorBoard or MLflow. Nothing is sent over a network unless the user names a server.

TensorBoard reads RUN/tensorboard. MLflow uses a file store, RUN/mlflow/store (mlflow-skinny has no database), or the
server that MLFLOW_TRACKING_URI names; that server receives result.json, which contains the names of the cases.

A tracker first copies the rounds that rounds.jsonl holds already. So a run that was interrupted, or not tracked before,
is complete, and no round appears twice. Rounds count from one, as on the page.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from polysite.config import flat
from polysite.engines.record import RoundRecord
from polysite.engines.run_folder import RunFolder, file_name
from polysite.engines.watch import Watch
from polysite.errors import ConfigError, RunError, nearest
from polysite.foreign import parse_toml
from polysite.own_process import unblock

log = logging.getLogger("polysite")

MAX_PARAMS, MAX_METRICS = 100, 1000  # per request to MLflow
LAST = "steps"  # the last metric of a round: if it is stored, all are


def tracker(kind: str, folder: Path) -> Watch:
    """Return the observer that copies a run to ``tensorboard`` or ``mlflow``; it writes once the run begins."""
    if kind not in TRACKERS:
        raise ConfigError(f"there is no tracker called {kind!r}; {nearest(kind, TRACKERS)}")
    return TRACKERS[kind](folder)


def _forwarding(call: str) -> Callable[..., None]:
    """Return a method that makes a call to several observers."""

    def forward(self: "Many", *given: Any, **named: Any) -> None:
        for watch in self.watches:
            getattr(watch, call)(*given, **named)

    return forward


class Many(Watch):
    """An observer that forwards every call to several others."""

    def __init__(self, *watches: Watch):
        self.watches = watches

    case = _forwarding("case")
    begin = _forwarding("begin")
    end = _forwarding("end")
    site = _forwarding("site")
    doing = _forwarding("doing")
    round = _forwarding("round")


class TensorBoard(Watch):
    """An observer that writes scalars to RUN/tensorboard."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.open = _need("tensorboard", "torch.utils.tensorboard").SummaryWriter

    def begin(self, title: str, rounds: int, done: int, best: float) -> None:
        """Open the event file and write the rounds so far."""
        self.writer = self.open(str(self.folder / "tensorboard"), purge_step=0)  # replaces what was written before
        for record in RunFolder(self.folder).records():
            self.round(record)

    def round(self, record: RoundRecord) -> None:
        """Write the scalars of a round."""
        for name, value in scalars(record).items():
            self.writer.add_scalar(name, value, record.round + 1)
        self.writer.flush()

    def end(self) -> None:
        """Close the event file."""
        self.writer.close()


class MLflow(Watch):
    """An observer that sends scalars to MLflow. Rounds that a server refuses are sent with a later round."""

    def __init__(self, folder: Path):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # required by MLflow 3
        self.folder, self.entities = folder, _need("mlflow", "mlflow.entities")
        self.tracking, self.problem = import_module("mlflow.tracking"), import_module("mlflow.exceptions")
        self.waiting: list[RoundRecord] = []

    def begin(self, title: str, rounds: int, done: int, best: float) -> None:
        """Find or create the MLflow run and send the rounds that it lacks."""
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (self.folder.resolve() / "mlflow" / "store").as_uri()
        try:
            self.client = self.tracking.MlflowClient(tracking_uri=uri)
            store = sha256(uri.encode()).hexdigest()[:12]  # hashed: the address may hold a password
            self.run = self._find(store, title)
            sent = max((m.step for m in self.client.get_metric_history(self.run, LAST)), default=0)
        except self.problem.MlflowException as problem:
            raise RunError(
                f"the MLflow store of {self.folder} cannot be used: {problem}; mend it, or run without"
            ) from problem
        self.sent = sent
        for record in RunFolder(self.folder).records():
            self.round(record)

    def round(self, record: RoundRecord) -> None:
        """Send the scalars of a round and of those that are still waiting."""
        if record.round < self.sent:
            return  # repeated after a restart, with the same result
        self.waiting.append(record)
        try:
            self._send_waiting()
        except self.problem.MlflowException as problem:
            log.warning("MLflow does not take round %d: %s", record.round, problem)

    def end(self) -> None:
        """Send the configuration and the result, and end the MLflow run."""
        try:
            self._send_waiting()
            for name in ("config.toml", "result.json"):
                self.client.log_artifact(self.run, str(self.folder / name))
            self.client.set_terminated(self.run)
        except self.problem.MlflowException as problem:
            log.warning("MLflow does not take the result of %s: %s", self.folder, problem)

    def _find(self, store: str, title: str) -> str:
        """Return the id of the folder's MLflow run; create the run, with the configuration, if there is none."""
        note = self.folder / "mlflow" / f"run-{store}.txt"
        if note.exists():
            return note.read_text().strip()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "polysite")
        known = self.client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self.client.create_experiment(name)
        tags = {"polysite.folder": str(self.folder.resolve())}
        run: str = self.client.create_run(experiment, run_name=title, tags=tags).info.run_id
        given = flat(parse_toml(RunFolder(self.folder).config, str(self.folder / "config.toml")))
        texts = {_name(k): v if isinstance(v, str) else json.dumps(v) for k, v in given.items()}
        params = [self.entities.Param(k, v) for k, v in texts.items()]
        for i in range(0, len(params), MAX_PARAMS):
            self.client.log_batch(run, params=params[i : i + MAX_PARAMS])
        note.parent.mkdir(exist_ok=True)
        note.write_text(run + "\n")
        return run

    def _send_waiting(self) -> None:
        while self.waiting:
            self._send(self.waiting[0])
            self.waiting.pop(0)

    def _send(self, record: RoundRecord) -> None:
        now, step = int(time.time() * 1000), record.round + 1
        metrics = [self.entities.Metric(k, v, now, step) for k, v in scalars(record).items()]
        for i in range(0, len(metrics), MAX_METRICS):
            self.client.log_batch(self.run, metrics=metrics[i : i + MAX_METRICS])


TRACKERS: Mapping[str, type[TensorBoard] | type[MLflow]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def scalars(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a round by name: validation of every site and label, losses, bytes and steps of all sites.

    >>> from polysite.engines.record import SiteRecord, SiteValidation
    >>> trained = {"a": SiteRecord(loss=0.5, steps=3, lr_sum=0.1, seconds=1.0)}
    >>> moved = {"bytes_down": {"a": 8}, "bytes_up": {"a": 16}}
    >>> seen = {"a": SiteValidation(cases=2, loss=None, score={"WT": 0.75})}
    >>> scalars(RoundRecord(0, 0, trained, validation=seen, measure="Dice", mean_score=0.75, **moved))
    ... # doctest: +NORMALIZE_WHITESPACE
    {'mean_Dice': 0.75, 'Dice/a/WT': 0.75, 'loss/a': 0.5, 'bytes_down': 8, 'bytes_up': 16, 'steps': 3}
    """
    values: dict[str, float] = {}
    if record.mean_score is not None:
        values[f"mean_{record.measure}"] = record.mean_score
    for site, seen in record.validation.items():
        values |= {f"{record.measure}/{_name(site)}/{_name(k)}": v for k, v in seen.score.items()}
        if seen.loss is not None:
            values[f"validation_loss/{_name(site)}"] = seen.loss
    values |= {f"loss/{_name(i)}": s.loss for i, s in record.sites.items() if s.loss is not None}
    values |= {"bytes_down": sum(record.bytes_down.values()), "bytes_up": sum(record.bytes_up.values())}
    values[LAST] = sum(s.steps for s in record.sites.values())
    return values


def _name(part: str) -> str:
    """Return a name that MLflow accepts and a store can use as a file name."""
    return file_name(part).replace("%", ":")


def _need(package: str, module: str) -> Any:
    """Import a module of an optional package."""
    try:
        unblock(package)
        import_module(package)
        return import_module(module)
    except ImportError as problem:
        raise ConfigError(
            f"tracking with {package} takes a package that is not installed ({problem}); pip install 'polysite[track]'"
        ) from problem
