"""Greets the coordinator where this hospital takes part in a study, and has the study's host answer all else."""

import time
from collections.abc import Callable

import torch

from polysite import assessment
from polysite.data.case import SPLITS
from polysite.deploy.site.agreement import Agreed, agree
from polysite.deploy.site.answers import Leaving, Sender, leaving
from polysite.deploy.site.hospital import Hospital
from polysite.deploy.site.limits import TimeIsUp
from polysite.deploy.site.policy import Intent, Refusal, obey
from polysite.deploy.site.studies import DAY
from polysite.engines.messages import Greeting, Join, Request
from polysite.engines.run_folder import file_name


class Joined:
    """Answers about the studies that this hospital takes part in. The last one stays prepared.

    Args:
        hospital: The hospital.
        wrapped: Returns what answers the requests of a study.
    """

    def __init__(self, hospital: Hospital, wrapped: Callable[[Hospital, Agreed], Sender]):
        self.hospital, self.wrapped = hospital, wrapped
        self.agreed: Agreed | None = None
        self._sender: Sender | None = None  # of this study

    def answer(self, study: str, request: Request) -> Leaving:
        """Do what is asked; raise ``Refusal`` where this hospital does not."""
        try:
            if isinstance(request, Join):
                return leaving(request, self._greet(study, request.config))
            return self._find(study).answer(request)
        except TimeIsUp:
            self.agreed = self._sender = None  # what was interrupted may be half done
            raise

    def _greet(self, study: str, text: str) -> Greeting:
        hospital, policy, known = self.hospital, self.hospital.policy, self.hospital.folder(study) / "study.toml"
        if known.is_file() and known.read_text() != text:
            raise Refusal("this study was agreed to with other settings; another one needs another name")
        if not known.exists():
            obey(policy.refuse(Intent("hello", studies=self._new_studies()), hospital.now()))
        agreed = self._take_part(study, text)
        revealed = "count" in policy.kinds  # otherwise only whether there are any
        counts = {k: len(agreed.splits[k]) if revealed else min(len(agreed.splits[k]), 1) for k in SPLITS}
        names = {k: [case.name for case in agreed.splits[k]] for k in SPLITS}
        return Greeting(
            counts,
            policy.case_scores,
            policy.may_assess(agreed.study.assess.private) and not assessment.is_unprotected(agreed.study),
            *_machine(),
            studies=max(0, policy.studies - self._new_studies()),
            listed=hospital.pseudonyms.list_digest(study, names),
        )

    def _find(self, study: str) -> Sender:
        """Return what answers for the study that is asked for; after a restart, it is read from disk."""
        if self._sender is None or self.agreed is None or self.agreed.id != study:
            file = self.hospital.folder(study) / "study.toml"
            if not file.is_file():
                raise Refusal("this study has not been agreed to here")
            self._take_part(study, file.read_text())
        assert self._sender
        return self._sender

    def _take_part(self, study: str, text: str) -> Agreed:
        if self.agreed is None or self.agreed.id != study:
            self.agreed = self._sender = None  # releases the memory before more is taken
            self.agreed = agree(self.hospital, study, text)
            self._sender = self.wrapped(self.hospital, self.agreed)
        return self.agreed

    def _new_studies(self) -> int:
        """Return how many studies were agreed to within a day, also those of which the folder was deleted."""
        files = (self.hospital.site.state / "runs").glob("*/study.toml")
        recent = {f.parent.name for f in files if time.time() - f.stat().st_mtime < DAY}
        return len(recent | {file_name(trace.study) for trace in self.hospital.studies.within(1)})


def _machine() -> tuple[str, str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return str(torch.__version__), gpu or "cpu"
