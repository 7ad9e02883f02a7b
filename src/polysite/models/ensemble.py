"""An ensemble: several networks, of one kind or of different kinds, whose logits are averaged.

    z(x) = sum_m a_m z_m(x),    a_m = 1 / M

The weights a_m are part of the parameters: in ensembles that polysite 0.1.0 made, hospitals may have others. An
ensemble is not trained: ``polysite train --trainings`` makes it of runs. Logits are averaged rather than probabilities,
as those of mirror images and of overlapping windows are: masks and exported models start from logits with or without an
ensemble.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from polysite.errors import ConfigError
from polysite.models.densenet import DenseNet
from polysite.models.monai import Monai
from polysite.models.sub_encoders import DenseNetSub, UNetSub
from polysite.models.unet import UNet
from polysite.tree import Tree

Member = UNet | DenseNet | UNetSub | DenseNetSub | Monai
WEIGHTS = "weights"  # name of the weights among the parameters


@dataclass(frozen=True)
class Ensemble:
    """Several networks whose logits are averaged; ``polysite train --trainings`` makes it of runs.

    Args:
        members: The networks, each a section with the name and the keys of a model.
    """

    members: tuple[Member, ...] = ()

    def __post_init__(self) -> None:
        if len(self.members) < 2:
            raise ConfigError(f"an ensemble has at least two networks, model.members has {len(self.members)}")
        odd = next((m for m in self.members if isinstance(m, Ensemble)), None)
        if odd is not None:
            raise ConfigError("an ensemble is no member of an ensemble; name the members of both in one")
        tasks = sorted({m.task for m in self.members})
        if len(tasks) > 1:
            raise ConfigError(f"model.members has networks for {' and for '.join(tasks)}; an ensemble has one task")

    @property
    def task(self) -> str:
        """The task of all members."""
        return self.members[0].task

    @property
    def divisor(self) -> int:
        """Factor that the sides of a patch must be multiples of."""
        return lcm(*(m.divisor for m in self.members))

    def build(self, *, dims: int, modalities: int, outputs: int, seed: int) -> Any:
        """Return the network with equal weights; the initial parameters of members come from different seeds."""
        from polysite.models.ensemble_network import EnsembleNetwork

        shape = {"dims": dims, "modalities": modalities, "outputs": outputs}
        return EnsembleNetwork([m.build(**shape, seed=seed + k) for k, m in enumerate(self.members)])


def joined(models: Sequence[Tree]) -> Tree:
    """Return the parameters of an ensemble of these models.

    >>> import numpy as np
    >>> sorted(joined([{"head.bias": np.zeros(1)}, {"head.bias": np.ones(1)}]))
    ['members.0.head.bias', 'members.1.head.bias', 'weights']
    """
    from torch import full

    parts = {f"members.{k}.{name}": leaf for k, model in enumerate(models) for name, leaf in model.items()}
    return {**parts, WEIGHTS: full((len(models),), 1 / len(models))}
