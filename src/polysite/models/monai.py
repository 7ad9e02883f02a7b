"""Any network of MONAI by its name and arguments: ``Monai("SegResNet", {"init_filters": 8})``.

Dimensions, modalities and outputs come from the data, whatever MONAI calls them in that network. The network is built
and tried on one patch before training, so that a wrong argument or size is a sentence and not a traceback.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from polysite.errors import ConfigError, nearest

NAMES = {
    "dims": ("spatial_dims", "dimensions"),
    "modalities": ("in_channels", "n_input_channels", "in_shape"),
    "outputs": ("out_channels", "num_classes", "out_shape"),
}


@dataclass(frozen=True)
class Monai:
    """A network of ``monai.networks.nets``.

    Args:
        network: Name of the class, such as SegResNet, AttentionUnet or DenseNet121.
        arguments: Further arguments of it, e.g. ``arguments = { init_filters = 8 }``.
        task: Segmentation or classification.
        divisor: Factor that the sides of a patch must be multiples of: 16 suits most networks.
    """

    network: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    task: Literal["segmentation", "classification"] = "segmentation"
    divisor: int = 16

    def __post_init__(self) -> None:
        if not self.network:
            raise ConfigError("model.network is missing: name a class of monai.networks.nets, such as 'SegResNet'")
        if self.divisor < 1:
            raise ConfigError(f"model.divisor = {self.divisor} must be at least 1")

    def shape(self, dims: int, modalities: int, outputs: int) -> dict[str, Any]:
        """Return the arguments that come from the data, by the names of the network, with all others."""
        known = inspect.signature(self._class()).parameters
        found: dict[str, Any] = {}
        for what, value in (("dims", dims), ("modalities", modalities), ("outputs", outputs)):
            name = next((n for n in NAMES[what] if n in known), None)
            if name is not None and name not in self.arguments:
                found[name] = value
        odd = next((k for k in self.arguments if k not in known and not _open(known)), None)
        if odd is not None:
            raise ConfigError(f"MONAI's {self.network} has no argument {odd!r}; {nearest(odd, known)}")
        return {**found, **{k: _tuple(v) for k, v in self.arguments.items()}}

    def build(self, *, dims: int, modalities: int, outputs: int, seed: int) -> Any:
        """Return the network with initial weights drawn from the seed."""
        import torch

        given = self.shape(dims, modalities, outputs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                return self._class()(**given)
            except Exception as problem:
                shown = ", ".join(f"{k}={v!r}" for k, v in given.items())
                raise ConfigError(
                    f"MONAI's {self.network}({shown}) cannot be built: {problem}; change model.arguments"
                ) from problem

    def _class(self) -> Any:
        from monai.networks import nets

        found = getattr(nets, self.network, None)
        if not isinstance(found, type):
            known = [n for n, v in vars(nets).items() if isinstance(v, type)]
            raise ConfigError(f"MONAI has no network called {self.network!r}; {nearest(self.network, known)}")
        return found


def _open(known: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a signature takes any keyword."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())


def _tuple(value: Any) -> Any:
    return tuple(_tuple(v) for v in value) if isinstance(value, list | tuple) else value
