"""Flower's SuperLink in this process: which hospitals are online, and which messages wait for an answer.

Of Flower only the SuperLink's record of nodes and messages is used, not its port, through which any client could
register keys and start code. Flower promises stability for ``flwr.app``, ``flwr.clientapp`` and ``flwr.serverapp``
only; a test finds whatever else is used here, and checks that the installed version has it.
"""

import logging
import os
import time
from collections.abc import Collection, Mapping

from polysite.errors import RunError

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower reads it while it is imported
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
try:
    from flwr.app import Message, RecordDict
    from flwr.app.message import make_message
    from flwr.app.metadata import Metadata
    from flwr.common.constant import NOOP_FLWR_AID, SUPERLINK_NODE_ID
    from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
    from flwr.supercore.constant import NOOP_FEDERATION_ID, NodeStatus, TaskType
    from flwr.superlink.main import create_app
except ModuleNotFoundError as problem:
    if (problem.name or "").partition(".")[0] != "flwr":
        raise
    raise RunError("deployment needs Flower: pip install 'polysite[deploy]'") from problem

HEARTBEAT = 10.0  # seconds; Flower takes a site for offline after twice as many


class _Relay(logging.Handler):
    """Sends the log of Flower to polysite's own debug log instead of the screen."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("polysite.link").debug("%s: %s", record.name, record.getMessage(), exc_info=record.exc_info)


for _name in ("flwr", "uvicorn", "uvicorn.error", "httpx", "alembic"):
    _logger = logging.getLogger(_name)
    _logger.handlers, _logger.propagate = [_Relay()], False
    _logger.setLevel(logging.WARNING)


class SuperLink:
    """Flower's record of nodes and messages, in memory, for one run without an app; letters and bodies are kept apart.

    Args:
        sites: Public key of every site.
    """

    def __init__(self, sites: Mapping[str, bytes]):
        state = create_app().state.linkstate_factory.state()
        if not isinstance(state, InMemoryLinkState):
            raise RunError("the coordinator keeps what is on the wire in memory: unset FLWR_DATABASE")
        self._state = state
        self._run = state.create_run(
            "polysite/study", "1", "0" * 64, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        self._nodes = {site: state.create_node(NOOP_FLWR_AID, site, key, 0) for site, key in sites.items()}

    def beat(self, site: str) -> None:
        """Take a site for online, for twice the time of a heartbeat."""
        self._state.acknowledge_node_heartbeat(self._nodes[site], HEARTBEAT)

    def leave(self, site: str) -> None:
        """Take a site for offline."""
        self._state.deactivate_node(self._nodes[site])

    def online(self, site: str) -> bool:
        """Return whether a site is online."""
        return bool(self._state.get_node_info(node_ids=[self._nodes[site]], statuses=[NodeStatus.ONLINE]))

    def ask(self, site: str, id: str, ttl: float, group: str) -> bool:
        """Keep a request for a site; return False if the site was never online."""
        made = self._message(id, SUPERLINK_NODE_ID, self._nodes[site], "", group, ttl)
        return self._state.store_message_ins(made) is not None

    def waiting(self, site: str) -> list[str]:
        """Return the requests that a site has not answered."""
        kept = list(self._state.message_ins_store.items())
        return [id for id, each in kept if each.metadata.dst_node_id == self._nodes[site] and not self.answered(id)]

    def answer(self, site: str, id: str) -> bool:
        """Keep that a site has answered a request; return False if that is not wanted, or comes too late."""
        asked = self._state.message_ins_store.get(id)
        if asked is None or (left := _left(asked)) <= 0:
            return False
        made = self._message(f"{id}-answer", self._nodes[site], SUPERLINK_NODE_ID, id, "", left)
        return self._state.store_message_res(made) is not None

    def answered(self, id: str) -> bool:
        """Return whether a request was answered."""
        return id in self._state.message_ins_id_to_message_res_id

    def is_over(self, id: str) -> bool:
        """Return whether the time to answer a request is over."""
        asked = self._state.message_ins_store.get(id)
        return asked is None or _left(asked) <= 0

    def forget(self, ids: Collection[str]) -> None:
        """Delete requests and their answers."""
        self._state.delete_messages(set(ids))

    def _message(self, id: str, source: int, target: int, asked: str, group: str, ttl: float) -> Message:
        metadata = Metadata(self._run, id, source, target, asked, group, time.time(), ttl, "train")
        return make_message(metadata, RecordDict())


def _left(asked: Message) -> float:
    """Return the seconds that are left to answer a request."""
    return float(asked.metadata.created_at + asked.metadata.ttl - time.time())
