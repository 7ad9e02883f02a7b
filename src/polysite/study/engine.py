"""Where the sites of a study compute: in this process, or in the workers of a Ray cluster."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from polysite import config
from polysite.config import Study
from polysite.data.case import SPLITS
from polysite.data.split import SiteSplit
from polysite.engines.phase_sites import PhaseSites
from polysite.engines.phases import Phase
from polysite.engines.sites import Sites
from polysite.engines.watch import Watch
from polysite.errors import ConfigError, nearest
from polysite.evaluation_folder import ExaminedSite
from polysite.study.cases import pinned, refuse_duplicates
from polysite.study.estimate import foresee, initial_params
from polysite.study.sites import POOLED, Materials, build_phases, refuse_bare, roles, train_sizes, with_cases
from polysite.tree import Tree

ENGINES = ("simulator", "ray")


WORKER_SITES = "polysite.worker_sites:WorkerSites"  # what a worker of the Ray engine builds its sites with


@dataclass(frozen=True)
class Engine:
    """Where the sites of a study compute. Results do not depend on it, so a run may be resumed in another engine.

    Args:
        name: ``simulator``: all in this process; ``ray``: in the workers of a Ray cluster.
        address: Ray cluster to connect to: ``auto`` for the running one, or host:port; empty starts one on this machine
            unless ``$RAY_ADDRESS`` names one.
        workers: Number of Ray workers; 0 for one per GPU, or per CPU and thread.
    """

    name: str = "simulator"
    address: str = ""
    workers: int = 0

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise ConfigError(f"there is no engine called {self.name!r}; {nearest(self.name, ENGINES)}")
        if self.name != "ray" and (self.address or self.workers):
            raise ConfigError("a Ray address or a number of workers goes with the engine 'ray': --engine ray")


@dataclass(frozen=True)
class OpenedStudy:
    """The sites of a study in an engine: its phases, the initial parameters, and the sites' cases for an evaluation."""

    phases: Sequence[Phase]
    start: Tree
    sites: Mapping[str, ExaminedSite]
    remarks: Sequence[str] = ()  # for the log


@contextmanager
def open_study(
    study: Study, dealt: Mapping[str, SiteSplit], engine: Engine, watch: Watch, out: Path, materials: Materials
) -> Iterator[OpenedStudy]:
    """Load the sites of a study into an engine; workers end with the block. A run that cannot fit is refused."""
    if engine.name == "ray":
        with _on_ray(study, dealt, engine, watch) as opened:
            yield opened
        return
    ready = materials.cases(study, dealt, watch)
    foreseen = foresee(study, ready, out)
    sites = with_cases(study, ready, materials.network(study, train_sizes(ready)))
    yield OpenedStudy(build_phases(study, sites), next(iter(sites.values())).start, sites, [foreseen.line])


@contextmanager
def _on_ray(study: Study, dealt: Mapping[str, SiteSplit], engine: Engine, watch: Watch) -> Iterator[OpenedStudy]:
    """Place the sites of a study on a Ray cluster. The server lists the cases; only the workers open them."""
    from polysite.engines.ray.cluster import Workers, connected
    from polysite.engines.ray.wire import RayWire, RemoteSite, lift

    refuse_bare(study)
    refuse_duplicates([ref for splits in dealt.values() for split in SPLITS for ref in splits[split]])
    cases = {site: {k: tuple(c.name for c in splits[k]) for k in SPLITS} for site, splits in dealt.items()}
    recipe = json.dumps({"study": config.dump(pinned(study)), "cases": cases})
    phases = config.phases(study)
    divided = [roles(phase, cases) for phase in phases]
    if any(phase.run.pooled for phase in phases):
        cases[POOLED] = {k: tuple(f"{i}/{n}" for i in dealt for n in cases[i][k] if k != "test") for k in SPLITS}
    sizes = {site: sum(map(len, splits.values())) for site, splits in cases.items()}
    device, threads = study.train.device, torch.get_num_threads()
    with connected(engine.address):
        workers = Workers(
            WORKER_SITES, recipe, sizes, device=device, threads=threads, count=engine.workers, watch=watch
        )
        try:
            known = {i: RemoteSite(i, workers, cases[i], study.data.label_names) for i in cases}
            everyone = Sites(RayWire(workers), cases, refusals=workers.incidents)
            built = [
                Phase(s.algorithm, PhaseSites(s.algorithm, everyone, k, lift, known=known, names=n, audience=a), s.run)
                for k, (s, (n, a)) in enumerate(zip(phases, divided, strict=True))
            ]
            yield OpenedStudy(built, initial_params(study), {i: known[i] for i in dealt}, [str(workers)])
        finally:
            workers.close()
