"""Attacks on feature vectors of scans: reconstruct the scan from its vector, or re-identify its patient.

Paper: Manthe et al., Whole-brain radiomics for clustered federated personalization, MIDL 2023, appendix F

The attacker is stronger than a real one: it has the pairs of vector and volume of the training cases. It selects its
best attempt on the validation cases, and is scored on the test cases, with their vectors alone.

    error of a guess   mean over the voxels inside the head, and over modalities, of (guess - volume)^2
    network            mean volume + decoder(vector), trained by the error inside the head; with the paper's decoder,
                       decoder(vector) alone, trained by the error of the whole volume (``decoders.py``)
    linear             mean volume + W vector, by ridge regression: with few cases often the stronger of the two

    average            no attack: the mean volume of the training cases, the reference for all others
    hospital           no attack: the mean volume of the hospital, since the server knows the sender of a vector
    nearest            the volume of the training case with the nearest vector
    compressed         a yardstick, no bound: the test scan itself, projected on the principal components of the
                       training volumes, as many as the vector has numbers (and the training cases allow)
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.functional import interpolate

from polysite.errors import ConfigError, nearest
from polysite.training import decoders

STRENGTHS = 10.0 ** np.arange(-3, 4)  # of the ridge penalty, in mean squared lengths of a vector
CLIP = 5.0  # standard deviations
MIN_VARIATION = 0.01  # of a number's deviation between patients: least deviation between scans of one patient


@dataclass(frozen=True)
class Settings:
    """Effort of the attacker.

    Args:
        decoder: The small decoder of this project, or the paper's (see ``PAPER`` for its other settings).
        side: Voxels of a side of the volumes to reconstruct: a multiple of 8 from 16 to 128; for the paper's decoder
            16, 32, 64 or 128.
        epochs: Largest number of epochs of a decoder, at least 1.
        patience: Epochs without progress on the validation cases that end the training of a decoder, at least 1.
        restarts: Number of decoders, at least 1; the best on the validation cases counts.
        rate: Learning rate of Adam, more than 0.
        batch: Cases of a training step, at least 1.
        dropout: Dropout rate of the small decoder.
    """

    decoder: Literal["small", "paper"] = "small"
    side: int = 32
    epochs: int = 60
    patience: int = 10
    restarts: int = 3
    rate: float = 2e-3
    batch: int = 8
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.side % 8 or not 16 <= self.side <= 128:
            raise ConfigError(f"side = {self.side}: a multiple of 8 from 16 to 128, such as 32 or 48")
        if self.decoder == "paper" and self.side & (self.side - 1):
            raise ConfigError(f"side = {self.side}: the paper's decoder doubles its sides, so take 16, 32, 64 or 128")
        if not self.rate > 0:
            raise ConfigError(f"rate = {self.rate} must be more than 0")
        for name in ("epochs", "patience", "restarts", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1")


PAPER = Settings("paper", side=128, epochs=300, patience=300, restarts=1, rate=1e-4, batch=2, dropout=0.0)
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


@dataclass(frozen=True)
class Curve:
    """Losses of one decoder after each epoch: mean squared errors of the training and of the validation cases."""

    training: tuple[float, ...]
    validation: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Scans:
    """Cases under attack: their vectors, and the volumes to reconstruct."""

    sites: tuple[str, ...]
    vectors: np.ndarray  # case x number, float64
    volumes: np.ndarray  # case x modality x space, float32
    inside: np.ndarray  # case x 1 x space: 1 inside the head, 0 outside

    def part(self, rows: Sequence[int]) -> "Scans":
        """Return some of the cases."""
        at = list(rows)
        return Scans(tuple(self.sites[k] for k in at), self.vectors[at], self.volumes[at], self.inside[at])


@dataclass(frozen=True, eq=False)
class Outcome:
    """Results on the test cases: error and reconstruction of every attack and yardstick, by its name."""

    errors: Mapping[str, np.ndarray]  # a number for every case
    rebuilt: Mapping[str, np.ndarray]
    chosen: str  # the best attack on the validation cases
    weights: int  # number of weights of a decoder
    coefficients: int  # number of coefficients of a compressed scan
    curves: tuple[Curve, ...] = ()  # of every decoder that was trained


def shrunk(image: np.ndarray, inside: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Resize modalities and mask to cubes, or squares: area means to shrink, linear interpolation to grow."""
    shape = image.shape[1:]
    both = torch.from_numpy(np.concatenate([image, inside[None]]).astype(np.float32))[None]
    smaller = [min(s, side) for s in shape]
    both = interpolate(both, smaller, mode="area")
    both = interpolate(both, [side] * len(shape), mode={2: "bilinear", 3: "trilinear"}[len(shape)])
    *volumes, mask = both[0].numpy()
    return np.stack(volumes), (mask > 0.5).astype(np.float32)[None]


def attack(
    train: Scans, validation: Scans, test: Scans, settings: Settings, seed: int, device: torch.device
) -> Outcome:
    """Run all attacks and yardsticks on the test cases."""
    mean = average(train)
    known = [_standardised(train.vectors, s.vectors) for s in (train, validation, test)]
    coefficients = min(test.vectors.shape[1], len(train.sites) - 1)
    decoded, decoded_error, weights, curves = _network(train, validation, known, mean, settings, seed, device)
    linear, linear_error = _linear(train, validation, known, mean)
    rebuilt = {
        "network": decoded,
        "linear": linear,
        "average": np.broadcast_to(mean, test.volumes.shape),
        "hospital": np.stack([hospital(train, site) for site in test.sites]),
        "nearest": train.volumes[_nearest(known[2], known[0])],
        "compressed": _compressed(train, test, mean, coefficients),
    }
    scored = {name: errors(guess, test) for name, guess in rebuilt.items()}
    chosen = "network" if decoded_error < linear_error else "linear"
    return Outcome(scored, rebuilt, chosen, weights, coefficients, curves)


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


def hospital(train: Scans, site: str) -> np.ndarray:
    """Return the mean volume of a hospital, or of all cases if it has no training case."""
    own = [k for k, name in enumerate(train.sites) if name == site]
    return average(train.part(own) if own else train)


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
    same: np.ndarray = _nearest(probes, gallery) == np.asarray(probe)
    return same


def _standardised(train: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Standardise by the training cases; numbers that are constant there become zero."""
    mean, deviation = train.mean(0), train.std(0)
    varies = deviation > 1e-9 * np.abs(mean)
    scaled = (vectors - mean) / np.where(varies, deviation, np.inf)
    clipped: np.ndarray = np.clip(scaled, -CLIP, CLIP).astype(np.float32)
    return clipped


def _nearest(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the row of ``others`` nearest to every point."""
    return np.array([np.square(others - point).sum(1).argmin() for point in points])


def _compressed(train: Scans, test: Scans, mean: np.ndarray, count: int) -> np.ndarray:
    centred = ((train.volumes - mean) * train.inside).reshape(len(train.sites), -1)
    axes = np.linalg.svd(centred, full_matrices=False)[2][:count]
    wanted = ((test.volumes - mean) * test.inside).reshape(len(test.sites), -1)
    guess: np.ndarray = mean + (wanted @ axes.T @ axes).reshape(test.volumes.shape)
    return guess


def _linear(train: Scans, validation: Scans, known: Sequence[np.ndarray], mean: np.ndarray) -> tuple[np.ndarray, float]:
    """Return guesses of the test cases, and the validation error, for the ridge penalty with the least of these."""
    x = known[0].astype(np.float64)
    values, basis = np.linalg.eigh(x @ x.T)
    turned = basis.T @ ((train.volumes - mean) * train.inside).reshape(len(x), -1)
    unit = max(float(values.mean()), np.finfo(float).tiny)

    def guess(vectors: np.ndarray, strength: float) -> np.ndarray:
        weights = (vectors @ x.T @ basis) / (np.maximum(values, 0) + strength * unit)
        volumes: np.ndarray = mean + (weights @ turned).reshape(-1, *mean.shape).astype(np.float32)
        return volumes

    scored = [float(errors(guess(known[1], s), validation).mean()) for s in STRENGTHS]
    best = int(np.argmin(scored))
    return guess(known[2], STRENGTHS[best]), scored[best]


def _network(
    train: Scans,
    validation: Scans,
    known: Sequence[np.ndarray],
    mean: np.ndarray,
    settings: Settings,
    seed: int,
    device: torch.device,
) -> tuple[np.ndarray, float, int, tuple[Curve, ...]]:
    """Return guesses of the test cases, the validation error and the size of the best decoder, and the loss curves."""
    x, ahead, test = (torch.from_numpy(v).to(device) for v in known)
    whole = settings.decoder == "paper"  # it rebuilds and is judged by whole volumes, not by what is inside the head
    start = torch.from_numpy(np.zeros_like(mean) if whole else mean).to(device)
    wanted, inside, judged = torch.from_numpy(train.volumes), torch.from_numpy(train.inside), validation
    if whole:
        inside = torch.ones(()).expand(train.inside.shape)
        judged = replace(validation, inside=np.broadcast_to(np.float32(1), validation.inside.shape))
    best, least, curves = None, np.inf, []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for restart in range(settings.restarts):
            torch.manual_seed(int(np.random.SeedSequence([seed, restart]).generate_state(1)[0]))
            net = _decoder(x.shape[1], mean.shape, settings).to(device)
            optimiser = torch.optim.Adam(net.parameters(), settings.rate, weight_decay=1e-5)
            fitted, scored, idle, lowest = list[float](), list[float](), 0, np.inf
            for _ in range(settings.epochs):
                fitted.append(_epoch(net, optimiser, x, wanted, inside, start, settings.batch))
                scored.append(float(errors(_decoded(net, ahead, start, settings), judged).mean()))
                if scored[-1] < least:
                    best, least = copy.deepcopy(net), scored[-1]
                idle = 0 if scored[-1] < lowest else idle + 1
                lowest = min(lowest, scored[-1])
                if idle == settings.patience:
                    break
            curves.append(Curve(tuple(fitted), tuple(scored)))
    count = sum(p.numel() for p in net.parameters())
    if best is None:
        return np.broadcast_to(mean, (len(test), *mean.shape)), np.inf, count, tuple(curves)
    error = float(errors(_decoded(best, ahead, start, settings), validation).mean())
    return _decoded(best, test, start, settings), error, count, tuple(curves)


def _decoder(numbers: int, shape: Sequence[int], settings: Settings) -> nn.Module:
    if settings.decoder == "paper":
        return decoders.residual(numbers, shape)
    return decoders.small(numbers, shape, settings.dropout)


def _epoch(
    net: nn.Module,
    optimiser: torch.optim.Optimizer,
    x: torch.Tensor,
    wanted: torch.Tensor,
    inside: torch.Tensor,
    start: torch.Tensor,
    batch: int,
) -> float:
    """Train for an epoch; return the mean squared error of the training cases during it."""
    net.train()
    total = 0.0
    for rows in torch.split(torch.randperm(len(x)), batch):
        target, mask = wanted[rows].to(x.device), inside[rows].to(x.device)
        wrong = (net(x[rows.to(x.device)]) - (target - start)).square() * mask
        loss = (wrong.flatten(1).sum(1) / mask.flatten(1).sum(1)).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        total += float(loss.detach()) * len(rows)
    return total / len(x) / wanted.shape[1]


def _decoded(net: nn.Module, x: torch.Tensor, start: torch.Tensor, settings: Settings) -> np.ndarray:
    """Return the volumes of some vectors; those of the paper's size are rebuilt a few at a time."""
    net.eval()
    together = settings.batch if settings.decoder == "paper" else len(x)
    with torch.inference_mode():
        guess: np.ndarray = np.concatenate([(net(some) + start).cpu().numpy() for some in torch.split(x, together)])
    return guess
