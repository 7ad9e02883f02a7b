"""The site in torch: the only module in which an algorithm meets a network, an optimiser and a GPU.

All randomness of a round comes from (seed, site, round). Models are passed and returned as tensors on the site's
device.
"""

import copy
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from polysite import tree
from polysite.data.case import SPLITS, Case
from polysite.data.prepare import Prepare
from polysite.errors import ConfigError, DataError, RunError
from polysite.metrics.measures import measure
from polysite.radiomics import NAMES, Settings, comparable, features
from polysite.site import Budget, Cases, Examined, Fit, Objective, Scores, Sketch, Tilt
from polysite.training import tasks
from polysite.training.cleaning import cleaned
from polysite.training.clipping import clip
from polysite.training.losses import ExtraLosses, Replaced, replacement
from polysite.training.mixing import Mixing
from polysite.training.network import Network
from polysite.training.patches import Kind, Labelled, Pair, labelled_voxels, mixed_shares
from polysite.training.personal import Personal
from polysite.training.predict import predict
from polysite.training.private_steps import Draws, PrivateStep, refuse_batch_norm
from polysite.training.settings import Train
from polysite.training.supervision import supervised
from polysite.tree import Tree

NONE = [0.0] * len(NAMES)  # radiomics of a constant modality
FADED = 0.1  # share of a step that remains; below, its cases no longer count as cases behind the model
_FIXED = 1 << 32  # a round number that never occurs: the randomness of fixed patches
_FRESH = _FIXED + 1  # the same for other initial parameters
_LABELLED = _FIXED + 2  # the same for the labelled voxels that are listed
_ORDER, _PATCHES, _MIXING, _NOISE = 1, 2, 3, 4  # additional random streams of a round


class TorchSite:
    """A hospital with its prepared cases. Without training cases it can predict and score, but not train.

    Args:
        name: Name of the site.
        network: The network, shared with other sites.
        cases: Prepared cases by split.
        labels: Labels, or classes.
        train: Settings of local training.
        seed: Seed of the study.
        task: The task.
        brain: Returns the mask of the brain in a prepared image, for radiomics.
    """

    def __init__(
        self,
        name: str,
        network: Network,
        cases: Mapping[str, Sequence[Case]],
        labels: Sequence[str],
        train: Train,
        seed: int,
        task: tasks.Task = tasks.Outline(),
        brain: Callable[[np.ndarray], np.ndarray] = partial(Prepare().brain, modalities=()),
    ):
        self.name, self.network, self.labels, self.train, self.seed = name, network, tuple(labels), train, seed
        self.task, self.round, self._loss = task, 0, tasks.CaseLoss(task, tasks.check_loss(task, train.loss))
        self._splits = {s: tuple(c.name for c in cases.get(s, ())) for s in SPLITS}
        self._volumes = {c.name: self._load(c) for s in SPLITS for c in cases.get(s, ())}
        self.grids = {c.name: (c.spacing, c.unit) for s in SPLITS for c in cases.get(s, ())}  # voxel size and unit
        self.fits: list[Fit] = []
        self._drawn: list[Sequence[str]] = []  # cases of every step of a fit
        self._first, self._start = 0, network.start  # first round and initial parameters of the phase
        self._seen: dict[tuple[str, float], torch.Tensor] = {}  # shares of the labels in a patch, by case and setting
        self._labelled: dict[str, Labelled] = {}  # labelled voxels of a case, listed on first use
        self._amounts: list[float] = []  # of every channel, computed on first use
        self._brain = brain
        self._patients = {c.name: c.patient or c.name for s in SPLITS for c in cases.get(s, ())}
        self.unpredictable = False  # whether noise and draws come from the operating system, not from the seed
        if train.private.unit == "patient":
            refuse_batch_norm(network.module)
        self._radiomics: dict[tuple[str, float], np.ndarray] = {}  # by case and bin width, computed on first use

    @classmethod
    def pool(cls, name: str, sites: Mapping[str, "TorchSite"]) -> "TorchSite":
        """Return one site with the training and validation cases of all sites, for centralised training.

        It shares the volumes with the sites.
        """
        pooled = copy.copy(next(iter(sites.values())))
        pooled.name, pooled.fits, pooled._seen, pooled._amounts, pooled._radiomics = name, [], {}, [], {}
        pooled._labelled = {}
        splits = {k: {f"{i}/{n}": s._volumes[n] for i, s in sites.items() for n in s.cases(k)} for k in SPLITS[:2]}
        pooled.grids = {f"{i}/{n}": s.grids[n] for i, s in sites.items() for k in SPLITS[:2] for n in s.cases(k)}
        pooled._volumes = {name: volume for split in splits.values() for name, volume in split.items()}
        pooled._splits = {"test": (), **{k: tuple(split) for k, split in splits.items()}}
        return pooled

    @property
    def size(self) -> int:
        """Number of training cases."""
        return len(self._splits["train"])

    @property
    def lr(self) -> float:
        """Learning rate, before its decay."""
        return self.train.lr

    @property
    def setup(self) -> tuple[float, str]:
        """Seconds that the network of this process has spent on compiling, and what went wrong."""
        return self.network.setup

    @property
    def start(self) -> Tree:
        """Initial parameters of the phase."""
        return self._start

    @property
    def fresh(self) -> Tree:
        """The initial parameters with the values of every array shuffled, which keeps their distribution."""
        rng = self._rng(_FRESH)

        def shuffled(x: torch.Tensor) -> torch.Tensor:
            order = torch.as_tensor(rng.permutation(x.numel()), device=x.device)
            return x.reshape(-1)[order].reshape(x.shape)

        initial = self.network.start
        return {**initial, **tree.map(shuffled, tree.trained(initial))}

    def amount(self, channel: int) -> float:
        """Return the amount of a class in the training set: cases to classify, voxels to segment."""
        if not self._amounts:
            truths = (self._volumes[n][1][None] for n in self.cases("train"))
            counted = [self.task.channels(y).flatten(2).sum(2)[0] if y.ndim > 2 else y[0].long() for y in truths]
            self._amounts.extend(torch.stack(counted).sum(0).tolist())
        return float(self._amounts[channel])

    def sketch(self, kind: Sketch, cases: Collection[str]) -> np.ndarray:
        """Return a short summary of these cases, averaged over cases."""
        of = _label_shares if kind == "labels" else _moments
        return torch.stack([of(self._volumes[n][kind == "labels"]) for n in cases]).mean(0).cpu().numpy()

    def radiomics(self, cases: Collection[str], bin_width: float) -> np.ndarray:
        """Return the radiomic features of these cases, one row per case."""
        for name in cases:
            if (name, bin_width) not in self._radiomics:
                image = self._volumes[name][0].cpu().numpy()
                try:
                    mask = self._brain(image)
                    self._radiomics[name, bin_width] = radiomics_of(image, mask, self.grids[name][0], bin_width)
                except (ConfigError, DataError) as problem:
                    raise DataError(f"case {name!r} of site {self.name!r}: {problem}") from problem
        return np.array([self._radiomics[name, bin_width] for name in cases])

    def shares(self, case: str) -> np.ndarray:
        """Return the share of the head that every label occupies; in a classification, the one-hot class."""
        image, truth = self._volumes[case]
        head = int(self._brain(image.cpu().numpy()).sum()) if truth.ndim > 1 else 1
        labels: np.ndarray = (
            (truth.flatten(1).double().sum(1) / head if truth.ndim > 1 else truth.double()).cpu().numpy()
        )
        return labels

    def cases(self, split: str) -> Cases:
        """Return the names of the cases of a split."""
        return self._splits[split]

    def volume(self, case: str) -> Pair:
        """Return the prepared image and the ground truth of a case."""
        return self._volumes[case]

    def patient_of(self, case: str) -> str:
        """Return the patient of a case; its name if the patient has no other."""
        return self._patients[case]

    @property
    def loss(self) -> tasks.CaseLoss:
        """Loss of every case of a batch."""
        return self._loss

    def at(self, round: int) -> "TorchSite":
        """Return this site with the randomness of one round."""
        site = copy.copy(self)
        site.round, site.fits = round, []
        return site

    def begin(self, round: int, start: Tree) -> "TorchSite":
        """Return this site in a phase that starts in this round from these parameters."""
        site = copy.copy(self)
        site._first, site._start = round, start
        return site

    def under(self, train: Train) -> "TorchSite":
        """Return this site with other settings of training and the same network and volumes."""
        site = copy.copy(self)
        site.train, site._loss = train, tasks.CaseLoss(self.task, tasks.check_loss(self.task, train.loss))
        return site

    def lift(self, params: Tree) -> Tree:
        """Return the parameters on the device of this site."""
        device = self.network.device
        return {
            k: v.to(device) if isinstance(v, torch.Tensor) else torch.tensor(v, device=device)
            for k, v in params.items()
        }

    def fit(
        self,
        params: Tree,
        objective: Objective = Objective(),
        budget: Budget = Budget(),
        *,
        only: Collection[str] = ("*",),
        keep: Collection[str] | None = None,
    ) -> Fit:
        """Train from ``params`` with a new optimiser; see ``polysite.site.Site.fit``."""
        if not self.size:
            raise DataError(f"site {self.name!r} has no training case; add cases or leave the site out")
        if self.train.private.unit == "patient":
            return self._fit_privately(params, objective, budget, only, keep)
        self._drawn = []
        steps = self.network.gpu_steps if not objective.extra else None  # a step that all fits share
        trained, rate = self._begin_fit(params, only, budget, steps is not None)  # it computes all gradients
        mixing = Mixing(trained, objective.mix, self._rng(None, _MIXING)) if objective.mix else None
        weights = mixing.weights if mixing else list(trained.values())
        force = _Force(objective.tilt or Tilt(), mixing.shared if mixing else trained)
        optimiser = self._optimiser(weights, rate)
        total, count = torch.zeros((), device=self.network.device), 0
        extra = ExtraLosses(self.network, objective.extra) if objective.extra else None
        shared_loss = self._shared_loss(objective, keep)
        aim = None if shared_loss else self._replacement(objective, keep)
        beside = self._personal(objective, rate)
        speed = reach = 0.0  # of a weight under a constant gradient of one
        with torch.random.fork_rng(devices=[]):  # dropout, if the network has any
            torch.manual_seed(int(self._rng().integers(1 << 62)))
            for x, y in self._batches(self._length(budget), keep, budget.minibatch):
                optimiser.zero_grad(set_to_none=True)
                if mixing:
                    mixing.place()
                if shared_loss:
                    local = self.network.backward(x, y, shared_loss, self.train.batch)
                else:
                    heads, more = extra(x, self.task.channels(y)) if extra else (self.network.heads(x), None)
                    local = supervised(self._mean_loss, heads, y)
                    goal = supervised(aim, heads, y) if aim else local
                    (goal if more is None else goal + more).backward()  # type: ignore[no-untyped-call]
                    self.network.complete()
                if mixing:
                    mixing.divide()
                clip(weights, self.train.clip_gradients)
                force.apply()
                optimiser.step()
                local = beside.step(x, y) if beside else local
                total, count = total + local.detach(), count + 1
                speed = self.train.momentum * speed + 1
                reach += rate * speed
        shared, twin = mixing.models() if mixing else ({}, {})
        model = {**self.network.read(), **shared}
        second = beside.read() if beside else {}
        tilt = objective.tilt.weight if objective.tilt else 0.0
        pull, one = rate * (self.train.weight_decay + tilt), budget.minibatch is not None
        behind = self._behind(pull)
        fit = Fit(model, float(total) / max(count, 1), count, count * rate, reach, twin, second, behind, one)
        return self._kept(fit, [*model.values(), *twin.values(), *second.values()])

    def _begin_fit(
        self, params: Tree, only: Collection[str], budget: Budget, all_gradients: bool = False
    ) -> tuple[dict[str, torch.nn.Parameter], float]:
        """Put the parameters into the network; return those to train, and the learning rate."""
        self.network.write(params)
        self.network.train(only)
        trained = {k: p for k, p in self.network.parameters.items() if tree.matches(k, only)}
        for k, p in self.network.parameters.items():
            p.requires_grad_(k in trained or all_gradients)
        passed = self.round - self._first if budget.round is None else budget.round
        return trained, (self.train.lr if budget.lr is None else budget.lr) * self.train.gamma**passed

    def _kept(self, fit: Fit, values: list[torch.Tensor]) -> Fit:
        """Add a fit to those of this round; refuse one that diverged."""
        sound = torch.stack(torch._foreach_norm(values)).isfinite().all()
        if not (math.isfinite(fit.loss) and sound):
            raise RunError(
                f"training diverged at site {self.name!r} in round {self.round}: "
                f"the loss is {fit.loss} or a parameter is not finite; lower train.lr"
            )
        self.fits.append(fit)
        return fit

    def _fit_privately(
        self, params: Tree, objective: Objective, budget: Budget, only: Collection[str], keep: Collection[str] | None
    ) -> Fit:
        """Train under differential privacy for every patient (``private_steps.py``)."""
        if budget.minibatch is not None or objective != Objective(objective.tilt):
            raise ConfigError(
                "train.private.unit = 'patient' covers fits of the task's own loss; choose another "
                "algorithm, such as fedavg"
            )
        private, rng = self.train.private, self.noise_rng()
        draws = self.private_draws(rng)
        length, counted = self._length(budget)
        steps = draws.steps(length) if counted is None else counted
        trained, rate = self._begin_fit(params, only, budget)
        force = _Force(objective.tilt or Tilt(), trained)
        optimiser = self._optimiser(list(trained.values()), rate)
        step = PrivateStep(self.network, self._loss, list(trained.values()), private, draws.expected, rng)
        total, count, speed, reach = 0.0, 0, 0.0, 0.0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.integers(1 << 62)))
            for _ in range(steps):
                step.begin()
                for names in draws.draw(keep):
                    x, y = self._batch(names, rng, self.train.augment, self.train.foreground)
                    total, count = total + float(step.add(x, y)), count + 1
                step.finish()
                force.apply()
                optimiser.step()
                speed = self.train.momentum * speed + 1
                reach += rate * speed
        model = self.network.read()
        behind, release = frozenset(self.cases("train")), step.release(draws, steps)
        loss = total / count if count else 0.0
        fit = Fit(model, loss, steps, steps * rate, reach, cases=behind, release=release)
        return self._kept(fit, list(model.values()))

    def private_draws(self, rng: np.random.Generator) -> Draws:
        """Return how patients are drawn under differential privacy."""
        patients: dict[str, list[str]] = {}
        for name in self.cases("train"):
            patients.setdefault(self._patients[name], []).append(name)
        return Draws(patients, self.train.patches, self.train.batch, rng)

    def noise_rng(self) -> np.random.Generator:
        """Return the source of noise and draws: the operating system at a hospital; (seed, site, round, fit) in a
        simulation, which can be repeated and therefore protects no patient."""
        if self.unpredictable:
            return np.random.default_rng(secrets.randbits(256))
        return self._rng(None, _NOISE, len(self.fits))

    @torch.no_grad()
    def losses(self, params: Tree, *, augmented: bool = False) -> Mapping[str, float]:
        """Return the loss of every training case, on fixed patches, or on patches drawn as in training."""
        self.network.write(params)
        self.network.module.eval()
        rng, kind = (self._rng(), self.train.augment) if augmented else (self._rng(_FIXED), "none")
        names, losses = self.cases("train"), []
        for i in range(0, len(names), self.train.batch):
            x, y = self._batch(names[i : i + self.train.batch], rng, kind, self.train.foreground if augmented else 0.0)
            losses.append(self._loss(self.network(x), y))
        return dict(zip(names, torch.cat(losses).tolist(), strict=True))

    @torch.no_grad()
    def calibrate(self, params: Tree) -> Tree:
        """Return the parameters with running statistics re-estimated on the training cases."""
        layers = [m for m in self.network.module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        if not layers or not self.size:
            return params
        self.network.write(params)
        self.network.module.eval()
        paces, rng, names = [m.momentum for m in layers], self._rng(_FIXED), self.cases("train")
        for m in layers:
            m.train().reset_running_stats()
            m.momentum = None  # mean over the batches
        try:
            for i in range(0, len(names), self.train.batch):
                self.network(self._batch(names[i : i + self.train.batch], rng, "none")[0])
            return {**params, **tree.statistics(self.network.read())}
        finally:
            for m, pace in zip(layers, paces, strict=True):
                m.momentum = pace

    def score(self, params: Tree, cases: Collection[str]) -> Scores:
        """Predict these cases and return their Dice (or accuracy) and loss."""
        return self.scores_of(self.predictions(params, cases))

    def scores_of(self, predictions: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> Scores:
        """Return the scores of cases from names, logits and ground truth."""
        if isinstance(self.task, tasks.Classify):
            losses = ((n, z, y, float(self._loss(z[None], y[None].float()))) for n, z, y in predictions)
            return {name: self.task.score(logits, truth, loss) for name, logits, truth, loss in losses}
        names, voxels, numbers = [], [], []
        for name, logits, truth in predictions:  # on a GPU, the host waits for all numbers at once
            counts = tasks.tally(self._masks(name, logits), truth.bool())
            loss = self._loss(logits[None], truth[None].float())
            names.append(name)
            voxels.append(math.prod(truth.shape[1:]))
            numbers.append(torch.cat([loss.double(), counts.flatten().double()]))
        scores = {}
        for name, size, (loss, *counts) in zip(
            names, voxels, torch.stack(numbers).tolist() if numbers else (), strict=True
        ):
            whole = iter(map(int, counts))
            rows = list(zip(whole, whole, whole, strict=True))
            scores[name] = tasks.tallied(self.labels, rows, size, loss)
        return scores

    def _masks(self, case: str, logits: torch.Tensor) -> torch.Tensor:
        """Return the predicted mask of every label, cleaned if the settings say so."""
        masks = self.task.masks(logits)
        if not self.train.clean.does:
            return masks
        (spacing, unit), exclusive = self.grids[case], isinstance(self.task, tasks.Exclusive)
        clean = cleaned(masks.cpu().numpy(), self.train.clean, spacing, unit, exclusive)
        return torch.from_numpy(clean).to(masks.device)

    def examine(self, params: Tree, cases: Collection[str], tolerance: float) -> Iterator[Examined]:
        """Predict these cases and yield all measures of each."""
        for name, logits, truth in self.predictions(params, cases):
            score, (spacing, unit) = self.scores_of([(name, logits, truth)])[name], self.grids[name]
            if isinstance(self.task, tasks.Classify):
                classes = {"predicted": float(logits.argmax()), "true": float(truth.argmax())}
                yield Examined(name, score, {self.labels[int(truth.argmax())]: {**score.labels, **classes}}, unit=unit)
                continue
            masks, truths = self._masks(name, logits).cpu().numpy(), truth.bool().cpu().numpy()
            measures = {
                label: measure(p, t, spacing, tolerance) for label, p, t in zip(self.labels, masks, truths, strict=True)
            }
            yield Examined(name, score, measures, packed(masks), unit)

    def predictions(self, params: Tree, cases: Collection[str]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield name, logits and ground truth of these cases, on the network's device."""
        self.network.write(params)
        self.network.module.eval()
        images = ((n, self._volumes[n][0].to(self.network.device)) for n in cases)
        window = None if isinstance(self.task, tasks.Classify) else self.train.window or self.train.patch
        on_gpu = self.network.device.type == "cuda"
        train = self.train
        for name, logits in predict(self.network.infer, images, window, train.overlap, on_gpu, train.mirror):
            yield name, logits, self._volumes[name][1].to(logits.device)

    def _mean_loss(self, logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        return self._loss(logits, truth).mean()

    def _shares(self, keep: Collection[str] | None) -> tuple[torch.Tensor, float]:
        """Return the shares of the labels in an epoch, and the number of its voxels, or cases."""
        names = [n for n in self.cases("train") if keep is None or n in keep]
        share = self.train.foreground
        for n in names:
            if (n, share) not in self._seen:
                voxels = self._voxels(n) if share else ()
                self._seen[n, share] = mixed_shares(self._volumes[n][1], self.train.patch, share, voxels)
        whole = 1 if isinstance(self.task, tasks.Classify) else math.prod(self.train.patch)
        return torch.stack([self._seen[n, share] for n in names]).mean(0), len(names) * whole

    def _load(self, case: Case) -> Pair:
        who = f"case {case.name!r} of site {self.name!r}"
        if case.label.shape[0] != len(self.labels):
            raise DataError(f"{who} has {case.label.shape[0]} label channels, "
                            f"but {len(self.labels)} labels are declared: {', '.join(self.labels)}")  # fmt: skip
        if self.train.cases == "disk":
            image, label = torch.from_numpy(case.image), torch.from_numpy(case.label)
        else:
            device = self.network.device
            image, label = torch.tensor(case.image, device=device), torch.tensor(case.label, device=device)
        tasks.check_label(self.task, label, who)
        return image, label

    def _behind(self, pull: float) -> frozenset[str]:
        """Return the names of the cases that still influence the result of a fit.

        A pull towards the start makes earlier steps fade; a pull that overshoots makes all but the first fade. Running
        statistics take a tenth of every new batch.
        """
        tracks = any(isinstance(m, _BatchNorm) and m.track_running_stats for m in self.network.module.modules())
        after, steps, back = abs(1.0 - pull), self._drawn, self._drawn[::-1]
        for kept, newest in ((after, back), (1 / max(after, 1e-9), steps), (0.9 if tracks else 1.0, back)):
            if kept < 1:
                count = 1 + math.floor(math.log(FADED) / math.log(max(kept, 1e-9)))
                steps = min(steps, newest[:count], key=lambda some: len({n for names in some for n in names}))
        return frozenset(name for names in steps for name in names)

    def _rng(self, round: int | None = None, *stream: int) -> np.random.Generator:
        """Return the random generator of a round, or of an additional stream of it."""
        at = self.round if round is None else round
        return np.random.default_rng([self.seed, crc32(self.name.encode()), at, *stream])

    def _shared_loss(self, objective: Objective, keep: Collection[str] | None) -> tasks.CaseLoss | Replaced | None:
        """Return the loss of a step that fits share; None if this fit needs steps of its own."""
        if objective.loss is None and not objective.extra:
            return self._loss
        if objective.loss is None or objective.extra or not self.network.gpu_steps:
            return None
        found = self.network.gpu_steps.replaced(objective.loss, self._loss)
        found.prepare(lambda: self._shares(keep), self.network.device)
        return found

    def _replacement(self, objective: Objective, keep: Collection[str] | None) -> Callable[..., torch.Tensor] | None:
        if objective.loss is None:
            return None
        return replacement(objective.loss, self.task, self._loss.name, lambda: self._shares(keep))

    def _personal(self, objective: Objective, rate: float) -> Personal | None:
        if not objective.personal:
            return None
        make = partial(self._optimiser, rate=rate)
        return Personal(self.network, objective.personal, make, self._loss, self.train.batch, self.train.clip_gradients)

    def _length(self, budget: Budget) -> tuple[int, int | None]:
        """Return (epochs, steps) of a fit. Steps take precedence; without either the site's settings apply."""
        epochs, steps = budget.epochs, budget.steps
        if epochs is None and steps is None:
            epochs, steps = self.train.epochs, self.train.steps
        return (epochs or 0, None) if steps is None else (steps, steps)

    def _batches(
        self, budget: tuple[int, int | None], keep: Collection[str] | None, minibatch: int | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield patches of shuffled cases until the budget is spent; each batch is valid until the next."""
        names = [n for n in self.cases("train") if keep is None or n in keep]
        rng, (epochs, steps), taken = self._rng(), budget, 0
        if minibatch is not None:
            yield from repeat(self._minibatch(minibatch, names), epochs)
            return
        for _ in range(epochs):
            order = [names[i] for i in rng.permutation(len(names)) for _ in range(self.train.patches)]
            for i in range(0, len(order), self.train.batch):
                if taken == steps:
                    return
                yield self._batch(order[i : i + self.train.batch], rng, self.train.augment, self.train.foreground)
                taken += 1

    def _minibatch(self, number: int, names: Sequence[str]) -> Pair:
        """Return the mini-batch of this number without computing those before it."""
        epoch, place = divmod(number, math.ceil(len(names) * self.train.patches / self.train.batch))
        shuffled = self._rng(None, _ORDER, epoch).permutation(len(names))
        order = [names[i] for i in shuffled for _ in range(self.train.patches)]
        here = order[place * self.train.batch :][: self.train.batch]
        return self._batch(here, self._rng(None, _PATCHES, number), self.train.augment, self.train.foreground)

    def _batch(self, names: Sequence[str], rng: np.random.Generator, augment: Kind, foreground: float = 0.0) -> Pair:
        self._drawn.append(names)
        cases, train = [self._volumes[n] for n in names], self.train
        voxels = [self._voxels(n) for n in names] if foreground else []
        return self.network.patches.batch(cases, train.patch, rng, augment, train.contrast, foreground, voxels)

    def _voxels(self, case: str) -> Labelled:
        """Return the labelled voxels of a case, listed once."""
        if case not in self._labelled:
            chance = self._rng(_LABELLED, crc32(case.encode()))
            self._labelled[case] = labelled_voxels(self._volumes[case][1], chance)
        return self._labelled[case]

    def _optimiser(self, weights: list[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
        if self.train.optimiser == "sgd":
            return torch.optim.SGD(
                weights, rate, momentum=self.train.momentum, weight_decay=self.train.weight_decay, foreach=True
            )
        kind = torch.optim.Adam if self.train.optimiser == "adam" else torch.optim.AdamW
        return kind(weights, rate, weight_decay=self.train.weight_decay, foreach=True)


def radiomics_of(image: np.ndarray, mask: np.ndarray, spacing: Sequence[float], bin_width: float) -> np.ndarray:
    """Return all features of all modalities inside a mask."""
    settings = Settings(bin_width=bin_width)
    if not mask.any():
        raise DataError("every voxel of every modality is background")
    rows = [list(features(x, mask, spacing=spacing, settings=settings).values()) if np.ptp(x) else NONE for x in image]
    vector: np.ndarray = comparable(np.concatenate(rows)[None])[0]
    return vector


def _label_shares(truth: torch.Tensor) -> torch.Tensor:
    return truth.flatten(1).double().mean(1) if truth.ndim > 1 else truth.double()


def _moments(image: torch.Tensor) -> torch.Tensor:
    """Return the mean of every modality, and the covariances between modalities."""
    voxels = image.flatten(1).double()
    spread = torch.cov(voxels, correction=0).reshape(len(voxels), len(voxels))
    row, column = torch.triu_indices(*spread.shape)
    return torch.cat([voxels.mean(1), spread[row, column]])


def packed(masks: Any) -> np.ndarray:
    """Pack the masks of all labels into one integer array: bit k is label k.

    >>> packed(np.array([[True, False], [True, True]])).tolist()
    [3, 2]
    """
    bits = np.zeros(masks.shape[1:], np.min_scalar_type((1 << len(masks)) - 1))
    for k, mask in enumerate(masks):
        bits |= np.asarray(mask.cpu() if hasattr(mask, "cpu") else mask).astype(bool).astype(bits.dtype) << k
    return bits


class _Force:
    """Adds the gradient of a tilt, linear + weight (w - anchor), to all gradients in two fused calls."""

    def __init__(self, tilt: Tilt, trained: Mapping[str, torch.nn.Parameter]):
        self.weights: list[torch.Tensor] = list(trained.values())
        self.pull = tilt.weight
        self.linear = [tilt.linear[k] for k in trained] if tilt.linear is not None else None
        anchor = tilt.anchor if tilt.anchor is not None and tilt.weight else {}
        self.held: list[torch.Tensor] = [p for k, p in trained.items() if k in anchor]
        self.anchor = [anchor[k] for k in trained if k in anchor]

    @torch.no_grad()
    def apply(self) -> None:
        if self.linear is None and not self.held:
            return
        for p in self.weights:
            if p.grad is None:  # the tilt acts on parameters without a gradient, too
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in self.weights if p.grad is not None]
        if self.linear is not None:
            torch._foreach_add_(grads, self.linear)
        if self.held:
            grads = [p.grad for p in self.held if p.grad is not None]
            torch._foreach_add_(grads, torch._foreach_sub(self.held, self.anchor), alpha=self.pull)
