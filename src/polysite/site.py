"""What an algorithm may ask of a hospital."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from polysite.tree import Tree

Cases = tuple[str, ...]  # names of patients
Sketch = Literal["labels", "images"]  # what a few numbers about cases are taken from
Scores = Mapping[str, Mapping[str, float]]  # case -> label -> Dice, or "accuracy" -> 0 or 1; and what is aside
ASIDE = ("loss", "said", "true")  # no measure of quality: the loss, and in a classification the classes themselves


@dataclass(frozen=True, slots=True)
class Tilt:
    """A linear-quadratic term added to the local objective: F(w) + <linear, w> + weight/2 |w - anchor|^2.

    FedProx, SCAFFOLD, FedDyn, Ditto, pFedMe and FedAMP differ only in what they put here. Its gradient goes through
    the optimiser like that of F, momentum included; running statistics feel nothing of it. A parameter that ``anchor``
    does not name is not held.
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


@dataclass(frozen=True, slots=True)
class Divergence:
    """A loss added to the local one: what the encoder of a class makes of the cases of a batch shall vary little.

    weight * sum_i mean_j std_batch(beta_i F_ij),    F_ij the j-th feature of the encoder of class i

    A classification weights every case: beta_i = e^focus where it is of class i and e^-focus where not; F_ij is a
    number a case. A segmentation weights every position: beta_i = focus e^-m with m the share of class i there, which
    is its mask, averaged down to the size of the feature; F_ij is a map, one of those that go to the decoder from any
    depth, and its deviation the mean of those at its positions. The deviation is that of a population, so a case alone
    has none. ``weight`` None is the task's own: 0.2 to classify, 0.4 to segment.

    It needs a network that has an encoder for every class.
    """

    weight: float | None
    focus: float


Term = Contrast | Divergence  # an extra loss, by name


@dataclass(frozen=True, slots=True)
class Balanced:
    """A loss in place of the site's own: the same, of logits that are shifted by how often each label occurs here.

    Classes that exclude one another: z_c + log(n_c / n), the balanced softmax; labels that may overlap:
    z_c + log(pi_c / (1 - pi_c)). Counted is what training sees, so where it sees patches, the voxels of a random patch.
    No shift is longer than ``clip``: a label that does not occur would have none at all.
    """

    clip: float


@dataclass(frozen=True, slots=True)
class OneVsAll:
    """A loss in place of the site's own: a binary problem for every label, balanced and hard-mined, summed.

    weight * mean (1 - p)^gamma (-log p) over y = 1, p < below
    + (1 - weight) * mean p^gamma (-log(1 - p)) over y = 0, p > above, of these the hardest ``ratio`` for every y = 1

    Means are over a batch. Where the site segments, the soft Dice of these p is added.
    """

    weight: float
    gamma: float
    below: float
    above: float
    ratio: float | None


Loss = Balanced | OneVsAll  # what is minimised instead of the site's own loss


@dataclass(frozen=True, slots=True)
class Mix:
    """Two models that are trained as one: the loss is taken at points between them, and both feel it.

    F((1 - lam) w + lam v) + orthogonality <w, v>^2 / (|w|^2 |v|^2), lam drawn from U(0, 1) for every step

    w are the parameters of the fit, on which its tilt acts, v is the twin; what the twin has no name of is not mixed.
    ``by`` says whether a step draws one lam for the model, or one for every layer. The inner product and the lengths
    are those of all mixed parameters together.
    """

    twin: Tree
    orthogonality: float
    by: Literal["model", "layer"]


@dataclass(frozen=True, slots=True)
class Fit:
    """What local training did, measured by the loop that did it."""

    params: Tree
    loss: float  # mean training loss over the steps
    steps: int
    time: float  # sum of the learning rates of the steps taken: K * eta for a constant eta
    reach: float  # how far a constant gradient of one would have carried: the time, and more with momentum
    twin: Tree = field(default_factory=dict)  # what a mix made of it
    personal: Tree = field(default_factory=dict)  # the personal head, where there is one
    cases: frozenset[str] = frozenset()  # that it saw
    part: bool = False  # one mini-batch of several that make up a round


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
        """The initial parameters, which every site builds from the same configuration and seed; in a later phase,
        what the site was served when it began."""
        ...

    @property
    def fresh(self) -> Tree:
        """Other initial parameters, which no other site has: drawn for (seed, site), the same in every round."""
        ...

    @property
    def fits(self) -> Sequence[Fit]:
        """What was trained since ``at``: the engine's record of effort."""
        ...

    def at(self, round: int) -> "Site":
        """This site with the randomness of one round. Engines call it; algorithms never seed."""
        ...

    def begin(self, round: int, start: Tree) -> "Site":
        """This site in a phase that begins with this round, from these parameters. Engines call it."""
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
        minibatch: int | None = None,
        mix: Mix | None = None,
        loss: Loss | None = None,
        personal: Tree | None = None,
    ) -> Fit:
        """Train from ``params``: ``only`` these parameters (patterns), on ``keep`` (names of cases) if given.

        ``terms`` are added to the loss. ``lr``, and ``epochs`` or ``steps``, replace the site's own settings for this
        call. The optimiser starts anew with every call.

        ``minibatch`` takes all steps on one mini-batch, that of this number: a round has as many as are asked for, and
        they go through the cases as epochs do. ``mix`` trains a twin beside ``params``.

        Running statistics that ``only`` does not name stand still, and their layers go by them. ``loss`` replaces the
        site's own, though what is told stays that. ``personal`` is a second head, whose logits are added to those of
        the network: after every step it takes one of its own on the same patches, by the site's own loss, and nothing
        else moves with it.
        """
        ...

    def losses(self, params: Tree, *, augmented: bool = False) -> Mapping[str, float]:
        """Loss of every training case: no augmentation, fixed patches; or patches drawn as in training."""
        ...

    def calibrate(self, params: Tree) -> Tree:
        """The same parameters with the running statistics that this site's training cases give them."""
        ...

    def amount(self, channel: int) -> float:
        """How much of a class there is to train on: cases in a classification, voxels in a segmentation.

        Classes are counted as the channels of the network's answer are: where background is one, it is the first.
        """
        ...

    def sketch(self, kind: Sketch, cases: Collection[str]) -> Any:
        """A few numbers (float64) about these cases, each counting alike.

        ``labels``: the share of the voxels that every label has, or of the cases that are of a class. ``images``: the
        mean of every modality, then the covariances between modalities, those of the first row first.
        """
        ...

    def radiomics(self, cases: Collection[str], bin_width: float) -> Any:
        """The radiomic features of these cases (float64), a row for each: 93 of every modality, within the head.

        A modality that is the same everywhere, as one that was not acquired, has none: zeros.
        """
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
