"""Speeds of computation and communication of hospitals, which turn steps and bytes into seconds.

Two sets of values have a name. ``paper_b`` is that of Manthe et al., Federated brain tumor segmentation: an extensive
benchmark, 2024 (section 4.4.7): every site has a V100 and the connection of the best connected institution of FeTS.
``fets`` has the medians of the values that the FeTS initiative measured at its institutions and published with its
challenge of 2022.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from polysite.errors import ConfigError
from polysite.payload import SiteId


@dataclass(frozen=True)
class Own:
    """Speeds of one hospital that differ from the others'. None stands for the common value.

    Args:
        patch: Seconds to train on a patch.
        case: Seconds to validate a case.
        down: MB/s that the site receives.
        up: MB/s that the site sends.
    """

    patch: float | None = None
    case: float | None = None
    down: float | None = None
    up: float | None = None

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class Speeds:
    """Speeds of all hospitals. A MB is 1e6 bytes.

    Args:
        patch: Seconds to train on a patch; a step takes ``train.batch`` times that.
        case: Seconds to validate a case.
        down: MB/s that a site receives.
        up: MB/s that a site sends.
        sites: Hospitals with other speeds, by name.
    """

    patch: float = 1.86 / 4
    case: float = 0.80
    down: float = 20.0
    up: float = 13.3
    sites: Mapping[SiteId, Own] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    def at(self, site: SiteId) -> "Speeds":
        """Return the speeds of one site.

        >>> Speeds(sites={"b": Own(up=1.0)}).at("b").up, Speeds().at("b").up
        (1.0, 13.3)
        """
        own = self.sites.get(site, Own())
        given = {f.name: getattr(own, f.name) for f in fields(own)}
        return replace(self, sites={}, **{k: v for k, v in given.items() if v is not None})


def _check(values: Speeds | Own) -> None:
    at = "cost." if isinstance(values, Speeds) else ""  # the caller of Own names the site
    for f in fields(values):
        value = getattr(values, f.name)
        if value is None or isinstance(value, Mapping):
            continue
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{at}{f.name} = {value} must be finite and not negative")
        if not value and f.name in ("down", "up"):
            raise ConfigError(f"{at}{f.name} = {value} must be more than zero: nothing would ever arrive")


MODEL_MB = 265.0  # paper B reads the 13.06 s and 20.0 s of the fastest institution as 20 and 13.3 MB/s: 261 and 266 MB

SPEEDS = {
    "paper_b": Speeds(),
    # Medians of the mean times of 21 institutions that computed and 16 that communicated, as in Task_1 of
    # github.com/FETS-AI/Challenge. Times of the network, not speeds, were published; a patient is taken for one patch.
    "fets": Speeds(patch=5.806, case=15.336, down=MODEL_MB / 98.925, up=MODEL_MB / 151.06),
}
