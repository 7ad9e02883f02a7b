"""What an algorithm may ask of a hospital."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from polysite.tree import Tree

Cases = tuple[str, ...]  # names of patients
Scores = Mapping[str, Mapping[str, float]]  # case -> label -> Dice, or "accuracy" -> 0 or 1; and what is aside
ASIDE = ("loss", "said", "true")  # no measure of quality: the loss, and in a classification the classes themselves


@dataclass(frozen=True, slots=True)
class Tilt:
    """A linear-quadratic term added to the local objective: F(w) + <linear, w> + weight/2 |w - anchor|^2.

    FedProx, SCAFFOLD, FedDyn, Ditto, pFedMe and FedAMP differ only in what they put here. Its gradient goes through
    the optimiser like that of F, momentum included; running statistics feel nothing of it.
    """

    linear: Tree | None = None
    anchor: Tree | None = None
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Contrast:
    """A loss added to the local one: what the network makes of a patch shall look more like what ``near`` makes of it
    than like what ``far`` does.

    weight * -log( e^(cos(z, z_near)/T) / (e^(cos(z, z_near)/T) + e^(cos(z, z_far)/T)) ), no gradient into near and far
    """

    near: Tree
    far: Tree
    weight: float
    temperature: float


Term = Contrast  # an extra loss, by name


@dataclass(frozen=True, slots=True)
class Fit:
    """What local training did, measured by the loop that did it."""

    params: Tree
    loss: float  # mean training loss over the steps
    steps: int
    time: float  # sum of the learning rates of the steps taken: K * eta for a constant eta
    reach: float  # how far a constant gradient of one would have carried: the time, and more with momentum


@dataclass(frozen=True, slots=True)
class Examined:
    """All that is measured of one case, and the answer itself, which does not leave the hospital."""

    case: str
    measures: Mapping[str, Mapping[str, float]]  # label -> measure -> value; in a classification, of the true class
    answer: Any = None  # an array of whole numbers in which bit k is label k; none in a classification


class Site(Protocol):
    """A hospital: its patients stay inside, only answers come out."""

    @property
    def size(self) -> int:
        """Number of training cases."""
        ...

    @property
    def start(self) -> Tree:
        """The initial parameters, which every site builds from the same configuration and seed."""
        ...

    @property
    def fits(self) -> Sequence[Fit]:
        """What was trained since ``at``: the engine's record of effort."""
        ...

    def at(self, round: int) -> "Site":
        """This site with the randomness of one round. Engines call it; algorithms never seed."""
        ...

    def fit(
        self,
        params: Tree,
        *,
        tilt: Tilt | None = None,
        only: Collection[str] = ("*",),
        keep: Collection[str] | None = None,
        terms: Sequence[Term] = (),
        lr: float | None = None,
        epochs: int | None = None,
        steps: int | None = None,
    ) -> Fit:
        """Train from ``params``: ``only`` these parameters (patterns), on ``keep`` (names of cases) if given.

        ``terms`` are added to the loss. ``lr``, and ``epochs`` or ``steps``, replace the site's own settings for this
        call. The optimiser starts anew with every call.
        """
        ...

    def losses(self, params: Tree, *, augmented: bool = False) -> Mapping[str, float]:
        """Loss of every training case: no augmentation, fixed patches; or patches drawn as in training."""
        ...

    def cases(self, split: str) -> Cases:
        """The names of the cases of ``train``, ``validation`` or ``test``."""
        ...

    def score(self, params: Tree, cases: Collection[str]) -> Scores:
        """Segment these cases and compare with the truth."""
        ...

    def examine(self, params: Tree, cases: Collection[str], tolerance: float) -> Iterator[Examined]:
        """Segment these cases and measure everything: overlap, and surfaces, which may lie ``tolerance`` apart."""
        ...

    def lift(self, params: Tree) -> Tree:
        """The same values where this site computes."""
        ...


class Surveyed(Protocol):
    """A hospital that is asked what its cases are like, before anything is trained."""

    @property
    def size(self) -> int:
        """Number of cases that are described."""
        ...

    def features(self, kind: str) -> Mapping[str, Any]:
        """Arrays with a row for every case.

        ``absent``: for every quantity whether it is absent, a modality not acquired or nothing labelled. ``metadata``:
        every quantity by name, and ``metric``, the dimensions of a case whose voxel
        size is known, or 0. ``embedding``: the
        ``embedding`` (case, modality, channel, component), and the number of the ``encoder`` that made it.
        """
        ...


def quality(scores: Mapping[str, float]) -> float:
    """The mean over the labels of a case.

    >>> quality({"WT": 0.5, "TC": 0.25, "loss": 9.0})
    0.375
    """
    labels = [v for k, v in scores.items() if k not in ASIDE]
    return math.fsum(labels) / len(labels)
