"""How long a coordinator waits, for whom, and what it does when that time is over."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from skippipe.cost_model import ns
from skippipe.runtime.coordinator.interfaces import WriteFailed
from skippipe.runtime.coordinator.membership import MemberState
from skippipe.runtime.coordinator.settings import CoordinatorState
from skippipe.runtime.messages import LinkDown

if TYPE_CHECKING:
    from skippipe.runtime.coordinator.state_machine import Coordinator

SEVERAL = 4  # heartbeats, or promised iterations: how long nothing may come back after a repair
ROOM_S = 2.0  # from one try to write the model to the next
SLOW = 3  # promised iterations: then those who are waited for are slow


class FailureDetector:
    def __init__(self, coordinator: Coordinator, now_ns: int) -> None:
        self._of = coordinator
        self._since_ns = self._begun_ns = self._ticked_ns = self._tried_ns = now_ns
        self._patient_from_ns = now_ns
        """Before that nobody could be heard."""
        self._again = 0
        self._slow: set[int] = set()
        self._unwritten: WriteFailed | None = None
        self._idle_said = False
        self._complaints: list[tuple[int, LinkDown]] = []
        """Nodes that cannot reach another, which is silent here, too: it may be gone."""
        self._building_since_ns: dict[tuple[int, int], int] = {}
        """Node and stage."""

    @property
    def iteration_s(self) -> float:
        """Since the last iteration was done."""
        return (self._now_ns - self._begun_ns) / 1e9

    def renew(self) -> None:
        """Something has happened that was waited for."""
        self._since_ns = self._now_ns

    def waits_for_room(self, unwritten: WriteFailed | None) -> bool:
        """Whether weights cannot be written: nodes keep their state meanwhile."""
        before, self._unwritten = self._unwritten, unwritten
        if (before is None) != (unwritten is None):
            self.renew()
            wait = f"{self._of.deadlines.room.total_seconds() / 60:.0f} minutes"
            waits = f"{unwritten}; nodes keep their state, and room is waited for, {wait} at most"
            self._of.happened("storage", waits if unwritten else "the model can be written again")
        return unwritten is not None

    def iteration_done(self) -> None:
        self._begun_ns, self._again = self._now_ns, 0
        self._slow.clear()
        self._idle_said = False

    def complained(self, node: int, broken: LinkDown) -> None:
        """A node cannot reach another. If that one has not been heard of here either, it is not the link: then it
        either speaks again before long, or counts as gone."""
        if self._is_quiet(broken.peer):
            self._complaints.append((node, broken))
        else:
            self._of.cut(node, broken)

    def deadline_ns(self) -> int:
        """When the state that the coordinator is in has lasted too long."""
        deadlines, plan = self._of.deadlines, self._of.plan
        limit = {
            CoordinatorState.JOINING: deadlines.join,
            CoordinatorState.PREPARING: deadlines.ready,
            CoordinatorState.PAUSED: deadlines.join,
            CoordinatorState.COLLECTING: deadlines.room if self._unwritten else deadlines.collect,
            CoordinatorState.REUNITING: deadlines.reunion,
        }.get(self._of.state, deadlines.iteration)
        if self._of.state is CoordinatorState.TRAINING and self._of.is_disturbed and plan.expected:
            limit = min(limit, SEVERAL * max(deadlines.heartbeat, timedelta(seconds=plan.expected.iteration_s)))
        return self._since_ns + ns(limit.total_seconds())

    def tick(self) -> None:
        """Look at the clock. Those who were silent for too long are gone; what lasts too long is dealt with."""
        coordinator, now_ns = self._of, self._now_ns
        heartbeat_ns = ns(coordinator.deadlines.heartbeat.total_seconds())
        held_up, self._ticked_ns = now_ns - self._ticked_ns > heartbeat_ns // 2, now_ns
        if held_up:
            self._patient_from_ns = now_ns
        if coordinator.state not in (CoordinatorState.JOINING, CoordinatorState.REUNITING):  # then connections tell
            self._give_up_silent(now_ns, heartbeat_ns)
            self._look_at_complaints()
        if coordinator.over:
            return
        if now_ns >= self.deadline_ns():
            self._overdue()
        elif (
            coordinator.state is CoordinatorState.PAUSED and now_ns > self._tried_ns + heartbeat_ns
        ):  # a cut may be over by now
            self._tried_ns = now_ns
            coordinator.go_on_if_possible()
        elif (
            self._unwritten
            and coordinator.state is CoordinatorState.COLLECTING
            and now_ns > self._tried_ns + ns(ROOM_S)
        ):
            self._tried_ns = now_ns
            coordinator.store_again()
        elif coordinator.state is CoordinatorState.TRAINING:
            self._look_for_slow(now_ns)

    def _give_up_silent(self, now_ns: int, heartbeat_ns: int) -> None:
        coordinator, deadlines = self._of, self._of.deadlines
        since_ns = now_ns - heartbeat_ns
        for node in coordinator.membership.silent(since_ns) if self._patient_from_ns < since_ns else ():
            coordinator.lost(node, f"no sign of life for {deadlines.heartbeat.total_seconds():g} s")
        building = {
            (node, coordinator.membership[node].stage) for node in coordinator.membership.of(MemberState.BUILDING)
        }
        self._building_since_ns = {each: self._building_since_ns.get(each, now_ns) for each in building}
        if coordinator.state is CoordinatorState.TRAINING:
            for (node, _), since_ns in self._building_since_ns.items():
                if since_ns < now_ns - ns(deadlines.ready.total_seconds()):
                    coordinator.lost(node, f"it has been building its stage for {deadlines.ready.total_seconds():g} s")

    def _look_at_complaints(self) -> None:
        membership, complaints = self._of.membership, self._complaints
        self._complaints = [each for each in complaints if each[0] in membership and each[1].peer in membership]
        for node, broken in [each for each in self._complaints if not self._is_quiet(each[1].peer)]:
            self._complaints.remove((node, broken))
            if node in membership and broken.peer in membership:
                self._of.cut(node, broken)

    def _is_quiet(self, node: int) -> bool:
        """Has it missed signs of life?"""
        missed_ns = ns(self._of.deadlines.heartbeat.total_seconds()) // 2
        return self._of.membership[node].heard_ns < self._now_ns - missed_ns

    def _overdue(self) -> None:
        coordinator, state = self._of, self._of.state
        waited = f"waited {(self._now_ns - self._since_ns) / 1e9:.0f} s for"
        missing = coordinator.missing()
        names = ", ".join(coordinator.membership.name(node) for node in missing)
        survives = coordinator.survival.survives
        if state is CoordinatorState.REUNITING:
            coordinator.reunited()
        elif state is CoordinatorState.TRAINING and survives and self._again == 0:
            self._again += 1
            coordinator.restart(f"{waited} {names} {state.value}")
        elif state is CoordinatorState.PREPARING and survives and coordinator.membership.able:
            for node in missing:
                coordinator.lost(node, f"{waited} it {state.value}")
        elif self._unwritten and state is CoordinatorState.COLLECTING:
            coordinator.leave(f"{self._unwritten}; {waited} room; {self._unwritten.ways}")
        elif state is CoordinatorState.PAUSED:
            coordinator.fail(f"{waited} nodes {state.value}: {coordinator.lacking}")
        else:
            coordinator.fail(f"{waited} {names} {state.value}")

    def _look_for_slow(self, now_ns: int) -> None:
        """Those who are waited for longer than the plan promises and have had work all the time; who waits for others
        is not slow. If nobody has work, that is said, because then it is a link."""
        coordinator, promised = self._of, self._of.plan.expected
        if promised is None or now_ns < self._begun_ns + SLOW * promised.iteration_ns:
            return
        heartbeat_s = coordinator.deadlines.heartbeat.total_seconds()
        if now_ns < self._since_ns + ns(heartbeat_s):
            return
        missing = {node: coordinator.membership[node] for node in coordinator.missing()}
        for node, peer in missing.items():
            if node not in self._slow and peer.busy_s >= heartbeat_s:
                self._slow.add(node)
                coordinator.happened("slow", f"is slow, but there: {peer.doing}", node)
        idle = not any(peer.busy_s for peer in missing.values())
        if idle and not self._idle_said and now_ns >= self._since_ns + 2 * ns(heartbeat_s):
            self._idle_said = True
            names = ", ".join(coordinator.membership.name(node) for node in missing)
            coordinator.happened("slow", f"no node computes, {names} wait for what others send: a link is slow")

    @property
    def _now_ns(self) -> int:
        return self._of.env.now_ns()
