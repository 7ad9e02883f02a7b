"""Gradient inversion: rebuild the images behind a gradient, or behind the change that training made to a model.

Paper: Geiping et al., Inverting Gradients, NeurIPS 2020

    minimise over x    1 - cos(gradient of L(w; x, y), target) + SMOOTH * TV(x)          by Adam, from a guess of x

The target is the gradient of a patient, or the change of the model by a site: w sent - w replied, whose direction is
that of the gradient if training was one step. The attacker knows the network, w, the outlines y, and other scans, whose
mean is the first guess. It does not know where patches were cut: it takes the middle. The guess is also what the result
is compared with: an error ratio of 1 means that nothing was learnt and 0 that the image was copied. How far to trust
the search is chosen afterwards, in favour of the attacker (``best_match``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from polysite.privacy import Private
from polysite.training.network import leaves_of
from polysite.training.supervision import supervised
from polysite.training.tasks import CaseLoss
from polysite.training.torch_site import TorchSite
from polysite.tree import Tree

RATE = 0.02  # learning rate of the voxels, in standard deviations of a prepared image; it decays to 0
SMOOTH = 1e-4  # weight of the total variation
PATIENTS = 3  # whose gradients are inverted
LEAST_SIDE = 8  # voxels of a side of the patch of one patient, at least

Sites = Mapping[str, TorchSite]
Protection = Literal["none", "sum", "noise"]


class Inverter:
    """Computes gradients of a network of its own, in float32, and inverts them.

    Args:
        module: The network; it is not shared with a site, since sites may compile theirs.
        loss: Loss of every case.
        device: The device.
        iterations: Steps of Adam for an image, at least 1.
    """

    def __init__(self, module: nn.Module, loss: CaseLoss, device: torch.device, iterations: int):
        self.module, self.loss, self.device = module.to(device).train(), loss, device
        self.iterations = iterations
        self.weights, self._leaves = leaves_of(self.module)

    def at(self, params: Tree) -> None:
        """Set the parameters at which gradients are computed."""
        with torch.no_grad():
            for name, leaf in self._leaves.items():
                leaf.copy_(torch.as_tensor(params[name], device=self.device))

    def gradient(self, images: torch.Tensor, truths: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradient of the mean loss of a batch; zeros for parameters that it does not depend on."""
        return [g.detach() for g in self._gradient(images.to(self.device), truths.to(self.device), False)]

    def change(self, sent: Tree, replied: Tree) -> list[torch.Tensor]:
        """Return the change of the model by a site as if it were a gradient."""
        return [
            torch.as_tensor(sent[name], device=self.device).float() - torch.as_tensor(replied[name], device=self.device)
            for name in self.weights
        ]

    def rebuild(self, target: Sequence[torch.Tensor], truths: torch.Tensor, guess: torch.Tensor) -> torch.Tensor:
        """Return images whose gradient has the direction of the target.

        Args:
            target: The gradient.
            truths: Ground truth of the images.
            guess: The images to begin from.
        """
        truths = truths.to(self.device)
        x = guess.to(self.device).clone().requires_grad_()
        optimiser = torch.optim.Adam([x], RATE)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.iterations)
        for _ in range(self.iterations):
            optimiser.zero_grad()
            away = 1 - _cosine(self._gradient(x, truths, True), target)
            (away + SMOOTH * _variation(x)).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            decay.step()
        return x.detach().cpu()

    def _gradient(self, x: torch.Tensor, y: torch.Tensor, again: bool) -> list[torch.Tensor]:
        """Return the gradients by the weights; ``again``: they can be differentiated by the images."""
        twice = len(x) == 1 and self.device.type == "cpu"  # a single small volume takes a slow path on a CPU
        made = self.module(torch.cat([x, x]) if twice else x)
        heads = made if isinstance(made, tuple) else (made,)
        loss = supervised(self.loss, [h[: len(x)] for h in heads], y).mean()
        weights = list(self.weights.values())
        found = torch.autograd.grad(loss, weights, create_graph=again, allow_unused=True)
        return [torch.zeros_like(w) if g is None else g for g, w in zip(found, weights, strict=True)]


def under_noise(gradient: Sequence[torch.Tensor], private: Private, rng: np.random.Generator) -> list[torch.Tensor]:
    """Return the gradient of one patient as differential privacy lets it leave: shortened and under noise."""
    length = float(torch.stack([g.double().norm() for g in gradient]).norm())
    scale = min(1.0, private.clip / max(length, 1e-12))
    spread = private.noise * private.clip

    def noise(g: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(tuple(g.shape)).astype(np.float32)).to(g.device)

    return [g * scale + spread * noise(g) for g in gradient]


def mean_of(gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the mean of several gradients: what a secure sum shows."""
    return [torch.stack(list(each)).mean(0) for each in zip(*gradients, strict=True)]


def middle(image: torch.Tensor, patch: Sequence[int]) -> torch.Tensor:
    """Return the middle patch of an image, or of its ground truth; a class is returned as it is.

    >>> middle(torch.arange(6).view(1, 6), [2]).tolist()
    [[2, 3]]
    """
    if image.ndim == 1:
        return image
    starts = [(side - length) // 2 for side, length in zip(image.shape[1:], patch, strict=True)]
    return image[:, *(slice(a, a + n) for a, n in zip(starts, patch, strict=True))]


@dataclass(frozen=True, eq=False)
class Match:
    """A rebuilt image beside the training image that it resembles most.

    Args:
        rebuilt: The rebuilt image.
        original: The training image.
        guess: The first guess.
        error: Mean squared error of the rebuilt image after the best scaling of its difference from the guess: what an
            attacker reaches that knows how far to trust the search.
        usual: Mean squared error of the guess, which is never smaller.
    """

    rebuilt: torch.Tensor
    original: torch.Tensor
    guess: torch.Tensor
    error: float
    usual: float


def mean_scan(sites: Sites, patch: Sequence[int]) -> torch.Tensor:
    """Return the mean of the middle patches of scans outside training: what the attacker guesses first."""
    shown = [middle(site.volume(n)[0].float(), patch) for site in sites.values() for n in site.cases("test")]
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
    guess: torch.Tensor,
    protection: Protection = "none",
    private: Private = Private(),
    seed: int = 0,
    patients: int = PATIENTS,
) -> list[Match]:
    """Invert the gradient of one step on one patient: the least that could leave a hospital, and so the worst case.

    Args:
        inverter: Inverts gradients, at the parameters that it was set to.
        sites: The hospitals.
        guess: The first guess, one patch.
        protection: The gradient alone; the mean over one patient of every hospital, as a secure sum shows it; or the
            gradient shortened and under noise.
        private: Length and noise of the latter.
        seed: Seed of the noise.
        patients: Patients whose gradients are inverted.
    """
    names = sorted(name for name, site in sites.items() if site.cases("train"))
    found = list[Match]()
    for k in range(patients):
        home = k % len(names)
        pairs = [_patch(sites[i], k // len(names) if at == home else k, guess.shape[1:]) for at, i in enumerate(names)]
        truth = pairs[home][1]
        behind = pairs if protection == "sum" else [pairs[home]]
        target = mean_of([inverter.gradient(x[None], y[None]) for x, y in behind])
        if protection == "noise":
            target = under_noise(target, private, np.random.default_rng([seed, k]))
        rebuilt = inverter.rebuild(target, truth[None], guess[None])[0]
        found.append(best_match(rebuilt, guess, torch.stack([x for x, _ in behind])))
    return found


def invert_reply(
    inverter: Inverter,
    sites: Sequence[TorchSite],
    sent: Tree,
    replied: Tree,
    guess: torch.Tensor,
    patients: int = PATIENTS,
) -> list[Match]:
    """Invert the change of a model by one hospital, or by several together.

    The attacker knows the outlines of as many training patients as it rebuilds; each image counts by the nearest scan
    of any training patient.

    Args:
        inverter: Inverts gradients.
        sites: The hospitals behind the change.
        sent: The model before.
        replied: The model after.
        guess: The first guess, one patch.
        patients: Patients whose images are searched for.
    """
    inverter.at(sent)
    pairs = [_patch(site, k, guess.shape[1:]) for site in sites for k in range(len(site.cases("train")))]
    truths = torch.stack([y for _, y in pairs[:patients]])
    rebuilt = inverter.rebuild(inverter.change(sent, replied), truths, guess.expand(len(truths), *guess.shape))
    originals = torch.stack([x for x, _ in pairs])
    return [best_match(image, guess, originals) for image in rebuilt]


def _patch(site: TorchSite, number: int, patch: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the middle patch of a training case and its ground truth."""
    cases = site.cases("train")
    image, truth = site.volume(cases[number % len(cases)])
    return middle(image.float(), patch).cpu(), middle(truth.float(), patch).cpu()


def best_match(rebuilt: torch.Tensor, guess: torch.Tensor, originals: torch.Tensor) -> Match:
    """Return the original of which the rebuilt image explains most beyond the guess.

    >>> found = best_match(torch.tensor([2.0, 0.0]), torch.zeros(2), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    >>> found.original.tolist(), found.error, found.usual
    ([1.0, 0.0], 0.0, 0.5)
    """
    moved, wanted = (rebuilt - guess).double().flatten(), (originals - guess).double().flatten(1)
    squares = wanted.square().mean(1)
    along = (wanted @ moved).clamp(min=0)
    explained = along.square() / moved.square().sum().clamp(min=1e-30) / moved.numel()
    scaled = (squares - explained).clamp(min=0)
    best = int((scaled / squares.clamp(min=1e-30)).argmin())
    return Match(rebuilt, originals[best], guess, float(scaled[best]), float(squares[best]))


def _cosine(gradient: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> torch.Tensor:
    product = torch.stack([(a * b).sum() for a, b in zip(gradient, target, strict=True)]).sum()
    lengths = [torch.stack([g.square().sum() for g in each]).sum().sqrt() for each in (gradient, target)]
    return product / (lengths[0] * lengths[1]).clamp(min=1e-30)


def _variation(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.diff(dim=axis).abs().mean() for axis in range(2, x.ndim)]).sum()
