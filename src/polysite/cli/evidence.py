"""The command that shows the evidence bank: evidence."""

import json
from pathlib import Path
from typing import Annotated

import typer

from polysite.cli.base import Json, Override, app, say, study_of
from polysite.errors import ConfigError


@app.command()
def evidence(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Federation whose methods are listed; all federations without one."),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(metavar="STUDY", help="List the federations that are most like that of a study or a manifest."),
    ] = None,
    override: Override = None,
    count: Annotated[int, typer.Option(min=1, help="Number of federations with --like.")] = 3,
    own: Annotated[bool, typer.Option("--own", help="Leave out polysite's own and published results.")] = False,
    as_json: Json = False,
) -> None:
    """Show what methods scored in other federations.

    Finished runs and assessments of this user are in the bank, and results of polysite and of published papers. With
    --like, the distances between the hospitals count if the study was assessed before.
    """
    from polysite import evidence as bank
    from polysite.evidence import show
    from polysite.report import tables

    if name is not None and like is not None:
        raise ConfigError(f"evidence {name} --like {like}: give a federation of the bank or a study, not both")
    if override and like is None:
        raise ConfigError("--set changes the study of --like; name the study, too")
    known = [f for f in bank.federations() if not (own and f.source)]
    if like is not None:
        from polysite.study import deal_volumes

        study = study_of(like, override or [])
        found = bank.similar(bank.describe_study(study, deal_volumes(study)), count, known)
        if as_json:
            for match in found:
                print(json.dumps(show.plain_match(match)))
            return
        for grid in show.matches(found):
            tables.show_grid(grid)
        say(show.GAIN if found else "The evidence bank is empty.")
        return
    chosen = known if name is None else [f for f in known if f.data == name]
    chosen = chosen or [f for f in known if f.data.startswith(name or "")]
    if name is not None and not chosen:
        raise ConfigError(f"there is no federation {name!r} in the evidence bank; 'polysite evidence' lists them")
    if as_json:
        for federation in chosen:
            print(json.dumps(show.plain(federation)))
    elif name is None:
        tables.show_grid(show.overview(chosen))
        say("Local table: off" if bank.is_off() else f"Local table: {bank.place()}")
    else:
        for federation in chosen:
            tables.show_grid(show.methods(federation))
        say(show.GAIN)
