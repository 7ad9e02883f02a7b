"""The application, and the options that several commands share."""

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
import typer.core
from typer import Argument, Option

# OpenMP threads that spin while they wait starve on a shared machine: beside one busy process a training step took
# 3 times as long with the default and twice as long with this value. It must be set before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

typer.core.HAS_RICH = False  # plain help: typer escapes brackets wherever rich is installed

ORDER = (
    "demo", "data", "assess", "cost", "tune", "advise", "train", "evaluate", "predict", "compare", "report",
    "serve-model", "bench", "radiomics", "audit", "algorithms", "deploy", "site",
)  # fmt: skip


class Ordered(typer.core.TyperGroup):
    """The commands in the order in which a study uses them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the help; old names, which are hidden, come last."""
        return sorted(self.commands, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


app = typer.Typer(
    cls=Ordered,
    help="Federated learning for medical image segmentation, for hospitals whose data differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[
    Path | None,
    Argument(
        metavar="STUDY",
        help="A study in TOML, a manifest (.csv, .jsonl) or a folder of images; without one, the phantom federation.",
        show_default=False,
    ),
]
Source = Annotated[
    Path, Argument(metavar="DATA", help="A manifest (.csv, .jsonl), a folder of images, or a study in TOML.")
]
Override = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override a value, e.g. train.lr=0.2.")
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print errors only.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object per line instead of tables.")]


def study_of(path: Path | None, override: list[str], said: list[str] | None = None) -> Any:
    """Return the study of a TOML file, or a study on a manifest or a folder of images.

    Settings that such a study does not state come from the images; a file that states ``train.patch``, or a preset, has
    decided.

    Args:
        path: The file or folder; None for the phantoms.
        override: KEY=VALUE pairs of ``--set``.
        said: Gets the lines of the plan.
    """
    from polysite import config as configuration

    given = overrides_of(override)
    if path is None:
        return configuration.parse("", given)
    from polysite.data.files import Files
    from polysite.foreign import read_toml

    plain = path.suffix in (".csv", ".jsonl") or path.is_dir()
    if plain:
        wanted: dict[str, Any] = {"data": {"name": "files", "path": str(path)}}
    else:
        study = configuration.load(path, given)
        wanted = read_toml(path, "the configuration")
        keys = {*configuration.flat(wanted), *given}
        if "preset" in keys or "train.patch" in keys or not isinstance(study.data, Files):
            return study
    from polysite import planning
    from polysite.errors import DataError

    try:
        study, plan = planning.planned(wanted, given)
    except DataError:
        if plain:
            raise
        return study  # its images cannot be read here; training says so
    if plan is not None and said is not None:
        said += plan.lines()
    return study


def folder_of(out: Path | None, below: str, study: Path | None) -> Path:
    """Return the folder to write, by default one that is named after the study; refuse the study itself."""
    from polysite.errors import ConfigError

    target = out or Path(below) / (study.stem if study else "phantom")
    if target == study:
        raise ConfigError(f"--out {target} is the study itself; name another folder")
    return target


def overrides_of(given: list[str], option: str = "--set", example: str = "algorithm.lr=0.2") -> dict[str, str]:
    """Return the KEY=VALUE pairs of ``--set``, or of another option, as a mapping."""
    from polysite.errors import ConfigError

    wrong = next((g for g in given if "=" not in g), None)
    if wrong is not None:
        raise ConfigError(f"{option} {wrong}: write KEY=VALUE, for example {option} {example}")
    return dict(g.split("=", 1) for g in given)


def say(*lines: str, file: TextIO | None = None, hang: int = 0) -> None:
    """Print lines. A terminal gets them broken between words, and a command that does not fit whole on the next line.

    Args:
        lines: What to print.
        file: Standard output, unless given.
        hang: Spaces before a continued line, besides those before its first.
    """
    file = file or sys.stdout
    width = shutil.get_terminal_size().columns if file.isatty() else None
    for line in "\n".join(lines).split("\n"):
        print(line if width is None else _broken(line, width, hang), file=file, flush=True)


def _broken(line: str, width: int, hang: int) -> str:
    """Return a line in a terminal of this width.

    >>> print(_broken("The manifest is new.csv. Next: polysite data check new.csv", 30, 0))
    The manifest is new.csv. Next:
      polysite data check new.csv
    """
    if len(line) <= width:
        return line
    said, _, command = line.partition(": polysite ")
    if command:
        return f"{_broken(said + ':', width, hang)}\n  polysite {command}"
    before = " " * (len(line) - len(line.lstrip()) + hang)
    return textwrap.fill(line, width, subsequent_indent=before, break_long_words=False, break_on_hyphens=False)


@contextmanager
def watching(quiet: bool, as_json: bool) -> Iterator[Any]:
    """Yield the observer of a run: silent, printing JSON lines, or with a progress bar."""
    from polysite.engines.record import RoundRecord
    from polysite.engines.watch import Watch

    class Lines(Watch):
        def round(self, record: RoundRecord) -> None:
            print(record.to_json(), flush=True)

    if quiet or as_json:
        yield Lines() if as_json else Watch()
        return
    from polysite.report.progress import progress

    with progress() as watch:
        yield watch


def keep_old_name(old: str, new: str, command: Callable[..., None]) -> None:
    """Keep the old name of a command for one release: hidden from the help, with a hint on standard error."""

    @app.command(old, hidden=True)
    @wraps(command)
    def renamed(*args: Any, **options: Any) -> None:
        say(f"'polysite {old}' is now 'polysite {new}'; the old name goes in 0.3", file=sys.stderr)
        command(*args, **options)
