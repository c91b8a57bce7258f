"""The coordinator as a process: its state machine over a real mailbox."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from datetime import timedelta
from typing import Any

from skippipe.errors import UserError
from skippipe.optim_config import OptimConfig
from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import StopRequests
from skippipe.runtime.coordinator.state_machine import (
    Callback,
    CheckpointStore,
    Coordinator,
    Deadlines,
    RecoverySettings,
)
from skippipe.runtime.messages import ControlMessage, NewPlan, PeerUpdate, StateRequest, Stop, Welcome
from skippipe.runtime.node.agent import THE_COORDINATOR
from skippipe.runtime.node.ops import StateSource
from skippipe.runtime.node_config import NodeConfig
from skippipe.runtime.rendezvous import Gone, Listener
from skippipe.transport.keys import KeyPair
from skippipe.transport.mailbox import Mailbox, Security
from skippipe.transport.message import Message, MessageKind, Received, StatePiece

CLOSE_LINGER_S = 2.0  # for the last words to leave
MOST_LENT = 2**24  # numbers of a state in one message
EXIT_MESSAGE_S = 0.5  # for those of a node that is gone to arrive


class CoordinatorServer:
    """What the coordinator's state machine sees of the world, and the loop around it."""

    def __init__(
        self,
        node_config: NodeConfig,
        keys: KeyPair | None,
        publics: Mapping[str, str | None],
        *,
        listen: str = "127.0.0.1:0",
        security: Security = "curve",
        store: Callable[[int, int, Any], None],
        keeper: CheckpointStore | None = None,
        note: Callable[[dict[str, Any]], None] = lambda record: None,
    ) -> None:
        self.keeper = keeper
        self.machine: Coordinator | None = None
        self._node_config = node_config
        self._brief_json = node_config.to_json()
        self._publics = publics
        self._store = store
        self._note = note
        self._names = {number: node.name for number, node in enumerate(node_config.plan.cluster.nodes)}
        self._numbers = dict(node_config.plan.cluster.number)
        self._mailbox = Mailbox(THE_COORDINATOR, keys, listen=listen, security=security, depth=1024)
        self._reception = Listener(self._mailbox, self._numbers, publics, self._complain)
        self._leaving: dict[str, tuple[float, str]] = {}
        """Nodes that are gone, but may have said why: until when that is waited for."""
        self._plan_told: tuple[Plan, dict[str, Any]] | None = None

    @property
    def address(self) -> str:
        return self._mailbox.address

    def run(
        self,
        learning: OptimConfig,
        iterations: int,
        callback: Callback,
        *,
        first: int = 0,
        plans: Mapping[int, Plan] | None = None,
        resumed: bool = False,
        recorded: Container[int] = frozenset(),
        kept_every: int = 0,
        deadlines: Deadlines | None = None,
        survival: RecoverySettings | None = None,
        wal: Sequence[Mapping[str, Any]] = (),
        gone: Gone = lambda: (),
        asked: StopRequests = lambda: 0,
        patience: timedelta = timedelta(milliseconds=200),
    ) -> None:
        """Train; UserError if it cannot be done."""
        self.machine = Coordinator(
            self._node_config.plan,
            learning,
            self,
            callback,
            iterations,
            first=first,
            recipe=self._node_config.recipe,
            plans=plans or {},
            resumed=resumed,
            recorded=recorded,
            kept_every=kept_every,
            deadlines=deadlines or Deadlines(),
            survival=survival or RecoverySettings(),
            wal=wal,
        )
        self._reception.fence.term = self.machine.term
        try:
            while not self.machine.over:
                self._turn(self.machine, gone, patience.total_seconds())
                self.machine.asked_to_end(asked())
        except BaseException:
            self.machine.fail("the run was ended")
            raise
        finally:
            self._mailbox.close(CLOSE_LINGER_S)
        if self.machine.failure:
            raise UserError(self.machine.failure)

    def _turn(self, machine: Coordinator, gone: Gone, patience_s: float) -> None:
        for received in self._mailbox.receive(patience_s):
            self._deliver(machine, received)
        now = time.monotonic()
        for name, how in self._reception.lost():
            self._leaving.setdefault(name, (now + EXIT_MESSAGE_S, how))
        for name, how in gone():  # what it had to say is here
            self._leaving.pop(name, None)
            machine.lost(self._numbers[name], how)
        for name, (until, how) in list(self._leaving.items()):
            if now >= until or machine.over:
                del self._leaving[name]
                machine.lost(self._numbers[name], how)
        machine.tick()

    def close(self) -> None:
        self._mailbox.close()

    # What the state machine sees

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def meet(self, node: int, address: str) -> bool:
        name, reception = self._names[node], self._reception
        self._leaving.pop(name, None)  # that was in another life
        try:
            reception.meet(name, address)
        except UserError:
            return False
        others = [other for other in reception.addresses if other != name]
        if others:  # one that comes back to a new coordinator is not welcomed again, and they may have moved
            self.tell(node, PeerUpdate(reception.introduced(others)))
        return True

    def part(self, node: int) -> None:
        self._reception.part(self._names[node], EXIT_MESSAGE_S)

    def tell(self, node: int, control: ControlMessage) -> None:
        name = self._names[node]
        if isinstance(control, Stop) and name not in self._reception.addresses:  # it is there after all
            self._reception.answer_a_ghost(name)
        else:
            self._reception.tell(name, control)

    def welcome(self, node: int, plan: Plan, origin: StateSource | None, assignment: int) -> None:
        node_config = {**self._brief_json, "plan": self._told(plan)}
        self.tell(node, Welcome(node_config, self._reception.introduced(self._publics), origin, assignment))

    def replan(self, node: int, plan: Plan) -> None:
        self.tell(node, NewPlan(self._told(plan)))

    def store(self, stage: int, number: int, piece: Any) -> None:
        self._store(stage, number, piece)

    def note(self, record: dict[str, Any]) -> None:
        self._note(record)

    def give(self, node: int, stage: int, want: StateRequest) -> None:
        assert self.keeper is not None
        try:
            state = self.keeper.state(stage, want.first, min(want.count, MOST_LENT))
            message = Message(StatePiece(0, want.first, want.assignment), state)
        except (UserError, ValueError, AssertionError) as error:
            assert self.machine is not None
            self.machine.lost(node, f"it asked for state that is not there: {error}")
            return
        self._reception.send(self._names[node], message)

    def _told(self, plan: Plan) -> dict[str, Any]:
        """As JSON; everybody gets the same."""
        if self._plan_told is None or self._plan_told[0] is not plan:
            self._plan_told = plan, plan.to_json()
        return self._plan_told[1]

    def _deliver(self, machine: Coordinator, received: Received) -> None:
        node = self._numbers[received.peer]
        if received.message.kind is not MessageKind.CONTROL:
            machine.receive(node, received.message)
            return
        control = self._reception.understood(received)
        if control is not None:
            machine.hear(node, control)

    def _complain(self, name: str, what: str) -> None:
        assert self.machine is not None
        self.machine.complain(self._numbers[name], what)
