"""The command that advises a strategy for every hospital: advise."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from polysite.cli.base import Config, Json, Override, Quiet, app, folder_of, say, study_of
from polysite.cli.deploy import HERE, Deadline, Project, Wait, coordinator, loaded, stoppable
from polysite.errors import ConfigError

if TYPE_CHECKING:
    from polysite.advice import Advice

Inner = Annotated[int, Option(min=2, help="Inner folds; the cases of each are left out once.")]
Only = Annotated[
    list[str] | None, Option("--only", metavar="NAME", help="Compare only this strategy. May be repeated.")
]
Models = Annotated[bool, Option(help="Spend a budget on models, too; or only compare strategies.")]
Out = Annotated[Path | None, Option(help="Folder to write, advice/STUDY by default; an existing one is continued.")]


@app.command()
def advise(
    config: Config = None,
    override: Override = None,
    trainings: Annotated[float | None, Option(help="Budget: whole trainings of FedAvg. 50 by default.")] = None,
    hours: Annotated[float | None, Option(help="Budget: hours on this machine's device.")] = None,
    inner: Inner = 3,
    only: Only = None,
    models: Models = True,
    out: Out = None,
    jobs: Annotated[int | None, Option(min=1, help="Runs in parallel; as many as fit by default.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Advise a strategy for every hospital within a budget.

    Assesses how the hospitals differ, compares the strategies that the assessment proposes at equal local steps, adapts
    the model to a hospital where that pays, and trains the advised study as long as the budget lasts. No test case is
    used. The same command continues an advice that was interrupted.
    """
    study = study_of(config, override or [])
    from polysite import advice, tuning
    from polysite.benchmark import Workers
    from polysite.report.progress import counting

    if not models and (trainings is not None or hours is not None):
        raise ConfigError("--no-models takes what the strategies take, so it has no budget; leave one of them out")
    budget = tuning.budget(study, tuning.load(methods=["fedavg"]), trainings, hours, advice.TRAININGS)
    target = folder_of(out, "advice", config)
    with counting("runs", None, quiet or as_json) as step:
        found = advice.advise(study, target, budget if models else None, inner, only or (), Workers(jobs, step))
    _show(found, quiet, as_json)


@coordinator.command("advise")
def advise_hospitals(
    config: Config = None,
    project: Project = HERE,
    override: Override = None,
    trainings: Annotated[
        float | None, Option(help="Budget: whole trainings of FedAvg; 50 by default.", show_default=False)
    ] = None,
    inner: Inner = 3,
    only: Only = None,
    models: Models = True,
    out: Out = None,
    deadline: Deadline = None,
    wait: Wait = 60.0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Advise a strategy for every hospital, as ``polysite advise`` does, from trainings at the hospitals that connect.

    Every training is a study of its own at the hospitals, and every round waits for all of them. The same command
    continues an advice that was interrupted.
    """
    if not models and trainings is not None:
        raise ConfigError("--no-models takes what the strategies take, so it has no budget; leave one of them out")
    study = study_of(config, override or [])
    from polysite import advice
    from polysite.advice import connected
    from polysite.deploy.coordinator.run import listening
    from polysite.report.progress import counting

    connected.check(study)
    found, deadlines = loaded(project, None, deadline)
    budget = (trainings or advice.TRAININGS) if models else None
    target = folder_of(out, "advice", config)
    stoppable()
    with listening(found) as link, counting("runs", None, quiet or as_json) as step:
        names = list(found.sites)
        hospitals = connected.Connected.join(study, link, names, target, step, deadlines=deadlines, wait=wait)
        advised = hospitals.advise(budget, inner, only or ())
    _show(advised, quiet, as_json, f"polysite deploy run --project {project}")


def _show(found: "Advice", quiet: bool, as_json: bool, command: str = "polysite train") -> None:
    """Write the page of an advice, and print what it says. ``command`` trains a study."""
    from polysite import advice
    from polysite.report import tables

    page = advice.write_page(found)
    if as_json:
        print(json.dumps(advice.plain(found)))
    elif not quiet:
        say(f"{advice.decision(found)}\n\n{advice.against_given(found)}\n")
        tables.show_grid(advice.hospitals(found))
        tables.show_grid(advice.strategies(found))
        if found.models:
            words = " ".join(filter(None, (advice.models(found), advice.tested(found))))
            say(f"Models: {found.models.run.folder.path}: {words}")
        elif found.trainings and (found.folder / "trained").exists():
            say("There are no models: their training failed, as said above; the same command tries it again.")
        often = found.models.members if found.models else 1
        again = f" --trainings {often}" if often > 1 else ""
        say(f"Page: {page}\nThe advised study: {command} {found.folder / 'study.toml'}{again}")
        for recipe in found.exceptions:
            file = found.folder / f"{recipe.file('study')}.toml"
            say(f"For hospitals with another strategy: {command} {file}")
