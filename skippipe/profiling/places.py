"""Where nodes are when they are measured: processes of this machine, or wherever they join from."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from skippipe.profiling.brief import ProfilingBrief
from skippipe.profiling.conductor import Deadlines, Watching
from skippipe.profiling.desk import ProfilingDesk
from skippipe.profiling.survey import Survey
from skippipe.training.nursery import Nursery, how_ended, log_file
from skippipe.training.run import birth
from skippipe.transport.keys import KeyFile, KeyPair, PeerList

Stopped = Callable[[], bool]


def here(
    brief: ProfilingBrief,
    watching: Watching,
    stopped: Stopped = lambda: False,
    started: Callable[[Nursery], None] = lambda nursery: None,
) -> Survey:
    """Every node as a process of this machine. Forks first, so call it before threads are started."""
    with tempfile.TemporaryDirectory(prefix="skippipe-") as folder:
        logs = Path(folder)
        nursery = Nursery(birth, logs)
        try:
            own, pairs = KeyPair.new(), {name: KeyPair.new() for name in brief.names}
            publics = {name: pair.public for name, pair in pairs.items()}
            desk = ProfilingDesk(brief, own, publics, watching=watching)
            for name, pair in pairs.items():
                invitation = {
                    "name": name,
                    "coordinator": desk.address,
                    "keys": [pair.public, pair.secret],
                    "coordinator_public": own.public,
                }
                nursery.start(name, invitation)
            started(nursery)
            return desk.run(lambda: _ended(nursery, logs), stopped)
        finally:
            nursery.close()


def joined(
    brief: ProfilingBrief,
    key: Path,
    peers: Path,
    listen: str,
    watching: Watching,
    deadlines: Deadlines,
    stopped: Stopped = lambda: False,
) -> Survey:
    """Nodes come from wherever they are ('skippipe node'), if their keys are on the list."""
    known = PeerList.load(peers).peers
    publics: dict[str, str | None] = {name: known[name] for name in brief.names}
    desk = ProfilingDesk(brief, KeyFile.load(key).keys, publics, listen=listen, watching=watching, deadlines=deadlines)
    print(f"waiting for {len(publics)} nodes to join {desk.address}: {', '.join(publics)}", file=sys.stderr)
    return desk.run(stopped=stopped)


def _ended(nursery: Nursery, logs: Path) -> list[tuple[str, str]]:
    """Nodes that are no more, and how they ended."""
    nursery.look()
    found = []
    for name, status in nursery.ended.items():
        found.append((name, f"it has ended ({how_ended(status)}): {_last_words(log_file(logs, name))}"))
    nursery.ended.clear()
    return found


def _last_words(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        lines = []
    return next((line for line in reversed(lines) if line.strip()), "it left no word")
