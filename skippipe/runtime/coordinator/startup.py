"""Before the first iteration: nodes join and build their stages, or reconnect to a coordinator that was restarted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from skippipe.runtime.coordinator.commit_loop import CommitContext, CommitLoop
from skippipe.runtime.coordinator.interfaces import CoordinatorEnv, CoordinatorState
from skippipe.runtime.coordinator.membership import Membership, MemberState
from skippipe.runtime.coordinator.recovery import RecoverySourceSelector
from skippipe.runtime.coordinator.replanner import Replanner, with_node
from skippipe.runtime.coordinator.wal_records import RecoveredLog
from skippipe.runtime.fencing import first_id
from skippipe.runtime.messages import Hello

FOLLOWING_NS = 5 * 10**9


class StartupContext(CommitContext, Protocol):
    """What the startup sees of the coordinator."""

    def await_last_step(self, stepped: set[int]) -> None: ...


@dataclass
class Startup:
    context: StartupContext
    log: RecoveredLog
    resumed: bool
    """Nodes start from a checkpoint."""
    membership: Membership
    env: CoordinatorEnv
    replanner: Replanner
    recovery: RecoverySourceSelector
    commits: CommitLoop
    _hellos: dict[int, Hello] = field(default_factory=dict)
    """Where the nodes that reconnected are in the run."""
    _joined_ns: int = 0
    """When the last node came."""
    _awaits_relay: bool = False
    """Nothing but a relay is missing, and that was said."""

    @property
    def missing(self) -> list[int]:
        """Nodes of the plan that are not connected, or of which it is not known yet whether they can be called."""
        nodes = sorted(self.replanner.plan.stage_of)
        return [node for node in nodes if node not in self.membership or self.env.is_called(node)]

    @property
    def is_enough(self) -> bool:
        """Whether training can begin without the nodes that have not joined: those that are here are as many as there
        are stages."""
        plan, here = self.replanner.plan, list(self.membership)
        enough = len(here) >= len(plan.stages) and any(node in plan.stage_of for node in here)
        return self.commits.settings.recovery.fault_tolerant and enough and not self._lacks_relay()

    @property
    def may_begin(self) -> bool:
        """The same, and no node has come just now: others often follow."""
        return self.is_enough and self.env.now_ns() >= self._joined_ns + FOLLOWING_NS

    def joined(self, node: int, hello: Hello) -> None:
        self._joined_ns = self.env.now_ns()
        if self.context.state is CoordinatorState.REJOINING:
            self._hellos[node] = hello
        self.go_on_if_complete()

    def lost(self, node: int) -> None:
        self._hellos.pop(node, None)

    def begin_if_ready(self) -> None:
        """Start to train when all nodes have built their stages."""
        if self.context.state is not CoordinatorState.PREPARING or self.membership.in_state(MemberState.BUILDING):
            return
        if self.commits.current.number >= self.commits.end:  # the checkpoint is of the end: only weights are missing
            self.context.gather_weights()
        else:
            placed = {node: self.membership[node].stage for node in self.membership.active}
            complete = placed.items() >= self.replanner.plan.stage_of.items()
            self.commits.detector.committed()  # the time in which nodes joined is no part of the iteration
            self.commits.restart("" if complete else "nodes are missing")

    def finish_rejoin(self) -> None:
        """All nodes have reconnected, or have had time enough: those whose state fits the log continue."""
        stepped, misplaced = self._readmit()
        if not self.membership.active:
            self._begin_from_checkpoint()
            return
        new = len(self.membership.in_state(MemberState.SPARE))
        there = len(self.membership.members) - new
        self.context.log_event("coordinator-restarted", f"{there} nodes are where they were, {new} are new")
        for node in misplaced:
            self.context.evict(node, "it is not where the others are")
        if self.context.state is CoordinatorState.FAILED:
            return
        self.replanner.changed = True
        if self.commits.current.number == self.commits.end:
            self.context.await_last_step(stepped)
        else:
            self.commits.restart("the coordinator was restarted")

    def go_on_if_complete(self) -> None:
        """More is known of the nodes that there are, and of how they are reached."""
        if self.context.state is CoordinatorState.JOINING:
            self._prepare_if_complete()
        elif self.context.state is CoordinatorState.REJOINING and not self.missing:
            self.finish_rejoin()

    def _prepare_if_complete(self) -> None:
        if not self.missing and not self._lacks_relay():
            self._prepare()

    def begin_without_missing(self, waited: str) -> None:
        """Training begins as if nodes that have not joined had been lost; they may still come."""
        for node in self.missing:
            if node not in self.membership:
                why = f"{waited} it {CoordinatorState.JOINING.value}: training begins without it"
                self.context.log_event("lost", why, node)
        self._prepare()

    def _prepare(self) -> None:
        """Nodes build their stages and, if the run is resumed, fetch the checkpoint."""
        unreachable = self.replanner.plan_around_unreachable(self.commits.current.number)
        if unreachable:
            one, other = unreachable
            self.context.fail(
                f"nodes '{one}' and '{other}' can only call out, so they cannot reach each other, and the plan needs "
                "it: start a relay ('skippipe relay'), make one of them reachable, or plan with a bandwidth of 0 "
                "between them"
            )
            return
        self.context.enter(CoordinatorState.PREPARING)
        if self.resumed:  # the log is to have the steps of optimizers before any node has their state
            for stage in range(len(self.replanner.plan.stages)):
                self.recovery.from_checkpoint(stage)
        self.replanner.begin(self.commits.current.number)
        for node, stage in self._stages_of_those_here().items():
            self._build(node, stage)

    def _stages_of_those_here(self) -> dict[int, int]:
        """Node → stage, as planned. A stage for which no node has come gets one without a stage, or else one of the
        stage with the most."""
        plan, here = self.replanner.plan, list(self.membership)
        found = {node: stage for node, stage in plan.stage_of.items() if node in here}
        for stage in range(len(plan.stages)):
            held = Counter(found.values())
            able = [
                node for node in here if plan.costs.slots[stage, node] and (node not in found or held[found[node]] > 1)
            ]
            if not held[stage] and able:
                found[max(able, key=lambda node: held[found[node]] if node in found else len(here))] = stage
        return found

    def rejoined(self, node: int) -> None:
        """A node that was lost is back while others still build: it builds its stage like them. One without a stage may
        get one later."""
        stage = self.replanner.plan.stage_of.get(node)
        if stage is not None:
            self._build(node, stage)

    def _build(self, node: int, stage: int) -> None:
        plan = self.replanner.plan
        if plan.stage_of.get(node) != stage:
            plan = with_node(plan, node, stage)
        self.membership[node].state, self.membership[node].stage = MemberState.BUILDING, stage
        origin = self.recovery.from_checkpoint(stage) if self.resumed else None
        self.env.send_welcome(node, plan, origin, self.membership.assign(node))

    def _lacks_relay(self) -> bool:
        """Do nodes of the plan need a relay that may still come?"""
        lacks = self.membership.lacks_relay and self.replanner.needs_unreachable_pair()
        if lacks and not self._awaits_relay:
            self.context.log_event("paused", "all nodes are there, and some only call out: waiting for a relay")
        self._awaits_relay = lacks
        return lacks

    def _readmit(self) -> tuple[set[int], list[int]]:
        """Nodes whose state fits the log take part again, if need be after the last step in the log. Gives those that
        had taken that step, and those that are in the middle of something else."""
        hellos, self._hellos = self._hellos, {}
        log, commits, stage_of = self.log, self.commits, self.replanner.plan.stage_of
        least, most = first_id(log.term), first_id(log.term + 1)  # hardly any coordinator needs more than its own
        seen = [hello.epoch for hello in hellos.values() if hello.epoch < most]  # none of this term, but perhaps more
        commits.epoch = max([commits.epoch, least, *seen]) + 1
        stepped = set()
        for node, hello in hellos.items():
            behind = hello.iteration == log.iteration and hello.phase == "AVERAGED"
            if node in stage_of and hello.phase and (behind or hello.iteration == commits.current.number):
                state = MemberState.RECOVERING if node in log.recovering else MemberState.ACTIVE
                self.membership.add(node, state, stage_of[node], self.env.now_ns())
                self.membership[node].backup = hello.backup if hello.backup <= commits.current.number else 0
                if behind:
                    self.env.send(node, log.last_commit)
                else:
                    stepped.add(node)
        return stepped, [node for node in self.membership.in_state(MemberState.SPARE) if hellos[node].phase]

    def _begin_from_checkpoint(self) -> None:
        """No node has any state: those that are here, or join, begin where the newest checkpoint was made."""
        store = self.env.checkpoint_store
        completed = store.newest() if store is not None else None
        if completed is None:
            self.context.fail("no node is left that was there before, and there is no checkpoint; start anew")
            return
        self.resumed = True
        for node in self.membership:
            self.membership.add(node, MemberState.SPARE, -1, self.env.now_ns())
        self.commits.open(completed)
        self.context.enter(CoordinatorState.JOINING)
        self._prepare_if_complete()
