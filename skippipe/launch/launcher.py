"""The interface of launchers, what they have in common, and the simplest: for nodes that join by themselves."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from skippipe.errors import UserError
from skippipe.runtime.admission import Admission
from skippipe.transport.keys import KeyFile, KeyPair, PeerList
from skippipe.transport.members import MemberStore

if TYPE_CHECKING:
    from skippipe.transport.mailbox import Security


@dataclass(frozen=True)
class NodeEndpoints:
    """What the coordinator must know of nodes before it listens for them."""

    public_keys: Mapping[str, str | None]
    """Node → its public key; None: connections are not encrypted."""
    coordinator_host: str = ""
    """An address of this machine that all nodes can reach; empty: where the job says."""
    torch_address: str = ""
    """host:port at which torch.distributed can meet; empty: where the job says."""
    admission: Admission | None = None
    """Who comes and goes among those that may join; none: that does not change."""


class Launcher(Protocol):
    """Starts the nodes of a run. Calls come in the order of the methods; `close` may follow after any of them."""

    keys: KeyPair | None
    """The coordinator's own; None: connections are not encrypted."""

    def prepare(self) -> NodeEndpoints:
        """Find places for nodes, and learn their keys."""

    def start(self, address: str) -> None:
        """Have every node join the coordinator at this address."""

    def ended(self) -> Sequence[tuple[str, str]]:
        """Nodes that have ended since the last call, and how; a launcher may have restarted them."""

    def close(self) -> None:
        """End every node that is left."""


def new_keys(security: Security) -> KeyPair | None:
    return KeyPair.new() if security == "curve" else None


def join_config(name: str, address: str, coordinator: KeyPair | None, own: KeyPair | None = None) -> dict[str, Any]:
    """A node's `JoinConfig` as JSON, for `node_main`; without its own keys, the node adds them itself."""
    return {
        "name": name,
        "coordinator": address,
        "keys": [own.public, own.secret] if own else None,
        "coordinator_public": coordinator.public if coordinator else None,
        "security": "curve" if coordinator else "none",
    }


class JoinLauncher:
    """Nodes that join from wherever they are ('skippipe node'), if their keys are on the list of peers."""

    def __init__(self, names: Sequence[str], key: Path, peers: Path) -> None:
        own = KeyFile.load(key).keys
        self.keys: KeyPair | None = own
        self._names = names
        self._peers = peers
        self._admission = Admission(MemberStore(peers), own)

    def prepare(self) -> NodeEndpoints:
        expected = PeerList.load(self._peers).expected(time.time())
        unknown = [name for name in self._names if name not in expected]
        if unknown:
            raise UserError(
                f"{self._peers}: has neither a key nor an open invitation of {', '.join(unknown)}; 'skippipe keys' "
                "makes keys, 'skippipe invite' an invitation"
            )
        return NodeEndpoints(self._admission.publics, admission=self._admission)

    def start(self, address: str) -> None:
        self._admission.start(address)
        print(f"waiting for {len(self._names)} nodes to join {address}: {', '.join(self._names)}", file=sys.stderr)

    def ended(self) -> list[tuple[str, str]]:
        """Always empty: whether such a node is there is seen by its connection and its heartbeats."""
        return []

    def close(self) -> None:
        """Nobody is admitted any more; nodes end when the coordinator tells them to."""
        self._admission.close()
