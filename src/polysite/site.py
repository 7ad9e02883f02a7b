"""The interface through which an algorithm uses a hospital, and the values that pass through it."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from polysite.privacy import Release
from polysite.tree import Tree

Cases = tuple[str, ...]  # names of cases
Sketch = Literal["labels", "images"]  # what a sketch summarises
Count = tuple[int, int, int, int]  # true positives, false positives, false negatives, true negatives
Counts = Mapping[str, Count]  # by label or class


@dataclass(frozen=True, slots=True)
class CaseScore:
    """Score of one case: Dice per label in a segmentation, ``accuracy`` (0 or 1) in a classification.

    >>> CaseScore({"WT": 0.5, "TC": 0.25}, loss=9.0).mean
    0.375
    """

    labels: Mapping[str, float]
    loss: float
    predicted: int | None = None  # class index; classification only
    true: int | None = None
    counts: Counts = field(default_factory=dict)  # voxels of every label and of the background; segmentation only

    @property
    def mean(self) -> float:
        """Mean over the labels."""
        return math.fsum(self.labels.values()) / len(self.labels)


Scores = Mapping[str, CaseScore]  # by case


@dataclass(frozen=True, slots=True)
class Tilt:
    """A linear-quadratic term added to the local objective: F(w) + <linear, w> + weight/2 |w - anchor|^2.

    FedProx, SCAFFOLD, FedDyn, Ditto, pFedMe and FedAMP differ only in these three values. The term's gradient passes
    through the optimiser together with that of F, momentum included. It does not act on running statistics, nor on
    parameters that ``anchor`` does not name.
    """

    linear: Tree | None = None
    anchor: Tree | None = None
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Contrast:
    """A contrastive loss added to the local one: features should resemble those of ``near`` more than those of ``far``.

    weight * -log( e^(cos(z, z_near)/T) / (e^(cos(z, z_near)/T) + e^(cos(z, z_far)/T)) ), no gradient into near and far
    """

    near: Tree
    far: Tree
    weight: float
    temperature: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """A loss added to the local one: the features of each class encoder should vary little over a batch.

    weight * sum_i mean_j std_batch(beta_i F_ij),    F_ij the j-th feature of the encoder of class i

    Classification: F_ij is a number per case, and beta_i = e^focus for cases of class i, e^-focus for others.
    Segmentation: F_ij is a feature map (any skip connection), beta_i = focus e^-m per position, where m is the mask of
    class i averaged down to the map's size, to the power of ``edges``; the deviation is averaged over positions. The
    standard deviation is the population's, so it is 0 for a batch of one case. ``weight = None`` means 0.2 to classify
    and 0.4 to segment.

    The network must have one encoder per class.
    """

    weight: float | None
    focus: float
    edges: float = 1.0


ExtraLoss = Contrast | Divergence  # added to the local loss


@dataclass(frozen=True, slots=True)
class Balanced:
    """The local loss computed on logits that are shifted by the label frequencies of this site.

    Exclusive classes: z_c + log(n_c / n), the balanced softmax. Overlapping labels: z_c + log(pi_c / (1 - pi_c)).
    Frequencies are those that training sees: of voxels in random patches, or of cases. Shifts are clipped to
    [-clip, clip], so that a label which does not occur has a finite shift.
    """

    clip: float


@dataclass(frozen=True, slots=True)
class OneVsAll:
    """A binary loss per label, balanced and hard-mined, summed over the labels. It replaces the local loss.

    weight * mean (1 - p)^gamma (-log p) over y = 1, p < below
    + (1 - weight) * mean p^gamma (-log(1 - p)) over y = 0, p > above, of these the hardest ``ratio`` for every y = 1

    Means are over a batch. In a segmentation the soft Dice loss of these p is added.
    """

    weight: float
    gamma: float
    below: float
    above: float
    ratio: float | None


ReplacementLoss = Balanced | OneVsAll  # minimised instead of the local loss


@dataclass(frozen=True, slots=True)
class Mix:
    """Train a second model (``twin``) beside the first, with the loss taken at random points between the two.

    F((1 - lam) w + lam v) + orthogonality <w, v>^2 / (|w|^2 |v|^2), lam drawn from U(0, 1) for every step

    w are the parameters of the fit, on which the tilt acts; v is the twin. Parameters that the twin does not name are
    not mixed. ``by`` draws one lam per step for the whole model, or one per layer. The inner product and the norms run
    over all mixed parameters.
    """

    twin: Tree
    orthogonality: float
    by: Literal["model", "layer"]


@dataclass(frozen=True, slots=True)
class Objective:
    """What a local fit minimises. The default is the site's own loss."""

    tilt: Tilt | None = None
    """Linear-quadratic term added to the objective."""
    extra: Sequence[ExtraLoss] = ()
    """Losses added to the local loss."""
    loss: ReplacementLoss | None = None
    """Loss minimised instead of the local loss. ``Fit.loss`` still reports the local loss."""
    mix: Mix | None = None
    """Second model to train together with the first."""
    personal: Tree | None = None
    """Personal head whose logits are added to the network's. After every step it takes a step of its own on the same
    patches, with the local loss; no other parameter moves in that step."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How long a local fit lasts, and at which learning rate. None means the site's own setting (``[train]``)."""

    lr: float | None = None
    epochs: int | None = None
    steps: int | None = None
    """Number of steps; takes precedence over ``epochs``."""
    minibatch: int | None = None
    """Take all steps on the mini-batch of this number. The mini-batches of a round pass through the cases as epochs
    do."""
    round: int | None = None
    """Number of the round in the schedule of the learning rate, from 0; None counts the exchanges of the phase. An
    algorithm whose first exchanges do not train counts its own."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of a local fit, measured by the training loop itself."""

    params: Tree
    loss: float
    """Mean training loss over the steps."""
    steps: int
    lr_sum: float
    """Sum of the learning rates of all steps: K * eta for a constant eta."""
    reach: float
    """Distance that a constant gradient of one would have moved a weight: ``lr_sum``, or more with momentum."""
    twin: Tree = field(default_factory=dict)
    """Second model, if the objective has a ``mix``."""
    personal: Tree = field(default_factory=dict)
    """Personal head, if the objective has one."""
    cases: frozenset[str] = frozenset()
    """Cases whose steps still weigh in the result."""
    minibatch: bool = False
    """Whether this fit is one mini-batch of several in a round."""
    release: Release | None = None
    """What this fit costs under differential privacy; None without noise."""


@dataclass(frozen=True, slots=True)
class Examined:
    """All measures of one case, with the prediction, which stays at the hospital."""

    case: str
    score: CaseScore
    measures: Mapping[str, Mapping[str, float]]
    """Label -> measure -> value. In a classification the only label is the true class."""
    prediction: Any = None
    """Integer array in which bit k of a voxel is label k; None in a classification, or where it may not leave."""
    unit: str = ""
    """Unit of distances: that of the voxel size, if known."""


class Site(Protocol):
    """A hospital as an algorithm sees it. Images stay inside."""

    @property
    def size(self) -> int:
        """Number of training cases."""
        ...

    @property
    def lr(self) -> float:
        """Learning rate of the site (``train.lr``), before its decay."""
        ...

    @property
    def start(self) -> Tree:
        """Initial parameters of the phase: equal at all sites in the first phase, later the model it was served."""
        ...

    @property
    def fresh(self) -> Tree:
        """Other initial parameters, different at every site, drawn from (seed, site)."""
        ...

    @property
    def fits(self) -> Sequence[Fit]:
        """Results of all fits since ``at`` was called; the engine records them as the effort of the site."""
        ...

    def at(self, round: int) -> "Site":
        """Return this site with the randomness of one round. Engines call it; algorithms never seed."""
        ...

    def begin(self, round: int, start: Tree) -> "Site":
        """Return this site in a phase that starts in this round from these parameters. Engines call it."""
        ...

    def fit(
        self,
        params: Tree,
        objective: Objective = Objective(),
        budget: Budget = Budget(),
        *,
        only: Collection[str] = ("*",),
        keep: Collection[str] | None = None,
    ) -> Fit:
        """Train from ``params`` with a new optimiser.

        Args:
            params: The model to start from.
            objective: What to minimise.
            budget: Learning rate and duration, where they differ from the site's settings.
            only: Patterns of the parameters to train. Batch-norm layers whose statistics match none of them stay in
                evaluation mode.
            keep: Names of the training cases to use; None for all.
        """
        ...

    def losses(self, params: Tree, *, augmented: bool = False) -> Mapping[str, float]:
        """Return the loss of every training case, on fixed patches without augmentation, or on patches drawn as in
        training."""
        ...

    def calibrate(self, params: Tree) -> Tree:
        """Return the parameters with running statistics re-estimated on this site's training cases."""
        ...

    def amount(self, channel: int) -> float:
        """Return the amount of a class in the training set: cases to classify, voxels to segment.

        Channels are those of the network's output; a background channel is the first.
        """
        ...

    def sketch(self, kind: Sketch, cases: Collection[str]) -> Any:
        """Return a short float64 summary of these cases, averaged over cases.

        ``labels``: each label's share of the voxels, or each class's share of the cases. ``images``: the mean of every
        modality, then the covariances between modalities (upper triangle, row by row).
        """
        ...

    def radiomics(self, cases: Collection[str], bin_width: float) -> Any:
        """Return the radiomic features of these cases (float64), one row per case: 93 per modality, within the head.

        A constant modality (one that was not acquired) has zeros.
        """
        ...

    def patient_of(self, case: str) -> str:
        """Return an identifier of the patient of a case."""
        ...

    def cases(self, split: str) -> Cases:
        """Return the names of the ``train``, ``validation`` or ``test`` cases."""
        ...

    def score(self, params: Tree, cases: Collection[str]) -> Scores:
        """Predict these cases and compare with the ground truth: Dice (or accuracy) and loss."""
        ...

    def examine(self, params: Tree, cases: Collection[str], tolerance: float) -> Iterator[Examined]:
        """Predict these cases and compute every measure; surfaces may differ by ``tolerance``."""
        ...

    def lift(self, params: Tree) -> Tree:
        """Return the parameters on the device of this site."""
        ...


def setup_of(site: Site) -> tuple[float, str]:
    """Return the seconds that a site has spent on compiling so far, which are no training time, and what went wrong."""
    setup: tuple[float, str] = getattr(site, "setup", (0.0, ""))
    return setup


class AssessedSite(Protocol):
    """A hospital as the assessment sees it, before any training."""

    @property
    def size(self) -> int:
        """Number of cases described."""
        ...

    def features(self, kind: str) -> Mapping[str, Any]:
        """Return arrays with one row per case.

        ``absent``: for every quantity whether it is absent (modality not acquired, nothing labelled). ``metadata``:
        every quantity by name, and ``metric``, the number of dimensions if the voxel size is known, else 0.
        ``embedding``: the ``embedding`` (case, modality, channel, component), and the number of its ``encoder``.
        ``cases``: every quantity by name, each case in the unit of its own voxels. ``patients``: a number for every
        case, the same for all cases of a patient.
        """
        ...
