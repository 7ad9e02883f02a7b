"""How a site trains: the optimiser, its schedule, the patches, the device."""

from dataclasses import dataclass
from typing import Any, Literal

from polysite.errors import ConfigError


@dataclass(frozen=True)
class Train:
    """Defaults are those of the FeTS 2022 benchmark, but for the patch, which suits a laptop."""

    lr: float = 0.1  # learning rate; algorithm.lr, where given, comes before it
    gamma: float = 0.995  # the rate of a round is lr * gamma**round
    epochs: int = 1  # local epochs a round
    patches: int = 1  # of every case in an epoch
    steps: int | None = None  # local iterations a round, instead of epochs
    batch: int = 4  # patches a step
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 1e-5
    loss: Literal["auto", "dice", "dice_ce", "ce"] = "auto"  # auto: dice to segment, ce (cross-entropy) to classify
    exclusive: bool = False  # every voxel has one label at most (softmax); otherwise labels may overlap (sigmoid)
    patch: tuple[int, ...] = (32, 32, 32)  # voxels; cases are padded to it
    augment: Literal["full", "light", "none"] = "full"  # light: flips, scale, shift; full: noise, blur, contrast too
    window: tuple[int, ...] = ()  # of the sliding window; empty: the patch
    overlap: float = 0.5  # of the sliding window
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1"
    cases: Literal["device", "disk"] = "device"  # hold all cases there, or leave them on disk and map what is needed
    autocast: bool = True  # bfloat16 on a GPU; a CPU always computes in float32
    compile: bool = False  # torch.compile the network

    def __post_init__(self) -> None:
        for name in ("lr", "gamma", "epochs", "patches", "batch"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"train.{name} must be more than zero, got {getattr(self, name)}")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"train.steps must be at least one, got {self.steps}")
        for name in ("momentum", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"train.{name} must not be negative, got {getattr(self, name)}")
        if not self.momentum < 1:
            raise ConfigError(f"train.momentum must be less than one, got {self.momentum}")
        if self.momentum and self.optimiser != "sgd":
            raise ConfigError(f"train.momentum = {self.momentum} goes with optimiser = 'sgd', not {self.optimiser!r}")
        if not 0 <= self.overlap < 1:
            raise ConfigError(f"train.overlap must lie in [0, 1), got {self.overlap}")

    def allow(self, algorithm: Any, name: str) -> None:
        """Refuse an optimiser under which the algorithm's mathematics does not hold."""
        if algorithm.plain_sgd and (self.optimiser != "sgd" or self.momentum):
            given = f"momentum = {self.momentum}" if self.momentum else f"optimiser = {self.optimiser!r}"
            raise ConfigError(
                f"{name} is derived for plain SGD and would be wrong with train.{given}; "
                "set train.optimiser = 'sgd' and train.momentum = 0, or choose another algorithm"
            )
