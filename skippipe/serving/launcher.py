"""Starts and ends all that serves: the gateway, the HTTP server, and nodes on this machine, restarted when they end."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippipe import web
from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import CheckpointOutline
from skippipe.launch.fork_server import how_ended, last_log_line
from skippipe.launch.launcher import JoinLauncher, Launcher, LocalLauncher
from skippipe.serving.async_engine import AsyncEngine
from skippipe.serving.gateway_thread import GatewayCallback, GatewayThread
from skippipe.serving.http.routes import application
from skippipe.serving.node import ROLES, ServingConfig
from skippipe.serving.routing import RouteCost, UniformCost
from skippipe.serving.scheduler import ServingSettings
from skippipe.transport.addresses import join_address, listening_socket
from skippipe.web import ApiSettings

if TYPE_CHECKING:
    import uvicorn


BACKLOG = 1024
RESTART_S, MAX_RESTART_S = 1.0, 60.0  # before a node is started again; doubled with every early exit in a row
EARLY_EXIT_S = 60.0  # an exit sooner after the start is an early one
MAX_EARLY_EXITS = 3  # of a node that has never served


@dataclass(frozen=True)
class ServeConfig:
    """How a model is served, beside the configuration of its nodes."""

    name: str
    """The model's name, to clients."""
    context: int
    """Tokens of prompt and answer at most."""
    api: ApiSettings
    gateway: ServingSettings = field(default_factory=ServingSettings)
    cost: RouteCost = field(default_factory=UniformCost)
    host: str = "127.0.0.1"
    port: int = 8000
    """Port of the HTTP server; 0: any that is free."""
    keys: Path | None = None
    """A folder of `skippipe keys`, for nodes that join by themselves; None: all nodes are processes of this machine."""
    listen: str = "127.0.0.1:0"
    """Address where nodes join."""
    logs: Path | None = None
    """Folder for the logs of nodes on this machine; None: they are not kept."""
    access_log: bool = True
    """Is there a line for every request?"""


class LocalNodePool(LocalLauncher):
    """Nodes on this machine, each a process that is restarted when it ends, after a while that grows."""

    def __init__(self, names: Sequence[str], logs: Path | None) -> None:
        super().__init__(names, ROLES, logs)
        self._started_s: dict[str, float] = {}
        self._restart_at_s: dict[str, float] = {}
        self._early_exits: Counter[str] = Counter()
        """Node → how many exits in a row were early."""
        self._served: set[str] = set()

    def start(self, address: str, **settings: Any) -> None:
        super().start(address, **settings)
        self._started_s = dict.fromkeys(self._join_configs, time.monotonic())

    def serving(self, name: str) -> int | None:
        """Notes that a node has got to serve; the id of its process."""
        self._served.add(name)
        return self.pool.pids.get(name)

    def ended(self) -> list[tuple[str, str]]:
        """Nodes that have ended since the last call, and how; starts those again whose time has come."""
        self.pool.poll()
        found = [(name, how_ended(status)) for name, status in self.pool.ended.items()]
        self.pool.ended.clear()
        now_s = time.monotonic()
        for name, how in found:
            early = now_s - self._started_s[name] < EARLY_EXIT_S
            self._early_exits[name] = self._early_exits[name] + 1 if early else 1
            if name not in self._served and self._early_exits[name] >= MAX_EARLY_EXITS:
                raise UserError(f"node '{name}' does not get to serve ({how}): {last_log_line(self._log_folder, name)}")
            wait_s = min(MAX_RESTART_S, RESTART_S * 2 ** (self._early_exits[name] - 1))
            self._restart_at_s[name] = now_s + wait_s
            _log(f"'{name}' has ended ({how}) and is started again in {wait_s:g} s")
        for name in [name for name, restart_at_s in self._restart_at_s.items() if restart_at_s <= now_s]:
            del self._restart_at_s[name]
            self._started_s[name] = now_s
            self.pool.start(name, self._join_configs[name])
        return found


class ServeApp(GatewayCallback):
    def __init__(self, outline: CheckpointOutline, node_config: ServingConfig, config: ServeConfig) -> None:
        self._outline = outline
        self._node_config = node_config
        self._config = config
        self._pool: LocalNodePool | None = None
        self._server: uvicorn.Server | None = None
        self._failure: Exception | None = None
        self._ready: set[str] = set()
        """Nodes that hold their stage."""
        self._announced = False
        self._address = ""

    def run(self) -> None:
        """Serves until it is stopped by KeyboardInterrupt."""
        config = self._config
        with ExitStack() as stack:
            # before anything is loaded, or a port that is taken would be an error after minutes
            listening = stack.enter_context(listening_socket(config.host, config.port, BACKLOG, "try --port 0"))
            self._address = f"http://{join_address(config.host, listening.getsockname()[1])}"
            launcher = stack.enter_context(closing(self._launcher()))
            endpoints = launcher.prepare()
            gateway = GatewayThread(
                self._node_config,
                launcher.keys,
                endpoints.public_keys,
                settings=config.gateway,
                cost=config.cost,
                listen=config.listen,
                ended=launcher.ended,
                callback=self,
                admission=endpoints.admission,
            )
            stack.callback(gateway.close)
            launcher.start(gateway.address)
            gateway.start()
            self._serve_http(gateway, listening)
        if self._failure is not None:
            raise self._failure

    # Callbacks of the gateway

    def node_ready(self, node: str, stage: int) -> None:
        self._ready.add(node)
        pid = self._pool.serving(node) if self._pool is not None else None
        where = f" (process {pid})" if pid else ""
        _log(
            f"'{node}'{where} holds stage {stage}; "
            f"{len(self._ready)} of {len(self._node_config.stage_of)} nodes are ready"
        )
        if not self._announced and len(self._stages) == len(self._node_config.layers):
            self._announced = True
            self._announce()

    def node_lost(self, node: str, reason: str) -> None:
        self._ready.discard(node)
        _log(f"lost '{node}': {reason}; {len(self._stages)} of {len(self._node_config.layers)} stages are left")

    def happened(self, what: str) -> None:
        _log(what)

    def failed(self, error: Exception) -> None:
        self._failure = error
        if self._server is not None:
            self._server.should_exit = True

    @property
    def _stages(self) -> set[int]:
        """Stages that a node holds."""
        return {self._node_config.stage_of[node] for node in self._ready}

    # Start

    def _launcher(self) -> Launcher:
        names, folder = list(self._node_config.stage_of), self._config.keys
        if folder is not None:
            return JoinLauncher(names, folder / "coordinator.key", folder / "peers.json")
        self._pool = LocalNodePool(names, self._config.logs)
        _log(f"{self._config.name}: {len(names)} nodes of this machine load {len(self._node_config.layers)} stages")
        return self._pool

    def _serve_http(self, gateway: GatewayThread, listening: socket.socket) -> None:
        config, model_config = self._config, self._outline.spec.config
        tokenizer = self._outline.tokenizer()
        end_tokens = self._outline.end_tokens(tokenizer)
        engine = AsyncEngine(gateway, tokenizer, config.name, config.context, model_config.vocab_size, end_tokens)
        app = application(engine, config.api, _log if config.access_log else None)
        self._server = web.server(app, config.host, config.port, gateway.cancel_all)
        if self._failure is None:
            asyncio.run(self._server.serve([listening]))

    def _announce(self) -> None:
        config, layers = self._config, self._node_config.layers
        body = json.dumps({"model": config.name, "prompt": "It is a truth", "max_tokens": 32})
        token = ' -H "Authorization: Bearer $TOKEN"' if config.api.tokens else ""
        print(
            f"{config.name} is served at {self._address}/v1: {len(layers)} stages on {len(self._node_config.stage_of)} "
            f"nodes, {config.context:,} tokens of context; Ctrl-C ends it\n"
            f"try: curl {self._address}/v1/completions{token} -H 'Content-Type: application/json' -d '{body}'",
            flush=True,
        )


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
