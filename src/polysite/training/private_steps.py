"""Steps of training under differential privacy for every patient: DP-SGD.

Paper: Abadi et al., Deep Learning with Differential Privacy, CCS 2016, Algorithm 1

    draw each patient with probability q;   g = (sum over drawn patients of clip(g_i) + N(0, (noise clip)^2)) / (q n)

A patient is one unit, however many scans or slices there are: a drawn patient gives ``train.patches`` patches, and the
gradient of their mean loss is shortened as a whole. Draws are Poisson, as the accountant assumes: a step may have many
patients or none, and is divided by the expected number. Gradients are computed patient by patient, so they are exact
for every network whose layers do not mix cases; batch normalisation does and is refused.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from polysite.errors import ConfigError
from polysite.privacy import Private, Release
from polysite.training.network import Network
from polysite.training.supervision import supervised
from polysite.training.tasks import CaseLoss


@dataclass(frozen=True)
class Draws:
    """Poisson draws of patients.

    Args:
        patients: Training cases of every patient.
        patches: Patches of a drawn patient.
        batch: Patches that a step has on average, as near as whole patients allow.
        rng: Source of the draws; at a hospital it is secret.
    """

    patients: Mapping[str, Sequence[str]]
    patches: int
    batch: int
    rng: np.random.Generator

    @property
    def expected(self) -> int:
        """Number of patients in a step on average."""
        return min(len(self.patients), max(1, round(self.batch / self.patches)))

    @property
    def rate(self) -> float:
        """Probability with which a patient is drawn."""
        return self.expected / len(self.patients)

    def steps(self, epochs: int) -> int:
        """Return the steps in which every patient is drawn ``epochs`` times on average."""
        return epochs * math.ceil(len(self.patients) / self.expected)

    def draw(self, keep: Collection[str] | None = None) -> list[list[str]]:
        """Return the cases of the patches of every drawn patient; of ``keep`` alone, if it is given.

        Patients without a kept case are drawn as well and then left out, so the number of the others does not show.
        """
        patients = {p: [n for n in cases if keep is None or n in keep] for p, cases in self.patients.items()}
        names = sorted(self.patients)
        taken = self.rng.random(len(names)) < self.rate
        return [
            [patients[p][i] for i in self.rng.integers(len(patients[p]), size=self.patches)]
            for p, here in zip(names, taken, strict=True)
            if here and patients[p]
        ]


class PrivateStep:
    """Puts the noisy gradient of one step into the parameters.

    Args:
        network: The network.
        loss: Loss of every case.
        weights: Parameters that are trained.
        private: The settings.
        expected: Number of patients in a step on average.
        rng: Source of the noise.
    """

    def __init__(
        self,
        network: Network,
        loss: CaseLoss,
        weights: Sequence[torch.nn.Parameter],
        private: Private,
        expected: int,
        rng: np.random.Generator,
    ):
        self.network, self.loss, self.weights, self.private = network, loss, list(weights), private
        self.expected, self.rng = expected, rng
        self._sums: list[torch.Tensor] = []

    def begin(self) -> None:
        """Begin a step without any patient."""
        self._sums = [torch.zeros_like(p) for p in self.weights]

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add the gradient of one patient, shortened to ``clip``; return the patient's loss."""
        loss = supervised(self.loss, self.network.heads(x), y).mean()
        found = torch.autograd.grad(loss, self.weights, allow_unused=True)
        kept = [torch.zeros_like(p) if g is None else g for p, g in zip(self.weights, found, strict=True)]
        length = torch.stack(torch._foreach_norm(kept)).double().norm()
        if not bool(length.isfinite()):
            return loss.detach()  # it counts as zero: leaving it in would break the limit
        scale = float((self.private.clip / length.clamp(min=1e-12)).clamp(max=1.0))
        torch._foreach_add_(self._sums, kept, alpha=scale)
        return loss.detach()

    def finish(self) -> None:
        """Add the noise, and make the sum the gradient of the parameters."""
        spread = self.private.noise * self.private.clip
        for p, total in zip(self.weights, self._sums, strict=True):
            drawn = self.rng.standard_normal(tuple(p.shape), dtype=np.float32)
            noise = torch.from_numpy(np.ascontiguousarray(drawn)).to(p.device)
            p.grad = (total + spread * noise) / self.expected

    def release(self, draws: Draws, steps: int) -> Release:
        """Return what so many steps cost."""
        return Release(self.private.noise, draws.rate, steps, self.private.delta)


def refuse_batch_norm(module: torch.nn.Module) -> None:
    """Refuse a network with batch normalisation: the gradient of a patient would depend on the others of a step.

    Running statistics of any layer are refused, too: they are means over patients that leave without noise.
    """
    layers = list(module.modules())
    if any(isinstance(layer, _BatchNorm) or getattr(layer, "running_mean", None) is not None for layer in layers):
        raise ConfigError(
            "train.private limits the gradient of every patient; batch normalisation mixes the patients of a step, and "
            "running statistics leave without noise: choose a network with instance normalisation, such as model.name "
            "= 'unet_small'"
        )
