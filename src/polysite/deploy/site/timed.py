"""Stops a request that takes longer than the policy allows; after three of them, the study is refused."""

from polysite.deploy.site.answers import Leaving
from polysite.deploy.site.hospital import Hospital
from polysite.deploy.site.limits import TimeIsUp, time_limit
from polysite.deploy.site.policy import Refusal
from polysite.deploy.site.received import Desk
from polysite.engines.messages import Request

MAX_LATE = 3  # requests of a study that took too long, after which it is refused


class Timed:
    """Answers within ``seconds`` of the policy, or not at all."""

    def __init__(self, hospital: Hospital, inner: Desk):
        self.hospital, self.inner = hospital, inner

    def answer(self, study: str, request: Request) -> Leaving:
        """Do what is asked; raise ``Refusal`` where this hospital does not."""
        late, seconds = self.hospital.folder(study) / "late.count", self.hospital.policy.seconds
        if late.exists() and late.stat().st_size >= MAX_LATE:
            raise Refusal(f"requests of this study took too long here: policy.toml says seconds = {seconds:g}")
        try:
            with time_limit(seconds):
                return self.inner.answer(study, request)
        except TimeIsUp:
            if late.parent.is_dir():
                with late.open("ab") as file:
                    file.write(b".")
            raise Refusal(f"{request.kind} took too long here: policy.toml says seconds = {seconds:g}") from None
