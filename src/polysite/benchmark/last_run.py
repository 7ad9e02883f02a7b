"""The prepared cases and the networks of the last runs in this process, for the next run of a benchmark.

Most runs have the same cases and the same network. Opening a case from the cache reads it twice, for its checksum and
to look for values that are not finite, and a phantom is drawn anew; both are saved. The arrays of files stay
memory-mapped, so keeping them takes no memory of the process. Folds and methods that divide the same cases differently
share them. A network on a GPU keeps what was compiled.
"""

from collections.abc import Mapping
from typing import Any

from polysite import study
from polysite.config import Study
from polysite.data.case import SPLITS, Case, CaseRef
from polysite.data.files import Files
from polysite.data.split import SiteSplit
from polysite.engines.watch import Watch
from polysite.study import Materials
from polysite.study.cases import PreparedCases, refuse_duplicates
from polysite.study.sites import expected_steps
from polysite.training.network import Network

NETWORKS = 2  # kept in a process: the common one, and that of a method with a network of its own


class LastRun(Materials):
    """Keeps the cases of the last study and the last networks; ``runs``: runs that this process expects."""

    def __init__(self) -> None:
        self.runs = 1
        self._kind: Any = None
        self._known: dict[Any, Case] = {}
        self._networks: dict[Any, Network] = {}  # the last used one is the last

    def cases(self, chosen: Study, dealt: Mapping[str, SiteSplit], watch: Watch = Watch()) -> PreparedCases:
        """Return the prepared cases of every site and split; only those that the last study did not have are loaded."""
        if chosen.slices.axis:  # they are copies, of which there may be many
            return study.load_cases(chosen, dealt, watch)
        seed = None if isinstance(chosen.data, Files) else chosen.seed  # phantoms are drawn by it
        kind = (chosen.data, chosen.prepare, chosen.train.patch, seed)
        if kind != self._kind:
            self._kind, self._known = kind, {}
        wanted = {s: {k: [_key(ref) for ref in splits[k]] for k in SPLITS} for s, splits in dealt.items()}
        new = {
            site: {k: [ref for ref in splits[k] if _key(ref) not in self._known] for k in SPLITS}
            for site, splits in dealt.items()
        }
        if any(refs for splits in new.values() for refs in splits.values()):
            refuse_duplicates([ref for splits in dealt.values() for k in SPLITS for ref in splits[k]])
        for site, splits in study.load_cases(chosen, new, watch).items():
            for k in SPLITS:
                self._known |= {_key(r): case for r, case in zip(new[site][k], splits[k], strict=True)}
        used = {key for splits in wanted.values() for keys in splits.values() for key in keys}
        self._known = {key: case for key, case in self._known.items() if key in used}
        return {s: {k: [self._known[key] for key in splits[k]] for k in SPLITS} for s, splits in wanted.items()}

    def network(self, chosen: Study, sizes: Mapping[str, int]) -> Network:
        """Return the network of a former study with the initial parameters of this one, if it has the same layers."""
        train, outputs = chosen.train, (len(chosen.data.modality_names), chosen.data.label_names, chosen.data.task)
        built = (chosen.model, chosen.dims, outputs, train.exclusive, train.device, train.autocast, train.compile)
        known = self._networks.pop(built, None)
        steps = expected_steps(chosen, sizes)
        later = (self.runs - 1) * steps
        if known is not None:
            known.restart(study.build_module(chosen), steps, later)
            self._networks[built] = known
            return known
        while len(self._networks) >= NETWORKS:
            del self._networks[next(iter(self._networks))]
        fresh = Network(study.build_module(chosen), train, steps, later)
        if fresh.gpu_steps:  # a CPU compiles nothing
            self._networks[built] = fresh
        return fresh


def _key(ref: CaseRef) -> Any:
    """Return what a prepared case depends on, besides the study: its site and names, and its files as they are now."""
    stamps = tuple((file, *_stamp(file)) for file in ref.files)
    return ref.site, ref.name, ref.source, ref.group, ref.hidden, ref.recipe, stamps


def _stamp(file: Any) -> tuple[int, int, int]:
    try:
        is_now = file.stat()
    except OSError:  # loading it reports what is wrong
        return (0, 0, 0)
    return is_now.st_size, is_now.st_mtime_ns, is_now.st_ino
