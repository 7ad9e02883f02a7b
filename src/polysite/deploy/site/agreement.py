"""Whether this hospital takes part in a study: its policy, its data, what the study takes, and studies like it.

A study that was agreed to is kept in the state folder; after a restart it is opened from there.
"""

import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from polysite import assessment, config, machine, plugins, study
from polysite.algorithms import names_of
from polysite.algorithms.base import Algorithm, Kind, facts, small_models, small_sums
from polysite.config import Study
from polysite.data.cache import Cache, place
from polysite.data.case import SPLITS, CaseRef
from polysite.data.files import Files
from polysite.data.layouts import LAYOUTS
from polysite.data.sources import Phantom, PhantomClasses, Source
from polysite.data.split import SiteSplit
from polysite.deploy.site.hospital import Hospital
from polysite.deploy.site.kept_split import keep_split
from polysite.deploy.site.limits import refuse_size
from polysite.deploy.site.masked_sums import MaskedSums
from polysite.deploy.site.policy import Intent, Refusal, SitePolicy, obey
from polysite.deploy.site.studies import Trace
from polysite.deploy.site.withdrawn import withdrawn_cases
from polysite.engines.host import HostPhase, SiteHost
from polysite.errors import ConfigError, DataError
from polysite.models.encoders import Bundled
from polysite.payload import SiteId
from polysite.storage import private_folder, write_file
from polysite.study.estimate import demand, device_memory
from polysite.training.torch_site import TorchSite


@dataclass
class Agreed:
    """A study that this hospital takes part in, with its cases prepared."""

    id: str
    study: Study  # with this hospital's data
    splits: SiteSplit
    volumes: SiteSplit  # volumes that were cut into slices, where the study has slices; else the same as the splits
    host: SiteHost
    sums: MaskedSums
    folder: Path


def agree(hospital: Hospital, id: str, text: str) -> Agreed:
    """Take part, if the policy allows everything that the study will ask and the data fit."""
    site, policy = hospital.site, hospital.policy
    with plugins.only(policy.digests):
        wanted = config.parse(text, where="the study")
    if any(phase.run.pooled for phase in config.phases(wanted)):
        raise Refusal("run.pooled would bring all scans to one place; no scan leaves this site")
    if isinstance(wanted.data, Files) and wanted.data.format not in ("auto", *LAYOUTS):
        raise Refusal("data.format names code of the coordinator's choice; the layout here is this site's own")
    if wanted.split.file:
        raise Refusal("split.file names a file of the coordinator's; the study must split by itself")
    if not isinstance(wanted.encoder, Bundled):
        raise Refusal("encoder.name names a file of the coordinator's; leave it out, for the one that is built in")
    refuse_size(wanted)
    folder = hospital.folder(id)
    new = not (folder / "study.toml").exists()
    try:
        local = replace(wanted, data=hospital.source(wanted.data), train=replace(wanted.train, device=site.device))
        _check_data(local.data, wanted.data)
        withdrawn = withdrawn_cases(site.state)
        cases = [case for case in _cases(local, site.name) if case.name not in withdrawn]
    except ConfigError as problem:  # of this hospital's own configuration: it may name files
        raise DataError(str(problem)) from problem
    _check_demand(hospital, local, len(cases), new)
    try:
        whole = local.split.apply({site.name: cases}, local.split.seed_of(local.seed))
        kept = keep_split(folder / "split.json", cases, whole[site.name], hospital.pseudonyms)
        volumes, splits = kept.splits, study.cut(local, {site.name: kept.splits})[site.name]
    except ConfigError as problem:
        raise DataError(str(problem)) from problem
    _check_study(local, len(volumes["train"]), splits, policy, hospital.now())
    trace = _trace(hospital, id, local, volumes, splits)
    if new:
        obey(_refuse_similar(hospital, trace))
    for inside in (folder, folder / "memory"):
        private_folder(inside)
    kept.write(folder / "split.json")
    if new:  # before any work: it counts as a study, however it ends
        write_file(folder / "study.toml", lambda p: p.write_text(text))
    if new and not isinstance(local.data, Phantom | PhantomClasses):
        hospital.studies.add(trace)
    if kept.changed:
        hospital.note(
            "its cases are not those with which it agreed to this study: every known case stays in its part of the "
            "split, and new ones train"
        )
    made = study.build_sites(local, {site.name: splits})[site.name]
    made.unpredictable = True  # the coordinator knows the seed
    sums = MaskedSums(folder, site, policy)
    return Agreed(id, local, splits, volumes, _host(site.name, local, made, volumes, sums), sums, folder)


def _host(name: SiteId, local: Study, site: TorchSite, volumes: SiteSplit, sums: MaskedSums) -> SiteHost:
    """Return what answers for this hospital in all phases of a study."""
    phases = {
        k: HostPhase(p.algorithm, site.under(p.train), tuple(p.run.outgoing), p.run.secure, p.train.private)
        for k, p in enumerate(config.phases(local))
    }

    def assessed() -> HostPhase:
        described: Any = assessment.assessed_sites(local, dealt={name: volumes}).known[name]
        described.unpredictable = True  # the coordinator knows the seed
        return HostPhase(cast(Algorithm[Any], local.assess), described)

    return SiteHost(name, phases, assessment=assessed, masks=sums)


def _check_demand(hospital: Hospital, local: Study, cases: int, new: bool) -> None:
    """Ask the policy about the memory and the disk space of a study, before anything is allocated."""
    free = shutil.disk_usage(hospital.site.state).free + Cache(place()).size if new else sys.maxsize
    _, device = device_memory(local)
    obey(hospital.policy.refuse_demand(demand(local, cases), machine.memory().total, device.total, free))


def _trace(hospital: Hospital, id: str, local: Study, volumes: SiteSplit, splits: SiteSplit) -> Trace:
    """Return what a study does with the cases here."""
    digests = {part: sorted(hospital.pseudonyms.digest(c.name) for c in volumes[part]) for part in SPLITS}
    every = sorted(d for part in SPLITS for d in digests[part])
    described = every if local.assess.cases == "all" else digests["train"]
    assessed = described if hospital.policy.may_assess(local.assess.private) else ()
    seen = [n for p in config.phases(local) if (n := _most_seen(p, len(splits["train"]))) is not None]
    train, seed = tuple(digests["train"]), local.seed
    return Trace(id, time.time(), train, tuple(assessed), seed, tuple(seen), _of_one(splits))


def _refuse_similar(hospital: Hospital, trace: Trace) -> str | None:
    """Return why a study that is too much like another is refused, or None."""
    days, fewest = hospital.policy.similar_days, hospital.policy.fewest
    if not hospital.studies.similar(trace, days, fewest):
        return None
    return (
        "this study and another one (or two phases of it) differ by so few training cases or steps that the "
        f"difference of their results would be about single cases: policy.toml says similar_days = {days:g} and "
        f"fewest = {fewest}"
    )


def _check_study(wanted: Study, cases: int, splits: SiteSplit, policy: SitePolicy, now: datetime) -> None:
    """Ask the policy about everything that the study will want; rounds are counted through all phases.

    The policy counts patients, not slices: as many slices as the largest volume has may be of one patient.
    """
    of_one, phases = _of_one(splits), config.phases(wanted)
    rounds = sum(phase.run.rounds for phase in phases)
    seen = -(-min(map(_fewest_seen, phases)) // of_one)
    if seen < policy.fewest:
        raise Refusal(
            f"one training of this study may see {seen} cases, too few behind 'model': policy.toml says fewest = "
            f"{policy.fewest}; a larger train.batch, more steps or whole epochs would do"
        )
    fewest = policy.fewest * of_one
    for phase in phases:
        obey(policy.refuse_open(phase.run.secure.on or not phase.algorithm.reply))
        obey(policy.refuse_without_noise(phase.train.private.on or not phase.algorithm.reply))
        sums = "" if phase.run.secure.on else small_sums(phase.algorithm, fewest)  # secure sums are over all hospitals
        obey(policy.refuse_small(sums, small_models(phase.algorithm, fewest)))
    for phase, name in ((p, name) for p in phases for name in names_of(p.algorithm)):
        intent = Intent(
            kind="hello",
            algorithm=name,
            round=rounds - 1,
            cases=cases,
            leaves=leaves_of(phase.algorithm),
            case_scores=facts(phase.algorithm).sends_scores,
        )
        obey(policy.refuse(intent, now))


def _of_one(splits: SiteSplit) -> int:
    """Return the most training slices of one volume; 1 if cases are volumes."""
    return max(Counter(case.source for case in splits["train"]).values(), default=1)


def _cases(local: Study, name: str) -> list[CaseRef]:
    """Return this hospital's cases. A folder of one site is this hospital, whatever the folder calls it."""
    sites = local.data.case_refs(local.seed)
    if name in sites:
        return list(sites[name])
    if len(sites) != 1:
        raise DataError(f"the data hold the sites {', '.join(sites)}; none is called {name!r}")
    (only,) = sites.values()
    return [replace(ref, site=name) for ref in only]


def _check_data(local: Source, wanted: Source) -> None:
    """Refuse data that are not what the study is about."""
    for what in ("task", "dims", "modality_names", "label_names"):
        here, there = getattr(local, what), getattr(wanted, what)
        if here != there:
            raise Refusal(
                f"the study's {what.replace('_', ' ')}: {there}; those of this site: {here}; its [data] can name them"
            )


def _most_seen(phase: Study, cases: int) -> int | None:
    """Return how many cases one training of a phase sees, with repetitions; None if nothing that was trained leaves."""
    train, (steps, epochs) = phase.train, _effort(phase)
    if not {"model", "update"} & set(phase.algorithm.reply.values()):
        return None
    return int(cases * epochs) if steps is None else -(-int(steps) * train.batch // train.patches)


def _fewest_seen(phase: Study) -> int:
    """Return how few cases may be behind a model that leaves, where the steps of a fit are counted."""
    algorithm, batch = phase.algorithm, -(-phase.train.batch // phase.train.patches)
    if not {"model", "update"} & set(algorithm.reply.values()):
        return sys.maxsize  # nothing that was trained leaves
    if facts(algorithm).single_step:
        return batch
    steps, _ = _effort(phase)
    return sys.maxsize if steps is None else int(steps) * batch


def _effort(phase: Study) -> tuple[int | None, int]:
    """Return the steps of a fit, None where it trains whole epochs, and the epochs."""
    steps, epochs = (getattr(phase.algorithm, name, None) for name in ("steps", "epochs"))
    steps = phase.train.steps if steps is None and epochs is None else steps
    return steps, phase.train.epochs if epochs is None else epochs


def leaves_of(algorithm: Any) -> dict[str, Kind]:
    """Return the fields that an algorithm may ask of a site, as far as its settings tell."""
    pooled = getattr(algorithm, "fit", "") == "pooled"
    return {name.rstrip("?") if pooled and kind == "cases" else name: kind for name, kind in algorithm.reply.items()}
