"""All that serves, under one roof: nodes, gateway, HTTP; and how it begins and ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from skippipe.errors import UserError
from skippipe.inference.generating import ending_tokens
from skippipe.inference.loading import Outline
from skippipe.serving import api
from skippipe.serving.answers import Answers
from skippipe.serving.brief import ServingBrief
from skippipe.serving.crew import Crew
from skippipe.serving.front import Front, Watching
from skippipe.serving.gateway import ServingSettings
from skippipe.serving.lanes import Distance, Even
from skippipe.serving.limits import ApiSettings
from skippipe.transport.keys import KeyFile, KeyPair, PeerList
from skippipe.transport.route import joined

if TYPE_CHECKING:
    import uvicorn

TERMINATED = 128 + signal.SIGTERM  # exit status, as shells have it
BACKLOG = 1024


@dataclass(frozen=True)
class Hosting:
    """How a model is served, beside what nodes are told."""

    name: str
    """Of the model, to those who ask."""
    context: int
    """Tokens of prompt and answer at most."""
    api: ApiSettings
    gateway: ServingSettings = field(default_factory=ServingSettings)
    distance: Distance = field(default_factory=Even)
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any."""
    keys: Path | None = None
    """A folder of `skippipe keys`, for nodes that join by themselves; none: all are processes of this machine."""
    listen: str = "127.0.0.1:0"
    """Where nodes join."""
    logs: Path | None = None
    """Of nodes on this machine; none: gone when all is over."""


class House(Watching):
    def __init__(self, outline: Outline, brief: ServingBrief, hosting: Hosting) -> None:
        self._outline = outline
        self._brief = brief
        self._hosting = hosting
        self._crew: Crew | None = None
        self._server: uvicorn.Server | None = None
        self._failure: Exception | None = None
        self._there: set[str] = set()
        self._complete = False
        self._address = ""

    def run(self) -> None:
        """Until somebody stops it: KeyboardInterrupt, or SystemExit for SIGTERM."""
        with ExitStack() as stack:
            listening = stack.enter_context(_listening(self._hosting.host, self._hosting.port))
            self._address = f"http://{joined(self._hosting.host, listening.getsockname()[1])}"
            if self._hosting.keys is None:
                logs = self._hosting.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skippipe-")))
                self._crew = stack.enter_context(closing(Crew(logs, _say)))
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
        _say(f"'{node}'{where} holds stage {stage}; {len(self._there)} of {len(self._brief.stage_of)} nodes are there")
        if not self._complete and len(self._stages) == len(self._brief.layers):
            self._complete = True
            self._announce()

    def gone(self, node: str, how: str) -> None:
        self._there.discard(node)
        _say(f"'{node}' is gone: {how}; {len(self._stages)} of {len(self._brief.layers)} stages are left")

    def failed(self, error: Exception) -> None:
        self._failure = error
        if self._server is not None:
            self._server.should_exit = True

    @property
    def _stages(self) -> set[int]:
        """That somebody holds."""
        return {self._brief.stage_of[node] for node in self._there}

    # Beginnings

    def _front(self) -> Front:
        if self._crew is None:
            own, publics = self._keys()
            front = self._made_front(own, publics)
            _say(f"waiting for {len(publics)} nodes to join {front.address}: {', '.join(publics)}")
            return front
        pairs = {name: KeyPair.new() for name in self._brief.stage_of}
        own = KeyPair.new()
        front = self._made_front(own, {name: pair.public for name, pair in pairs.items()})
        self._crew.begin({name: _invitation(name, pair, front.address, own) for name, pair in pairs.items()})
        _say(f"{self._hosting.name}: {len(pairs)} nodes of this machine load {len(self._brief.layers)} stages")
        return front

    def _keys(self) -> tuple[KeyPair, dict[str, str]]:
        folder = self._hosting.keys
        assert folder is not None
        known = PeerList.load(folder / "peers.json").peers
        unknown = [name for name in self._brief.stage_of if name not in known]
        if unknown:
            raise UserError(f"{folder / 'peers.json'}: has no key of {', '.join(unknown)}")
        return KeyFile.load(folder / "coordinator.key").keys, {name: known[name] for name in self._brief.stage_of}

    def _made_front(self, own: KeyPair, publics: dict[str, str]) -> Front:
        return Front(
            self._brief,
            own,
            publics,
            settings=self._hosting.gateway,
            distance=self._hosting.distance,
            listen=self._hosting.listen,
            gone=self._crew.gone if self._crew is not None else lambda: (),
            watching=self,
        )

    def _answer(self, front: Front, listening: socket.socket) -> None:
        hosting, config = self._hosting, self._outline.blueprint.config
        tokenizer = self._outline.tokenizer()
        answers = Answers(
            front,
            tokenizer,
            hosting.name,
            context=hosting.context,
            vocabulary=config.vocab_size,
            ends=ending_tokens(config, tokenizer),
        )
        self._server = api.server(api.app(answers, hosting.api), hosting.host, hosting.port, front.hang_up)
        if self._failure is None:
            asyncio.run(self._server.serve([listening]))

    def _announce(self) -> None:
        hosting, layers = self._hosting, self._brief.layers
        asked = json.dumps({"model": hosting.name, "prompt": "It is a truth", "max_tokens": 32})
        token = ' -H "Authorization: Bearer $TOKEN"' if hosting.api.tokens else ""
        print(
            f"{hosting.name} is served at {self._address}/v1: {len(layers)} stages on {len(self._brief.stage_of)} "
            f"nodes, {hosting.context:,} tokens of context; Ctrl-C ends it\n"
            f"try: curl {self._address}/v1/completions{token} -H 'Content-Type: application/json' -d '{asked}'",
            flush=True,
        )


def _invitation(name: str, pair: KeyPair, address: str, own: KeyPair) -> dict[str, Any]:
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
        raise UserError(f"{joined(host, port)}: cannot listen there: {error.strerror or error}; try --port 0") from None


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(TERMINATED)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
