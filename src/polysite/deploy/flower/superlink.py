"""Flower's SuperLink in this process: which hospitals are online.

Of Flower only the SuperLink's record of nodes is used, not its port, through which any client could register keys and
start code, and not its record of messages: letters and bodies are kept in ``gateway.py``. Flower promises stability for
``flwr.app``, ``flwr.clientapp`` and ``flwr.serverapp`` only; a test finds whatever else is used here, and checks that
the installed version has it.
"""

import logging
import os
from collections.abc import Mapping

from polysite.errors import RunError

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower reads it while it is imported
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
try:
    from flwr.common.constant import NOOP_FLWR_AID
    from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
    from flwr.supercore.constant import NodeStatus
    from flwr.superlink.main import create_app
except ModuleNotFoundError as problem:
    if (problem.name or "").partition(".")[0] != "flwr":
        raise
    raise RunError("deployment needs Flower: pip install 'polysite[deploy]'") from problem

HEARTBEAT = 10.0  # seconds; Flower takes a site for offline after twice as many


for _name in ("flwr", "uvicorn", "uvicorn.error", "httpx", "alembic"):  # what they say is of a server that is not run
    logging.getLogger(_name).handlers = [logging.NullHandler()]
    logging.getLogger(_name).propagate = False


class SuperLink:
    """Flower's record of nodes, in memory.

    Args:
        sites: Public key of every site.
    """

    def __init__(self, sites: Mapping[str, bytes]):
        state = create_app().state.linkstate_factory.state()
        if not isinstance(state, InMemoryLinkState):
            raise RunError("the coordinator keeps who is online in memory: unset FLWR_DATABASE")
        self._state = state
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
