"""Members of an ensemble: finished runs of the same data, and the parts that their cases have in the ensemble.

The part of a case follows from its parts in all members. A test case of one member is a test case of the ensemble if no
other member trained on it or chose its best round by it; otherwise the runs do not go together. A case that is a
validation case of all members that know it is one of the ensemble; any other case counts as a training case. The test
cases that ``split.inner`` leaves out of a run are test cases that this run has not seen.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polysite import config, study
from polysite.config import Study
from polysite.data.files import Files
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
PREDICTS = ("exclusive", "patch", "window", "overlap", "mirror")  # settings of training that decide how to predict
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


def read(runs: Sequence[Path | str]) -> list[MemberRun]:
    """Read the members; refuse runs that do not go together."""
    if len(runs) < 2:
        raise ConfigError(f"an ensemble is made of at least two runs, got {len(runs)}")
    members = [_read(open_finished(run)) for run in runs]
    for other in members[1:]:
        _check_alike(members[0], other)
    return members


def _read(folder: RunFolder) -> MemberRun:
    chosen = config.parse(folder.config, where=str(folder.path / "config.toml"))
    rows = csv_rows(io.StringIO(folder.split))
    parts = {(row[PARTITION], row[SUBJECT]): (row[SPLIT], row["Site"]) for row in rows}
    if chosen.split.inner:
        whole = study.deal_volumes(replace(chosen, split=replace(chosen.split, inner=0, inner_fold=0)))
        unseen = {case.source: ("test", site) for site, splits in whole.items() for case in splits["test"]}
        parts = {**unseen, **parts}
    return MemberRun(folder, chosen, parts)


def _check_alike(first: MemberRun, other: MemberRun) -> None:
    """Refuse a member whose data, preparation or way of predicting differs from the first one's."""
    a, b = first.study, other.study
    one, two = first.folder.result, other.folder.result
    compared: list[tuple[str, Any, Any]] = [
        ("task", one.task, two.task),
        ("labels", one.labels, two.labels),
        ("modalities", one.modalities, two.modalities),
        ("data", a.data, b.data),
        ("federation", a.federation, b.federation),
        ("preparation", a.prepare, b.prepare),
        ("slices", a.slices, b.slices),
        *((f"train.{name}", getattr(a.train, name), getattr(b.train, name)) for name in PREDICTS),
    ]
    if not isinstance(a.data, Files) and getattr(a.data, "seed", None) is None:
        compared.append(("patients, which come from the seed", a.seed, b.seed))
    odd = next((what for what, here, there in compared if here != there), None)
    if odd is not None:
        raise ConfigError(
            f"{other.folder.path} differs from {first.folder.path} in its {odd}; an ensemble needs equal ones"
        )


def combined(members: Sequence[MemberRun]) -> Parts:
    """Return the part and site of every case in the ensemble; refuse a test case that another member has seen."""
    cases = dict.fromkeys(source for m in members for source in m.parts)
    return {source: _combined(source, [m for m in members if source in m.parts]) for source in cases}


def _combined(source: Source, members: Sequence[MemberRun]) -> tuple[str, SiteId]:
    parts = {m.parts[source][0]: m for m in members}
    sites = {m.parts[source][1]: m for m in members}
    seen = next((k for k in ("train", "validation") if k in parts), None)
    if "test" in parts and seen:
        raise ConfigError(
            f"the case {source[1]!r} of site {source[0]!r} is a test case of {parts['test'].folder.path}, and "
            f"{parts[seen].folder.path} has it as a {seen} case: an ensemble takes runs with the same test cases"
        )
    part = next(iter(parts)) if len(parts) == 1 else "train"
    if len(sites) > 1 and part != "train":  # a federation may deal out the training cases of every fold anew
        (one, a), (two, b), *_ = sites.items()
        raise ConfigError(
            f"the case {source[1]!r} belongs to site {one!r} in {a.folder.path} and to {two!r} in {b.folder.path}; an "
            "ensemble needs runs with the same sites"
        )
    return part, next(iter(sites))


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
