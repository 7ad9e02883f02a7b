"""The implementation of ``polysite deploy run``: the rounds of a study over the hospitals that connect to this machine.

The run folder is that of a simulation, so reports and comparisons read both. Its ``deployment.json`` lists the sites
and the name by which they know the study, so that a server that was stopped finds its sites again.
"""

import json
import logging
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from polysite import assessment, config, study
from polysite.algorithms.base import Algorithm, check_sites
from polysite.cluster.mixture import CaseClusters
from polysite.config import Study
from polysite.data.case import SPLITS
from polysite.data.federation import Natural
from polysite.deploy.coordinator.posted import Post, Posted
from polysite.deploy.identity import identity
from polysite.deploy.project import Project
from polysite.deploy.protocol import Subject
from polysite.engines import checkpoint
from polysite.engines.messages import Join
from polysite.engines.phase_sites import PhaseSites
from polysite.engines.phases import Evaluate, Phase, find_progress, load_checkpoint
from polysite.engines.record import Incident
from polysite.engines.rounds import Progress
from polysite.engines.run_folder import RunFolder
from polysite.engines.secure import server as secure_server
from polysite.engines.sites import Deadlines, Sites
from polysite.engines.watch import Watch
from polysite.errors import ConfigError, DataError, RunError
from polysite.evaluation_folder import EvaluationFolder
from polysite.foreign import parse_json
from polysite.storage import Journal
from polysite.study import Run
from polysite.study.sites import refuse_bare
from polysite.tree import Tree

if TYPE_CHECKING:
    from polysite.deploy.flower.server import Link

FILE = "deployment.json"
JOURNAL = "incidents.jsonl"  # every incident as it happens; rounds.jsonl has those of each round
WAIT = 60.0  # seconds to wait for all sites, once there is a quorum

log = logging.getLogger("polysite")


@contextmanager
def listening(project: Project) -> Iterator["Link"]:
    """Open the port that sites connect to."""
    from polysite.deploy.flower.server import Link  # only here: other engines bring their own wire

    with Link(
        project.host,
        project.port,
        certificate=project.certificate,
        key=project.key,
        ca=project.ca,
        sites=project.sites,
        revoked=project.revoked,
    ) as link:
        yield link


def run(
    chosen: Study,
    post: Post,
    names: Sequence[str],
    out: Path | str | None = None,
    watch: Watch = Watch(),
    *,
    deadlines: Deadlines = Deadlines(),
    assess: bool = True,
    wait: float = WAIT,
    evaluate: bool = True,
    until: int | None = None,
    id: str = "",
    after: RunFolder | None = None,
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> Run:
    """Train a study with the sites that connect, into a new folder.

    Args:
        chosen: The study.
        post: Carries the messages.
        names: The sites of the project.
        out: The new folder; by default one below ``runs/``.
        watch: Observer of the progress.
        deadlines: How long to wait for sites.
        assess: Assess the sites before training.
        wait: Seconds to wait for all sites, once there is a quorum.
        evaluate: Have every measure of the final model computed, not only Dice.
        until: Number of rounds after which to raise ``polysite.errors.Paused``; ``resume`` goes on. None for all.
        id: Name by which the sites know the study; by default a new one.
        after: A finished run that is the beginning of this study, and left no memory at the sites: it is taken over.
        facts: More about this run, for deployment.json.
    """
    chosen = guarded(chosen)
    check(chosen)
    path = Path(out) if out else RunFolder.fresh(Path("runs"), study.title(chosen))
    if path.exists():
        raise RunError(
            f"{path} exists already; a run never overwrites another: choose another folder or resume this one"
        )
    id, text = id or secrets.token_hex(8), config.dump(chosen)
    roster = _roster(post, id, chosen, text, names, deadlines, watch)
    roster.gather(wait)
    phases, start = _phases(chosen, roster), study.initial_params(chosen)
    _check_roster(roster, phases, start)
    folder = RunFolder.create(path, text, chosen.seed, more={FILE: _facts(roster, id, assess, facts)})
    roster.keep(_journal(folder))
    with folder.alone():
        if assess:
            with study.logged(folder):
                assess_sites(chosen, roster, folder.path / "assessment")
        at = _taken_over(after, folder, phases) if after else None
        final = _evaluation(chosen, roster, folder) if evaluate else None
        return study.conduct(chosen, _words(roster), phases, start, folder, at, watch, final, until)


def retrain(
    path: Path | str,
    without: Sequence[str],
    post: Post,
    enrolled: Collection[str],
    out: Path | str | None = None,
    watch: Watch = Watch(),
    *,
    deadlines: Deadlines = Deadlines(),
    wait: float = WAIT,
) -> Run:
    """Repeat a deployed run from its beginning without some sites, into a new folder; the former one is not changed.

    Args:
        path: The run folder.
        without: The sites to leave out.
        post: Carries the messages.
        enrolled: Sites of the project that have keys.
        out: The new folder; by default one below ``runs/``.
        watch: Observer of the progress.
        deadlines: How long to wait for sites; a larger quorum than there are sites is reduced to their number.
        wait: Seconds to wait for all sites, once there is a quorum.
    """
    folder = RunFolder.open(Path(path))
    known = _known(folder)
    odd = [name for name in without if name not in known["sites"]]
    if odd or not without:
        raise RunError(f"{path} has no site {', '.join(map(repr, odd))}; its sites are {', '.join(known['sites'])}")
    names = [name for name in known["sites"] if name not in without]
    gone = [name for name in names if name not in enrolled]
    if gone or not names:
        raise RunError(
            f"{', '.join(gone) or 'no site'} would take part in the repetition and has no key in the project: "
            "leave it out as well, or enrol it"
        )
    chosen = config.parse(folder.config, where=str(folder.path / "config.toml"))
    return run(
        chosen,
        post,
        names,
        out,
        watch,
        deadlines=replace(deadlines, quorum=min(deadlines.quorum, len(names))),
        assess=bool(known.get("assess")),
        wait=wait,
        facts={"repeats": str(folder.path), "without": list(without)},
    )


def resume(
    path: Path | str,
    post: Post,
    watch: Watch = Watch(),
    *,
    deadlines: Deadlines = Deadlines(),
    wait: float = WAIT,
    evaluate: bool = True,
    until: int | None = None,
    paused: bool = False,
) -> Run:
    """Continue a deployed run after its server was stopped; the sites return to their memories of that time.

    Args:
        path: The run folder.
        post: Carries the messages.
        watch: Observer of the progress.
        deadlines: How long to wait for sites.
        wait: Seconds to wait for all sites, once there is a quorum.
        evaluate: Have every measure of the final model computed, not only Dice.
        until: Number of rounds after which to raise ``polysite.errors.Paused``; None for all.
        paused: The run was paused on purpose, so that its continuation is no incident.
    """
    folder = RunFolder.open(Path(path))
    if folder.finished:
        return Run(folder, folder.result)
    known = _known(folder)
    id, names = str(known["study"]), list(known["sites"])
    with folder.alone():
        chosen = config.parse(folder.config, where=str(folder.path / "config.toml"))
        secret = int(known.get("secret", 0))
        roster = _roster(post, id, chosen, folder.config, names, deadlines, watch, secret)
        roster.needed = folder.needed()
        for name, facts in known["sites"].items():
            roster.status[name].cases = {k: int(facts[k]) for k in SPLITS if k in facts}
        roster.keep(_journal(folder))
        roster.gather(wait)
        phases, start = _phases(chosen, roster), study.initial_params(chosen)
        with study.logged(folder):
            if not paused:
                roster.note("the server was started again")
            target = folder.path / "assessment"
            if known.get("assess") and not target.exists():
                assess_sites(chosen, roster, target)
            at = find_progress(folder, phases)
            roster.recall(_unrecorded(folder))
        final = _evaluation(chosen, roster, folder) if evaluate else None
        return study.conduct(chosen, _words(roster), phases, start, folder, at, watch, final, until)


def assess_sites(chosen: Study, roster: Sites, path: Path) -> assessment.AssessmentRun | None:
    """Assess the sites. A site whose policy forbids it is left out; where too few remain, the study continues without
    an assessment."""
    if assessment.is_unprotected(chosen):
        roster.note(f"no assessment: {assessment.UNPROTECTED}")
        return None
    engine = PhaseSites(cast(Algorithm[Any], chosen.assess), roster, kind="assess")
    if len(engine.names) < 2:
        roster.note("no assessment: the policies of fewer than two sites allow it")
        return None
    cases = {i: roster.status[i].cases for i in engine.names}
    splits = SPLITS if chosen.assess.cases == "all" else SPLITS[:1]
    sizes = {i: sum(counts[split] for split in splits) for i, counts in cases.items()}
    unseen = any(not counts["train"] for counts in cases.values())
    try:
        return assessment.run_assessment(chosen, engine, sizes, unseen, path)
    except (ConfigError, DataError) as problem:
        roster.note(f"no assessment: {problem}")
        return None


def check(chosen: Study) -> None:
    """Refuse a study that only a simulation can run."""
    chosen.check()
    if any(phase.run.pooled for phase in config.phases(chosen)):
        raise ConfigError("run.pooled is centralised training: scans would have to leave the hospitals")
    if not isinstance(chosen.federation, Natural):
        raise ConfigError("a federation that deals cases out anew is for simulations; leave out [federation]")
    if chosen.split.file:
        raise ConfigError("split.file names cases, which stay at the hospitals: leave it out")
    refuse_bare(chosen)
    study.refuse_ensemble(chosen)


def _known(folder: RunFolder) -> dict[str, Any]:
    """Return what is known of a deployed run: at least the name of its study, and its sites."""
    try:
        known = parse_json((folder.path / FILE).read_text())
        return {**known, "study": str(known["study"]), "sites": dict(known["sites"])}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise RunError(f"{folder.path} is no run over real sites: its {FILE} cannot be read") from problem


def guarded(chosen: Study) -> Study:
    """Return the study with the guard on, unless its configuration decides otherwise, or no single reply is seen."""
    guard = chosen.run.guard
    if guard.use != "auto":
        return chosen
    if chosen.run.secure.on:
        log.warning(
            "run.secure hides each reply, so the guard is off: a single hospital can do to the model what it wants "
            "(docs/protection.md); run.guard.use = 'off' says that this is meant"
        )
    use: Literal["on", "off"] = "off" if chosen.run.secure.on else "on"
    return replace(chosen, run=replace(chosen.run, guard=replace(guard, use=use)))


def joined(chosen: Study, post: Post, names: Sequence[str], deadlines: Deadlines, wait: float, id: str) -> Sites:
    """Return the sites that take part in a study, without those that do not; nothing is trained.

    Args:
        chosen: The study.
        post: Carries the messages.
        names: The sites of the project.
        deadlines: How long to wait for sites.
        wait: Seconds to wait for all sites, once there is a quorum.
        id: Name by which the sites know the study.
    """
    roster = _roster(post, id, chosen, config.dump(chosen), names, deadlines, Watch())
    roster.gather(wait)
    if len(roster.ready) < len(names):
        return joined(chosen, post, roster.ready, deadlines, wait, id)
    return roster


def _taken_over(before: RunFolder, folder: RunFolder, phases: Sequence[Phase]) -> Progress | None:
    """Copy rounds and checkpoints of another study, and return their last position. The versions of memories are left
    out: sites have none of them in this study."""
    shutil.copy(before.path / "rounds.jsonl", folder.path)
    for path in sorted((before.path / "checkpoints").glob("*.safetensors")):  # of rounds last: they need the others
        found = load_checkpoint(before, path, phases)
        new = replace(found, at=replace(found.at, memories={}, versions={}))
        checkpoint.save(folder.path / "checkpoints" / path.name, new)
    return find_progress(folder, phases)


def _roster(
    post: Post,
    id: str,
    chosen: Study,
    text: str,
    names: Sequence[str],
    deadlines: Deadlines,
    watch: Watch,
    secret: int | None = None,
) -> Sites:
    subject = Subject(tuple(chosen.data.label_names), chosen.data.task == "classification")
    wire = Posted(post, id, identity(), subject)
    secret = secrets.randbits(63) if secret is None else secret
    sites = Sites(wire, names, deadlines, Join(text), watch, secret=secret, refusals=post.incidents)
    wire.cases_of, wire.note = lambda site: sites.status[site].cases, sites.note
    return sites


def _check_roster(roster: Sites, phases: Sequence[Phase], start: Tree) -> None:
    """Refuse sites with which the study cannot work, before anything is written."""
    if not any(roster.status[i].cases["validation"] for i in phases[0].transport.audience):
        raise RunError(
            "no site that takes part scores models, so no best round could be chosen: their policies say "
            "case_scores = false, or they have no validation cases"
        )
    train, validation = ({i: roster.status[i].cases[k] for i in roster.ready} for k in ("train", "validation"))
    for phase in phases:
        if phase.plan.secure.on and phase.algorithm.reply:
            secure_server.check_sites(phase.plan.secure, len(roster.ready))
        phase.algorithm.init(start, phase.transport.names)  # it may refuse these sites, or this network
        check_sites(phase.algorithm, train, validation)


def _phases(chosen: Study, roster: Sites) -> list[Phase]:
    phases = config.phases(chosen)
    return [Phase(p.algorithm, PhaseSites(p.algorithm, roster, k, _lift), p.run) for k, p in enumerate(phases)]


def _lift(params: Tree) -> Tree:
    return {k: v if isinstance(v, torch.Tensor) else torch.as_tensor(v) for k, v in params.items()}


def _evaluation(chosen: Study, roster: Sites, folder: RunFolder) -> Evaluate:
    """Return how a deployed run is evaluated: all measures, no images."""

    def write(split: str, clusters: CaseClusters | None) -> EvaluationFolder:
        trained = [i for i in roster.ready if roster.status[i].cases["train"]]
        return EvaluationFolder(folder.path / "evaluation" / split, chosen, split, trained, clusters)

    return Evaluate(write)


def _words(roster: Sites) -> Iterator[str]:
    for name, site in roster.status.items():
        absent = "could not be greeted yet" if site.greeting_failed else "not connected yet"
        counts = ", ".join(f"{site.cases[split]} {split}" for split in SPLITS) if site.greeting else absent
        yield f"{name}: {f'does not take part: {site.refused}' if site.refused else counts}"


def _facts(roster: Sites, id: str, assess: bool, more: Mapping[str, Any]) -> str:
    sites = {
        i: {**g.cases, "torch": g.torch, "device": g.device} if (g := s.greeting) else {}
        for i, s in roster.status.items()
    }
    known = {"study": id, "assess": assess, "sites": sites, "secret": roster.secret, **more}
    return json.dumps(known, indent=1) + "\n"


def _journal(folder: RunFolder) -> Callable[[Incident], None]:
    """Return a writer of incidents that goes on if the disk is full."""

    def write(incident: Incident) -> None:
        try:
            _incidents(folder).append(json.dumps(dict(incident)), sync=False)
        except OSError as problem:
            log.warning("incidents cannot be kept in %s: %s", folder.path / JOURNAL, problem)

    return write


def _unrecorded(folder: RunFolder) -> list[Incident]:
    """Return the incidents of the journal that no round has recorded: the server was killed before, or returns to an
    earlier round."""
    recorded = [i for record in folder.records() for i in record.incidents]
    return [i for i in _incidents(folder).read() if isinstance(i, dict) and i not in recorded]


def _incidents(folder: RunFolder) -> Journal[Any]:
    return Journal(folder.path / JOURNAL, lambda found: found, skip="any")
