"""Noise on what leaves a hospital: on the change of a model, and on sums over its patients. Two outgoing steps.

    reply = base + min(1, clip / |change|) change + N(0, (noise clip)^2),    change = model - base

``base`` is the model that the site received. One hospital more or less changes the released change by at most ``clip``,
so a round is one release of the Gaussian mechanism; ``polysite.privacy`` adds up rounds. The number of cases, by which
replies are weighed, is taken for public.

Sums (``SumNoise``) are bounded where they are made: all statistics of a reply together change by at most 1 in length
with one patient more or less. Where replies are added up in secret, no part of a sum is seen by itself, and the sites
share the noise: of at least m sites in a sum, each adds N(0, noise^2 / (m - 1)), so that the sum has all of the noise
even to a hospital that knows its own part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from polysite import tree
from polysite.algorithms.base import Kind
from polysite.engines.secure.member import Session
from polysite.errors import ConfigError, PayloadError
from polysite.payload import Payload, plain
from polysite.privacy import Private, Release

BOUNDED = ("model", "count", "one")  # kinds of reply that noise on the model covers
VARIANCES = ("*running_var",)


class _Noise:
    """What the two steps have in common."""

    @property
    def reveals(self) -> Literal["each"]:
        return "each"

    def restore(self, kinds: Mapping[str, Kind], sent: Payload, reply: Payload) -> Payload:
        """Return the reply as it is: noise stays."""
        return reply


@dataclass(frozen=True)
class HospitalNoise(_Noise):
    """Shorten the change of the model and add noise to it.

    Args:
        private: The settings.
        rng: Source of the noise; at a hospital it is secret.
    """

    private: Private
    rng: np.random.Generator

    @property
    def release(self) -> Release:
        """What this reply costs."""
        return Release(self.private.noise, delta=self.private.delta)

    def apply(self, kinds: Mapping[str, Kind], got: Payload, reply: Payload) -> Payload:
        """Return the reply under noise; all models in it together are one change."""
        fields = [name for name in sorted(reply) if kinds.get(name) == "model"]
        odd = [name for name in reply if kinds.get(name) not in BOUNDED]
        if odd or len(fields) != 1:
            raise PayloadError(f"noise covers one model in a reply, not {', '.join(sorted(reply))}")
        (name,) = fields
        value, base = reply[name], got.get(name) or got.get("model") or {}
        if not value.keys() <= base.keys():
            raise PayloadError(f"{name!r} has parameters that the site was not sent, so its change has no limit")
        change = {k: plain(value[k]).astype(np.float64) - plain(base[k]) for k in sorted(value)}
        length = tree.norm(change)
        if not np.isfinite(length):
            raise PayloadError(f"{name!r} is not finite")
        scale = min(1.0, self.private.clip / length) if length else 1.0
        spread = self.private.noise * self.private.clip
        noisy = {k: x * scale + spread * self.rng.standard_normal(x.shape) for k, x in change.items()}
        moved = {k: plain(base[k]) + noisy[k] for k in value}
        # a variance below zero would break every network that receives it; the limit does not depend on any patient
        moved |= {k: np.maximum(moved[k], 0.0) for k in moved if tree.matches(k, VARIANCES)}
        model = {k: _like(value[k], moved[k]) for k in value}
        return Payload(**{**reply, name: model})


@dataclass(frozen=True)
class SumNoise(_Noise):
    """Add noise to the statistics of a reply, whatever their fields; sums of which a patient changes at most 1.

    Args:
        release: Noise, and what it costs.
        rng: Source of the noise; at a hospital it is secret.
        sharers: Sites that share the noise; 1 for a reply that is seen by itself.
    """

    release: Release
    rng: np.random.Generator
    sharers: int = 1

    def apply(self, kinds: Mapping[str, Kind], got: Payload, reply: Payload) -> Payload:
        """Return the reply with noise on every statistic."""
        spread = self.release.noise / np.sqrt(self.sharers)
        noisy: dict[str, Any] = {}
        for name in sorted(name for name in reply if kinds.get(name) == "statistics"):
            sums = {k: plain(reply[name][k]).astype(np.float64) for k in sorted(reply[name])}
            noisy[name] = {k: x + spread * self.rng.standard_normal(x.shape) for k, x in sums.items()}
        return Payload(**{**reply, **noisy})


def noise_steps(
    algorithm: Any, private: Private, site: Any, got: Payload = Payload(), session: Session | None = None
) -> tuple[HospitalNoise | SumNoise, ...]:
    """Return the steps that a site's turn needs: noise on sums, or on the change of a model.

    Args:
        algorithm: The algorithm.
        private: Differential privacy of training.
        site: The site.
        got: What the site received.
        session: The secure sum in which the reply is masked, if there is one.
    """
    release = release_of(algorithm, got)
    if release is not None:
        return (SumNoise(release, site.noise_rng(), session.fewest_answers - 1 if session else 1),)
    if private.unit != "hospital" or not algorithm.reply:
        return ()
    return (HospitalNoise(private, site.noise_rng()),)


def release_of(algorithm: Any, got: Payload) -> Release | None:
    """Return what noise on the sums of a reply costs; None for an algorithm without such noise."""
    return algorithm.release_of(got) if hasattr(algorithm, "release_of") else None


def _like(leaf: Any, array: Any) -> Any:
    """Return an array as a leaf of the same kind, type and device as another."""
    if isinstance(leaf, np.ndarray):
        return array.astype(leaf.dtype)
    return leaf.new_tensor(array)


def check_replies(name: str, reply: Mapping[str, Kind]) -> None:
    """Refuse an algorithm with replies that noise on the model does not cover, before anything is trained."""
    odd = sorted(field for field, kind in reply.items() if kind not in BOUNDED)
    models = [field for field, kind in reply.items() if kind == "model"]
    if odd or len(models) > 1 or any(field.endswith("*") for field in reply):
        raise ConfigError(
            f"{name} replies {', '.join(odd or sorted(reply))}, which noise on the change of one model does not cover; "
            "with train.private.unit = 'hospital' choose an algorithm that replies one model, such as fedavg, fedprox, "
            "fedper or ditto"
        )
