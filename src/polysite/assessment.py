"""From a study to a finished assessment: ask every hospital once, analyse the replies, write the folder."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

from polysite import config, privacy
from polysite.algorithms.base import Algorithm
from polysite.config import Study
from polysite.data.cache import Cache, place
from polysite.data.case import SPLITS
from polysite.data.files import Files
from polysite.data.split import SiteSplit
from polysite.engines.phase_sites import PhaseSites
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.run_folder import RunFolder, versions
from polysite.engines.secure.settings import Secure
from polysite.engines.simulator import Simulator
from polysite.engines.watch import Watch
from polysite.errors import ConfigError, RunError
from polysite.foreign import parse_json
from polysite.heterogeneity.analysis import analyse, random_case_angles
from polysite.heterogeneity.assessment import Assessment
from polysite.heterogeneity.bounds import INTENSITY
from polysite.heterogeneity.verdict import Verdict, judge
from polysite.models.encoders import Embedder
from polysite.payload import SiteId, natural
from polysite.report import assess_page
from polysite.site import AssessedSite, Site
from polysite.storage import draft_folder, vacant
from polysite.study import deal_volumes, pinned
from polysite.training.assessed_site import TorchAssessedSite
from polysite.training.network import device_of

UNPROTECTED = (
    "a distance between two hospitals is no sum, so the statistics of an assessment would leave without the masks "
    "(run.secure) or the noise (train.private) of this study: set assess.private.epsilon, so that sums under noise "
    "leave, or assess the hospitals in a study of its own, if their policies allow that"
)


@dataclass(frozen=True)
class AssessmentRun:
    """A finished assessment and its folder."""

    folder: Path
    assessment: Assessment
    verdict: Verdict


def assess(study: Study, out: Path | str | None = None, watch: Watch = Watch()) -> AssessmentRun:
    """Measure how the hospitals of a study differ, and propose strategies as studies that can be trained.

    Args:
        study: The study; its data, preparation, encoder and ``[assess]`` settings count.
        out: A new folder; by default one below ``assessments/``.
        watch: Observer of the progress.
    """
    path = vacant(Path(out) if out else RunFolder.fresh(Path("assessments"), "assess"), "assessment")
    dealt = deal_volumes(study)
    engine = assessed_sites(study, watch)
    unseen = any(not splits["train"] and any(splits.values()) for splits in dealt.values())

    sizes = {i: site.size for i, site in engine.known.items()}
    return run_assessment(study, engine, sizes, unseen, path, watch)


def is_unprotected(study: Study) -> bool:
    """Return whether an assessment would leave without the masks or the noise that a study promises."""
    return (study.run.secure.on or study.train.private.on) and not study.assess.private.on


def run_assessment(
    study: Study,
    engine: PhaseSites,
    sizes: Mapping[str, int],
    unseen: bool,
    path: Path,
    watch: Watch = Watch(),
) -> AssessmentRun:
    """Run the exchange on any engine and write the assessment folder.

    Args:
        study: The study; its ``[assess]`` settings and encoder count.
        engine: The sites.
        sizes: Number of cases of every site.
        unseen: Whether models will serve sites that do not train; strategies with several models are then left out.
        path: The new folder.
        watch: Observer of the progress.
    """
    if study.assess.private.on:
        privacy.require()
    elif study.run.secure.on:
        raise ConfigError(UNPROTECTED)
    large = sum(size >= study.assess.fewest for size in sizes.values())
    if isinstance(study.assess.take, int) and study.assess.take > max(large - 2, 0):
        raise ConfigError(
            f"assess.take = {study.assess.take}, but of {large} sites that are compared one stays outside"
        )
    algorithm = cast(Algorithm[Any], study.assess)
    (only,) = run_rounds(algorithm, engine, {}, Plan(rounds=1), study.seed, watch=watch)
    found = analyse(only.state.replies, study.assess, study.encoder.words)
    sent = {site: (only.replies[site].nbytes, "what was refused") for site in only.refused}
    assessment = replace(found, refused={**only.refused, **found.refused}, left={**found.left, **sent})
    if engine.simulated and study.assess.projections and not found.noise:  # single cases do not leave real hospitals
        hosts = cast(Mapping[SiteId, AssessedSite], engine.known)
        vectors = {i: study.assess.vectors(hosts[i].features("embedding")["embedding"]) for i in found.sites}
        assessment = replace(assessment, case_angles=random_case_angles(vectors, study.seed))
    verdict = judge(assessment, modalities_can_change=isinstance(study.data, Files), unseen=unseen)
    base = _allowing(pinned(replace(study, run=replace(study.run, pooled=False))), assessment)
    changed = {file: changes for s in verdict.strategies for file, changes in s.files.items()}
    studies = {file: _strategy(base, changes) for file, changes in changed.items()}
    _publish(path, assessment, verdict, studies, {**versions(), "seed": study.seed})
    return AssessmentRun(path, assessment, verdict)


def _strategy(base: Study, changes: Mapping[str, Any]) -> str:
    """Return the study of a strategy as TOML; one that needs the reply of each hospital is without secure sums."""
    try:
        return config.dump(config.vary(base, changes), notes=True)
    except ConfigError:
        if not base.run.secure.on:
            raise
    open_run = replace(base.run, secure=Secure())
    text = config.dump(config.vary(replace(base, run=open_run), changes), notes=True)
    return f"# this strategy needs the reply of each hospital, so it is without secure sums (run.secure)\n{text}"


def _publish(
    path: Path, assessment: Assessment, verdict: Verdict, studies: Mapping[str, str], about: Mapping[str, Any]
) -> None:
    """Write the folder: the page with its figures, all numbers, and a study for every strategy."""
    numbers = {**assessment.plain(), "verdict": asdict(verdict), "versions": dict(about)}
    with draft_folder(path, "assessment") as draft:
        (draft / "strategies").mkdir()
        for name, text in studies.items():
            (draft / "strategies" / name).write_text(text, encoding="utf-8")
        (draft / "assessment.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        (draft / "distances.csv").write_text(assessment.table(), encoding="utf-8")
        release = assessment.settings.release
        if release:  # by site, whether or not its reply could be used
            paid = {site: asdict(release) for site in natural(assessment.left)}
            (draft / "privacy.json").write_text(json.dumps(paid, indent=1) + "\n", encoding="utf-8")
        assess_page.write(draft, assessment, verdict, about)


def read_verdict(folder: Path) -> Verdict:
    """Return the recommendations of a finished assessment."""
    return Verdict.of(read_part(folder, "verdict"))


def read_part(folder: Path, part: str) -> dict[str, Any]:
    """Return one part of ``assessment.json``; RunError if the file is damaged."""
    try:
        found = parse_json((folder / "assessment.json").read_bytes())[part]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as problem:
        raise RunError(f"{folder} is no assessment that can be read: {problem!r}") from problem
    if not isinstance(found, dict):
        raise RunError(f"{folder} is no assessment that can be read: its {part} is a {type(found).__name__}")
    return found


def assessed_sites(study: Study, watch: Watch = Watch(), dealt: Mapping[str, SiteSplit] | None = None) -> Simulator:
    """Return the simulated hospitals, ready to describe their cases. If the study has slices, these are whole volumes
    (also in ``dealt``), since slices of a patient are not independent. Missing modalities and empty labels are allowed:
    they are findings, not errors."""
    study = config.whole(study)
    if isinstance(study.data, Files):
        study = replace(study, data=replace(study.data, allow=("missing", "empty")))
    source, dealt = study.data, dealt or deal_volumes(study)
    described = SPLITS if study.assess.cases == "all" else SPLITS[:1]
    chosen = {site: [case for k in described for case in splits[k]] for site, splits in dealt.items()}
    embedder = None
    if study.assess.projections:
        embedder = Embedder(study.encoder, device_of(study.train.device), positions=study.assess.positions)
    total, done, cache = sum(map(len, chosen.values())), count(1), Cache(place())

    def step(case: str) -> None:
        watch.case(next(done), total, case)

    about = source.modality_names, source.label_names, source.dims, source.task == "classification"
    sites = {
        s: TorchAssessedSite(s, p, *about, study.prepare, embedder, cache, step, study.seed)
        for s, p in chosen.items()
        if p
    }
    # the same exchange as in training, with sites that offer less
    algorithm, hosts = cast(Algorithm[Any], study.assess), cast(Mapping[str, Site], sites)
    return Simulator(algorithm, hosts, wire=study.run.wire)


def _allowing(study: Study, assessment: Assessment) -> Study:
    """Return the study with ``data.allow`` extended by what the assessment found: missing modalities, empty labels."""
    if not isinstance(study.data, Files):
        return study
    missing = any(any(q.absent.values()) for q in assessment.quantities.values() if q.kind == INTENSITY)
    met = {"missing": missing, "empty": any(assessment.unlabelled.values())}
    allow = tuple(dict.fromkeys([*study.data.allow, *(word for word, true in met.items() if true)]))
    return replace(study, data=replace(study.data, allow=allow))  # type: ignore[arg-type]
