"""Settings of secure sums."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from polysite.algorithms import describe, names_of
from polysite.algorithms.base import facts
from polysite.errors import ConfigError


@dataclass(frozen=True)
class Secure:
    """Secure sums: the server learns the sum of the replies of a round and no single reply.

    Args:
        use: Whether replies leave under masks that cancel in their sum.
        fewest: Fewest sites in a sum, at least 3: of a sum over two, each knows the reply of the other.
        fraction: Bits after the binary point of a parameter times its weight, 16 to 48. With 32 a sum may be up to
            2^31.
        reveal: How many sites must reveal a mask: more than half (majority), or more than two thirds. With more, fewer
            may drop out, and more have to conspire with a lying server.
    """

    use: Literal["off", "on"] = "off"
    fewest: int = 3
    fraction: int = 32
    reveal: Literal["majority", "two_thirds"] = "majority"

    def __post_init__(self) -> None:
        if self.fewest < 3:
            raise ConfigError(
                f"run.secure.fewest = {self.fewest} must be at least 3: of a sum over two sites, each knows the reply "
                "of the other"
            )
        if not 16 <= self.fraction <= 48:
            raise ConfigError(
                f"run.secure.fraction = {self.fraction} must lie between 16 and 48; leave it out for the default"
            )

    @property
    def on(self) -> bool:
        """Whether replies leave under masks."""
        return self.use == "on"


def check_algorithm(algorithm: Any) -> None:
    """Refuse an algorithm that needs the reply of each site, before anything is trained."""
    if facts(algorithm).needs == "each":
        setting = facts(algorithm).sums_with
        raise ConfigError(
            f"{' around '.join(names_of(algorithm))} needs the reply of each site{f' unless {setting}' * bool(setting)}"
            f", and run.secure reveals only their sum; these algorithms work: {', '.join(summable())}"
        )


def summable() -> Iterator[str]:
    """Yield the names of the algorithms that need only the sum of the replies, with their default settings."""
    return (name for name, _, _, needs in describe() if needs == "sum")
