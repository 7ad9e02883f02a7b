"""Sites of a study in a worker process of the Ray engine, built from a text.

The worker lists the data as the server did and opens only the cases of its own sites. Cases that the server did not
list, or that are not on the worker's machine, are refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polysite import config, study
from polysite.data.case import SPLITS
from polysite.engines.host import HostPhase, SiteHost
from polysite.errors import RunError
from polysite.site import Cases
from polysite.study import sites
from polysite.training.network import Network
from polysite.training.torch_site import TorchSite

CaseNames = Mapping[str, Mapping[str, Cases]]  # by site and split


class WorkerSites:
    """Sites of a study that share one network.

    Args:
        recipe: The study and the names of all cases.
        device: Device of the network: ``cuda`` is the GPU that the worker was given.
    """

    def __init__(self, recipe: str, device: str):
        given = json.loads(recipe)
        whole = config.parse(given["study"])
        self._study = replace(whole, train=replace(whole.train, device=device))
        self._cases: CaseNames = given["cases"]
        self._phases = config.phases(self._study)
        self._dealt = study.deal_volumes(self._study)
        sizes = {s: len(splits["train"]) for s, splits in self._cases.items()}
        steps = sites.expected_steps(self._study, sizes)
        self._network = Network(study.build_module(self._study), self._study.train, steps)
        self._sites: dict[str, TorchSite] = {}
        self._ready: dict[tuple[int, str], TorchSite] = {}

    def load(self, names: Sequence[str]) -> None:
        """Load the cases of more sites; centralised training takes those of all."""
        wanted = self._cases if study.POOLED in names else names
        missing = [s for s in wanted if s not in self._dealt]
        volumes = {s: self._dealt[s] for s in wanted if s not in self._sites and s not in missing}
        dealt = study.cut(self._study, volumes)
        found = {s: {k: [c.name for c in splits[k]] for k in SPLITS} for s, splits in dealt.items()}
        missing += [s for s in found if found[s] != {k: list(self._cases[s][k]) for k in SPLITS}]
        if missing:
            raise RunError(
                f"a worker finds other cases of site {missing[0]!r} than the server; all nodes of the cluster must see "
                "the same data under the same path"
            )
        self._sites |= study.build_sites(self._study, dealt, network=self._network)

    def host(self, name: str) -> SiteHost:
        """Return the host of a site, in all phases."""
        phases = {
            k: HostPhase(p.algorithm, self._site(k, name), tuple(p.run.outgoing), p.run.secure, p.train.private)
            for k, p in enumerate(self._phases)
        }
        return SiteHost(name, phases)

    def _site(self, index: int, name: str) -> TorchSite:
        """Return a site with the settings of a phase."""
        if (index, name) not in self._ready:
            train = self._phases[index].train
            if name == study.POOLED:
                everyone = {s: self._sites[s].under(train) for s in self._cases}
                self._ready[index, name] = TorchSite.pool(name, everyone)
            else:
                self._ready[index, name] = self._sites[name].under(train)
        return self._ready[index, name]

    def describe(self, name: str) -> Mapping[str, Any]:
        """Return the voxel size and unit of every case."""
        return {"grids": {} if name == study.POOLED else dict(self._sites[name].grids)}

    def radiomics(self, name: str, cases: Cases, bin_width: float) -> Any:
        """Return the radiomic features of cases, one row per case."""
        return self._site(0, name).radiomics(cases, bin_width)

    def shares(self, name: str, case: str) -> Any:
        """Return the shares of the labels in a case."""
        return self._sites[name].shares(case)
