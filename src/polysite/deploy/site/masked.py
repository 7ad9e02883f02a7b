"""One masked reply for each secure sum: two under the same masks would reveal their difference (``masked_sums.py``)."""

from polysite.deploy.site.agreement import Agreed
from polysite.deploy.site.answers import Leaving, Sender
from polysite.deploy.site.hospital import Hospital
from polysite.engines.messages import HostRequest, Train


class Masked:
    """Has one masked reply leave in a secure sum; if the request comes again, the same one."""

    def __init__(self, hospital: Hospital, agreed: Agreed, inner: Sender):
        self.hospital, self.agreed, self.inner = hospital, agreed, inner

    def answer(self, request: HostRequest) -> Leaving:
        """Do what is asked; raise ``Refusal`` where this hospital does not."""
        agreed = self.agreed
        if not (isinstance(request, Train) and agreed.host.phases[request.phase].masked):
            return self.inner.answer(request)
        agreed.sums.joined(request)
        reply = agreed.sums.kept_reply(request)
        if reply is None:  # else this process was restarted since
            reply = self.inner.answer(request)
            self.hospital.make_room(agreed.folder, len(reply.body))
            agreed.sums.keep_reply(request, reply)
        return reply
