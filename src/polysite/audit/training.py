"""Attack the models that left the sites of a finished run: who was trained on, and what images can be rebuilt.

::

    FOLDER/
        index.html    results, in plain words first
        audit.json    every number
        figures/      as SVG, PDF and PNG

The auditor has the run folder and the data of all sites: a researcher with a simulated federation. The last rounds are
replayed (``engines/replay.py``), which gives what left the sites once more, reply by reply.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from polysite import config, tree
from polysite import study as studies
from polysite.algorithms import name_of
from polysite.algorithms.base import facts
from polysite.config import Study
from polysite.data.split import SiteSplit
from polysite.engines.phases import Phase, find_models
from polysite.engines.replay import Replayed, replay
from polysite.engines.reply_checks import kinds_of
from polysite.engines.run_folder import RunFolder, versions
from polysite.engines.secure.settings import Secure
from polysite.engines.watch import Watch
from polysite.errors import ConfigError, RunError
from polysite.payload import SiteId
from polysite.privacy import Private
from polysite.report import audit_page
from polysite.report.audit_page import Attacked, AttackedModels, Audit, Protections
from polysite.storage import vacant
from polysite.training.inversion import Effort, Inverter
from polysite.training.leaks import (
    Protection,
    Rebuilt,
    invert_patients,
    invert_reply,
    mean_scan,
    member_scores,
    membership_of,
    smallest_patch,
)
from polysite.training.network import device_of
from polysite.training.torch_site import TorchSite
from polysite.tree import Tree

SAME = 1e-4  # largest difference of a loss that a replay on another machine may have
SUPPOSED = Private("patient")  # noise of the row 'one patient, noise' if the run itself adds none


def is_run(path: Path | None) -> bool:
    """Return whether a path is the folder of a run."""
    return path is not None and (path / "config.toml").is_file() and (path / "rounds.jsonl").is_file()


def audit_run(
    run: Path | str,
    out: Path | str | None = None,
    *,
    effort: Effort = Effort(),
    images: bool = True,
    scans: bool = True,
    watch: Watch = Watch(),
) -> Audit[AttackedModels]:
    """Attack the models of a finished run and write the results into a folder.

    Args:
        run: The run folder.
        out: The new folder; one below audits/ by default.
        effort: Effort of the gradient inversion.
        images: Invert gradients, which takes most of the time.
        scans: Show slices of patients on the page.
        watch: Observer of the progress.
    """
    folder = studies.open_finished(run)
    target = vacant(Path(out) if out else RunFolder.fresh(Path("audits"), "audit"), "audit")
    chosen = config.parse(folder.config, where=str(folder.path / "config.toml"))
    if chosen.run.pooled:
        raise RunError(f"{folder.path} is centralised training: nothing left a hospital but the scans themselves")
    studies.refuse_ensemble(chosen)
    dealt = studies.dealt_as_trained(folder, chosen)
    sites = studies.build_sites(chosen, dealt, watch)
    bare = replace(chosen, run=replace(chosen.run, secure=Secure()))  # the same models, without masks
    phases, start = studies.build_phases(bare, sites), next(iter(sites.values())).start
    replayed = replay(folder, phases, start, chosen.seed, watch)
    attacked = _attack(folder, chosen, dealt, sites, phases, start, replayed, effort, images, watch)
    about = {
        "run": str(folder.path),
        "others": _others(dealt),
        "iterations": effort.iterations,
        "config": folder.config,
        "versions": versions(),
    }
    return audit_page.write(target, replace(attacked, scans=scans), about)


def _others(dealt: Mapping[str, SiteSplit]) -> str:
    """Return the split of the patients who were not trained on: test, or validation if there is none."""
    for split in ("test", "validation"):
        if any(splits[split] and splits["train"] for splits in dealt.values()):
            return split
    raise ConfigError("no hospital has test or validation cases beside its training cases; raise split.test")


def _attack(
    folder: RunFolder,
    chosen: Study,
    dealt: Mapping[str, SiteSplit],
    sites: Mapping[str, TorchSite],
    phases: Sequence[Phase],
    start: Tree,
    replayed: Replayed,
    effort: Effort,
    images: bool,
    watch: Watch,
) -> AttackedModels:
    others, done = _others(dealt), count(1)
    patients = {ref.name: ref.patient or "/".join(ref.source) for s in dealt.values() for k in s for ref in s[k]}
    sent, replied, weights = _models(replayed, start)
    mean = tree.mean(replied.values(), [weights[i] for i in replied])
    before = {i: [_sent(replayed.first.get(i), start)] for i in replied}
    protections = _protections(folder, chosen, dealt, replayed)
    plans = [
        ("single replies", "the reply of every hospital in the last round", not protections.secure, "the coordinator",
         replied, {i: [m for j, m in replied.items() if j != i] or [sent[i]] for i in replied}),
        ("sum", "the mean of these replies", True, "the coordinator and every hospital",
         dict.fromkeys(replied, mean), before),
    ]  # fmt: skip
    released = _released(folder, phases, sites)
    if released is not None:
        everybody = "everybody who gets the model"
        models = dict.fromkeys(replied, released)
        plans.append(("released model", "the model of the best round", True, everybody, models, before))
    total = len(plans) + 1 + 5 * images
    surfaces = []
    for name, words, seen, who, models, references in plans:
        watch.case(next(done), total, f"who was trained on, by {words}")
        found = membership_of(*member_scores(sites, models, references, patients, others))
        surfaces.append(Attacked(name, words, seen, found, who))
    watch.case(next(done), total, "the untrained network")
    control = membership_of(*member_scores(sites, dict.fromkeys(replied, start), {}, patients, others))
    inverted: list[Attacked[Rebuilt]] = []
    if images:
        for name, words, seen, rebuilt in _inversions(chosen, sites, sent, replied, mean, protections, effort, others):
            watch.case(next(done), total, f"images from {words}")
            inverted.append(Attacked(name, words, seen, rebuilt))
    return AttackedModels(tuple(surfaces), control, tuple(inverted), protections, _exactness(replayed))


def _models(replayed: Replayed, start: Tree) -> tuple[dict[SiteId, Tree], dict[SiteId, Tree], dict[SiteId, float]]:
    """Return the model that every site was sent and replied in the last round, filled up by the initial parameters, and
    the weight of its reply."""
    last, algorithm = replayed.last, replayed.phase.algorithm
    sent, replied, weights = dict[SiteId, Tree](), dict[SiteId, Tree](), dict[SiteId, float]()
    for site, reply in sorted(last.replies.items()):
        kinds = kinds_of(algorithm.reply, last.sent[site], reply.payload)
        fields = [name for name in sorted(reply.payload) if kinds.get(name) == "model"]
        if len(fields) != 1:
            raise RunError(
                f"{name_of(algorithm)} replies {len(fields)} models at {site!r}, and the audit attacks replies of one: "
                "audit a run of another algorithm, such as fedavg, on the same cases"
            )
        sent[site] = _sent(last.sent[site], start)
        replied[site] = {**sent[site], **reply.payload[fields[0]]}
        weights[site] = float(reply.payload.get("weight", 1.0))
    if not replied:
        raise RunError("no site replied in the last round, so there is nothing to attack")
    return sent, replied, weights


def _sent(payload: Any, start: Tree) -> Tree:
    """Return the model in a payload to a site, filled up by the initial parameters."""
    model = payload.get("model", {}) if payload is not None else {}
    return {**start, **{k: v for k, v in model.items() if k in start}}


def _released(folder: RunFolder, phases: Sequence[Phase], sites: Mapping[str, TorchSite]) -> Tree | None:
    """Return the model that all sites use in the end; None if each has its own, which stays there."""
    names = sorted(name for name, site in sites.items() if site.cases("train"))
    models = find_models(folder, phases, folder.result, names)
    shared = models.phase.transport.serve(models.round, models.payloads(names)).shared
    return dict(shared[0]) if shared and len(shared) == 1 else None


def _protections(folder: RunFolder, chosen: Study, dealt: Mapping[str, SiteSplit], replayed: Replayed) -> Protections:
    spent: dict[str, float] = {}
    for record in folder.records():
        spent |= {i: s.epsilon for i, s in record.sites.items() if s.epsilon is not None}
    private, phase = chosen.train.private, replayed.phase
    people = {i: len({r.patient or r.source for r in s["train"]}) for i, s in dealt.items() if s["train"]}
    unit = private.unit if private.on else ""
    return Protections(chosen.run.secure.on, unit, spent, private.delta, people, facts(phase.algorithm).needs == "sum")


def _inversions(
    chosen: Study,
    sites: Mapping[str, TorchSite],
    sent: Mapping[SiteId, Tree],
    replied: Mapping[SiteId, Tree],
    mean: Tree,
    protections: Protections,
    effort: Effort,
    others: str,
) -> Any:
    """Yield name, words, whether it left, and outcome of every inversion."""
    any_site, device = next(iter(sites.values())), device_of(chosen.train.device)
    inverter = Inverter(studies.build_module(chosen), any_site.loss, device)
    trained = {i: sites[i] for i in replied}
    divisor = int(getattr(chosen.model, "divisor", 1))
    small = mean_scan(trained, smallest_patch(chosen.train.patch, divisor), others)
    private = chosen.train.private if chosen.train.private.unit == "patient" else SUPPOSED
    at = next(iter(sent.values()))
    rows: list[tuple[str, str, Protection]] = [
        ("one patient", "the gradient of one patient in one step", "none"),
        ("one patient, sum", "the mean of such gradients, one of every hospital", "sum"),
        ("one patient, noise",
         f"such a gradient with clip {private.clip:g} and noise {private.noise:g}", "noise"),
    ]  # fmt: skip
    for name, words, protection in rows:
        rebuilt = invert_patients(inverter, trained, at, small, effort, protection, private, chosen.seed)
        yield name, words, False, rebuilt
    whole = mean_scan(trained, chosen.train.patch, others)
    few = min(replied, key=lambda i: (protections.patients.get(i, 0), i))
    reply: Rebuilt = invert_reply(inverter, [sites[few]], sent[few], replied[few], whole, effort)
    yield "reply", f"the reply of {few}, which has the fewest training patients", not protections.secure, reply
    total = invert_reply(inverter, [sites[i] for i in replied], at, mean, whole, effort)
    yield "sum", "the mean of all replies", True, total


def _exactness(replayed: Replayed) -> str:
    rounds = f"Rounds up to {replayed.last.index + 1} were replayed from a checkpoint"
    if replayed.difference is None:
        return f"{rounds}; the run has no losses to compare them with."
    if replayed.difference == 0:
        return f"{rounds}; all their losses are those of the run, so the replies are what left the sites."
    alike = "nearly those" if replayed.difference <= SAME else "NOT those"
    return (
        f"{rounds}; their losses are {alike} of the run (largest difference {replayed.difference:.1e}): another "
        "machine or other versions round differently."
    )
