"""How long a coordinator waits, for whom, and what it does when that time is over."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from skippipe.costs import ns
from skippipe.runtime.roster import Standing
from skippipe.runtime.states import State

if TYPE_CHECKING:
    from skippipe.runtime.coordinator import Coordinator

SEVERAL = 4  # heartbeats, or promised iterations: how long nothing may come back after a repair
SLOW = 3  # promised iterations: then those who are waited for are slow


class Patience:
    def __init__(self, coordinator: Coordinator, now_ns: int) -> None:
        self._of = coordinator
        self._since_ns = self._begun_ns = self._ticked_ns = self._tried_ns = now_ns
        self._again = 0
        self._slow: set[int] = set()

    @property
    def iteration_s(self) -> float:
        """Since the last iteration was done."""
        return (self._now_ns - self._begun_ns) / 1e9

    def renew(self) -> None:
        """Something has happened that was waited for."""
        self._since_ns = self._now_ns

    def iteration_done(self) -> None:
        self._begun_ns, self._again = self._now_ns, 0
        self._slow.clear()

    def deadline_ns(self) -> int:
        """When the state that the coordinator is in has lasted too long."""
        deadlines, plan = self._of.deadlines, self._of.plan
        limit = {
            State.JOINING: deadlines.join,
            State.PREPARING: deadlines.ready,
            State.PAUSED: deadlines.join,
            State.COLLECTING: deadlines.collect,
            State.REUNITING: deadlines.reunion,
        }.get(self._of.state, deadlines.iteration)
        if self._of.state is State.TRAINING and self._of.is_disturbed and plan.expected:
            limit = min(limit, SEVERAL * max(deadlines.heartbeat, timedelta(seconds=plan.expected.iteration_s)))
        return self._since_ns + ns(limit.total_seconds())

    def tick(self) -> None:
        """Look at the clock. Those who were silent for too long are gone; what lasts too long is dealt with."""
        coordinator, now_ns = self._of, self._now_ns
        heartbeat_ns = ns(coordinator.deadlines.heartbeat.total_seconds())
        held_up, self._ticked_ns = now_ns - self._ticked_ns > heartbeat_ns // 2, now_ns
        if held_up:  # nobody could be heard meanwhile
            for node in coordinator.roster:
                coordinator.roster.heard(node, now_ns)
        if coordinator.state not in (State.JOINING, State.REUNITING):  # then connections tell
            self._give_up_silent(now_ns, heartbeat_ns)
        if coordinator.over:
            return
        if now_ns >= self.deadline_ns():
            self._overdue()
        elif coordinator.state is State.PAUSED and now_ns > self._tried_ns + heartbeat_ns:  # a cut may be over by now
            self._tried_ns = now_ns
            coordinator.go_on_if_possible()
        elif coordinator.state is State.TRAINING:
            self._look_for_slow(now_ns)

    def _give_up_silent(self, now_ns: int, heartbeat_ns: int) -> None:
        coordinator, deadlines = self._of, self._of.deadlines
        for node in coordinator.roster.silent(now_ns - heartbeat_ns):
            coordinator.lost(node, f"no sign of life for {deadlines.heartbeat.total_seconds():g} s")
        if coordinator.state is State.TRAINING:
            for node in coordinator.roster.building(now_ns - ns(deadlines.ready.total_seconds())):
                coordinator.lost(node, f"it has been building its stage for {deadlines.ready.total_seconds():g} s")

    def _overdue(self) -> None:
        coordinator, state = self._of, self._of.state
        waited = f"waited {(self._now_ns - self._since_ns) / 1e9:.0f} s for"
        missing = coordinator.missing()
        names = ", ".join(coordinator.roster.name(node) for node in missing)
        survives = coordinator.survival.survives
        if state is State.REUNITING:
            coordinator.reunited()
        elif state is State.TRAINING and survives and self._again == 0:
            self._again += 1
            coordinator.restart(f"{waited} {names} {state.value}")
        elif state is State.PREPARING and survives and coordinator.roster.able:
            for node in missing:
                coordinator.lost(node, f"{waited} it {state.value}")
        elif state is State.PAUSED:
            coordinator.fail(f"{waited} nodes {state.value}: {coordinator.lacking}")
        else:
            coordinator.fail(f"{waited} {names} {state.value}")

    def _look_for_slow(self, now_ns: int) -> None:
        """Those who are waited for longer than the plan promises, though they give signs of life."""
        coordinator, promised = self._of, self._of.plan.expected
        if promised is None or now_ns < self._begun_ns + SLOW * promised.iteration_ns:
            return
        if now_ns < self._since_ns + ns(coordinator.deadlines.heartbeat.total_seconds()):
            return
        for node in coordinator.missing():
            if node not in self._slow and coordinator.roster[node].standing is not Standing.BUILDING:
                self._slow.add(node)
                doing = coordinator.roster[node].doing or "says nothing"
                coordinator.happened("slow", f"is slow, but there: {doing}", node)

    @property
    def _now_ns(self) -> int:
        return self._of.surroundings.now_ns()
