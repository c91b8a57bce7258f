"""The coordinator as a process: its state machine over a real mailbox."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from skippipe.errors import UserError
from skippipe.learning import Learning
from skippipe.runtime.control import Control, from_json, to_json
from skippipe.runtime.coordinator import Coordinator, Deadlines, Keeper, Watcher
from skippipe.runtime.member import THE_COORDINATOR
from skippipe.training.brief import Brief
from skippipe.transport.keys import KeyPair
from skippipe.transport.mailbox import Mailbox, NotConnected, QueueFull, Security
from skippipe.transport.message import Kind, Message, Received

GOODBYE_S = 2.0  # for the last words to leave
LAST_WORDS_S = 0.5  # for those of a node that is gone to arrive


class Desk:
    """What the coordinator's state machine sees of the world, and the loop around it."""

    def __init__(
        self,
        brief: Brief,
        keys: KeyPair | None,
        publics: Mapping[str, str | None],
        *,
        listen: str = "127.0.0.1:0",
        security: Security = "curve",
        store: Callable[[int, Any], None],
        keeper: Keeper | None = None,
    ) -> None:
        self._plan = brief.plan
        self._brief = brief
        self._publics = publics
        self._store = store
        self._keeper = keeper
        self._mailbox = Mailbox(THE_COORDINATOR, keys, listen=listen, security=security, depth=1024)
        self._names = {number: node.name for number, node in enumerate(self._plan.cluster.nodes)}
        for number in self._plan.stage_of:
            self._mailbox.allow(self._names[number], publics.get(self._names[number]))
        self.machine: Coordinator | None = None

    @property
    def address(self) -> str:
        return self._mailbox.address

    @property
    def refused(self) -> int:
        return self._mailbox.refused

    def run(
        self,
        learning: Learning,
        iterations: int,
        watcher: Watcher,
        *,
        first: int = 0,
        recorded: frozenset[int] = frozenset(),
        kept_every: int = 0,
        deadlines: Deadlines | None = None,
        gone: Callable[[], str] = lambda: "",
        stopped: Callable[[], bool] = lambda: False,
        patience: timedelta = timedelta(milliseconds=200),
    ) -> None:
        """Train; UserError if it cannot be done.

        `gone` names a node that is known to have ended; once `stopped` says yes, the weights are collected as they are.
        """
        self.machine = Coordinator(
            self._plan,
            learning,
            self,
            watcher,
            iterations,
            brief=self._brief.to_json(),
            keys={number: self._publics.get(self._names[number]) for number in self._plan.stage_of},
            first=first,
            resumed=first > 0,
            recorded=recorded,
            kept_every=kept_every,
            deadlines=deadlines or Deadlines(),
        )
        try:
            while not self.machine.over:
                for received in self._mailbox.receive(patience.total_seconds()):
                    self._deliver(self.machine, received)
                lost = self._mailbox.lost()
                for each in lost:
                    self._mailbox.disconnect(each.peer)  # or a last message to nobody would hold up the end
                if not self.machine.over and (lost or gone()):
                    self._last_words(self.machine)
                    if ended := gone():
                        self.machine.fail(ended)
                for each in lost:
                    self.machine.lost(self._plan.cluster.number[each.peer], each.reason)
                if stopped():
                    self.machine.finish_early()
                self.machine.tick()
        except BaseException:
            self.machine.fail("the run was ended")
            raise
        finally:
            self._mailbox.close(GOODBYE_S)
        if self.machine.failure:
            raise UserError(self.machine.failure)

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def close(self) -> None:
        self._mailbox.close()

    def meet(self, node: int, address: str) -> None:
        try:
            self._mailbox.connect(self._names[node], address, self._publics.get(self._names[node]))
        except UserError as error:
            assert self.machine is not None
            self.machine.fail(f"node '{self._names[node]}' says that it is at {error}")

    def tell(self, node: int, control: Control) -> None:
        self._send(node, Message(Kind.CONTROL, 0, 0, 0, 0, to_json(control)))

    def _send(self, node: int, message: Message) -> None:
        try:
            self._mailbox.send(self._names[node], message)
        except (NotConnected, QueueFull):
            assert self.machine is not None
            self.machine.lost(node, "it does not take messages")

    def store(self, stage: int, piece: Any) -> None:
        self._store(stage, piece)

    def save(self, stage: int, piece: Any) -> None:
        assert self._keeper is not None
        self._keeper.save(stage, piece)

    def saved(self, iterations: int) -> None:
        assert self._keeper is not None
        self._keeper.saved(iterations)

    def give(self, node: int, piece: int) -> None:
        assert self._keeper is not None
        stage = self._plan.stage_of[node]
        body, steps = self._keeper.piece(stage, piece)
        self._send(node, Message(Kind.CHUNK, 0, stage, piece, steps, body))

    def _deliver(self, machine: Coordinator, received: Received) -> None:
        node = self._plan.cluster.number[received.peer]
        if received.message.kind is not Kind.CONTROL:
            machine.receive(node, received.message)
            return
        try:
            control = from_json(received.message.body)
        except UserError as error:
            machine.fail(f"node '{received.peer}' sent nonsense: {error}")
            return
        machine.hear(node, control)

    def _last_words(self, machine: Coordinator) -> None:
        """A node that ended may have said why; whatever else is said no longer matters."""
        deadline = time.monotonic() + LAST_WORDS_S
        while not machine.over and (left_s := deadline - time.monotonic()) > 0:
            for received in self._mailbox.receive(left_s):
                body = received.message.body
                if isinstance(body, dict) and body.get("say") == "failed":
                    self._deliver(machine, received)
