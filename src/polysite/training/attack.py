"""Attacks on the numbers that describe a scan: can the scan be rebuilt from them, can its patient be found again?

Paper: Manthe et al., Whole-brain radiomics for clustered federated personalization, MIDL 2023, appendix F

The attacker holds more than one ever should: the true pairs of vector and volume of the training cases. It chooses
between its attempts by the validation cases, and is judged by test cases, of which it gets the vectors alone.

    error of a guess   mean over the voxels inside the head, and over modalities, of (guess - volume)^2
    network            mean volume + decoder(vector): a linear layer, then transposed convolutions, as in the paper
    linear             mean volume + W vector, by ridge regression: with few cases often the stronger of the two

    average            no attack: the mean volume of the training cases, by which all others are measured
    hospital           no attack either: the mean volume of the hospital, as the server knows who sends a vector
    nearest            the volume of the training case with the nearest vector
    compressed         a yardstick, no limit: the test scan itself, as its coefficients in the principal components of
                       the training volumes, as many as the vector has numbers (and training cases allow)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn.functional import interpolate

from polysite.errors import ConfigError

CHANNELS = (64, 32, 16)  # of the decoder, from an eighth of the side to half of it
STRENGTHS = 10.0 ** np.arange(-3, 4)  # of the ridge, in mean squared lengths of a vector
FAR = 5.0  # deviations beyond which a number is taken for this
CLEAR = 0.01  # of a number's deviation between patients: the least that it is taken to vary between scans of one


@dataclass(frozen=True)
class Settings:
    """How hard the attacker tries."""

    side: int = 32  # voxels of a side of the volumes to rebuild
    epochs: int = 60  # of a decoder, at most
    patience: int = 10  # epochs without progress on the validation cases, after which a decoder is given up
    restarts: int = 3  # decoders; the best on the validation cases counts
    rate: float = 2e-3  # of Adam
    batch: int = 8
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.side % 8 or not 16 <= self.side <= 128:
            raise ConfigError(f"side = {self.side}: a multiple of 8 from 16 to 128, such as 32 or 48")
        for name in ("epochs", "patience", "restarts", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1")


@dataclass(frozen=True, eq=False)
class Scans:
    """Cases under attack: their vectors, and what is to be rebuilt."""

    sites: tuple[str, ...]
    vectors: np.ndarray  # case x number, float64
    volumes: np.ndarray  # case x modality x space, float32
    inside: np.ndarray  # case x 1 x space: 1 inside the head, 0 outside

    def part(self, rows: Sequence[int]) -> "Scans":
        at = list(rows)
        return Scans(tuple(self.sites[k] for k in at), self.vectors[at], self.volumes[at], self.inside[at])


@dataclass(frozen=True, eq=False)
class Outcome:
    """Of the test cases: the error of every attack and yardstick, and what was rebuilt."""

    errors: Mapping[str, np.ndarray]  # by its name, a number for every case
    rebuilt: Mapping[str, np.ndarray]
    chosen: str  # the attack that did best on the validation cases
    weights: int  # of a decoder
    coefficients: int  # of the compressed scan


def shrunk(image: np.ndarray, inside: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Modalities and mask as cubes, or squares: means where they shrink, linear where they grow."""
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
    """All attacks and yardsticks on the test cases."""
    mean = average(train)
    known = [_standardised(train.vectors, s.vectors) for s in (train, validation, test)]
    coefficients = min(test.vectors.shape[1], len(train.sites) - 1)
    decoded, judged, weights = _network(train, validation, known, mean, settings, seed, device)
    straight, judged_straight = _linear(train, validation, known, mean)
    rebuilt = {
        "network": decoded,
        "linear": straight,
        "average": np.broadcast_to(mean, test.volumes.shape),
        "hospital": np.stack([hospital(train, site) for site in test.sites]),
        "nearest": train.volumes[_nearest(known[2], known[0])],
        "compressed": _compressed(train, test, mean, coefficients),
    }
    found = {name: errors(guess, test) for name, guess in rebuilt.items()}
    return Outcome(found, rebuilt, "network" if judged < judged_straight else "linear", weights, coefficients)


def errors(guess: np.ndarray, scans: Scans) -> np.ndarray:
    """Of every case: mean squared error inside the head."""
    axes = tuple(range(1, guess.ndim))
    wrong = (np.square(guess - scans.volumes) * scans.inside).sum(axes, dtype=np.float64)
    voxels = scans.inside.sum(axes, dtype=np.float64) * scans.volumes.shape[1]
    found: np.ndarray = wrong / voxels
    return found


def average(scans: Scans) -> np.ndarray:
    """Voxel by voxel over the cases whose head is there."""
    total = (scans.volumes * scans.inside).sum(0, dtype=np.float64)
    mean: np.ndarray = total / np.maximum(scans.inside.sum(0, dtype=np.float64), 1)
    return mean.astype(np.float32)


def hospital(train: Scans, site: str) -> np.ndarray:
    """The mean volume of a hospital; of all, if it has no training case."""
    own = [k for k, name in enumerate(train.sites) if name == site]
    return average(train.part(own) if own else train)


def matched(vectors: np.ndarray, again: np.ndarray, learn: Sequence[int], probe: Sequence[int]) -> np.ndarray:
    """Whether the nearest of all vectors to that of a second scan is that of the same patient, for each of ``probe``.

    How a number moves from scan to scan, and how much that varies, is learned from the patients of ``learn``: what is
    steady in a patient and differs between patients counts most.
    """
    between = vectors.std(0)
    moved = (again - vectors)[list(learn)]
    steady = np.maximum(moved.std(0), CLEAR * between)
    use = between > 0
    gallery, probes = vectors[:, use] / steady[use], (again - moved.mean(0))[list(probe)][:, use] / steady[use]
    found: np.ndarray = _nearest(probes, gallery) == np.asarray(probe)
    return found


def _standardised(train: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """By the training cases; a number that is the same in all of them is zero."""
    mean, deviation = train.mean(0), train.std(0)
    varies = deviation > 1e-9 * np.abs(mean)
    scaled = (vectors - mean) / np.where(varies, deviation, np.inf)
    near: np.ndarray = np.clip(scaled, -FAR, FAR).astype(np.float32)
    return near


def _nearest(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The row of ``others`` that is nearest to every point."""
    return np.array([np.square(others - point).sum(1).argmin() for point in points])


def _compressed(train: Scans, test: Scans, mean: np.ndarray, count: int) -> np.ndarray:
    centred = ((train.volumes - mean) * train.inside).reshape(len(train.sites), -1)
    axes = np.linalg.svd(centred, full_matrices=False)[2][:count]
    wanted = ((test.volumes - mean) * test.inside).reshape(len(test.sites), -1)
    guess: np.ndarray = mean + (wanted @ axes.T @ axes).reshape(test.volumes.shape)
    return guess


def _linear(train: Scans, validation: Scans, known: Sequence[np.ndarray], mean: np.ndarray) -> tuple[np.ndarray, float]:
    """Guesses of the test cases, and the error of the validation cases, by the ridge that makes the latter least."""
    x = known[0].astype(np.float64)
    values, basis = np.linalg.eigh(x @ x.T)
    turned = basis.T @ ((train.volumes - mean) * train.inside).reshape(len(x), -1)
    unit = max(float(values.mean()), np.finfo(float).tiny)

    def guess(vectors: np.ndarray, strength: float) -> np.ndarray:
        weights = (vectors @ x.T @ basis) / (np.maximum(values, 0) + strength * unit)
        found: np.ndarray = mean + (weights @ turned).reshape(-1, *mean.shape).astype(np.float32)
        return found

    judged = [float(errors(guess(known[1], s), validation).mean()) for s in STRENGTHS]
    best = int(np.argmin(judged))
    return guess(known[2], STRENGTHS[best]), judged[best]


def _network(
    train: Scans,
    validation: Scans,
    known: Sequence[np.ndarray],
    mean: np.ndarray,
    settings: Settings,
    seed: int,
    device: torch.device,
) -> tuple[np.ndarray, float, int]:
    """Guesses of the test cases, the error of the validation cases, and the size, of the best of some decoders."""
    x, ahead, test = (torch.from_numpy(v).to(device) for v in known)
    start = torch.from_numpy(mean).to(device)
    wanted, inside = (torch.from_numpy(v).to(device) for v in (train.volumes, train.inside))
    best, least = np.broadcast_to(mean, (len(test), *mean.shape)), np.inf
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for restart in range(settings.restarts):
            torch.manual_seed(int(np.random.SeedSequence([seed, restart]).generate_state(1)[0]))
            net = decoder(x.shape[1], mean.shape, settings.dropout).to(device)
            optimiser, idle, mine = torch.optim.Adam(net.parameters(), settings.rate, weight_decay=1e-5), 0, np.inf
            for _ in range(settings.epochs):
                _epoch(net, optimiser, x, wanted - start, inside, settings.batch)
                judged = float(errors(_decoded(net, ahead, start), validation).mean())
                idle = 0 if judged < mine else idle + 1
                mine = min(mine, judged)
                if judged < least:
                    best, least = _decoded(net, test, start), judged
                if idle == settings.patience:
                    break
    return best, least, sum(p.numel() for p in net.parameters())


def decoder(numbers: int, shape: Sequence[int], dropout: float) -> nn.Sequential:
    """From a vector to a volume (modality, *space), which is zero before it has learned anything."""
    modalities, space = shape[0], shape[1:]
    grow = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[len(space)]
    small = [side // 8 for side in space]
    layers: list[nn.Module] = [
        nn.Linear(numbers, CHANNELS[0] * int(np.prod(small))),
        nn.Dropout(dropout),
        nn.Unflatten(1, (CHANNELS[0], *small)),
    ]
    for before, after in pairwise((*CHANNELS, modalities)):
        layers += [nn.LeakyReLU(0.2), grow(before, after, kernel_size=4, stride=2, padding=1)]
    for weights in layers[-1].parameters():
        nn.init.zeros_(weights)
    return nn.Sequential(*layers)


def _epoch(
    net: nn.Module,
    optimiser: torch.optim.Optimizer,
    x: torch.Tensor,
    wanted: torch.Tensor,
    inside: torch.Tensor,
    batch: int,
) -> None:
    net.train()
    for rows in torch.split(torch.randperm(len(x)), batch):
        some = rows.to(x.device)
        wrong = (net(x[some]) - wanted[some]).square() * inside[some]
        loss = (wrong.flatten(1).sum(1) / inside[some].flatten(1).sum(1)).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def _decoded(net: nn.Module, x: torch.Tensor, start: torch.Tensor) -> np.ndarray:
    net.eval()
    with torch.inference_mode():
        guess: np.ndarray = (net(x) + start).cpu().numpy()
    return guess
