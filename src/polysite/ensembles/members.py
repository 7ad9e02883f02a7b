"""Members of an ensemble: runs of one study with different seeds or inner folds, and the parts of their cases in it.

A test case of the members is a test case of the ensemble, also if ``split.inner`` leaves it out of their runs. A
validation case of all members is one of the ensemble; any other case counts as a training case.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polysite import config, study
from polysite.config import Study
from polysite.data.split import PARTITION, SPLIT, SUBJECT
from polysite.engines.memory_store import to_host
from polysite.engines.run_folder import RunFolder
from polysite.engines.watch import Watch
from polysite.errors import ConfigError, RunError
from polysite.models.ensemble import Ensemble, Member
from polysite.models.unet import UNet
from polysite.payload import SiteId
from polysite.report.runs import title
from polysite.spreadsheets import rows as csv_rows
from polysite.study import dealt_as_trained, models_of, open_finished
from polysite.tree import Tree, drop

Source = tuple[str, str]  # site and name of a case in the data
Parts = Mapping[Source, tuple[str, SiteId]]  # part and site of every case
HEADS = ("decoder.supervision.*",)  # heads that do not predict


@dataclass(frozen=True)
class MemberRun:
    """A finished run as a member of an ensemble."""

    folder: RunFolder
    study: Study
    parts: Parts

    @property
    def name(self) -> str:
        """The name of the run."""
        return title(self.folder.path)

    @property
    def model(self) -> Member:
        """The network without heads that do not predict."""
        model = self.study.model
        if isinstance(model, Ensemble):
            raise ConfigError(f"{self.folder.path} is an ensemble already; name its members instead")
        return replace(model, deep_supervision=0) if isinstance(model, UNet) else model


def read(run: Path | str) -> MemberRun:
    """Read a finished run."""
    folder = open_finished(run)
    chosen = config.parse(folder.config, where=str(folder.path / "config.toml"))
    rows = csv_rows(io.StringIO(folder.split))
    parts = {(row[PARTITION], row[SUBJECT]): (row[SPLIT], row["Site"]) for row in rows}
    if chosen.split.inner:
        whole = study.deal_volumes(replace(chosen, split=replace(chosen.split, inner=0, inner_fold=0)))
        unseen = {case.source: ("test", site) for site, splits in whole.items() for case in splits["test"]}
        parts = {**unseen, **parts}
    return MemberRun(folder, chosen, parts)


def combined(members: Sequence[MemberRun]) -> Parts:
    """Return the part and site of every case in the ensemble."""
    found: dict[Source, tuple[str, SiteId]] = {}
    for member in members:
        for source, (part, site) in member.parts.items():
            known, first = found.setdefault(source, (part, site))
            found[source] = (part if part == known else "train"), first
    return found


def served(member: MemberRun, wanted: Sequence[SiteId], watch: Watch) -> tuple[dict[SiteId, Tree], bool]:
    """Return the model that each of these sites uses in a run, in main memory, and whether all use the same."""
    dealt = dealt_as_trained(member.folder, member.study)
    sites = study.build_sites(member.study, dealt, watch)
    trained = sorted(s for s, splits in dealt.items() if splits["train"])
    known, models = models_of(member.folder, member.study, trained, sites)
    missing = [s for s in wanted if s not in known]
    if missing:
        raise ConfigError(f"{member.folder.path} has no model for {missing[0]!r}, which did not train there")
    found = models.phase.transport.serve(models.round, models.payloads(wanted))
    several = next((s for s, count in found.groups.items() if count != 1), None)
    if several is not None:
        raise RunError(
            f"{member.folder.path} has {found.groups[several]} models for {several!r}, for different patients; an "
            "ensemble takes runs with one model per site"
        )
    if found.shared is not None:
        return dict.fromkeys(wanted, drop(to_host(found.shared[0]), HEADS)), True
    return {s: drop(to_host(trees[0]), HEADS) for s, trees in found.models.items()}, False
