"""The interface of launchers, and what they have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from skippipe.transport.keys import KeyPair

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
