"""The failure detector: nodes that are silent, slow or unreachable, and states that last too long.

It looks at the clock and tells the coordinator what it finds. What follows is the coordinator's decision.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Protocol

from skippipe.cost_model import ns
from skippipe.heartbeat import BUILDING, HELD_UP, IDLE, REPAIRED_ITERATION, SUSPECTED
from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import CoordinatorEnv, CoordinatorState, EventKind
from skippipe.runtime.coordinator.membership import Membership, MemberState
from skippipe.runtime.coordinator.settings import Deadlines
from skippipe.runtime.messages import LinkDown

WRITE_RETRY_S = 2.0  # from one attempt to write the final weights to the next
SLOW = 3  # promised iterations after which the nodes that are awaited are slow


class FailureContext(Protocol):
    """What the failure detector sees of the coordinator."""

    @property
    def state(self) -> CoordinatorState: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def is_disturbed(self) -> bool: ...

    @property
    def is_disk_full(self) -> bool: ...

    @property
    def may_begin(self) -> bool: ...

    def awaited(self) -> list[int]: ...

    def node_lost(self, node: int, how: str) -> None: ...

    def link_down(self, node: int, report: LinkDown) -> None: ...

    def retry(self) -> None: ...

    def deadline_passed(self, waited: str) -> None: ...

    def log_event(self, kind: EventKind, text: str, node: int | None = None) -> None: ...


class FailureDetector:
    def __init__(
        self, context: FailureContext, membership: Membership, env: CoordinatorEnv, deadlines: Deadlines
    ) -> None:
        self._context = context
        self._membership = membership
        self._env = env
        self._deadlines = deadlines
        self._progress_ns = self._committed_ns = self._ticked_ns = self._retried_ns = env.now_ns()
        self._listening_from_ns = self._progress_ns
        """Before that this process was held up, and could not hear any node."""
        self._slow: set[int] = set()
        """Nodes that were reported to be slow in this iteration."""
        self._idle_reported = False
        self._link_reports: list[tuple[int, LinkDown]] = []
        """Reports of links to nodes that are silent here, too: they may be dead."""
        self._building_since_ns: dict[tuple[int, int], int] = {}
        """Node and the stage that it builds → since when."""

    @property
    def iteration_s(self) -> float:
        """Seconds since the last commit."""
        return (self._env.now_ns() - self._committed_ns) / 1e9

    def progress(self) -> None:
        """Something that was awaited has arrived: the deadline of the state starts over."""
        self._progress_ns = self._env.now_ns()

    def committed(self) -> None:
        """An iteration is done."""
        self._committed_ns = self._env.now_ns()
        self._slow.clear()
        self._idle_reported = False

    def hurry(self) -> None:
        """The run is to stop at once: the final weights are awaited for a short time only."""
        self._deadlines = replace(self._deadlines, gather=self._deadlines.abort, disk_space=self._deadlines.abort)

    def link_reported(self, node: int, report: LinkDown) -> None:
        """A node cannot reach a peer. If the peer has been silent here as well, the link may be fine: the peer either
        sends something before long, or is declared dead."""
        if self._is_suspected(report.peer):
            self._link_reports.append((node, report))
        else:
            self._context.link_down(node, report)

    def deadline_ns(self) -> int:
        """When the coordinator's state has lasted too long."""
        deadlines, state, promised = self._deadlines, self._context.state, self._context.plan.expected
        limit = {
            CoordinatorState.JOINING: deadlines.join
            if self._context.may_begin
            else max(deadlines.join, deadlines.enough),
            CoordinatorState.PREPARING: deadlines.ready,
            CoordinatorState.PAUSED: deadlines.enough,
            CoordinatorState.GATHERING: deadlines.disk_space if self._context.is_disk_full else deadlines.gather,
            CoordinatorState.REJOINING: deadlines.rejoin,
        }.get(state, deadlines.iteration)
        disturbed = state is CoordinatorState.TRAINING and self._context.is_disturbed
        if (disturbed or state is CoordinatorState.VALIDATING) and promised:
            each = max(deadlines.heartbeat, timedelta(seconds=promised.iteration_s))
            limit = min(limit, REPAIRED_ITERATION * each)
        return self._progress_ns + ns(limit.total_seconds())

    def tick(self) -> None:
        """Look at the clock, and report nodes that are silent for too long and states that last too long."""
        context, now_ns = self._context, self._env.now_ns()
        heartbeat_ns = ns(self._deadlines.heartbeat.total_seconds())
        if now_ns - self._ticked_ns > HELD_UP * heartbeat_ns:
            self._listening_from_ns = now_ns
        self._ticked_ns = now_ns
        if context.state not in (CoordinatorState.JOINING, CoordinatorState.REJOINING):  # then connections tell
            self._find_silent(now_ns, heartbeat_ns)
            self._find_stuck_builders(now_ns)
            self._resolve_link_reports()
        retry_ns = ns(WRITE_RETRY_S) if context.state is CoordinatorState.GATHERING else heartbeat_ns
        retries = context.state is CoordinatorState.PAUSED or (  # a link may be up again by now
            context.state is CoordinatorState.GATHERING and context.is_disk_full
        )
        if context.state in (CoordinatorState.DONE, CoordinatorState.FAILED):
            return
        if now_ns >= self.deadline_ns():
            context.deadline_passed(f"waited {(now_ns - self._progress_ns) / 1e9:.0f} s for")
        elif retries and now_ns > self._retried_ns + retry_ns:
            self._retried_ns = now_ns
            context.retry()
        elif context.state is CoordinatorState.TRAINING:
            self._find_slow(now_ns)

    def _find_silent(self, now_ns: int, heartbeat_ns: int) -> None:
        since_ns = now_ns - heartbeat_ns
        for node in self._membership.silent(since_ns) if self._listening_from_ns < since_ns else ():
            timeout_ns = heartbeat_ns
            if self._membership[node].state is MemberState.BUILDING:
                timeout_ns = round(BUILDING * heartbeat_ns)
            if self._membership[node].last_seen_ns < now_ns - timeout_ns:
                self._context.node_lost(node, f"no heartbeat for {timeout_ns / 1e9:g} s")

    def _find_stuck_builders(self, now_ns: int) -> None:
        membership, ready_s = self._membership, self._deadlines.ready.total_seconds()
        building = {(node, membership[node].stage) for node in membership.in_state(MemberState.BUILDING)}
        self._building_since_ns = {each: self._building_since_ns.get(each, now_ns) for each in building}
        if self._context.state is CoordinatorState.TRAINING:
            for (node, _), since_ns in self._building_since_ns.items():
                if since_ns < now_ns - ns(ready_s):
                    self._context.node_lost(node, f"it has been building its stage for {ready_s:g} s")

    def _resolve_link_reports(self) -> None:
        membership, reports = self._membership, self._link_reports
        self._link_reports = [each for each in reports if each[0] in membership and each[1].peer in membership]
        for node, report in [each for each in self._link_reports if not self._is_suspected(each[1].peer)]:
            self._link_reports.remove((node, report))
            if node in membership and report.peer in membership:
                self._context.link_down(node, report)

    def _is_suspected(self, node: int) -> bool:
        """Has a node missed heartbeats, so that it may be dead?"""
        missed_ns = SUSPECTED * ns(self._deadlines.heartbeat.total_seconds())
        return self._membership[node].last_seen_ns < self._env.now_ns() - missed_ns

    def _find_slow(self, now_ns: int) -> None:
        """Report awaited nodes that take longer than the plan promises and have had work all the time; a node that
        waits for others is not slow. If no node has work, it is a link."""
        context, promised = self._context, self._context.plan.expected
        heartbeat_s = self._deadlines.heartbeat.total_seconds()
        if promised is None or now_ns < self._committed_ns + SLOW * promised.iteration_ns:
            return
        if now_ns < self._progress_ns + ns(heartbeat_s):
            return
        awaited = {node: self._membership[node] for node in context.awaited()}
        for node, member in awaited.items():
            if node not in self._slow and member.busy_s >= heartbeat_s:
                self._slow.add(node)
                context.log_event("slow", f"is slow, but there: {member.activity}", node)
        idle = not any(member.busy_s for member in awaited.values())
        if idle and not self._idle_reported and now_ns >= self._progress_ns + IDLE * ns(heartbeat_s):
            self._idle_reported = True
            names = ", ".join(map(self._membership.name, awaited))
            context.log_event("slow", f"no node computes, {names} wait for what others send: a link is slow")
