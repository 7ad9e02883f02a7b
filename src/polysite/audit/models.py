"""Attack the models that left the sites of a finished run: who was trained on, and what images can be rebuilt.

The auditor has the run folder and the data of all sites: a researcher with a simulated federation. The last rounds are
replayed (``replay.py``), which gives what left the sites once more, reply by reply.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import numpy as np

from polysite import config
from polysite import study as studies
from polysite.audit import findings
from polysite.audit.findings import OF_PATIENTS, Audit, Estimate, Finding, Row, picture
from polysite.audit.inversion import Inverter, Match, Sites, invert_patients, invert_reply, mean_scan, smallest_patch
from polysite.audit.replay import Left, replay
from polysite.config import Study
from polysite.engines.run_folder import RunFolder, versions
from polysite.engines.watch import Watch
from polysite.errors import DataError, RunError
from polysite.metrics.membership import Auc, Group, area
from polysite.privacy import Private
from polysite.report import protections, runs
from polysite.report.drawing import pictures
from polysite.report.page import Section
from polysite.storage import vacant
from polysite.training.network import device_of
from polysite.training.torch_site import TorchSite
from polysite.tree import Tree

SAME = 1e-4  # largest difference of a loss that a replay on another machine may have
MAX_REFERENCES = 4  # models that losses are calibrated by
PREVENTED = (
    "masked = true refuses a run without secure sums (run.secure), under which the coordinator has only the row 'mean "
    "of the replies'. epsilon = 8, or any other number, refuses one without noise (train.private), and limits what all "
    "studies together spend. fewest = 2 or more prevents what the rows 'one patient' show: the gradient of a single "
    "patient does not leave."
)
SUPPOSED = Private("patient")  # noise of the row 'one patient, noise' if the run itself adds none


def is_run(path: Path | None) -> bool:
    """Return whether a path is the folder of a run."""
    return path is not None and (path / "config.toml").is_file() and (path / "rounds.jsonl").is_file()


def audit_run(
    run: Path | str,
    out: Path | str | None = None,
    *,
    iterations: int = 300,
    scans: bool = True,
    watch: Watch = Watch(),
) -> Audit:
    """Attack the models of a finished run and write the results into a folder.

    Args:
        run: The run folder.
        out: The new folder; one below audits/ by default.
        iterations: Steps of the search for an image, which take most of the time; 0 leaves out gradient inversion.
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
    patients = {ref.name: ref.patient or "/".join(ref.source) for s in dealt.values() for k in s for ref in s[k]}
    left = replay(folder, chosen, sites, watch)
    done, total = count(1), 3 + 4 * (iterations > 0)

    def step(words: str) -> None:
        watch.case(next(done), total, words)

    found = [_members(chosen, sites, patients, left, step)]
    if iterations:
        found.append(_images(chosen, {i: sites[i] for i in left.replied}, left, iterations, scans, step))
    about = {"run": str(folder.path), "iterations": iterations}
    about |= {"config": folder.config, "versions": versions()}
    exact = "the run has no losses to compare them with"
    if left.difference is not None:
        alike = "those" if left.difference <= SAME else "NOT those"
        exact = f"their losses are {alike} of the run (largest difference {left.difference:.1e})"
    limits = [
        f"Rounds up to {left.rounds} were replayed from a checkpoint; {exact}.",
        "An attack that fails is no proof that none succeeds: with shadow models, more rounds, other priors or longer "
        "searches an attacker may do better. Intervals are over patients, not over trainings.",
    ]
    title = "What an attacker can learn from the models of a run"
    return findings.write(target, title, found, limits, about, [_prevented(folder)])


# Who was trained on?


def _members(
    study: Study, sites: Sites, patients: Mapping[str, str], left: Left, step: Callable[[str], None]
) -> Finding:
    """Return whether training patients are told from others."""
    alone = {i: [m for j, m in left.replied.items() if j != i] or [left.sent[i]] for i in left.replied}
    before = {i: [model] for i, model in left.before.items()}
    who = "nobody: secure sums were on" if study.run.secure.on else "the coordinator"
    attacks = [
        ("single replies", who, left.replied, alone),
        ("mean of the replies", "the coordinator and every hospital", dict.fromkeys(left.replied, left.mean), before),
        ("untrained network", "a control, which has seen no patient", dict.fromkeys(left.replied, left.start), {}),
    ]
    whole, single = list[Row](), list[Row]()
    for name, has, models, references in attacks:
        step(f"who was trained on, by the {name}")
        scores = member_scores(sites, models, references, patients)
        whole.append(_row(name, has, area(list(scores.values()))))
        if models is left.replied:
            large = {site: groups for site, groups in scores.items() if min(map(len, groups)) >= 2}
            single = [_row(f"reply of {site}", has, area([groups])) for site, groups in large.items()]
    worst = max(whole[1:2] if study.run.secure.on else whole[:2], key=lambda row: row.estimate.value)
    verdict = "are recognised" if worst.leaks else "are not recognised significantly better than by guessing"
    answer = (
        f"Training patients {verdict}: the largest AUC is {worst.estimate.words}, by the {worst.name} of the last "
        "round (0.5 is guessing, 1 certainty)."
    )
    method = (
        "The attacker has scans and outlines of patients, the network and its settings, and the model of the row; it "
        "does not know who was trained on, and has no models of its own making. It ranks patients by their loss under "
        "the model: training patients against test patients of the same hospital, who are drawn alike. From that loss "
        "it subtracts the one under models that have not seen the patient in this round (the replies of other "
        "hospitals), or have seen the patient less (an earlier model).",
    )
    note = (
        "Area under the ROC curve: the probability that a training patient ranks above another of the same hospital; "
        "0.5 is guessing, 1 certainty. The interval is Newcombe's. Hospitals with fewer than two patients of either "
        "kind have no row, and single hospitals have wide intervals. The untrained network shows chance in the split."
    )
    rows = (*whole, *single)
    return Finding("members", "Are training patients recognised?", answer, "AUC", "who had it", rows, note, method)


def member_scores(
    sites: Sites,
    models: Mapping[str, Tree],
    references: Mapping[str, Sequence[Tree]],
    patients: Mapping[str, str],
) -> dict[str, Group]:
    """Return the scores of the training patients of every hospital, and of its test patients.

    A score is the loss under reference models less the loss under the model that the attacker has: models that have not
    seen the patient in this round, or have seen the patient less. Without any it is the loss alone.

    Args:
        sites: The hospitals with their cases.
        models: The model that the attacker has of every hospital, or the common one.
        references: Models to calibrate by, of every hospital; none for an attack by the loss alone.
        patients: Patient of every case; a patient's loss is the mean over the cases.
    """
    scores = dict[str, Group]()
    for name, model in sorted(models.items()):
        site = sites[name]
        if not (site.cases("train") and site.cases("test")):
            continue
        own = _losses(site, model, patients)
        each = [_losses(site, r, patients) for r in references.get(name, ())[:MAX_REFERENCES]]
        usual = [np.mean([e[k] for e in each], axis=0) if each else 0.0 for k in (0, 1)]
        scores[name] = usual[0] - own[0], usual[1] - own[1]
    if not scores:
        raise DataError("no hospital has training cases and test cases to tell apart; raise split.test")
    return scores


def _losses(site: TorchSite, model: Tree, patients: Mapping[str, str]) -> Group:
    """Return the mean loss of every training patient, and of every other one."""

    def of(split: str) -> np.ndarray:
        found: dict[str, list[float]] = {}
        for case, score in site.score(site.lift(model), site.cases(split)).items():
            found.setdefault(patients.get(case, case), []).append(score.loss)
        return np.array([np.mean(found[patient]) for patient in sorted(found)])

    return of("train"), of("test")


def _row(name: str, who: str, found: Auc) -> Row:
    """Return the area of an attack, beside who had the model and the numbers of patients."""
    words = f"{who} ({found.members} trained on, {found.others} others)"
    return Row(name, words, Estimate(found.value, found.low, found.high), 0.5, found.succeeds)


# Are images rebuilt?


def _images(
    study: Study, sites: Sites, left: Left, iterations: int, scans: bool, step: Callable[[str], None]
) -> Finding:
    """Return what gradient inversion rebuilt."""
    rows, images = list[Row](), []
    for name, words, found in _inversions(study, sites, left, iterations):
        errors, usual = (np.array([getattr(match, of) for match in found]) for of in ("error", "usual"))
        rows.append(Row(name, words, Estimate.ratio(errors, usual), 1.0, False))
        shown = {"trained on": found[0].original, "guess": found[0].guess, "rebuilt": found[0].rebuilt}
        images.append((name, {title: _slice(image[0].numpy()) for title, image in shown.items()}))
        step(f"images from {words}")
    alone, together, noisy, reply = (row.estimate.value for row in rows)
    answer = (
        f"From the reply of a hospital, images were rebuilt with {reply:.2f} times the error of guessing the mean scan "
        f"(1: nothing was rebuilt, 0: a copy). From a single step on one patient, the worst case, it is {alone:.2f}; "
        f"in a sum over the hospitals {together:.2f}, and under noise {noisy:.2f}."
    )
    method = (
        "The attacker knows the network, the model that the hospital was sent, what came back, the outlines of as many "
        "patients as it rebuilds, and other scans (the test cases), whose mean is its first guess. It searches for "
        f"images whose gradient has the direction of what came back (Geiping et al. 2020), for {iterations} steps.",
        "The rows 'one patient' do not show what left in this run but what could leave if a hospital trained one step "
        "on one patient: they show that the attack works where there is something to find, and what prevents it.",
    )
    note = (
        "Mean squared error between a rebuilt image and the training image that it resembles most, relative to that of "
        "the mean scan: 1 is nothing learnt, 0 a copy. How far the attacker trusts its search is chosen afterwards in "
        "its favour, so the ratio is at most 1. The interval is over so few images that it says little, and so no row "
        "is marked."
    )
    title = "Images and what was rebuilt of them"
    caption = f"Middle slices of the first modality. {OF_PATIENTS}"
    drawn = (picture(pictures(images, 1.9, 1.5), "rebuilt", title, caption),) if scans else ()
    return Finding("images", "Are images rebuilt?", answer, "error ratio", "of what", tuple(rows), note, method, drawn)


def _inversions(study: Study, sites: Sites, left: Left, iterations: int) -> Iterator[tuple[str, str, list[Match]]]:
    """Yield name, words and outcome of every inversion."""
    loss = next(iter(sites.values())).loss
    inverter = Inverter(studies.build_module(study), loss, device_of(study.train.device), iterations)
    patch = smallest_patch(study.train.patch, int(getattr(study.model, "divisor", 1)))
    small = mean_scan(sites, patch)
    private = study.train.private if study.train.private.unit == "patient" else SUPPOSED
    inverter.at(next(iter(left.sent.values())))
    noise = f"such a gradient with clip {private.clip:g} and noise {private.noise:g}: what train.private does"
    yield "one patient", "the gradient of one patient in one step", invert_patients(inverter, sites, small)
    together = invert_patients(inverter, sites, small, "sum")
    yield "one patient, sum", "the mean of such gradients, one of every hospital: what run.secure does", together
    yield "one patient, noise", noise, invert_patients(inverter, sites, small, "noise", private, study.seed)
    few = min(left.replied, key=lambda i: (sites[i].size, i))
    whole = mean_scan(sites, study.train.patch)
    reply = invert_reply(inverter, [sites[few]], left.sent[few], left.replied[few], whole)
    yield "reply", f"the reply of {few}, which has the fewest training cases", reply


def _slice(volume: np.ndarray) -> np.ndarray:
    """Return the middle slice of a volume along its last axis, or an image as it is."""
    return volume if volume.ndim == 2 else volume[..., volume.shape[-1] // 2]


def _prevented(folder: RunFolder) -> Section:
    """Return what protected the hospitals of the run, and what a policy prevents."""
    methods = runs.methods([runs.read(folder.path)])
    grids = [grid for grid in (protections.table(methods), protections.audience(methods)) if grid.lines]
    bare = () if grids else ("Secure sums were off, and no noise was added (no differential privacy).",)
    return Section("prevented", "What a hospital's policy prevents", (PREVENTED, *bare, *grids))
