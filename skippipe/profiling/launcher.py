"""Where nodes are when they are measured: processes of this machine, or wherever they join from."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from skippipe.launch.fork_server import ProcessPool, how_ended, log_file
from skippipe.profiling.config import ProfilingConfig
from skippipe.profiling.coordinator import ProfilingCallback, ProfilingDeadlines
from skippipe.profiling.results import ProfileResult
from skippipe.profiling.role import ROLES
from skippipe.profiling.server import ProfilingServer
from skippipe.runtime.node.agent import node_process
from skippipe.transport.keys import KeyFile, KeyPair, PeerList

Stopped = Callable[[], bool]


def here(
    node_config: ProfilingConfig,
    watching: ProfilingCallback,
    stopped: Stopped = lambda: False,
    started: Callable[[ProcessPool], None] = lambda pool: None,
) -> ProfileResult:
    """Every node as a process of this machine. Forks first, so call it before threads are started."""
    with tempfile.TemporaryDirectory(prefix="skippipe-") as folder:
        logs = Path(folder)
        pool = ProcessPool(partial(node_process, ROLES), logs)
        try:
            own, pairs = KeyPair.new(), {name: KeyPair.new() for name in node_config.names}
            publics = {name: pair.public for name, pair in pairs.items()}
            desk = ProfilingServer(node_config, own, publics, watching=watching)
            for name, pair in pairs.items():
                join_config = {
                    "name": name,
                    "coordinator": desk.address,
                    "keys": [pair.public, pair.secret],
                    "coordinator_public": own.public,
                }
                pool.start(name, join_config)
            started(pool)
            return desk.run(lambda: _ended(pool, logs), stopped)
        finally:
            pool.close()


def joined(
    node_config: ProfilingConfig,
    key: Path,
    peers: Path,
    listen: str,
    watching: ProfilingCallback,
    deadlines: ProfilingDeadlines,
    stopped: Stopped = lambda: False,
) -> ProfileResult:
    """Nodes come from wherever they are ('skippipe node'), if their keys are on the list."""
    known = PeerList.load(peers).peers
    publics: dict[str, str | None] = {name: known[name] for name in node_config.names}
    desk = ProfilingServer(
        node_config, KeyFile.load(key).keys, publics, listen=listen, watching=watching, deadlines=deadlines
    )
    print(f"waiting for {len(publics)} nodes to join {desk.address}: {', '.join(publics)}", file=sys.stderr)
    return desk.run(stopped=stopped)


def _ended(pool: ProcessPool, logs: Path) -> list[tuple[str, str]]:
    """Nodes that are no more, and how they ended."""
    pool.look()
    found = []
    for name, status in pool.ended.items():
        found.append((name, f"it has ended ({how_ended(status)}): {_last_words(log_file(logs, name))}"))
    pool.ended.clear()
    return found


def _last_words(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        lines = []
    return next((line for line in reversed(lines) if line.strip()), "it left no word")
