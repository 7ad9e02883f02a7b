"""The commands that search for the best method and its settings: ``tune``, and ``deploy tune`` over real hospitals."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polysite.cli.base import Config, Json, Override, Quiet, app, say, study_of
from polysite.cli.deploy import HERE, Deadline, Project, Wait, coordinator, stoppable
from polysite.errors import ConfigError

if TYPE_CHECKING:
    from polysite.tuning import Plan, Tuned

Method = Annotated[list[str] | None, typer.Option("--method", metavar="NAME", help="Try this method. May be repeated.")]
SpaceFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A search space in TOML that extends polysite's own.")
]
Trainings = Annotated[float | None, typer.Option(help="Budget: whole trainings of the reference; 30 by default.")]
Rounds = Annotated[int | None, typer.Option(help="Budget: rounds of the reference.")]
Gigabytes = Annotated[
    float | None, typer.Option(help="Budget: gigabytes from and to all sites; candidates then have equal bytes.")
]
Inner = Annotated[int, typer.Option(help="Inner folds; the cases of each validate once.")]
PlanOnly = Annotated[bool, typer.Option("--plan", help="List the candidates and rungs; train nothing.")]
Out = Annotated[
    Path | None, typer.Option(help="Folder to write, tunings/STUDY by default; an existing one is continued.")
]


@app.command()
def tune(
    config: Config = None,
    override: Override = None,
    method: Method = None,
    space: SpaceFile = None,
    trainings: Trainings = None,
    rounds: Rounds = None,
    hours: Annotated[float | None, typer.Option(help="Budget: hours on this machine's device.")] = None,
    gigabytes: Gigabytes = None,
    inner: Inner = 3,
    plan: PlanOnly = False,
    out: Out = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs in parallel; as many as fit by default.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Search for the best method and its settings within a budget.

    Candidates are compared on inner folds of the cases that are not tested: many train for few rounds, and the better
    third goes on. The same command continues a search that was interrupted.
    """
    study = study_of(config, override or [])
    from polysite import tuning
    from polysite.report import live, tables

    known = tuning.load(space, method or ())
    budget, equal = tuning.budget(study, known, trainings=trainings, rounds=rounds, hours=hours, gigabytes=gigabytes)
    planned = tuning.plan(study, known, budget, inner)
    if plan:
        tables.show_grid(tuning.plan_table(planned))
        return
    target = _target(config, out)
    with live.board("runs", _runs(planned), quiet or as_json) as step:
        runner = tuning.Simulated(jobs)
        found = tuning.tune(study, target, known, budget, inner, equal, runner, step, tuning.write_page)
    _show(found, "polysite train", quiet, as_json)


@coordinator.command("tune")
def tune_hospitals(
    config: Config = None,
    project: Project = HERE,
    override: Override = None,
    method: Method = None,
    space: SpaceFile = None,
    trainings: Trainings = None,
    rounds: Rounds = None,
    gigabytes: Gigabytes = None,
    inner: Inner = 3,
    plan: PlanOnly = False,
    out: Out = None,
    min_sites: Annotated[
        int | None,
        typer.Option(help="Sites that a round needs; by default all that take part.", show_default=False),
    ] = None,
    deadline: Deadline = None,
    wait: Wait = 60.0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Search for the best method and its settings with the hospitals that connect, as ``polysite tune`` does.

    Every candidate and inner fold is a study of its own. The hospitals are asked about all of them before anything is
    trained; test cases are in none. The same command continues a search that was interrupted.
    """
    study = study_of(config, override or [])
    from polysite import tuning
    from polysite.deploy.coordinator import run
    from polysite.deploy.coordinator.roster import Deadlines
    from polysite.deploy.project import Project as Loaded
    from polysite.report import live, tables
    from polysite.tuning.hospitals import Hospitals

    run.check(study)
    loaded, known = Loaded.load(project), tuning.load(space, method or ())
    loaded.check_enrolled(min_sites or loaded.min_sites)
    one_each = {name: {"train": 1, "validation": 1} for name in loaded.sites}  # only rounds and bytes count
    given = {"trainings": trainings, "rounds": rounds, "gigabytes": gigabytes}
    budget, equal = tuning.budget(study, known, **given, sizes=one_each)  # type: ignore[arg-type]
    planned = tuning.plan(study, known, budget, inner)
    if plan:
        tables.show_grid(tuning.plan_table(planned, hospitals=True))
        return
    for remark in loaded.remarks:
        say(remark, file=sys.stderr)
    deadlines = Deadlines(quorum=min_sites or loaded.min_sites, deadline=deadline or loaded.deadline)
    target = _target(config, out)
    stoppable()
    with run.listening(loaded) as link, live.board("runs", _runs(planned), quiet or as_json) as step:
        if not quiet and not as_json:
            say(f"listening on {loaded.host}:{link.port} for {', '.join(loaded.sites)}", file=sys.stderr)
            say(f"every hospital is asked about {planned.studies} studies before anything is trained", file=sys.stderr)
        runner = Hospitals(link, list(loaded.sites), deadlines, wait, all_sites=min_sites is None)
        found = tuning.tune(study, target, known, budget, inner, equal, runner, step, tuning.write_page)
    _show(found, "polysite deploy run", quiet, as_json)


def _target(config: Path | None, out: Path | None) -> Path:
    """Return the folder of a search; refuse the study itself."""
    target = out or Path("tunings") / (config.stem if config else "phantom")
    if config is not None and target == config:
        raise ConfigError(f"--out {target} is the study itself; name another folder")
    return target


def _runs(planned: "Plan") -> int:
    return planned.inner * sum(rung.candidates for rung in planned.rungs)


def _show(found: "Tuned", command: str, quiet: bool, as_json: bool) -> None:
    """Print the result of a search, and the command that trains the best study."""
    from polysite import tuning
    from polysite.report import tables

    if as_json:
        print(json.dumps(_plain(found)))
    elif not quiet:
        tables.show_grid(tuning.table(found))
        say(f"\nPage: {found.folder / 'index.html'}\nThe best study: {command} {found.folder / 'best.toml'}")


def _plain(found: "Tuned") -> dict[str, object]:
    return {
        "folder": str(found.folder),
        "best": found.best.candidate.name,
        "score": found.best.score,
        "reference": found.reference.score,
        "study": str(found.folder / "best.toml"),
    }
