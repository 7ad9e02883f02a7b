"""What ``polysite deploy run`` does: the rounds of a study over the hospitals that connect to this machine.

The run folder is that of a simulation, so reports and comparisons read both; ``deployment.json`` in it says which sites
take part and by which name they know the study, so that a server that was stopped finds its sites again.
"""

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from polysite import assessment, config, study
from polysite.algorithms.base import Algorithm
from polysite.algorithms.cfft import Cfft
from polysite.config import Study
from polysite.data.case import SPLITS
from polysite.data.federation import Natural
from polysite.deploy.coordinator.remote import Deadlines, Incident, RemoteSites, Roster, Scale, Wire
from polysite.deploy.flower.server import Link
from polysite.deploy.identity import identity
from polysite.deploy.project import Project
from polysite.engines.phases import Phase, find_progress
from polysite.engines.rounds import Watch
from polysite.engines.run_folder import RunFolder
from polysite.errors import ConfigError, DataError, RunError
from polysite.study import Run
from polysite.tree import Tree

FILE = "deployment.json"
JOURNAL = "incidents.jsonl"  # every incident at once; the record of a round has those of the round
WAIT = 60.0  # seconds to wait for all sites, once there is a quorum

log = logging.getLogger("polysite")


@contextmanager
def listening(project: Project) -> Iterator[Link]:
    """The address that sites connect to."""
    with Link(
        project.host,
        project.port,
        certificate=project.certificate,
        key=project.key,
        ca=project.ca,
        sites=project.sites,
    ) as link:
        yield link


def run(
    chosen: Study,
    wire: Wire,
    names: Sequence[str],
    out: Path | str | None = None,
    watch: Watch = Watch(),
    *,
    deadlines: Deadlines = Deadlines(),
    assess: bool = True,
    wait: float = WAIT,
    track: Sequence[str] = (),
) -> Run:
    """Assess the sites that connect, if wanted, and train with them, into a new folder."""
    check(chosen)
    path = Path(out) if out else RunFolder.fresh(Path("runs"), study.title(chosen))
    if path.exists():
        raise RunError(
            f"{path} exists already; a run never overwrites another: choose another folder or resume this one"
        )
    hospitals = Roster(
        wire, secrets.token_hex(8), config.dump(chosen), names, deadlines, identity(), watch, _scale(chosen)
    )
    hospitals.gather(wait)
    phases, start = _phases(chosen, hospitals), study.initial_params(chosen)
    if not any(hospitals.sites[i].told["validation"] for i in phases[0].transport.audience):
        raise RunError(
            "no site that takes part judges models, so no best round could be chosen: their policies say "
            "case_scores = false, or they have no validation cases"
        )
    for phase in phases:
        phase.algorithm.init(start, phase.transport.names)  # it may refuse these sites, or this network
        if isinstance(phase.algorithm, Cfft):
            study.clusterable(phase.algorithm, _dealt(hospitals))
    watch = study.tracked(watch, track, path)
    folder = RunFolder.create(path, config.dump(chosen), chosen.seed, more={FILE: _facts(hospitals, assess)})
    hospitals.keep(_journal(folder))
    with folder.alone():
        if assess:
            with study.logged(folder):
                survey(chosen, hospitals, folder.path / "assessment")
        return study.conduct(chosen, _words(hospitals), phases, start, folder, None, watch)


def resume(
    path: Path | str,
    wire: Wire,
    watch: Watch = Watch(),
    *,
    deadlines: Deadlines = Deadlines(),
    wait: float = WAIT,
    track: Sequence[str] = (),
) -> Run:
    """Go on where a server was stopped; the sites go back to what they remembered then."""
    folder = RunFolder.open(Path(path))
    if folder.finished:
        return Run(folder, folder.result)
    try:
        known = json.loads((folder.path / FILE).read_text())
        id, names = str(known["study"]), list(known["sites"])
    except (OSError, ValueError, KeyError) as problem:
        raise RunError(f"{path} is no run over real sites: its {FILE} cannot be read") from problem
    with folder.alone():
        chosen = config.parse(folder.config, where=str(folder.path / "config.toml"))
        hospitals = Roster(wire, id, folder.config, names, deadlines, identity(), watch, _scale(chosen))
        hospitals.needed = folder.needed()
        hospitals.keep(_journal(folder))
        hospitals.gather(wait)
        phases, start = _phases(chosen, hospitals), study.initial_params(chosen)
        watch = study.tracked(watch, track, folder.path)
        with study.logged(folder):
            hospitals.note("the server was started again")
            assessment = folder.path / "assessment"
            if known.get("assess") and not assessment.exists():
                survey(chosen, hospitals, assessment)
            at = find_progress(folder, phases)
            hospitals.recall(_unrecorded(folder))
        return study.conduct(chosen, _words(hospitals), phases, start, folder, at, watch)


def survey(chosen: Study, hospitals: Roster, path: Path) -> assessment.AssessmentRun | None:
    """The assessment, asked of real sites; a site whose policy forbids it is left out of it. Where too few can be
    compared there is none, and the study goes on."""
    engine = RemoteSites(cast(Algorithm[Any], chosen.assess), hospitals, kind="assess")
    if len(engine.names) < 2:
        hospitals.note("no assessment: the policies of fewer than two sites allow it")
        return None
    told = {i: hospitals.sites[i].told for i in engine.names}
    asked = SPLITS if chosen.assess.cases == "all" else SPLITS[:1]
    sizes = {i: sum(t[part] for part in asked) for i, t in told.items()}
    unseen = any(not t["train"] for t in told.values())
    try:
        return assessment.run_assessment(chosen, engine, sizes, unseen, path)
    except (ConfigError, DataError) as problem:
        hospitals.note(f"no assessment: {problem}")
        return None


def check(chosen: Study) -> None:
    """Refuse what only a simulation can do."""
    chosen.check()
    if any(stage.run.pooled for stage in config.phases(chosen)):
        raise ConfigError("run.pooled is centralised training: scans would have to leave the hospitals")
    if not isinstance(chosen.federation, Natural):
        raise ConfigError("a federation that deals cases out anew is for simulations; leave out [federation]")
    if chosen.split.file:
        raise ConfigError("split.file names cases, which stay at the hospitals: leave it out")
    study.refuse_bare(chosen)


def _phases(chosen: Study, hospitals: Roster) -> list[Phase]:
    stages = config.phases(chosen)
    return [
        Phase(s.algorithm, RemoteSites(s.algorithm, hospitals, k, _lift, compress=s.run.compress), s.run)
        for k, s in enumerate(stages)
    ]


def _lift(params: Tree) -> Tree:
    return {k: v if isinstance(v, torch.Tensor) else torch.as_tensor(v) for k, v in params.items()}


def _scale(chosen: Study) -> Scale:
    """What a case of the study is scored by."""
    labels = chosen.data.label_names
    if chosen.data.task == "classification":
        return {"accuracy": 1.0, **dict.fromkeys(("said", "true"), len(labels) - 1.0)}
    return dict.fromkeys(labels, 1.0)


def _dealt(hospitals: Roster) -> Mapping[str, Any]:
    """As many cases as every site said that it has."""
    told = {i: hospitals.sites[i].told for i in hospitals.ready}
    return {i: {part: range(t[part]) for part in SPLITS} for i, t in told.items()}


def _words(hospitals: Roster) -> Iterator[str]:
    for name, site in hospitals.sites.items():
        absent = "could not be greeted yet" if site.greeted else "not connected yet"
        counts = ", ".join(f"{site.told[part]} {part}" for part in SPLITS) if site.told else absent
        yield f"{name}: {f'does not take part: {site.refused}' if site.refused else counts}"


def _facts(hospitals: Roster, assess: bool) -> str:
    told = {
        i: {k: v for k, v in s.told.items() if k in (*SPLITS, "torch", "device")} for i, s in hospitals.sites.items()
    }
    return json.dumps({"study": hospitals.study, "assess": assess, "sites": told}, indent=1) + "\n"


def _journal(folder: RunFolder) -> Callable[[Incident], None]:
    """Writes an incident down, if it can: a full disk is no reason to stop."""
    failed = False

    def write(incident: Incident) -> None:
        nonlocal failed
        try:
            with (folder.path / JOURNAL).open("ab+") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
                begin = b"" if file.read() in (b"", b"\n") else b"\n"  # after a line that a crash cut short
                file.write(begin + json.dumps(dict(incident)).encode() + b"\n")
        except OSError as problem:
            if not failed:
                log.warning("incidents cannot be kept in %s: %s", folder.path / JOURNAL, problem)
            failed = True

    return write


def _unrecorded(folder: RunFolder) -> list[Incident]:
    """What was noted and is in the record of no round: the server was killed before, or goes back behind that round."""
    recorded = [i for record in folder.records() for i in record.get("incidents", ())]
    return [i for i in _noted(folder.path / JOURNAL) if i not in recorded]


def _noted(path: Path) -> Iterator[Incident]:
    """The incidents of a journal; lines that were cut short are left out."""
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found
