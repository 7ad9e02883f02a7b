"""What the commands share: the application, their common options, and what those mean."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

# Threads that spin long while they wait for one another starve on a shared machine: beside one busy process a training
# step took 3 times as long by default and twice as long with this. Must be set before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

typer.core.HAS_RICH = False  # plain help: with rich there, typer escapes brackets even where it does not use it

app = typer.Typer(
    help="Federated learning for medical image segmentation, for hospitals whose data differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[
    Path | None,
    typer.Argument(
        metavar="STUDY",
        help="A study in TOML, a manifest (.csv, .jsonl) or a folder of images; without one, the phantom federation.",
        show_default=False,
    ),
]
Source = Annotated[
    Path, typer.Argument(metavar="DATA", help="A manifest (.csv, .jsonl), a folder of images, or a study in TOML.")
]
Override = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value, e.g. train.lr=0.2.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line instead of tables, for scripts.")]


def study_of(path: Path | None, override: list[str]) -> Any:
    """The study that a file means: TOML, or all defaults around a manifest or a folder."""
    from polysite import config as configuration

    given = overrides_of(override)
    if path is None or (path.suffix not in (".csv", ".jsonl") and not path.is_dir()):
        return configuration.load(path, given) if path else configuration.parse("", given)
    plain = {"data.name": "files", "data.path": json.dumps(str(path), ensure_ascii=False)}
    files = configuration.parse("", {**plain, **{k: v for k, v in given.items() if k.startswith("data.")}}).data
    if files.dims == 2:  # defaults that fit
        plain["train.patch"] = "[32, 32]"
    if files.task == "classification":
        plain["model.name"] = "densenet_small"
    return configuration.parse("", {**plain, **given})


def overrides_of(given: list[str]) -> dict[str, str]:
    from polysite.errors import ConfigError

    wrong = next((g for g in given if "=" not in g), None)
    if wrong is not None:
        raise ConfigError(f"--set {wrong}: write KEY=VALUE, for example --set algorithm.lr=0.2")
    return dict(g.split("=", 1) for g in given)


@contextmanager
def watching(quiet: bool, as_json: bool) -> Iterator[Any]:
    """What is shown while a study runs: nothing, JSON lines or a progress bar."""
    from polysite.engines.record import RoundRecord
    from polysite.engines.rounds import Watch

    class Lines(Watch):
        def round(self, record: RoundRecord) -> None:
            print(record.to_json(), flush=True)

    if quiet or as_json:
        yield Lines() if as_json else Watch()
        return
    from polysite.report.progress import progress

    with progress() as watch:
        yield watch
