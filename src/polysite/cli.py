"""The command line. Heavy imports wait inside the commands, so that help answers at once."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from polysite.errors import PolysiteError

# Threads that spin long while they wait for one another starve on a shared machine: beside one busy process a training
# step took 3 times as long by default and twice as long with this. Must be set before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

app = typer.Typer(
    help="Federated learning for medical image segmentation, for hospitals whose data differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[
    Path | None, typer.Argument(help="A study in TOML; without one, the phantom federation.", show_default=False)
]
Override = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value, e.g. algorithm.lr=0.2.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line instead of tables, for scripts.")]


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Where to write; a new folder below demo/ by default.")] = None,
    seed: Annotated[int, typer.Option(help="Another seed draws other patients.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Four drawn hospitals, one of them an outlier: what each gets alone, federated and pooled."""
    from polysite import demo as demonstration

    with _watching(quiet, False) as watch:
        page = demonstration.run(out, seed, watch)
    if not quiet:
        demonstration.show(page.parent)
        print(f"\nThe page with the figures: {page}")


@app.command()
def train(
    config: Config = None,
    override: Override = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; a new one below runs/ by default.")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Continue this run folder to the same end.")
    ] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Show the resolved study and stop.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a study and write a run folder."""
    from polysite import config as configuration

    if resume and (config or override or out):
        raise PolysiteError("--resume takes its configuration from the run folder; leave out the file, --set and --out")
    if resume and print_config:
        from polysite.engines.folder import RunFolder

        print(RunFolder.open(resume).config, end="")
        return
    if not resume:
        given = _overrides(override or [])
        study = configuration.load(config, given) if config else configuration.parse("", given)
        if print_config:
            print(configuration.dump(study), end="")
            return
    from polysite import study as studies

    with _watching(quiet, as_json) as watch:
        run = studies.resume(resume, watch) if resume else studies.run(study, out, watch)
    if as_json:
        print(json.dumps({"run": str(run.folder.path), **run.result}))
    elif not quiet:
        from polysite.report import tables

        tables.show([run.folder.path])
        print(f"\nThe run folder: {run.folder.path}")


@app.command()
def algorithms(as_json: Json = False) -> None:
    """List the algorithms: name, paper, one line."""
    from polysite.algorithms import describe

    found = list(describe())
    if as_json:
        for name, paper, line in found:
            print(json.dumps({"name": name, "paper": paper, "summary": line}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "what it does", "paper"):
        table.add_column(column, overflow="fold")
    for name, paper, line in found:
        table.add_row(name, line, paper)
    Console().print(table)


@app.command()
def phantom(
    out: Annotated[Path, typer.Argument(help="A new folder for SITE/CASE/modality.nii.gz.")],
    override: Override = None,
    seed: Annotated[int, typer.Option(help="Another seed draws other patients.")] = 0,
) -> None:
    """Write the phantom federation as NIfTI files, to try polysite on a folder like your own."""
    from polysite import config as configuration
    from polysite.data.folder import write
    from polysite.errors import RunError

    if out.exists():
        raise RunError(f"{out} exists already; name a new folder")
    study = configuration.parse("", {"seed": str(seed), **_overrides(override or [])})
    cases = study.data.load(study.seed)
    write((c for site in cases.values() for c in site), out, study.data.modality_names, (2, 1, 4))
    count = sum(map(len, cases.values()))
    print(f"{count} cases of {len(cases)} hospitals in {out}; labels: 2 oedema, 1 core, 4 enhancing")


def main() -> None:
    """Run the command line: a refusal is one sentence and exit code 2."""
    try:
        app()
    except (PolysiteError, OSError) as problem:  # the system's own refusals name the file, too
        print(f"polysite: {problem}", file=sys.stderr)
        sys.exit(2)


def _overrides(given: list[str]) -> dict[str, str]:
    from polysite.errors import ConfigError

    wrong = next((g for g in given if "=" not in g), None)
    if wrong is not None:
        raise ConfigError(f"--set {wrong}: write KEY=VALUE, for example --set algorithm.lr=0.2")
    return dict(g.split("=", 1) for g in given)


@contextmanager
def _watching(quiet: bool, as_json: bool) -> Iterator[Any]:
    """What is shown while a study runs: nothing, JSON lines or a progress bar."""
    from polysite.engines.rounds import Watch

    class Lines(Watch):
        def round(self, record: Mapping[str, Any]) -> None:
            print(json.dumps(record), flush=True)

    if quiet or as_json:
        yield Lines() if as_json else Watch()
        return
    from polysite.report.progress import progress

    with progress() as watch:
        yield watch


if __name__ == "__main__":
    main()
