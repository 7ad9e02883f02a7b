"""Attacks on feature vectors of scans: re-identify the patient of a vector, or rebuild the scan.

Paper: Manthe et al., Whole-brain radiomics for clustered federated personalization, MIDL 2023, appendix F

The attacker is stronger than a real one: it has the pairs of vector and volume of the training cases. The validation
cases choose the epoch; the test cases, with their vectors alone, give the score.

    error of a guess   mean over the voxels inside the head, and over modalities, of (guess - volume)^2
    small decoder      mean volume + decoder(vector), trained by the error inside the head
    paper's decoder    decoder(vector), trained by the error of the whole volume
    average            no attack: the mean volume of the training cases, the reference
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import interpolate

from polysite.audit import decoders
from polysite.errors import ConfigError, nearest

CLIP = 5.0  # standard deviations
MIN_VARIATION = 0.01  # of a number's deviation between patients: least deviation between scans of one patient


@dataclass(frozen=True)
class Settings:
    """Effort of the attacker.

    Args:
        decoder: The small decoder of this project, or the paper's (see ``PAPER`` for its other settings).
        side: Voxels of a side of the volumes to reconstruct: a multiple of 8 from 16 to 128; for the paper's decoder
            16, 32, 64 or 128.
        epochs: Number of epochs, at least 1.
        rate: Learning rate of Adam, more than 0.
        batch: Cases of a training step, at least 1.
    """

    decoder: Literal["small", "paper"] = "small"
    side: int = 32
    epochs: int = 60
    rate: float = 2e-3
    batch: int = 8

    def __post_init__(self) -> None:
        if self.side % 8 or not 16 <= self.side <= 128:
            raise ConfigError(f"side = {self.side}: a multiple of 8 from 16 to 128, such as 32 or 48")
        if self.decoder == "paper" and self.side & (self.side - 1):
            raise ConfigError(f"side = {self.side}: the paper's decoder doubles its sides, so take 16, 32, 64 or 128")
        if not self.rate > 0:
            raise ConfigError(f"rate = {self.rate} must be more than 0")
        for name in ("epochs", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1")


PAPER = Settings("paper", side=128, epochs=300, rate=1e-4, batch=2)
"""Settings of the paper's attack, by its text; its authors' program has a learning rate of 1e-5."""
DECODERS: Mapping[str, Settings] = {"small": Settings(), "paper": PAPER}


def settings_of(decoder: str, **changes: Any) -> Settings:
    """Return the settings of a decoder, with those changes that are not None.

    >>> settings_of("paper", side=64, epochs=None).side
    64
    """
    if decoder not in DECODERS:
        raise ConfigError(f"--decoder {decoder}: {nearest(decoder, DECODERS)}")
    return replace(DECODERS[decoder], **{k: v for k, v in changes.items() if v is not None})


@dataclass(frozen=True, eq=False)
class Scans:
    """Cases under attack: their vectors, and the volumes to reconstruct."""

    vectors: np.ndarray  # case x number, float64
    volumes: np.ndarray  # case x modality x space, float32
    inside: np.ndarray  # case x 1 x space: 1 inside the head, 0 outside

    def part(self, rows: Sequence[int]) -> "Scans":
        """Return some of the cases."""
        at = list(rows)
        return Scans(self.vectors[at], self.volumes[at], self.inside[at])


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """Results on the test cases.

    Args:
        volumes: The rebuilt volumes.
        average: The mean volume of the training cases.
        errors: The error of every case.
        usual: The error of the mean volume.
        training: Mean squared error of the training cases after each epoch.
        validation: The same of the validation cases.
    """

    volumes: np.ndarray
    average: np.ndarray
    errors: np.ndarray
    usual: np.ndarray
    training: Sequence[float]
    validation: Sequence[float]


def shrunk(image: np.ndarray, inside: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Resize modalities and mask to cubes, or squares: area means to shrink, linear interpolation to grow."""
    shape = image.shape[1:]
    both = torch.from_numpy(np.concatenate([image, inside[None]]).astype(np.float32))[None]
    smaller = [min(s, side) for s in shape]
    both = interpolate(both, smaller, mode="area")
    both = interpolate(both, [side] * len(shape), mode={2: "bilinear", 3: "trilinear"}[len(shape)])
    *volumes, mask = both[0].numpy()
    return np.stack(volumes), (mask > 0.5).astype(np.float32)[None]


def matched(vectors: np.ndarray, again: np.ndarray, learn: Sequence[int], probe: Sequence[int]) -> np.ndarray:
    """Return for each of ``probe`` whether the vector nearest to the second scan's belongs to the same patient.

    The patients of ``learn`` show how the numbers change from scan to scan. Numbers that are stable in a patient and
    differ between patients get the largest weight.

    Args:
        vectors: Vectors of the first scans, one row per patient.
        again: Vectors of the second scans.
        learn: Rows to learn from.
        probe: Rows to re-identify.
    """
    between = vectors.std(0)
    moved = (again - vectors)[list(learn)]
    steady = np.maximum(moved.std(0), MIN_VARIATION * between)
    use = between > 0
    gallery, probes = vectors[:, use] / steady[use], (again - moved.mean(0))[list(probe)][:, use] / steady[use]
    found = np.array([np.square(gallery - point).sum(1).argmin() for point in probes])
    same: np.ndarray = found == np.asarray(probe)
    return same


def rebuild(
    train: Scans, validation: Scans, test: Scans, settings: Settings, seed: int, device: torch.device
) -> Rebuilt:
    """Train a decoder and return what it makes of the vectors of the test cases."""
    mean = average(train)
    start, learned, chosen_by = mean, train, validation
    if settings.decoder == "paper":  # it rebuilds and is judged by whole volumes, not by what is inside the head
        start = np.zeros_like(mean)
        learned, chosen_by = (replace(s, inside=np.ones_like(s.inside)) for s in (train, validation))
    x, ahead, after = (
        torch.from_numpy(_standardised(train.vectors, s.vectors)).to(device) for s in (train, validation, test)
    )
    fitted, scored = list[float](), list[float]()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.SeedSequence([seed, 0]).generate_state(1)[0]))
        net = decoders.DECODERS[settings.decoder](x.shape[1], mean.shape).to(device)
        best, optimiser = net, torch.optim.Adam(net.parameters(), settings.rate, weight_decay=1e-5)
        for _ in range(settings.epochs):
            fitted.append(_epoch(net, optimiser, x, learned, start, settings.batch))
            scored.append(float(errors(_decoded(net, ahead, start, settings.batch), chosen_by).mean()))
            if scored[-1] <= min(scored):
                best = copy.deepcopy(net)
    volumes = _decoded(best, after, start, settings.batch)
    found, usual = errors(volumes, test), errors(np.broadcast_to(mean, volumes.shape), test)
    return Rebuilt(volumes, mean, found, usual, fitted, scored)


def errors(guess: np.ndarray, scans: Scans) -> np.ndarray:
    """Return the mean squared error of every case inside the head."""
    axes = tuple(range(1, guess.ndim))
    squares = (np.square(guess - scans.volumes) * scans.inside).sum(axes, dtype=np.float64)
    voxels = scans.inside.sum(axes, dtype=np.float64) * scans.volumes.shape[1]
    means: np.ndarray = squares / voxels
    return means


def average(scans: Scans) -> np.ndarray:
    """Return the mean volume; each voxel is averaged over the cases with a head there."""
    total = (scans.volumes * scans.inside).sum(0, dtype=np.float64)
    mean: np.ndarray = total / np.maximum(scans.inside.sum(0, dtype=np.float64), 1)
    return mean.astype(np.float32)


def _standardised(train: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Standardise by the training cases; numbers that are constant there become zero."""
    mean, deviation = train.mean(0), train.std(0)
    varies = deviation > 1e-9 * np.abs(mean)
    scaled = (vectors - mean) / np.where(varies, deviation, np.inf)
    clipped: np.ndarray = np.clip(scaled, -CLIP, CLIP).astype(np.float32)
    return clipped


def _epoch(
    net: torch.nn.Module,
    optimiser: torch.optim.Optimizer,
    x: torch.Tensor,
    scans: Scans,
    start: np.ndarray,
    batch: int,
) -> float:
    """Train for an epoch; return the mean squared error of the training cases during it."""
    net.train()
    total = 0.0
    for rows in torch.split(torch.randperm(len(x)), batch):
        some = scans.part(rows.tolist())
        wanted, mask = (torch.from_numpy(each).to(x.device) for each in (some.volumes - start, some.inside))
        wrong = (net(x[rows.to(x.device)]) - wanted).square() * mask
        loss = (wrong.flatten(1).sum(1) / mask.flatten(1).sum(1)).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        total += float(loss.detach()) * len(rows)
    return total / len(x) / int(scans.volumes.shape[1])


def _decoded(net: torch.nn.Module, x: torch.Tensor, start: np.ndarray, batch: int) -> np.ndarray:
    """Return the volumes of some vectors, rebuilt a few at a time."""
    net.eval()
    with torch.inference_mode():
        made: np.ndarray = np.concatenate([net(some).cpu().numpy() + start for some in torch.split(x, batch)])
    return made
