"""Settings of local training: optimiser, schedule, patches, device."""

from dataclasses import dataclass
from typing import Any, Literal

from polysite.algorithms.base import facts
from polysite.errors import ConfigError
from polysite.privacy import Private
from polysite.training.cleaning import Clean


@dataclass(frozen=True)
class Train:
    """Settings of local training. The defaults are those of the FeTS 2022 benchmark, with a patch for a laptop.

    Args:
        lr: Learning rate; ``algorithm.lr`` takes precedence.
        gamma: Decay: the rate of a round is lr * gamma**round, rounds of training counted from 0 in every phase.
        epochs: Local epochs per round.
        patches: Patches of every case in an epoch.
        steps: Local steps per round, instead of epochs.
        batch: Patches per step.
        optimiser: SGD, Adam or AdamW.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of the optimiser.
        clip_gradients: Largest norm of the gradient of the loss in a step, over all trained parameters; a longer one is
            scaled down to it. Loss terms of an algorithm count, pulls such as those of fedprox and ditto do not. 0: no
            limit; nnU-Net has 12.
        loss: ``auto`` is dice for a segmentation and ce (cross-entropy) for a classification. In a segmentation, ce
            goes with ``exclusive`` and includes the background.
        exclusive: Every voxel has at most one label (softmax); otherwise labels may overlap (sigmoid).
        patch: Size of a patch in voxels; smaller cases are padded.
        foreground: Probability, 0 to 1, that a patch is centred on a random voxel of a random label of its case, as
            far as the case reaches; nnU-Net has 0.33. Other patches, and all of a case without labels, are anywhere.
        augment: ``light`` flips, scales and shifts intensities; ``full`` adds noise, blur and contrast.
        contrast: Apply the random contrast of ``full`` between the extremes of each ``modality``, or of the whole
            ``image``, as in the FeTS 2022 benchmark.
        window: Size of the sliding window; empty for that of the patch.
        overlap: Overlap of the sliding window.
        mirror: Predict every window, or image to classify, in all mirror images of its axes, and take the mean of the
            logits, in validation, test and exported models: 8 times the time in 3D, 4 times in 2D.
        clean: Cleaning of predicted masks, e.g. ``clean = { largest = true }``; a segmentation's scores and exported
            models are those of cleaned masks.
        device: "auto", "cpu", "cuda" or "cuda:1".
        cases: Hold all cases in the memory of the device, or leave them on disk and map them.
        autocast: Use bfloat16 on a GPU; a CPU always computes in float32.
        compile: Compile training and prediction on a GPU with torch.compile: ``auto`` compiles if the steps of the run
            are expected to save more time than compiling takes.
        private: Differential privacy: noise that protects each patient, or each hospital.
    """

    lr: float = 0.1
    gamma: float = 0.995
    epochs: int = 1
    patches: int = 1
    steps: int | None = None
    batch: int = 4
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 1e-5
    clip_gradients: float = 0.0
    loss: Literal["auto", "dice", "dice_ce", "ce"] = "auto"
    exclusive: bool = False
    patch: tuple[int, ...] = (32, 32, 32)
    foreground: float = 0.0
    augment: Literal["full", "light", "none"] = "full"
    contrast: Literal["modality", "image"] = "modality"
    window: tuple[int, ...] = ()
    overlap: float = 0.5
    mirror: bool = False
    clean: Clean = Clean()
    device: str = "auto"
    cases: Literal["device", "disk"] = "device"
    autocast: bool = True
    compile: bool | Literal["auto"] = "auto"
    private: Private = Private()

    def __post_init__(self) -> None:
        for name in ("lr", "gamma", "epochs", "patches", "batch"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"train.{name} must be more than zero, got {getattr(self, name)}")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"train.steps must be at least one, got {self.steps}")
        for name in ("momentum", "weight_decay", "clip_gradients"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"train.{name} must not be negative, got {getattr(self, name)}")
        if self.clip_gradients and self.private.unit == "patient":
            raise ConfigError(
                f"train.clip_gradients = {self.clip_gradients:g} has no effect with train.private.unit = 'patient', "
                "which clips the gradient of every patient (train.private.clip): leave it out"
            )
        if not self.momentum < 1:
            raise ConfigError(f"train.momentum must be less than one, got {self.momentum}")
        if self.momentum and self.optimiser != "sgd":
            raise ConfigError(f"train.momentum = {self.momentum} goes with optimiser = 'sgd', not {self.optimiser!r}")
        if not 0 <= self.foreground <= 1:
            raise ConfigError(f"train.foreground must lie in [0, 1], got {self.foreground}")
        if not 0 <= self.overlap < 1:
            raise ConfigError(f"train.overlap must lie in [0, 1), got {self.overlap}")

    def allow(self, algorithm: Any, name: str) -> None:
        """Refuse an optimiser that violates the assumptions of the algorithm."""
        plain = {"optimiser": "sgd", "momentum": 0.0, "clip_gradients": 0.0}
        other = next((key for key, value in plain.items() if getattr(self, key) != value), None)
        if facts(algorithm).plain_sgd and other is not None:
            raise ConfigError(
                f"{name} is derived for plain SGD and would be wrong with train.{other} = {getattr(self, other)!r}; "
                f"set train.{other} = {plain[other]!r}, or choose another algorithm"
            )

    def check_private(self, algorithm: Any, name: str) -> None:
        """Refuse an algorithm whose replies the noise of differential privacy does not cover."""
        if self.private.unit == "patient" and algorithm.reply and not facts(algorithm).only_fits:
            raise ConfigError(
                f"{name} sends more of its patients than noise in training covers; with train.private.unit = 'patient' "
                "choose fedavg (also with a server optimiser), fedprox, fedper, lg_fedavg, fedrep or ditto"
            )

    def check_rate(self, algorithm: Any, name: str) -> None:
        """Refuse a learning rate at which SGD diverges because of the proximal term of the algorithm."""
        pull = facts(algorithm).pull
        if self.optimiser == "sgd" and self.lr * pull >= 2:
            raise ConfigError(
                f"{name} diverges: train.lr = {self.lr:g} times the weight {pull:g} of its proximal term is 2 or more; "
                "lower one of them"
            )
