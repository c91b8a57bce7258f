"""Nodes as processes of this machine, forked by a fork server and restarted when they end too early."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from skippipe.launch.fork_server import ProcessPool, how_ended, last_log_line, log_file
from skippipe.launch.launcher import NodeEndpoints, join_config, new_keys
from skippipe.runtime.node.agent import node_process
from skippipe.runtime.node.interfaces import Roles
from skippipe.transport.mailbox import Security


class LocalLauncher:
    def __init__(
        self,
        names: Sequence[str],
        roles: Roles,
        log_folder: Path | None = None,
        security: Security = "curve",
        restarts: int = 0,
    ) -> None:
        """Forks at once: make it before threads are started. Without a folder, logs are deleted in the end."""
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
