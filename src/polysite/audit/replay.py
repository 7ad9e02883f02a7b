"""Replay the last rounds of a finished run, to see again what left its sites.

All randomness of a simulated round comes from the seed, the site and the round, so a round that is run again from the
checkpoint before it gives the same replies. The losses that ``rounds.jsonl`` has show whether it did. Under secure sums
the replies are replayed without masks: what each site has put into the sum.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polysite import tree
from polysite.algorithms import name_of
from polysite.config import Study
from polysite.engines.phases import Phase, enter_phase, load_checkpoint
from polysite.engines.reply_checks import kinds_of
from polysite.engines.rounds import Progress, Round, run_rounds
from polysite.engines.run_folder import RunFolder
from polysite.engines.secure.settings import Secure
from polysite.engines.watch import Watch
from polysite.errors import RunError
from polysite.payload import Payload, SiteId
from polysite.study.sites import build_phases
from polysite.training.torch_site import TorchSite
from polysite.tree import Tree


@dataclass(frozen=True, eq=False)
class Left:
    """What left the sites of a run in its last round.

    Args:
        start: The initial parameters.
        before: The model that every site was sent in the first replayed round.
        sent: The model that every site was sent in the last round.
        replied: The model that every site replied.
        mean: The mean of the replies.
        rounds: Number of rounds of the run.
        difference: Largest difference between a loss of the replay and that of the run; None if the run has none.
    """

    start: Tree
    before: Mapping[SiteId, Tree]
    sent: Mapping[SiteId, Tree]
    replied: Mapping[SiteId, Tree]
    mean: Tree
    rounds: int
    difference: float | None


def replay(folder: RunFolder, study: Study, sites: Mapping[str, TorchSite], watch: Watch = Watch()) -> Left:
    """Run the rounds after the last but one checkpoint again, in the last phase in which models left the sites.

    If that phase has no such checkpoint, all its rounds are run again.

    Args:
        folder: The folder of a finished run.
        study: Its study.
        sites: Its sites.
        watch: Observer of the progress.
    """
    bare = replace(study, run=replace(study.run, secure=Secure()))  # the same models, without masks
    phases, params = build_phases(bare, sites), next(iter(sites.values())).start
    index = max((k for k, p in enumerate(phases) if "model" in p.algorithm.reply.values()), default=-1)
    if index < 0:
        raise RunError(f"no model left the sites in {folder.path}, so there is nothing to attack")
    records = [r for r in folder.records() if r.phase == index]
    if not records:
        raise RunError(f"{folder.path} has no record of phase {index + 1}")
    phase = phases[index]
    start = enter_phase(phases, index, folder) if index else params
    resume = _before(folder, phases, index, records[-1].round, start, records[0].round)
    plan = phase.plan
    first: Mapping[SiteId, Payload] = {}
    differences: list[float] = []
    recorded = {r.round: r for r in records}
    for found in run_rounds(phase.algorithm, phase.transport, params, plan, study.seed, resume=resume, watch=watch):
        first = first or found.sent
        known = recorded[found.index].sites
        again = found.record(index, plan.pooled).sites
        pairs = [(again[i].loss, known[i].loss) for i in again if i in known]
        differences += [abs(a - b) for a, b in pairs if a is not None and b is not None]
        if found.index == records[-1].round:
            return _left(phase, params, first, found, max(differences, default=None))
    raise RunError(f"round {records[-1].round + 1} of {folder.path} could not be replayed")


def _left(phase: Phase, start: Tree, first: Mapping[SiteId, Payload], last: Round, difference: float | None) -> Left:
    """Return what left in the last round; refuse an algorithm whose replies have several models."""
    sent, replied, weights = dict[SiteId, Tree](), dict[SiteId, Tree](), list[float]()
    for site, reply in sorted(last.replies.items()):
        kinds = kinds_of(phase.algorithm.reply, last.sent[site], reply.payload)
        fields = [name for name in sorted(reply.payload) if kinds.get(name) == "model"]
        if len(fields) != 1:
            raise RunError(
                f"{name_of(phase.algorithm)} replies {len(fields)} models at {site!r}, and the audit attacks replies "
                "of one: audit a run of another algorithm, such as fedavg, on the same cases"
            )
        sent[site] = _sent(last.sent[site], start)
        replied[site] = {**sent[site], **reply.payload[fields[0]]}
        weights.append(float(reply.payload.get("weight", 1.0)))
    if not replied:
        raise RunError("no site replied in the last round, so there is nothing to attack")
    before = {site: _sent(first.get(site, Payload()), start) for site in replied}
    return Left(start, before, sent, replied, tree.mean(replied.values(), weights), last.index + 1, difference)


def _sent(payload: Payload, start: Tree) -> Tree:
    """Return the model in a payload to a site, filled up by the initial parameters."""
    return {**start, **{k: v for k, v in payload.get("model", {}).items() if k in start}}


def _before(
    folder: RunFolder, phases: Sequence[Phase], index: int, last: int, start: Tree, begins: int
) -> Progress | None:
    """Return the position to replay from: the newest checkpoint before the last round, or the start of the phase."""
    for path in folder.checkpoints():
        if int(path.stem.rpartition("-")[2]) < last:
            at = load_checkpoint(folder, path, phases).at
            if at.phase == index:
                return at
    if not index:
        return None
    phase = phases[index]
    state = phase.algorithm.init(phase.transport.lift(start), phase.transport.names)
    return Progress(begins - 1, state, {}, best_score=-math.inf, phase=index, first=begins)
