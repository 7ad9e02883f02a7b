"""Attacks on models and updates that left hospitals: who was trained on (``metrics/membership.py``), and what images
can be rebuilt (``inversion.py``)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from polysite.errors import DataError
from polysite.metrics.membership import Auc, Group, area
from polysite.privacy import Private
from polysite.training.inversion import Effort, Inverter, Match, best_match, mean_of, middle, under_noise
from polysite.training.torch_site import TorchSite
from polysite.tree import Tree

LEAST_SIDE = 8  # voxels of a side of the patch of one patient, at least
MAX_REFERENCES = 4  # models that losses are calibrated by

Sites = Mapping[str, TorchSite]
Patients = Mapping[str, str]  # case -> patient
Protection = Literal["none", "sum", "noise"]


@dataclass(frozen=True)
class Membership:
    """Outcome of membership inference with one model of every hospital.

    Args:
        loss: Area of the attack by the loss.
        calibrated: Area of the attack by the loss less that of reference models; None without any.
        sites: Area of the attack by the loss at every hospital with two patients of either kind.
        sites_calibrated: The same for the calibrated loss.
    """

    loss: Auc
    calibrated: Auc | None = None
    sites: Mapping[str, Auc] = field(default_factory=dict)
    sites_calibrated: Mapping[str, Auc] = field(default_factory=dict)

    @property
    def strongest(self) -> Auc:
        """The attack with the larger area, chosen afterwards: in favour of the attacker."""
        return max((a for a in (self.loss, self.calibrated) if a), key=lambda a: a.value)


def member_scores(
    sites: Sites,
    models: Mapping[str, Tree],
    references: Mapping[str, Sequence[Tree]],
    patients: Patients,
    others: str = "test",
) -> tuple[dict[str, Group], dict[str, Group]]:
    """Return the scores of the patients of every hospital, by the loss and by the calibrated loss: trained on, others.

    Args:
        sites: The hospitals with their cases.
        models: The model that the attacker has of every hospital, or the common one.
        references: Models to calibrate by, of every hospital; none for an attack by the loss alone.
        patients: Patient of every case; a patient's loss is the mean over the cases.
        others: The split of the patients that were not trained on.
    """
    plain, calibrated = dict[str, Group](), dict[str, Group]()
    for name, model in sorted(models.items()):
        site = sites[name]
        if not (site.cases("train") and site.cases(others)):
            continue
        own = _losses(site, model, patients, others)
        plain[name] = -own[0], -own[1]
        if references.get(name):
            each = [_losses(site, r, patients, others) for r in references[name][:MAX_REFERENCES]]
            usual = [np.mean([e[k] for e in each], axis=0) for k in (0, 1)]
            calibrated[name] = usual[0] - own[0], usual[1] - own[1]
    if not plain:
        raise DataError(f"no hospital has training cases and {others} cases to tell apart; raise split.test")
    return plain, calibrated


def membership_of(plain: Mapping[str, Group], calibrated: Mapping[str, Group]) -> Membership:
    """Return the outcome of ranking patients by these scores."""
    whole = area(list(calibrated.values())) if calibrated else None
    return Membership(area(list(plain.values())), whole, _by_site(plain), _by_site(calibrated))


def _losses(site: TorchSite, model: Tree, patients: Patients, others: str) -> Group:
    """Return the mean loss of every training patient, and of every other one."""

    def of(split: str) -> np.ndarray:
        found: dict[str, list[float]] = {}
        for case, score in site.score(site.lift(model), site.cases(split)).items():
            found.setdefault(patients.get(case, case), []).append(score.loss)
        return np.array([np.mean(found[patient]) for patient in sorted(found)])

    return of("train"), of(others)


def _by_site(groups: Mapping[str, Group]) -> dict[str, Auc]:
    return {name: area([g]) for name, g in groups.items() if min(map(len, g)) >= 2}


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """Outcome of a gradient inversion.

    Args:
        matches: Every rebuilt image beside the training image that it resembles most.
        apart: How far the direction of the gradient of the rebuilt images is from the target: 0 same, 1 at right
            angles. Mean over the attacks.
        images: The images that were trained on, the guess, and the rebuilt ones, each (image, modality, *space).
    """

    matches: tuple[Match, ...]
    apart: float
    images: Mapping[str, np.ndarray]

    @property
    def ratio(self) -> float:
        """Error after the best scaling, relative to that of the guess: 1 nothing was learnt, 0 a copy."""
        return self._relative([m.scaled for m in self.matches])

    @property
    def plain_ratio(self) -> float:
        """Error as rebuilt, relative to that of the guess: above 1, guessing is better."""
        return self._relative([m.error for m in self.matches])

    def _relative(self, errors: Sequence[float]) -> float:
        return float(sum(errors) / max(sum(m.guess for m in self.matches), 1e-30))


def mean_scan(sites: Sites, patch: Sequence[int], split: str = "test") -> torch.Tensor:
    """Return the mean of the middle patches of scans outside training: what the attacker guesses first."""
    shown = [middle(site.volume(n)[0].float(), patch) for site in sites.values() for n in site.cases(split)]
    return torch.stack(shown).mean(0).cpu()


def smallest_patch(patch: Sequence[int], divisor: int) -> list[int]:
    """Return the patch of one patient: the smallest that the network takes, and no larger than in training.

    A small patch is the worst case: few voxels are behind many numbers of a gradient.

    >>> smallest_patch([32, 32, 4], 4), smallest_patch([32, 32], 16)
    ([8, 8, 4], [16, 16])
    """
    return [min(side, -(-LEAST_SIDE // divisor) * divisor) for side in patch]


def invert_patients(
    inverter: Inverter,
    sites: Sites,
    params: Tree,
    guess: torch.Tensor,
    effort: Effort,
    protection: Protection = "none",
    private: Private = Private(),
    seed: int = 0,
) -> Rebuilt:
    """Invert the gradient of one step on one patient: the least that could leave a hospital, and so the worst case.

    Args:
        inverter: Inverts gradients.
        sites: The hospitals.
        params: Parameters at which the gradient is taken.
        guess: The first guess, one patch.
        effort: Effort of the attacker.
        protection: The gradient alone; the mean over one patient of every hospital, as a secure sum shows it; or the
            gradient shortened and under noise.
        private: Length and noise of the latter.
        seed: Seed of the noise.
    """
    inverter.at(params)
    patch = guess.shape[1:]
    names = sorted(name for name, site in sites.items() if site.cases("train"))
    results = []
    for k in range(effort.patients):
        home = names[k % len(names)]
        pairs = [_patch(sites[i], k // len(names) if i == home else k, patch) for i in names]
        pairs = pairs if protection == "sum" else [pairs[names.index(home)]]
        gradients = [inverter.gradient(x[None], y[None]) for x, y in pairs]
        target = gradients[0] if len(gradients) == 1 else mean_of(gradients)
        if protection == "noise":
            target = under_noise(target, private, np.random.default_rng([seed, k]))
        own = pairs[names.index(home)] if protection == "sum" else pairs[0]
        rebuilt, apart = inverter.rebuild(target, own[1][None], guess[None], effort)
        results.append((rebuilt, torch.stack([x for x, _ in pairs]), apart))
    return _outcome(results, guess)


def invert_reply(
    inverter: Inverter, sites: Sequence[TorchSite], sent: Tree, replied: Tree, guess: torch.Tensor, effort: Effort
) -> Rebuilt:
    """Invert the change of a model by one hospital, or by several together.

    The attacker knows the outlines of as many training patients as it rebuilds; each image counts by the nearest scan
    of any training patient.

    Args:
        inverter: Inverts gradients.
        sites: The hospitals behind the change.
        sent: The model before.
        replied: The model after.
        guess: The first guess, one patch.
        effort: Effort of the attacker.
    """
    inverter.at(sent)
    patch = guess.shape[1:]
    pairs = [_patch(site, k, patch) for site in sites for k in range(len(site.cases("train")))]
    count = min(effort.patients, len(pairs))
    truths = torch.stack([y for _, y in pairs[:count]])
    first = guess.expand(count, *guess.shape)
    rebuilt, apart = inverter.rebuild(inverter.change(sent, replied), truths, first, effort)
    return _outcome([(rebuilt, torch.stack([x for x, _ in pairs]), apart)], guess)


def _patch(site: TorchSite, number: int, patch: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the middle patch of a training case and its ground truth."""
    cases = site.cases("train")
    image, truth = site.volume(cases[number % len(cases)])
    return middle(image.float(), patch).cpu(), middle(truth.float(), patch).cpu()


def _outcome(results: Sequence[tuple[torch.Tensor, torch.Tensor, float]], guess: torch.Tensor) -> Rebuilt:
    matches, near = list[Match](), list[torch.Tensor]()
    for rebuilt, originals, _ in results:
        for image in rebuilt:
            matches.append(best_match(image, guess, originals))
            near.append(originals[matches[-1].original])
    images = {
        "trained on": torch.stack(near).numpy(),
        "guess": guess[None].expand(len(near), *guess.shape).numpy(),
        "rebuilt": torch.cat([rebuilt for rebuilt, _, _ in results]).numpy(),
    }
    return Rebuilt(tuple(matches), float(np.mean([apart for *_, apart in results])), images)
