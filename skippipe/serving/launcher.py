"""All that serves, under one roof: nodes, gateway, HTTP; and how it begins and ends.

Nodes on the gateway's own machine: they are started, and started again when they end.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import CheckpointOutline
from skippipe.inference.engine import ending_tokens
from skippipe.launch.fork_server import ProcessPool, how_ended, log_file
from skippipe.runtime.node.agent import node_process
from skippipe.serving.async_engine import AsyncEngine
from skippipe.serving.gateway_thread import GatewayCallback, GatewayThread
from skippipe.serving.http.routes import app
from skippipe.serving.node.role import ROLES, ServingConfig
from skippipe.serving.routing import LinkCost, UniformCost
from skippipe.serving.scheduler import ServingSettings
from skippipe.transport.addresses import join_address
from skippipe.transport.keys import KeyFile, KeyPair, PeerList
from skippipe.web import server as web_server
from skippipe.web.auth import ApiSettings

if TYPE_CHECKING:
    import uvicorn


TERMINATED = 128 + signal.SIGTERM  # exit status, as shells have it
BACKLOG = 1024


@dataclass(frozen=True)
class ServeConfig:
    """How a model is served, beside what nodes are told."""

    name: str
    """Of the model, to those who ask."""
    context: int
    """Tokens of prompt and answer at most."""
    api: ApiSettings
    gateway: ServingSettings = field(default_factory=ServingSettings)
    distance: LinkCost = field(default_factory=UniformCost)
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any."""
    keys: Path | None = None
    """A folder of `skippipe keys`, for nodes that join by themselves; none: all are processes of this machine."""
    listen: str = "127.0.0.1:0"
    """Where nodes join."""
    logs: Path | None = None
    """Of nodes on this machine; none: gone when all is over."""


class ServeApp(GatewayCallback):
    def __init__(self, outline: CheckpointOutline, node_config: ServingConfig, hosting: ServeConfig) -> None:
        self._outline = outline
        self._node_config = node_config
        self._hosting = hosting
        self._crew: LocalNodePool | None = None
        self._server: uvicorn.Server | None = None
        self._failure: Exception | None = None
        self._there: set[str] = set()
        self._complete = False
        self._address = ""

    def run(self) -> None:
        """Until somebody stops it: KeyboardInterrupt, or SystemExit for SIGTERM."""
        with ExitStack() as stack:
            listening = stack.enter_context(_listening(self._hosting.host, self._hosting.port))
            self._address = f"http://{join_address(self._hosting.host, listening.getsockname()[1])}"
            if self._hosting.keys is None:
                logs = self._hosting.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skippipe-")))
                self._crew = stack.enter_context(closing(LocalNodePool(logs, _say)))
            signal.signal(signal.SIGTERM, _terminate)  # nodes are forked and have their own way to end
            front = self._front()
            stack.callback(front.close)
            front.start()
            self._answer(front, listening)
        if self._failure is not None:
            raise self._failure

    # What the front tells

    def holds(self, node: str, stage: int) -> None:
        self._there.add(node)
        process = None
        if self._crew is not None:
            self._crew.serves(node)
            process = self._crew.process(node)
        where = f" (process {process})" if process else ""
        _say(
            f"'{node}'{where} holds stage {stage}; "
            f"{len(self._there)} of {len(self._node_config.stage_of)} nodes are there"
        )
        if not self._complete and len(self._stages) == len(self._node_config.layers):
            self._complete = True
            self._announce()

    def gone(self, node: str, how: str) -> None:
        self._there.discard(node)
        _say(f"'{node}' is gone: {how}; {len(self._stages)} of {len(self._node_config.layers)} stages are left")

    def failed(self, error: Exception) -> None:
        self._failure = error
        if self._server is not None:
            self._server.should_exit = True

    @property
    def _stages(self) -> set[int]:
        """That somebody holds."""
        return {self._node_config.stage_of[node] for node in self._there}

    # Beginnings

    def _front(self) -> GatewayThread:
        if self._crew is None:
            own, publics = self._keys()
            front = self._made_front(own, publics)
            _say(f"waiting for {len(publics)} nodes to join {front.address}: {', '.join(publics)}")
            return front
        pairs = {name: KeyPair.new() for name in self._node_config.stage_of}
        own = KeyPair.new()
        front = self._made_front(own, {name: pair.public for name, pair in pairs.items()})
        self._crew.begin({name: _join_config(name, pair, front.address, own) for name, pair in pairs.items()})
        _say(f"{self._hosting.name}: {len(pairs)} nodes of this machine load {len(self._node_config.layers)} stages")
        return front

    def _keys(self) -> tuple[KeyPair, dict[str, str]]:
        folder = self._hosting.keys
        assert folder is not None
        known = PeerList.load(folder / "peers.json").peers
        unknown = [name for name in self._node_config.stage_of if name not in known]
        if unknown:
            raise UserError(f"{folder / 'peers.json'}: has no key of {', '.join(unknown)}")
        return KeyFile.load(folder / "coordinator.key").keys, {name: known[name] for name in self._node_config.stage_of}

    def _made_front(self, own: KeyPair, publics: dict[str, str]) -> GatewayThread:
        return GatewayThread(
            self._node_config,
            own,
            publics,
            settings=self._hosting.gateway,
            distance=self._hosting.distance,
            listen=self._hosting.listen,
            gone=self._crew.gone if self._crew is not None else lambda: (),
            watching=self,
        )

    def _answer(self, front: GatewayThread, listening: socket.socket) -> None:
        hosting, config = self._hosting, self._outline.spec.config
        tokenizer = self._outline.tokenizer()
        answers = AsyncEngine(
            front,
            tokenizer,
            hosting.name,
            context=hosting.context,
            vocabulary=config.vocab_size,
            ends=ending_tokens(config, tokenizer),
        )
        self._server = web_server.server(app(answers, hosting.api), hosting.host, hosting.port, front.hang_up)
        if self._failure is None:
            asyncio.run(self._server.serve([listening]))

    def _announce(self) -> None:
        hosting, layers = self._hosting, self._node_config.layers
        asked = json.dumps({"model": hosting.name, "prompt": "It is a truth", "max_tokens": 32})
        token = ' -H "Authorization: Bearer $TOKEN"' if hosting.api.tokens else ""
        print(
            f"{hosting.name} is served at {self._address}/v1: {len(layers)} stages on "
            f"{len(self._node_config.stage_of)} "
            f"nodes, {hosting.context:,} tokens of context; Ctrl-C ends it\n"
            f"try: curl {self._address}/v1/completions{token} -H 'Content-Type: application/json' -d '{asked}'",
            flush=True,
        )


def _join_config(name: str, pair: KeyPair, address: str, own: KeyPair) -> dict[str, Any]:
    return {
        "name": name,
        "coordinator": address,
        "keys": [pair.public, pair.secret],
        "coordinator_public": own.public,
        "security": "curve",
    }


def _listening(host: str, port: int) -> socket.socket:
    """Before anything is loaded: or minutes would pass until it says that the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UserError(
            f"{join_address(host, port)}: cannot listen there: {error.strerror or error}; try --port 0"
        ) from None


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(TERMINATED)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


FIRST_S, LONGEST_S = 1.0, 60.0  # from an end to the next start; twice as long with every one that follows soon
SOON_S = 60.0
MAX_EARLY_EXITS = 3  # times that a node may end before it has ever served


class LocalNodePool:
    def __init__(self, logs: Path, say: Callable[[str], None]) -> None:
        """Forks at once: make it before threads are started. Afterwards it is for one thread."""
        self._logs = logs
        self._say = say
        self._pool = ProcessPool(partial(node_process, ROLES), logs)
        self._told: Mapping[str, dict[str, Any]] = {}
        self._began: dict[str, float] = {}
        self._due: dict[str, float] = {}
        """Nodes that are no more, and when to start them again."""
        self._ends: Counter[str] = Counter()
        """One soon after the other."""
        self._served: set[str] = set()

    def begin(self, told: Mapping[str, dict[str, Any]]) -> None:
        """Name → invitation."""
        self._told = told
        for name in told:
            self._start(name)

    def process(self, name: str) -> int | None:
        return self._pool.pids.get(name)

    def serves(self, name: str) -> None:
        self._served.add(name)

    def gone(self) -> Iterator[tuple[str, str]]:
        """Nodes that ended since it was last asked, and how; those whose time has come are started again."""
        self._pool.poll()
        ended = dict(self._pool.ended)
        self._pool.ended.clear()
        now = time.monotonic()
        for name, status in ended.items():
            how = how_ended(status)
            self._ends[name] = self._ends[name] + 1 if now - self._began[name] < SOON_S else 1
            if name not in self._served and self._ends[name] >= MAX_EARLY_EXITS:
                raise UserError(f"node '{name}' does not get to serve ({how}): {self._last_words(name)}")
            wait_s = min(LONGEST_S, FIRST_S * 2 ** (self._ends[name] - 1))
            self._due[name] = now + wait_s
            self._say(f"'{name}' has ended ({how}) and is started again in {wait_s:g} s")
            yield name, how
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            self._start(name)

    def close(self) -> None:
        """End every node; returns when all are gone."""
        self._pool.close()

    def _start(self, name: str) -> None:
        self._began[name] = time.monotonic()
        self._pool.start(name, self._told[name])

    def _last_words(self, name: str) -> str:
        try:
            lines = log_file(self._logs, name).read_text(errors="replace").split("\n")
        except OSError:
            lines = []
        return next((line for line in reversed(lines) if line.strip()), "it left no word")
