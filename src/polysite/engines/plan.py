"""The plan of a training phase: rounds, cohorts, validation, checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from polysite.engines.compress import Compress
from polysite.engines.site_turn import OutgoingStep
from polysite.errors import ConfigError
from polysite.payload import SiteId


@dataclass(frozen=True)
class Plan:
    """How long to train, how often to look, how to choose."""

    rounds: int = 30
    share: float = 1.0  # of the sites that take part in a round
    validate_every: int = 1  # rounds
    best: Literal["case", "site"] = "case"  # mean validation Dice (accuracy) over all cases, or over the sites' means
    patience: int | None = None  # stop after this many validations without a better one
    peek: bool = False  # look at the test cases whenever validating, for the report alone: the papers' "best mean"
    checkpoint_every: int = 5  # rounds
    compress: Literal["none", "half", "int8"] = (
        "none"  # what sites send of their models: all, 16 bits or 8 bits of every change
    )
    wire: bool = False  # simulator: send every payload through the codec, as a network would
    pooled: bool = False  # simulator: one site holds all training cases (the centralised yardstick)

    def __post_init__(self) -> None:
        for name in ("rounds", "validate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"run.{name} must be at least one, got {getattr(self, name)}")
        if self.patience is not None and self.patience < 1:
            raise ConfigError(f"run.patience must be at least one, got {self.patience}")
        if not 0 < self.share <= 1:
            raise ConfigError(f"run.share must lie in (0, 1], got {self.share}")

    @property
    def outgoing(self) -> tuple[OutgoingStep, ...]:
        """The outgoing steps of every reply, in order."""
        return () if self.compress == "none" else (Compress(self.compress),)


def cohort(sites: Sequence[SiteId], share: float, seed: int, round: int) -> tuple[SiteId, ...]:
    """A random share of the sites, at least one, fixed by (seed, round).

    >>> cohort(["a", "b", "c"], 1.0, seed=0, round=7)
    ('a', 'b', 'c')
    >>> len(cohort(["a", "b", "c", "d"], 0.5, seed=0, round=7))
    2
    """
    count = max(1, round_half_up(share * len(sites)))
    chosen = np.random.default_rng([seed, round]).permutation(len(sites))[:count]
    return tuple(sites[i] for i in sorted(chosen))


def round_half_up(x: float) -> int:
    return int(x + 0.5)
