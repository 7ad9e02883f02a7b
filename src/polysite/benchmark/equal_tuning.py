"""What every method of a benchmark tries, for an equal effort of tuning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polysite import config
from polysite.benchmark.axes import points
from polysite.errors import ConfigError

Values = Mapping[str, Any]  # dotted key of a study -> value


@dataclass(frozen=True)
class Tuning:
    """What every method of a benchmark tries.

    Args:
        share: Share of the rounds that a trial trains for.
        settings: Values of settings, by dotted keys as in ``train.lr``; all combinations are tried.
    """

    share: float
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(f"tuning.share = {self.share}: it is a share of the rounds between 0 and 1")
        check_settings("tuning.settings", self.settings)

    def plain(self) -> dict[str, Any]:
        """Return it as a table of TOML."""
        return {"share": self.share, "settings": {key: list(values) for key, values in self.settings.items()}}

    @property
    def effort(self) -> float:
        """Cost of a run with its trials, one of which goes on, in runs without."""
        return 1 + self.share * (len(self.trials(None)) - 1)

    def trials(self, own: Mapping[str, Sequence[Any]] | None) -> Sequence[Values]:
        """Return the settings that a method tries: its own ones, or those of all methods."""
        grid = config.flat(own) if own else self.settings
        return points(grid)

    def check(self, methods: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse methods that would try more or fewer settings than the others."""
        count = len(self.trials(None))
        for name, changes in methods.items():
            own = changes.get("tuning")
            if own is not None:
                check_settings(f"methods.{name}.tuning", config.flat(own))
            if len(self.trials(own)) != count:
                raise ConfigError(
                    f"methods.{name}.tuning has {len(self.trials(own))} settings, but other methods try {count}; "
                    "give all methods equally many"
                )


def words(values: Values) -> str:
    """Return settings as text; keys are shortened where that is clear.

    >>> words({"algorithm.mu": 0.1, "train.lr": 0.2})
    'mu 0.1, lr 0.2'
    >>> words({"train.lr": 0.2, "algorithm.server.lr": 0.1})
    'train.lr 0.2, algorithm.server.lr 0.1'
    """
    ends = [key.rpartition(".")[2] for key in values]
    short = [end if ends.count(end) == 1 else key for key, end in zip(values, ends, strict=True)]
    return ", ".join(f"{name} {value}" for name, value in zip(short, values.values(), strict=True))


def check_settings(where: str, given: Mapping[str, Any]) -> None:
    """Refuse settings without a list of values."""
    odd = next((key for key, values in given.items() if not isinstance(values, list | tuple) or not values), None)
    if odd is not None:
        raise ConfigError(f"{where} tries {odd} = {given[odd]!r}; write a list of values")
    if not given:
        raise ConfigError(f'{where} names no setting; write, for example, "train.lr" = [0.1, 0.3]')
