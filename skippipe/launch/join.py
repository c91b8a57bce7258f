"""Nodes that join by themselves ('skippipe node'), from wherever they are, if their keys are on the list of peers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from skippipe.errors import UserError
from skippipe.launch.launcher import NodeEndpoints
from skippipe.transport.keys import KeyFile, KeyPair, PeerList


class JoinLauncher:
    def __init__(self, names: Sequence[str], key: Path, peers: Path) -> None:
        self.keys: KeyPair | None = KeyFile.load(key).keys
        self._names = names
        self._peers = peers

    def prepare(self) -> NodeEndpoints:
        known = PeerList.load(self._peers).peers
        unknown = [name for name in self._names if name not in known]
        if unknown:
            raise UserError(f"{self._peers}: has no key of {', '.join(unknown)}; 'skippipe keys' makes them")
        return NodeEndpoints(dict(known))

    def start(self, address: str) -> None:
        print(f"waiting for {len(self._names)} nodes to join {address}: {', '.join(self._names)}", file=sys.stderr)

    def ended(self) -> list[tuple[str, str]]:
        """None: whether such a node is there is seen by its connection and its heartbeats."""
        return []

    def close(self) -> None:
        """Nothing: they end when the coordinator tells them to."""
