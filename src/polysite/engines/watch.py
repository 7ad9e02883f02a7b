"""The observer of a run."""

from polysite.engines.record import RoundRecord
from polysite.payload import SiteId


class Watch:
    """Observer of a run. Every method does nothing by default; the command line shows progress with a subclass."""

    def case(self, done: int, of: int, case: str) -> None:
        """A case was loaded."""

    def begin(self, title: str, rounds: int, done: int, best: float) -> None:
        """Training starts, or resumes after ``done`` rounds."""

    def end(self) -> None:
        """Training ended."""

    def site(self, round: int, site: SiteId, done: int, of: int) -> None:
        """A site replied."""

    def doing(self, site: SiteId, what: str, done: bool) -> None:
        """A real site started or finished something."""

    def round(self, record: RoundRecord) -> None:
        """A round is finished."""
