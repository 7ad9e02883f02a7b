"""Make an ensemble of finished runs of one study: a finished run folder itself, whose model is the ensemble.

If all members have one model for all hospitals, the ensemble is one model for all, too (and new hospitals can use it).
Otherwise every hospital has its own.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from polysite import config, study
from polysite.algorithms import ALGORITHMS, find
from polysite.config import Study
from polysite.data.case import SPLITS
from polysite.data.parts import parts_of
from polysite.data.split import PARTITION, SPLIT, SUBJECT, SiteSplit, Split, table
from polysite.engines.phases import adopt
from polysite.engines.plan import Plan
from polysite.engines.record import RoundRecord, SiteRecord
from polysite.engines.rounds import Progress
from polysite.engines.run_folder import RunFolder
from polysite.engines.watch import Watch
from polysite.ensembles.members import MemberRun, Parts, combined, read, served
from polysite.errors import ConfigError, RunError
from polysite.models.ensemble import Ensemble, joined
from polysite.payload import Payload, SiteId
from polysite.spreadsheets import Writer
from polysite.study import OpenedStudy, Run

ABOUT = "ensemble.json"


def made_ensemble(runs: Sequence[Path | str], out: Path, watch: Watch = Watch()) -> Run:
    """Return the ensemble in a folder; make it if it is missing, and anew if it was interrupted.

    Nothing is trained in an ensemble, so an unfinished one has nothing to lose.

    Args:
        runs: Folders of finished, simulated runs of one study with different seeds or inner folds.
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
    members = [read(run) for run in runs]
    chosen, dealt = _study(members, out)
    wanted = sorted(s for s, splits in dealt.items() if any(splits[k] for k in SPLITS))
    found = [served(member, wanted, watch) for member in members]
    sites = study.build_sites(chosen, dealt, watch)
    trees = {site: joined([models[site] for models, _ in found]) for site in wanted}
    shared = all(one for _, one in found)
    chosen = _held(chosen, dealt, shared)
    phases = study.build_phases(chosen, sites)
    first, names = phases[0].transport.lift(trees[wanted[0]]), phases[0].transport.names
    state = phases[0].algorithm.init(first, names)
    memories = {} if shared else {s: Payload(model=trees[s]) for s in names}
    about = {"members": [{"name": m.name, "run": str(m.folder.path.resolve())} for m in members]}
    more = {ABOUT: json.dumps(about, indent=1) + "\n"}
    folder = RunFolder.create(out, config.dump(study.pinned(chosen)), chosen.seed, table(dealt), more=more)
    with folder.alone():  # as a run whose only round has ended
        folder.append(RoundRecord(0, 0, _effort(members, names)))
        at = adopt(folder, phases[0], Progress(0, state, memories, versions=dict.fromkeys(names, 0)))
        line = f"ensemble of {', '.join(str(m.folder.path) for m in members)}"
        opened = OpenedStudy(phases, first, sites, [line])
        return study.conducted(chosen, dealt, opened, folder, at, watch, evaluate=True, until=None)


def _study(members: Sequence[MemberRun], out: Path) -> tuple[Study, Mapping[SiteId, SiteSplit]]:
    """Return the study of an ensemble, and its cases."""
    first = members[0].study
    parts = combined(members)
    if not any(part != "train" for part, _ in parts.values()):
        raise ConfigError("every case trained some member, so the ensemble has neither test nor validation cases")
    chosen = replace(
        first,
        model=Ensemble(tuple(m.model for m in members)),
        algorithm=find("fedavg", ALGORITHMS, "algorithm")(),
        run=Plan(rounds=1),
        then=(),
    )
    if all(m.study.split == first.split and m.parts == parts for m in members) and not first.split.inner:
        return chosen, study.deal_cases(chosen)
    fixed = Split(validation=0.0, seed=first.split.seed_of(first.seed), file=str(out.resolve() / "split.csv"))
    with TemporaryDirectory() as place:  # the run folder is made when nothing can be refused any more
        file = Path(place) / "split.csv"
        _write(file, parts)
        dealt = study.deal_cases(replace(chosen, split=replace(fixed, file=str(file))))
    where = {case.source: site for site, splits in dealt.items() for k in SPLITS[1:] for case in splits[k]}
    wanted = {source: site for source, (part, site) in parts.items() if part != "train"}
    if parts_of(dealt) != {source: part for source, (part, _) in parts.items()} or where != wanted:
        raise ConfigError("the federation deals out the cases by their parts, so that an ensemble cannot keep them")
    return replace(chosen, split=fixed), dealt


def _write(file: Path, parts: Parts) -> None:
    with file.open("w", newline="", encoding="utf-8") as text:
        rows = Writer(text, "\r\n")
        rows.writerow([SUBJECT, PARTITION, SPLIT])
        rows.writerows([name, origin, part] for (origin, name), (part, _) in parts.items())


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
    """Return the effort and traffic behind all members, by site."""
    none = dict.fromkeys(("steps", "lr_sum", "seconds", "bytes_down", "bytes_up"), 0)
    total: dict[str, dict[str, Any]] = {site: {**none} for site in names}
    for record in (r for m in members for r in m.folder.records()):
        for site, done in record.sites.items():
            sums = total.setdefault(site, {**none})
            for key in sums:
                sums[key] += getattr(done, key)
            sums["bytes_down"] += record.handed.get(site, 0)
    return {site: SiteRecord(loss=None, **sums) for site, sums in sorted(total.items())}
