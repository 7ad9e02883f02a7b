"""Gradient inversion: rebuild the images behind a gradient, or behind the change that training made to a model.

Paper: Geiping et al., Inverting Gradients, NeurIPS 2020

    minimise over x    1 - cos(gradient of L(w; x, y), target) + smooth * TV(x)          by Adam, from a guess of x

The target is the gradient of a patient, or the change of the model by a site: w sent - w replied, whose direction is
that of the gradient if training was one step. The attacker knows the network, w, the outlines y, and other scans, whose
mean is the first guess. It does not know where patches were cut: it takes the middle. The guess is also what the result
is compared with: an error ratio of 1 means that nothing was learnt and 0 that the image was copied. How far to trust
the search is chosen afterwards, in favour of the attacker (``Match.scaled``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from polysite.errors import ConfigError
from polysite.privacy import Private
from polysite.training.network import leaves_of
from polysite.training.supervision import supervised
from polysite.training.tasks import CaseLoss
from polysite.tree import Tree


@dataclass(frozen=True)
class Effort:
    """Effort of the attacker.

    Args:
        iterations: Steps of Adam for an image, at least 1.
        rate: Learning rate of the voxels, in standard deviations of a prepared image; it decays to 0.
        smooth: Weight of the total variation.
        patients: Patients whose gradients are inverted, at least 1.
    """

    iterations: int = 300
    rate: float = 0.02
    smooth: float = 1e-4
    patients: int = 3

    def __post_init__(self) -> None:
        for name in ("iterations", "patients"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1")
        if not (self.rate > 0 and self.smooth >= 0):
            raise ConfigError(f"rate = {self.rate} must be more than 0 and smooth = {self.smooth} not negative")


class Inverter:
    """Computes gradients of a network of its own, in float32, and inverts them.

    Args:
        module: The network; it is not shared with a site, since sites may compile theirs.
        loss: Loss of every case.
        device: The device.
    """

    def __init__(self, module: nn.Module, loss: CaseLoss, device: torch.device):
        self.module, self.loss, self.device = module.to(device).train(), loss, device
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
        """Return the change of the model by a site as if it were a gradient; zeros where nothing came back."""
        found = []
        for name, weight in self.weights.items():
            if name in replied and name in sent:
                a, b = (torch.as_tensor(t[name], device=self.device).float() for t in (sent, replied))
                found.append(a - b)
            else:
                found.append(torch.zeros_like(weight))
        return found

    def rebuild(
        self, target: Sequence[torch.Tensor], truths: torch.Tensor, guess: torch.Tensor, effort: Effort
    ) -> tuple[torch.Tensor, float]:
        """Return images whose gradient has the direction of the target, and how far their direction is from it.

        Args:
            target: The gradient.
            truths: Ground truth of the images.
            guess: The images to begin from.
            effort: How long to search.
        """
        truths = truths.to(self.device)
        x = guess.to(self.device).clone().requires_grad_()
        optimiser = torch.optim.Adam([x], effort.rate)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, effort.iterations)
        apart = 1.0
        for _ in range(effort.iterations):
            optimiser.zero_grad()
            away = 1 - _cosine(self._gradient(x, truths, True), target)
            (away + effort.smooth * _variation(x)).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            decay.step()
            apart = float(away.detach())
        return x.detach().cpu(), apart

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


@dataclass(frozen=True)
class Match:
    """A rebuilt image beside the original that it resembles most.

    Args:
        original: Number of the original.
        error: Mean squared error of the rebuilt image.
        scaled: The same after the best scaling of its difference from the guess: what an attacker reaches that knows
            how far to trust the search. It is never larger than ``guess``.
        guess: Mean squared error of the guess.
    """

    original: int
    error: float
    scaled: float
    guess: float


def best_match(rebuilt: torch.Tensor, guess: torch.Tensor, originals: torch.Tensor) -> Match:
    """Return the original of which the rebuilt image explains most beyond the guess.

    >>> best_match(torch.tensor([2.0, 0.0]), torch.zeros(2), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    Match(original=1, error=0.5, scaled=0.0, guess=0.5)
    """
    moved, wanted = (rebuilt - guess).double().flatten(), (originals - guess).double().flatten(1)
    squares = wanted.square().mean(1)
    along = (wanted @ moved).clamp(min=0)
    explained = along.square() / moved.square().sum().clamp(min=1e-30) / moved.numel()
    scaled = (squares - explained).clamp(min=0)
    best = int((scaled / squares.clamp(min=1e-30)).argmin())
    error = float((rebuilt - originals[best]).double().square().mean())
    return Match(best, error, float(scaled[best]), float(squares[best]))


def _cosine(gradient: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> torch.Tensor:
    product = torch.stack([(a * b).sum() for a, b in zip(gradient, target, strict=True)]).sum()
    lengths = [torch.stack([g.square().sum() for g in each]).sum().sqrt() for each in (gradient, target)]
    return product / (lengths[0] * lengths[1]).clamp(min=1e-30)


def _variation(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.diff(dim=axis).abs().mean() for axis in range(2, x.ndim)]).sum()
