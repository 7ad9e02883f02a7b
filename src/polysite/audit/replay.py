"""Replay the last rounds of a finished run, to see again what left its sites.

All randomness of a simulated round comes from the seed, the site and the round, so a round that is run again from the
checkpoint before it gives the same replies. The losses that ``rounds.jsonl`` has show whether it did. Under secure sums
the replies are replayed without masks: what each site has put into the sum.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polysite.engines.phases import Phase, enter_phase, load_checkpoint
from polysite.engines.rounds import Progress, Round, run_rounds
from polysite.engines.run_folder import RunFolder
from polysite.engines.watch import Watch
from polysite.errors import RunError
from polysite.payload import Payload, SiteId
from polysite.tree import Tree


@dataclass(frozen=True)
class Replayed:
    """The rounds that were replayed.

    Args:
        phase: The phase.
        first: What the sites were sent in the first replayed round.
        last: The last one, with all replies.
        difference: Largest difference between a loss of the replay and that of the run; None if the run has none.
    """

    phase: Phase
    first: Mapping[SiteId, Payload]
    last: Round
    difference: float | None


def replay(folder: RunFolder, phases: Sequence[Phase], params: Tree, seed: int, watch: Watch = Watch()) -> Replayed:
    """Run the rounds after the last but one checkpoint again, in the last phase in which models left the sites.

    If that phase has no such checkpoint, all its rounds are run again.

    Args:
        folder: The folder of a finished run.
        phases: Its phases.
        params: Initial parameters.
        seed: Seed of the study.
        watch: Observer of the progress.
    """
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
    for found in run_rounds(phase.algorithm, phase.transport, params, plan, seed, resume=resume, watch=watch):
        first = first or found.sent
        known = recorded[found.index].sites
        again = found.record(index, plan.pooled).sites
        pairs = [(again[i].loss, known[i].loss) for i in again if i in known]
        differences += [abs(a - b) for a, b in pairs if a is not None and b is not None]
        if found.index == records[-1].round:
            return Replayed(phase, first, found, max(differences, default=None))
    raise RunError(f"round {records[-1].round + 1} of {folder.path} could not be replayed")


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
