"""The interface of launchers, what they have in common, and two of them: for nodes that join by themselves, and for
processes of this machine."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from skippipe.errors import UserError
from skippipe.launch.fork_server import ProcessPool, how_ended, last_log_line, log_file
from skippipe.runtime.admission import Admission
from skippipe.transport.keys import KeyFile, KeyPair, PeerList
from skippipe.transport.members import MemberStore

if TYPE_CHECKING:  # torchrun imports this before it has set up the environment of kernels
    from skippipe.runtime.node.interfaces import Roles
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


class LocalLauncher:
    """Nodes as processes of this machine, forked by a fork server and restarted when they end too early."""

    def __init__(
        self,
        names: Sequence[str],
        roles: Roles,
        log_folder: Path | None = None,
        security: Security = "curve",
        restarts: int = 0,
    ) -> None:
        """Forks at once: make it before threads are started. Without a folder, logs are deleted in the end."""
        from skippipe.runtime.node.agent import node_process

        self._temporary = tempfile.TemporaryDirectory(prefix="skippipe-") if log_folder is None else None
        self._log_folder = Path(self._temporary.name) if self._temporary else log_folder or Path()
        self.pool = ProcessPool(partial(node_process, roles), self._log_folder)
        self.keys = new_keys(security)
        self._node_keys = {name: new_keys(security) for name in names}
        self._restarts = restarts
        self._join_configs: dict[str, dict[str, Any]] = {}

    def prepare(self) -> NodeEndpoints:
        return NodeEndpoints({name: keys.public if keys else None for name, keys in self._node_keys.items()})

    def start(self, address: str, **settings: Any) -> None:
        """Start every node, with these settings of `JoinConfig` beside its own."""
        self._join_configs = {
            name: {**join_config(name, address, self.keys, keys), **settings} for name, keys in self._node_keys.items()
        }
        for name, config in self._join_configs.items():
            self.pool.start(name, config)

    def ended(self) -> list[tuple[str, str]]:
        """A node is restarted as often as the job allows; then it stays ended."""
        self.pool.poll()
        found = []
        for name, status in self.pool.ended.items():
            restarted = self.pool.started[name] <= self._restarts
            how = how_ended(status) + "; restarted by the launcher" * restarted
            if self._temporary:
                how += f": {last_log_line(self._log_folder, name)}"
            else:
                how += f"; last log lines in {log_file(self._log_folder, name)}"
            found.append((name, how))
            if restarted:
                self.pool.start(name, self._join_configs[name])
        self.pool.ended.clear()
        return found

    def kill(self, name: str) -> None:
        """End a node's process without a warning, to see what becomes of the run."""
        self.pool.poll()
        os.kill(self.pool.pids[name], signal.SIGKILL)

    def close(self) -> None:
        self.pool.close()
        if self._temporary:
            self._temporary.cleanup()
