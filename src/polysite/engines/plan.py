"""The plan of a training phase: rounds, cohorts, validation, checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from polysite.engines.compress import Compress
from polysite.engines.guard_state import Guard
from polysite.engines.secure.settings import Secure
from polysite.engines.site_turn import OutgoingStep
from polysite.errors import ConfigError
from polysite.payload import SiteId


@dataclass(frozen=True)
class Plan:
    """Length of the training, validation, choice of the best round, checkpoints.

    Args:
        rounds: Number of rounds.
        share: Share of the sites that take part in a round.
        validate_every: Validate after this many rounds.
        best: How the best round is chosen: by the mean validation score over all cases (case), by the mean over the
            means of the sites (site), or for every site, or cluster of sites that share a model, by itself (own).
        best_from: First round of the phase that can be the best, counted from 1, at most ``rounds``; 0: the model that
            the phase starts from can be the best, too.
        patience: Stop after this many validations without a better one; None: never.
        peek: Also score the test cases at every validation, for the report alone: the papers' "best mean".
        checkpoint_every: Write a checkpoint after this many rounds.
        compress: Send models whole, or their changes in 16 bits (half) or 8 bits (int8).
        wire: Simulation: pass every payload through the codec, as a network would.
        pooled: Simulation: one site holds all training cases (centralised training, the upper reference).
        guard: Limits on what a single site can do to the aggregate.
        secure: Secure sums: the server sees no single reply.
    """

    rounds: int = 30
    share: float = 1.0
    validate_every: int = 1
    best: Literal["case", "site", "own"] = "case"
    best_from: int = 0
    patience: int | None = None
    peek: bool = False
    checkpoint_every: int = 5
    compress: Literal["none", "half", "int8"] = "none"
    wire: bool = False
    pooled: bool = False
    guard: Guard = Guard()
    secure: Secure = Secure()

    def __post_init__(self) -> None:
        for name in ("rounds", "validate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"run.{name} must be at least one, got {getattr(self, name)}")
        if self.patience is not None and self.patience < 1:
            raise ConfigError(f"run.patience must be at least one, got {self.patience}")
        if not 0 <= self.best_from <= self.rounds:
            raise ConfigError(
                f"run.best_from must lie between 0 and run.rounds = {self.rounds}, or no round could be the best; got "
                f"{self.best_from}"
            )
        if not 0 < self.share <= 1:
            raise ConfigError(f"run.share must lie in (0, 1], got {self.share}")
        if self.secure.on:
            self._check_secure()

    def _check_secure(self) -> None:
        """Refuse what secure sums do not go with."""
        if self.compress != "none":
            raise ConfigError(
                f"run.compress = {self.compress!r} shortens each reply, and a masked reply is as long as its masks: "
                "leave out run.compress or run.secure"
            )
        if self.guard.use == "on":
            raise ConfigError(
                "run.guard judges each reply, and run.secure hides each reply: set run.guard.use = 'off', or leave "
                "out run.secure"
            )
        if self.pooled:
            raise ConfigError("run.pooled has one site and no sum: leave out run.secure")

    @property
    def guarded(self) -> bool:
        """Whether the guard is on. A deployment sets ``guard.use`` to on before it starts, if it is auto."""
        return self.guard.use == "on" and not self.pooled

    @property
    def outgoing(self) -> tuple[OutgoingStep, ...]:
        """The outgoing steps of every reply, in order."""
        return () if self.compress == "none" else (Compress(self.compress),)


def cohort(sites: Sequence[SiteId], share: float, seed: int, round: int) -> tuple[SiteId, ...]:
    """Return a random share of the sites, at least one, determined by (seed, round).

    >>> cohort(["a", "b", "c"], 1.0, seed=0, round=7)
    ('a', 'b', 'c')
    >>> len(cohort(["a", "b", "c", "d"], 0.5, seed=0, round=7))
    2
    """
    count = max(1, int(share * len(sites) + 0.5))
    chosen = np.random.default_rng([seed, round]).permutation(len(sites))[:count]
    return tuple(sites[i] for i in sorted(chosen))
