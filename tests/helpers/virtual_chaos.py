"""Random faults under virtual time: a scenario is played, and what must hold in the end is checked.

Every scenario is a pure function of its seed, so a seed that fails is the whole bug report.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Any

from skippipe.optim.config import OptimConfig
from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import Callback, CoordinatorState, Event, IterationReport
from skippipe.runtime.coordinator.settings import CoordinatorSettings, Deadlines, RecoverySettings, ValidationSettings
from skippipe.runtime.coordinator.wal_records import plan_records
from skippipe.runtime.node.ops import GradNorm, Op, OptimizerStep, PlanTransfer
from skippipe.runtime.simulation.symbolic_executor import SymbolicExecutor
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from tests.helpers.fault_scenarios import Scenario, published

PATIENCE_S = 60.0  # for one scenario; most take a tenth of a second, some with twenty nodes 20 s
LEARNING = OptimConfig(warmup=2, iterations=30)
NOTHING_LEFT = "and there is no checkpoint"
STAGE_0_LOST = "stage 0 is lost"
LOST = "no node holds it any more"

Which = tuple[int, int]


# What records a run


@dataclass
class MemoryStore:
    """A checkpoint store in memory, of checkpoints that are symbols."""

    stages: int
    kept: list[tuple[int, tuple[int, ...], dict[int, tuple[Any, ...]]]] = field(default_factory=list)
    _open: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    _whole: set[int] = field(default_factory=set)

    def save(self, stage: int, number: int, piece: Any) -> None:
        if piece is None:
            assert stage in self._open, "a stage that ends before it began"
            self._whole.add(stage)
        else:
            assert number == 0
            self._open[stage] = piece

    def saved(self, iterations: int, steps: Sequence[int], validation_loss: float | None = None) -> None:  # noqa: ARG002
        assert self._whole == set(range(self.stages)), f"a checkpoint of the stages {self._whole} only"
        self.kept.append((iterations, tuple(steps), self._open))
        self.abandon()

    def abandon(self) -> None:
        self._open, self._whole = {}, set()

    def state(self, stage: int, first: int, count: int) -> Any:
        assert (first, count) == (0, 1)
        return self.kept[-1][2][stage]

    def steps(self, stage: int) -> int:
        return self.kept[-1][1][stage]

    def lack(self) -> str:
        return ""

    def move(self) -> None:
        pass

    def newest(self) -> int | None:
        return self.kept[-1][0] if self.kept else None


class EventRecorder(Callback):
    """Events and reports, in the order in which they came."""

    def __init__(self) -> None:
        self.told: list[Event | IterationReport] = []

    def iteration_done(self, report: IterationReport) -> None:
        self.told.append(report)

    def happened(self, event: Event) -> None:
        self.told.append(event)


class Counting(SymbolicExecutor):
    """Counts its steps as Adam does, which corrects its means by them: replicas that count differently drift apart."""

    def __init__(self, node: int, plan: Plan) -> None:
        super().__init__(node, plan)
        self.steps = 0
        self._visited = False

    def run(self, work: Op) -> Any:
        match work:
            case PlanTransfer():
                self.steps = work.origin.steps
            case GradNorm():
                self._visited = work.stage_microbatches > 0
            case OptimizerStep() if work.scale > 0 and self._visited:
                self.steps += 1
        return super().run(work)


class CheckedLog(list[dict[str, Any]]):
    """A write-ahead log in memory, which checks at every commit that all microbatches are back."""

    cluster: VirtualCluster

    def append(self, record: dict[str, Any]) -> None:
        if "commit" in record:
            current = self.cluster.coordinator._commits.current
            assert current.log.all_returned(current._routes), "committed before all microbatches were back"
        super().append(json.loads(json.dumps(record, allow_nan=False)))


class Hang(Exception):
    """It took too long."""


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Of processor time, so that other programs do not count. In the main thread only."""

    def ring(_number: int, _frame: object) -> None:
        raise Hang(f"not done after {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@dataclass
class Played:
    scenario: Scenario
    cluster: VirtualCluster
    recorder: EventRecorder
    store: MemoryStore
    took_s: float = 0.0

    @property
    def nothing_left(self) -> bool:
        """Did all who had any state go, before there was a checkpoint? Then there is nothing to go on from."""
        cluster, coordinator = self.cluster, self.cluster.coordinator
        able, membership = coordinator.membership.active, coordinator.membership
        if STAGE_0_LOST in coordinator.failure:
            kept = any(cluster.executor_of[node].has_backup for node in able if membership[node].stage != 0)  # type: ignore[attr-defined]
            return not kept and not any(membership[node].stage == 0 for node in able) and not self.store.kept
        return NOTHING_LEFT in coordinator.failure and not able and not self.store.kept

    def timeline(self) -> str:
        """What happened, for people."""
        lines = [str(self.scenario)]
        for at_ns, event in self.cluster.events:
            lines.append(f"{at_ns / 1e9:10.3f} {event.kind:10} it{event.iteration} {event.node:10} {event.text}")
        coordinator = self.cluster.coordinator
        lines.append(f"{self.cluster.now_ns / 1e9:10.3f} {coordinator.state} {coordinator.failure}")
        lines += [
            f"           {report.iteration}: visits {report.stage_microbatches}" for report in self.cluster.reports
        ]
        return "\n".join(lines)


def staged(what: Scenario) -> Played:
    random = Random(what.seed)
    disturb: Callable[[int], int] = lambda duration_ns: int(duration_ns * random.uniform(0, 3))  # noqa: E731
    recorder, store, log = EventRecorder(), MemoryStore(len(what.plan.stages)), CheckedLog()
    long = what.plan.cluster is published().cluster
    cluster = VirtualCluster(
        what.plan,
        CoordinatorSettings(
            LEARNING,
            what.iterations,
            grows=what.grows,
            skip_schedule=what.recipe,
            recovery=RecoverySettings(what.lost_stage, what.drift, timedelta(0), what.backup_every),  # type: ignore[arg-type]
            checkpoint_every=what.kept_every,
            validation=ValidationSettings(what.validated_every, 5),
            deadlines=Deadlines(iteration=timedelta(seconds=900 if long else 60)),
        ),
        {node: Counting(node, what.plan) for node in what.plan.stage_of},
        disturb=disturb if what.uneven else lambda duration_ns: duration_ns,
        faults=what.faults,
        late=what.late,
        checkpoint_store=store,
        callback=recorder,
        builder=Counting,
        wal=log,
    )
    log.cluster = cluster
    return Played(what, cluster, recorder, store)


def play(played: Played) -> Played:
    """Until the end; AssertionError or Hang if it is not the one that it should be."""
    began = time.perf_counter()
    with bounded(PATIENCE_S):
        played.cluster.run()
        check(played)
    played.took_s = time.perf_counter() - began
    return played


# What must hold


def check(played: Played) -> None:
    cluster, recorder = played.cluster, played.recorder
    coordinator = cluster.coordinator
    if played.nothing_left:
        return
    assert coordinator.state is CoordinatorState.DONE, coordinator.failure or coordinator.state
    wanted = list(range(played.scenario.iterations))
    assert [report.iteration for report in cluster.reports] == wanted, "reported"
    assert [record["commit"] for record in cluster.wal if "commit" in record] == wanted, "noted"
    assert coordinator.has_grown == played.scenario.grows
    if played.scenario.grows:
        assert not cluster.stored, "only the checkpoint is needed"
        cluster.stored |= {stage: [state, None] for stage, state in played.store.kept[-1][2].items()}
    untouched = check_visits(cluster.wal, recorder.told)
    states = check_replicas(cluster)
    check_history(played, states, untouched)
    check_ends(played, states[0])
    check_store(played, states)


def plans_of(wal: Sequence[Mapping[str, Any]]) -> list[Plan]:
    """Of every iteration: the last that was noted before it was committed."""
    found: list[Plan] = []
    known: dict[int, Plan] = {}
    for number, record in enumerate(wal):
        if "commit" in record:
            noted = plan_records(wal[:number])[-1]
            if id(noted) not in known:
                known[id(noted)] = Plan.from_json(noted["plan"])
            found.append(known[id(noted)])
    return found


def check_visits(wal: Sequence[Mapping[str, Any]], told: Sequence[Event | IterationReport]) -> set[int]:
    """How many microbatches are in every gradient; the iterations that went as planned, perhaps at a second try."""
    plans = plans_of(wal)
    untouched: set[int] = set()
    touched = data_lost = spoiled = False
    for each in told:
        if isinstance(each, Event):
            if each.kind == "restarted":
                touched = data_lost = spoiled = False
            elif each.kind == "not-finite":
                touched = spoiled = True
            elif each.kind == "rerouted":
                touched = True
                plan = plans[min(each.iteration, len(plans) - 1)]
                data_lost = data_lost or plan.stage_of.get(plan.cluster.number[each.node]) == 0
            continue
        plan, visits = plans[each.iteration], list(each.stage_microbatches)
        assert plan.microbatches == plans[0].microbatches
        assert all(0 <= count <= most for count, most in zip(visits, plan.exposure, strict=True)), (
            f"iteration {each.iteration}: visits {visits} where the plan has {plan.exposure}"
        )
        if not touched:
            untouched.add(each.iteration)
            assert visits == plan.exposure, f"iteration {each.iteration}: visits {visits}, planned {plan.exposure}"
        if not data_lost and not spoiled:
            assert visits[0] == plan.microbatches, f"iteration {each.iteration}: {visits[0]} on stage 0"
            assert math.isfinite(each.loss)
        touched = data_lost = spoiled = False
    return untouched


def still_there(cluster: VirtualCluster) -> list[int]:
    """Nodes that have the state of the end; where the model grows, they begin anew."""
    coordinator = cluster.coordinator
    active = [] if coordinator.has_grown else coordinator.membership.active
    return [node for node in active if node in cluster.alive and node not in cluster.frozen]


def check_replicas(cluster: VirtualCluster) -> list[list[tuple[Which, ...]]]:
    """All who hold a stage have the same state, and that is what was collected; the state of each stage."""
    coordinator, found = cluster.coordinator, []
    there = still_there(cluster)
    for stage in range(len(coordinator.plan.stages)):
        states: list[list[tuple[Which, ...]]] = []
        for node in there:
            machine = cluster.executor_of[node]
            assert isinstance(machine, Counting)
            if coordinator.membership[node].stage != stage:
                continue
            states.append(machine.state)
            assert machine.state == states[0], f"stage {stage}: node {node} has {machine.state}, others {states[0]}"
            steps = coordinator.progress.steps[stage]
            assert machine.steps == steps, f"stage {stage}: node {node} took {machine.steps} steps of {steps}"
        collected = cluster.stored[stage]
        assert collected[-1] is None
        assert not states or list(collected[0]) == states[0], f"stage {stage}: what was collected is not what is there"
        found.append(list(collected[0]))
    return found


def check_history(played: Played, states: Sequence[list[tuple[Which, ...]]], untouched: set[int]) -> None:
    """Every step that a stage has taken since its state was last lost was along the gradient that was reported."""
    cluster = played.cluster
    plans = plans_of(cluster.wal)
    taken = [record["commit"] for record in cluster.wal if "commit" in record and record["scale"] > 0]
    for stage, state in enumerate(states):
        since = last_lost(played.recorder.told, stage)
        steps = [iteration for iteration in taken if iteration >= since]
        if since == 0:
            assert len(state) == len(taken), f"stage {stage}: {len(state)} steps of {len(taken)}"
        tail = state[len(state) - len(steps) :]
        for iteration, found in zip(steps, tail, strict=True):
            counted = cluster.reports[iteration].stage_microbatches[stage]
            where = f"stage {stage}, iteration {iteration}"
            assert len(found) == counted, f"{where}: {len(found)} microbatches in the step, {counted} reported"
            planned = sorted(
                (lane, microbatch)
                for lane, each in enumerate(plans[iteration].lanes)
                for microbatch in range(each.microbatches)
                if stage in plans[iteration].visits(each)
            )
            if iteration in untouched:
                assert list(found) == planned, where
            else:
                assert set(found) <= set(planned), where


def check_ends(played: Played, state: list[tuple[Which, ...]]) -> None:
    """What only stage 0 holds was never made up: it has learned before it was lost, and in all iterations since."""
    cluster, coordinator = played.cluster, played.cluster.coordinator
    ends = list(cluster.stored[0][0].ends)
    for node in still_there(cluster):
        if coordinator.membership[node].stage == 0:
            machine = cluster.executor_of[node]
            assert isinstance(machine, Counting)
            assert machine.ends == ends, f"node {node} has other ends than were collected"
    since = last_lost(played.recorder.told, 0)
    taken = [record["commit"] for record in cluster.wal if "commit" in record and record["scale"] > 0]
    steps = [iteration for iteration in taken if iteration >= since]
    assert ends[len(ends) - len(steps) :] == state[len(state) - len(steps) :], "they have not stepped with their stage"
    assert len(ends) > len(steps) or len(steps) == len(taken), "they began anew"


def last_lost(told: Sequence[Event | IterationReport], stage: int) -> int:
    """The iteration from which on the stage's state was not lost again: 0 if it never was."""
    since, done, lost = 0, 0, False
    for each in told:
        if isinstance(each, IterationReport):
            done += 1
        elif each.kind == "recovering" and each.text.startswith(f"stage {stage} ") and LOST in each.text:
            lost = True
        elif each.kind == "recovered" and each.text.endswith(f" {stage}") and lost:
            since, lost = done, False
    return since


def check_store(played: Played, states: Sequence[list[tuple[Which, ...]]]) -> None:
    """A checkpoint of a stage that was never lost is what the stage was after so many iterations; one is of the end."""
    cluster = played.cluster
    taken = [record["commit"] for record in cluster.wal if "commit" in record and record["scale"] > 0]
    if played.scenario.kept_every:
        assert played.store.newest() == played.scenario.iterations, "there is no checkpoint of the end"
        final = [list(played.store.kept[-1][2][stage]) for stage in range(len(states))]
        assert final == states, "the checkpoint of the end is not the model"
    for iterations, steps, kept in played.store.kept:
        count = sum(iteration < iterations for iteration in taken)
        for stage, state in enumerate(states):
            lost = any(
                isinstance(each, Event) and each.kind == "recovering" and f"stage {stage} " in each.text
                and LOST in each.text for each in played.recorder.told
            )  # fmt: skip
            if not lost:
                assert list(kept[stage]) == state[:count], f"checkpoint {iterations}, stage {stage}"
                visited = sum(bool(each) for each in kept[stage])
                assert steps[stage] == visited, f"checkpoint {iterations}, stage {stage}: {steps[stage]} steps"
