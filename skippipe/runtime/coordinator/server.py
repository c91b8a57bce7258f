"""The coordinator as a process: its state machine over a real mailbox."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from skippipe.constraints import lanes_through
from skippipe.cost_model import device_bytes
from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.runtime.admission import Admission
from skippipe.runtime.coordinator.interfaces import Callback, CheckpointStore, StopRequests
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.coordinator.state_machine import Coordinator
from skippipe.runtime.messages import ControlMessage, NewPlan, PeerUpdate, StateRequest, Stop, Welcome
from skippipe.runtime.node_config import NodeConfig
from skippipe.runtime.rendezvous import EXIT_MESSAGE_S, EndedNodes, Listener, poll_s
from skippipe.runtime.state_source import StateSource
from skippipe.transport.admission import NodeNeeds
from skippipe.transport.keys import THE_COORDINATOR, KeyPair
from skippipe.transport.mailbox import OUT_ONLY, Mailbox, Security
from skippipe.transport.message import Message, MessageKind, Received, StatePiece

CLOSE_LINGER_S = 2.0  # for the last messages to leave
MAX_STATE_VALUES = 2**24  # numbers of a state in one message
MOST_FREE_NAMES = 8  # that are named to one who has none


class CoordinatorServer:
    """The environment of the coordinator's state machine, and the event loop around it."""

    def __init__(
        self,
        node_config: NodeConfig,
        keys: KeyPair | None,
        publics: Mapping[str, str | None],
        *,
        listen: str = "127.0.0.1:0",
        security: Security = "curve",
        store: Callable[[int, int, Any], None],
        checkpoint_store: CheckpointStore | None = None,
        append_wal: Callable[[dict[str, Any]], None] = lambda record: None,
        admission: Admission | None = None,
        later_plans: Sequence[Plan] = (),
    ) -> None:
        self.machine: Coordinator | None = None
        self.adopt(node_config, store, checkpoint_store, append_wal)
        self._publics = publics
        self._plans = [node_config.plan, *later_plans]
        """The plan that the run starts with, and those for when its model has grown."""
        self._names = {number: node.name for number, node in enumerate(node_config.plan.cluster.nodes)}
        self._numbers = dict(node_config.plan.cluster.number)
        self._mailbox = Mailbox(THE_COORDINATOR, keys, listen=listen, security=security, depth=1024)
        self._listener = Listener(
            self._mailbox,
            self._numbers,
            publics,
            on_malformed=lambda name, what: self._machine.on_malformed(self._numbers[name], what),
            on_reached=lambda name: self._machine.on_reach(self._numbers[name], None),
            on_out_only=self._on_out_only,
            on_relay=lambda name, info: self._machine.on_relay(name, info),
            on_relay_only=lambda a, b, now: self._machine.on_relay_only(self._numbers[a], self._numbers[b], now),
        )
        self._admission = admission
        if admission is not None:
            admission.needs = self._needs
            admission.follow(self._listener)

    def adopt(
        self,
        node_config: NodeConfig,
        store: Callable[[int, int, Any], None],
        checkpoint_store: CheckpointStore | None,
        append_wal: Callable[[dict[str, Any]], None],
    ) -> None:
        """What `run` trains from now on: of another run with nodes of the same names."""
        self.checkpoint_store = checkpoint_store
        self.store_weights = store
        self.append_wal = append_wal
        self._node_config = node_config
        self._node_config_json = node_config.to_json()
        self._plan_json: tuple[Plan, dict[str, Any]] | None = None

    @property
    def address(self) -> str:
        return self._mailbox.address

    def run(
        self,
        settings: CoordinatorSettings,
        callback: Callback,
        *,
        wal: Sequence[Mapping[str, Any]] = (),
        first_term: int = 0,
        ended: EndedNodes = lambda: (),
        stop_requests: StopRequests = lambda: 0,
        leaves_nodes: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train; whether the model is to grow now: then nodes stay connected, for the run that is adopted next.

        UserError if it cannot be done. `leaves_nodes`: whether nodes are to wait for another coordinator when this one
        ends by request.
        """
        self.machine = Coordinator(self._node_config.plan, settings, self, callback, wal, first_term)
        self._listener.fence.term = self.machine.term
        for name, info in self._listener.relays.items():  # that came before the model has grown
            self.machine.on_relay(name, info)
        try:
            while not self.machine.over:
                self._poll(self.machine, poll_s(settings.deadlines.heartbeat.total_seconds()), ended)
                self.machine.leaves_nodes = leaves_nodes()
                self.machine.on_stop_requests(stop_requests())
        except BaseException:
            self.machine.fail("the run was ended")
            raise
        finally:
            if not self.machine.has_grown:
                self._mailbox.close(CLOSE_LINGER_S)
        if self.machine.failure:
            raise UserError(self.machine.failure)
        return self.machine.has_grown

    def _poll(self, machine: Coordinator, timeout_s: float, ended: EndedNodes) -> None:
        machine.membership.may_relay = bool(self._listener.relay_names)
        for received in self._mailbox.receive(timeout_s):
            self._deliver(machine, received)
        for name, how in chain(ended(), self._listener.lost()):  # the last messages of the former have arrived
            machine.node_lost(self._numbers[name], how)
        if self._admission is not None:
            self._follow_admission(machine, self._admission)
        machine.tick()

    def _follow_admission(self, machine: Coordinator, admission: Admission) -> None:
        for name, how in admission.poll(self._listener):
            machine.log_event("revoked", how, self._numbers[name])
            machine.node_lost(self._numbers[name], how)
        for event in admission.events():
            if event.name in self._numbers:
                machine.log_event(event.kind, event.text, self._numbers[event.name])
            else:  # it is invited, but has no place in this cluster
                machine.log_event(event.kind, f"'{event.name}', which is not in the cluster of this job: {event.text}")

    def _unplaced(self, name: str) -> str:
        """What to do about a member whose name the cluster of this run does not have."""
        free = [each for each in self._numbers if each not in self._listener.addresses][:MOST_FREE_NAMES]
        rename = f"be invited as one of its nodes that is not there ({', '.join(free)}); or " if free else ""
        return (
            f"the cluster of the run that goes on has no '{name}': {rename}put '{name}' into the cluster file, stop "
            "the run with Ctrl-C, and go on with --resume"
        )

    def _needs(self, name: str) -> NodeNeeds:
        """What each device of a node of the plans that the run started with is to bring; called by another thread."""
        node = self._numbers.get(name, -1)
        if node < 0 and name not in self._listener.relay_names:
            return NodeNeeds(unplaced=self._unplaced(name))
        needed = [_device_bytes(plan, node) for plan in self._plans if node in plan.stage_of]
        return NodeNeeds(self._node_config.device, max(needed)) if needed else NodeNeeds(self._node_config.device)

    def close(self) -> None:
        self._mailbox.close()

    # The state machine's environment

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def connect(self, node: int, address: str) -> bool:
        name, listener = self._names[node], self._listener
        try:
            listener.connect(name, address)
        except UserError:
            return False
        others = [other for other in listener.addresses if other != name]
        # one that reconnects to a restarted coordinator gets no welcome, and they may have moved; and any message tells
        # a node that it can be reached
        self.send(node, PeerUpdate(listener.peer_addresses(others, self._names[node])))
        return True

    def is_called(self, node: int) -> bool:
        return self._listener.is_called(self._names[node])

    def disconnect(self, node: int) -> None:
        self._listener.disconnect(self._names[node], EXIT_MESSAGE_S)

    def send(self, node: int, control: ControlMessage) -> None:
        name = self._names[node]
        if isinstance(control, Stop) and name not in self._listener.addresses:  # it is there after all
            self._listener.request_rejoin(name)
        else:
            self._listener.send(name, control)

    def send_welcome(self, node: int, plan: Plan, origin: StateSource | None, assignment: int) -> None:
        node_config = {**self._node_config_json, "plan": self._to_json(plan)}
        peers = self._listener.peer_addresses(self._publics, self._names[node])
        self.send(node, Welcome(node_config, peers, origin, assignment))

    def send_plan(self, node: int, plan: Plan) -> None:
        self.send(node, NewPlan(self._to_json(plan)))

    def send_checkpoint_state(self, node: int, stage: int, request: StateRequest) -> None:
        assert self.checkpoint_store is not None
        try:
            state = self.checkpoint_store.state(stage, request.first, min(request.count, MAX_STATE_VALUES))
            message = Message(StatePiece(0, request.first, request.assignment), state)
        except (UserError, ValueError, AssertionError) as error:
            assert self.machine is not None
            self.machine.node_lost(node, f"it asked for state that is not there: {error}")
            return
        self._listener.send_message(self._names[node], message)

    def _to_json(self, plan: Plan) -> dict[str, Any]:
        """A plan as JSON, made once for all nodes."""
        if self._plan_json is None or self._plan_json[0] is not plan:
            self._plan_json = plan, plan.to_json()
        return self._plan_json[1]

    def _deliver(self, machine: Coordinator, received: Received) -> None:
        node = self._numbers.get(received.peer, -1)  # a relay, to which only the listener listens
        if received.message.kind is not MessageKind.CONTROL and node >= 0:
            machine.on_piece(node, received.message)
            return
        control = self._listener.decode(received)
        if control is not None:
            machine.on_message(node, control)

    @property
    def _machine(self) -> Coordinator:
        assert self.machine is not None
        return self.machine

    def _on_out_only(self, name: str, address: str, site: str) -> None:
        self._machine.on_reach(self._numbers[name], "" if address == OUT_ONLY else address, site)


def _device_bytes(plan: Plan, node: int) -> int:
    """What each device of a node has to hold by a plan."""
    stage, lanes = plan.stage_of[node], len(lanes_through([lane.path for lane in plan.lanes]).get(node, ()))
    slots = -(-lanes // plan.workers[node])
    return device_bytes(plan.cluster.nodes[node], plan.workload, stage, plan.layers[stage], slots)
