"""Make an ensemble of trainings of one study: a finished run folder itself, whose model is the ensemble.

If all members have one model for all hospitals, the ensemble is one model for all, too (and new hospitals can use it).
Otherwise every hospital has its own.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polysite import config, study
from polysite.algorithms import ALGORITHMS, find
from polysite.config import Study
from polysite.data.case import SPLITS
from polysite.data.split import SiteSplit, table
from polysite.engines.memory_store import to_host
from polysite.engines.phases import adopt
from polysite.engines.plan import Plan
from polysite.engines.record import RoundRecord, SiteRecord
from polysite.engines.rounds import Progress
from polysite.engines.run_folder import RunFolder
from polysite.engines.watch import Watch
from polysite.errors import ConfigError, RunError
from polysite.models.ensemble import Ensemble, Member, joined
from polysite.models.unet import UNet
from polysite.payload import Payload, SiteId
from polysite.report.runs import title
from polysite.study import Run, dealt_as_trained, models_of, open_finished
from polysite.study.engine import OpenedStudy
from polysite.study.sites import build_phases
from polysite.study.training import conducted
from polysite.tree import Tree, drop

ABOUT = "ensemble.json"
HEADS = ("decoder.supervision.*",)  # heads that do not predict


@dataclass(frozen=True)
class MemberRun:
    """A finished training as a member of an ensemble."""

    folder: RunFolder
    study: Study

    @classmethod
    def read(cls, run: Path | str) -> "MemberRun":
        """Read the folder of a finished training."""
        folder = open_finished(run)
        return cls(folder, config.parse(folder.config, where=str(folder.path / "config.toml")))

    @property
    def model(self) -> Member:
        """The network without heads that do not predict."""
        model = self.study.model
        if isinstance(model, Ensemble):
            raise ConfigError(f"{self.folder.path} is an ensemble already; name its members instead")
        return replace(model, deep_supervision=0) if isinstance(model, UNet) else model


def made_ensemble(runs: Sequence[Path | str], out: Path, watch: Watch = Watch()) -> Run:
    """Return the ensemble in a folder; make it if it is missing, and anew if it was interrupted.

    Nothing is trained in an ensemble, so an unfinished one has nothing to lose.

    Args:
        runs: Folders of finished, simulated runs of one study with different seeds and the same cases.
        out: The folder of the ensemble, which is then a finished run, evaluated on the test cases.
        watch: Observer of the progress.
    """
    made = RunFolder(out)
    if made.finished:
        return Run(made, made.result)
    if (out / ABOUT).exists():
        shutil.rmtree(out)
    if out.exists():
        raise RunError(f"{out} exists already; an ensemble never overwrites a run: choose another folder")
    members = [MemberRun.read(run) for run in runs]
    chosen, dealt = _study(members)
    wanted = sorted(s for s, splits in dealt.items() if any(splits[k] for k in SPLITS))
    found = [_served(member, wanted, watch) for member in members]
    sites = study.build_sites(chosen, dealt, watch)
    trees = {site: joined([models[site] for models, _ in found]) for site in wanted}
    shared = all(one for _, one in found)
    chosen = _held(chosen, dealt, shared)
    phases = build_phases(chosen, sites)
    first, names = phases[0].transport.lift(trees[wanted[0]]), phases[0].transport.names
    state = phases[0].algorithm.init(first, names)
    memories = {} if shared else {s: Payload(model=trees[s]) for s in names}
    about = {"members": [{"name": title(m.folder.path), "run": str(m.folder.path.resolve())} for m in members]}
    more = {ABOUT: json.dumps(about, indent=1) + "\n"}
    folder = RunFolder.create(out, config.dump(study.pinned(chosen)), chosen.seed, table(dealt), more=more)
    with folder.alone():  # as a run whose only round has ended
        record = RoundRecord(0, 0, _effort(members, names))
        for each in (r for m in members for r in m.folder.records()):
            record = record.with_traffic(each.bytes_down, each.bytes_up)
        folder.append(record)
        at = adopt(folder, phases[0], Progress(0, state, memories, versions=dict.fromkeys(names, 0)))
        line = f"ensemble of {', '.join(str(m.folder.path) for m in members)}"
        opened = OpenedStudy(phases, first, sites, [line])
        return conducted(chosen, dealt, opened, folder, at, watch, evaluate=True, until=None)


def _study(members: Sequence[MemberRun]) -> tuple[Study, Mapping[SiteId, SiteSplit]]:
    """Return the study of an ensemble, and its cases, which are those of every member."""
    first = members[0]
    odd = next((m for m in members if m.folder.split != first.folder.split), None)
    if odd is not None:
        raise ConfigError(f"{odd.folder.path} has other cases than {first.folder.path}; an ensemble needs equal ones")
    chosen = replace(
        first.study,
        model=Ensemble(tuple(m.model for m in members)),
        algorithm=find("fedavg", ALGORITHMS, "algorithm")(),
        run=Plan(rounds=1),
        then=(),
    )
    return chosen, study.deal_cases(chosen)


def _served(member: MemberRun, wanted: Sequence[SiteId], watch: Watch) -> tuple[dict[SiteId, Tree], bool]:
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


def _held(chosen: Study, dealt: Mapping[SiteId, SiteSplit], shared: bool) -> Study:
    """Return the study with the algorithm that holds the models: one for all hospitals, or one for each."""
    if shared:
        return chosen
    stranger = next((s for s, splits in sorted(dealt.items()) if not splits["train"]), None)
    if stranger is not None:
        raise ConfigError(
            f"{stranger!r} does not train, so it can use an ensemble only if all hospitals share one: train a study "
            "with one model for all"
        )
    return replace(chosen, algorithm=find("local", ALGORITHMS, "algorithm")())


def _effort(members: Sequence[MemberRun], names: Sequence[SiteId]) -> dict[SiteId, SiteRecord]:
    """Return the effort behind all members, by site."""
    none = dict.fromkeys(("steps", "lr_sum", "seconds"), 0)
    total: dict[str, dict[str, Any]] = {site: {**none} for site in names}
    for record in (r for m in members for r in m.folder.records()):
        for site, done in record.sites.items():
            sums = total.setdefault(site, {**none})
            for key in sums:
                sums[key] += getattr(done, key)
    return {site: SiteRecord(loss=None, **sums) for site, sums in sorted(total.items())}
