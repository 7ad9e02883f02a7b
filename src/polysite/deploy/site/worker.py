"""The hospital's answers: cases, model and GPU stay warm in one process, which does what the policy allows.

All that may leave passes here. Every rule is a wrapper with the method ``answer``, from the outside in::

    Held        keeps the last body, which may be named instead of sent
    Logged      the ledger has a line before a response is handed to the courier; a lost response is given again
    Received    reads the message, and turns errors into sentences
    Timed       stops a request that takes too long
    Joined      greets, and finds the study that is asked for; then, for each study:

    Allowed     the policy, before anything is computed, and the count of what was answered
    Masked      one reply for each secure sum
    Packed      makes a message of the response
    Budgeted    the privacy budget, before and after
    Checked     the policy about the response, and pseudonyms
    Remembered  the memory on disk
    SiteHost    computes (``engines/host.py``)
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import torch

from polysite.buffers import Buffer
from polysite.deploy.project import SiteConfig
from polysite.deploy.site.agreement import Agreed
from polysite.deploy.site.allowed import Allowed
from polysite.deploy.site.answers import Packed, Sender
from polysite.deploy.site.budgeted import Budgeted
from polysite.deploy.site.checked import Checked
from polysite.deploy.site.held import Held
from polysite.deploy.site.hospital import Hospital
from polysite.deploy.site.joined import Joined
from polysite.deploy.site.logged import Logged
from polysite.deploy.site.masked import Masked
from polysite.deploy.site.policy import SitePolicy
from polysite.deploy.site.received import Received
from polysite.deploy.site.remembered import Remembered
from polysite.deploy.site.timed import Timed


class Worker:
    """Answers one message at a time.

    Args:
        site: The site's configuration.
        policy: What the hospital allows.
        now: The clock by which the policy's hours are kept.
    """

    def __init__(self, site: SiteConfig, policy: SitePolicy, now: Callable[[], datetime] = datetime.now):
        self.hospital = Hospital(site, policy, now)
        self._joined = Joined(self.hospital, wrapped)
        self._logged = Logged(self.hospital, Received(self.hospital, Timed(self.hospital, self._joined)))
        self._held = Held(self._logged)
        if torch.cuda.is_available() and policy.gpu_share < 1:
            torch.cuda.set_per_process_memory_fraction(policy.gpu_share)

    @property
    def agreed(self) -> Agreed | None:
        """The study that is prepared."""
        return self._joined.agreed

    def answer(
        self, header: Mapping[str, Any], body: Buffer, incidents: Sequence[str] = ()
    ) -> tuple[dict[str, Any], Buffer]:
        """Return header and body of the response to a message; ``incidents`` of the courier are sent along."""
        return self._held.answer(header, body, incidents)


def wrapped(hospital: Hospital, agreed: Agreed) -> Sender:
    """Return the host of a study within all rules of the hospital."""
    host = Checked(hospital, agreed, Remembered(hospital, agreed))
    return Allowed(hospital, agreed, Masked(hospital, agreed, Packed(Budgeted(hospital, agreed, host))))
