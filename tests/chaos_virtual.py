"""Random faults under virtual time: a seed gives a cluster, a plan, what goes wrong, and what must hold in the end.

Every scenario is a pure function of its seed, so a seed that fails is the whole bug report.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from random import Random
from typing import Any

from skippipe import rules
from skippipe.examples import published20, published_plan
from skippipe.learning import Learning
from skippipe.plan import Lane, Plan, Stage
from skippipe.recipe import Recipe
from skippipe.runtime.coordinator import Deadlines, Event, IterationReport, State, Survival, Watcher
from skippipe.runtime.faults import DURING, Fault, accuse, drawn, kill, stale
from skippipe.runtime.memory import plan_records
from skippipe.runtime.symbols import Symbols
from skippipe.runtime.virtual import VirtualCluster
from skippipe.runtime.work import Measure, Step, Study, Work
from skippipe.simulate import simulate
from skippipe.timeline import Timing
from skippipe.workload import Workload
from tests.plans import TINY, uniform_cluster

PATIENCE_S = 20.0  # for one scenario; it takes a tenth of a second
LEARNING = Learning(warmup=2, iterations=30)
NOTHING_LEFT = "and there is no checkpoint"
STAGE_0_LOST = "stage 0 is lost"
LOST = "nobody holds it any more"

Which = tuple[int, int]


# What is played


def plan_over(stages: Sequence[Sequence[int]], lanes: Sequence[tuple[tuple[int, ...], int]], split: bool) -> Plan:
    count = sum(map(len, stages))
    microbatches = sum(each for _, each in lanes)
    workload = Workload(TINY, 16, 1, microbatches, max_slots=3)
    layers = workload.layer_split(len(stages))
    plan = Plan(
        uniform_cluster(count),
        workload,
        tuple(Stage(each, tuple(nodes), tuple(nodes)) for each, nodes in zip(layers, stages, strict=True)),
        tuple(Lane(path, each) for path, each in lanes),
        split_backward=split,
    )
    return plan.promising(simulate(plan, Timing.FULL))


@cache
def wide(split: bool) -> Plan:
    """Nine nodes, several on every stage."""
    paths = ((0, 3, 5), (0, 4, 7), (1, 6, 8), (1, 3, 5), (2, 4, 7), (2, 6, 8))
    return plan_over(((0, 1, 2), (3, 4), (5, 6), (7, 8)), [(path, 2) for path in paths], split)


@cache
def thin(split: bool) -> Plan:
    """Six nodes, two of them the only ones of their stage."""
    lanes = (((0, 2, 3), 2), ((0, 3, 4), 1), ((0, 2, 5), 1), ((1, 2, 4), 1), ((1, 3, 2), 1), ((1, 3, 5), 2))
    return plan_over(((0, 1), (2,), (3,), (4, 5)), lanes, split)


@cache
def published() -> Plan:
    return published_plan(published20(), "skippipe", None)


def drawn_plan(random: Random) -> Plan:
    """Any small plan that keeps CC1 and CC2 and cannot lock up."""
    while True:
        sizes = [random.randint(1, 3) for _ in range(random.randint(3, 5))]
        numbers = iter(range(sum(sizes)))
        stages = [[next(numbers) for _ in range(size)] for size in sizes]
        lanes = []
        for _ in range(random.randint(2, 3 * sizes[0])):
            others = sorted(random.sample(range(1, len(sizes)), random.randint(1, len(sizes) - 1)))
            visits = [0, *others]
            at = random.randrange(1, len(visits))
            if at + 1 < len(visits) and visits[at + 1] == visits[at] + 1:
                visits[at], visits[at + 1] = visits[at + 1], visits[at]
            lanes.append((tuple(random.choice(stages[stage]) for stage in visits), random.randint(1, 3)))
        slots = dict.fromkeys(range(sum(sizes)), 3)
        if rules.deadlock_cycle([path for path, _ in lanes], slots) is None:
            return plan_over(stages, lanes, random.random() < 0.3)


@dataclass(frozen=True)
class Scenario:
    seed: int
    plan: Plan
    iterations: int
    faults: tuple[Fault, ...]
    lost_stage: str
    kept_every: int
    uneven: bool
    """Tasks and hops take between nothing and three times what is planned."""
    drift: float
    """The plan is renewed when figures are off by this share; 0: never."""
    recipe: Recipe = field(default_factory=Recipe)
    backup_every: int = 2
    """Iterations from one copy of what only stage 0 holds to the next; 0: none."""

    def __str__(self) -> str:
        nodes = ", ".join(str(list(stage.nodes)) for stage in self.plan.stages)
        about = f"{self.iterations} iterations on {nodes}" + ", split backward" * self.plan.split_backward
        about += f", a checkpoint every {self.kept_every}" * bool(self.kept_every) + ", uneven" * self.uneven
        about += f", a copy of the ends every {self.backup_every}" * bool(self.backup_every)
        about += f", a drift of {self.drift:g}" * bool(self.drift)
        about += f", skip {self.recipe.skip}" * bool(self.recipe.phases)
        return "\n  ".join((f"seed {self.seed}: {about}", *map(str, self.faults)))


def scenario(seed: int) -> Scenario:
    random = Random(seed)
    kind, split = random.random(), random.random() < 0.3
    if kind < 0.35:
        plan = wide(split)
    elif kind < 0.65:
        plan = thin(split)
    elif kind < 0.98:
        plan = drawn_plan(random)
    else:
        plan = published()
    iterations = random.randint(3, 6)
    faults = drawn(random, plan, iterations, random.choice([2, 3, 6]))
    if random.random() < 0.2 and len(plan.stage_of) > len(plan.stages):  # and one that never comes back
        node = random.choice(sorted(plan.stage_of))
        faults.append(kill(node).at(random.randrange(iterations), random.choice(["forward", "backward", "averaging"])))
    if random.random() < 0.25:  # all data nodes at once
        struck = random.randrange(iterations), random.choice(DURING)
        back_s = random.choice([0.01, 0.5, 12.0, 40.0])
        faults += [kill(node).at(*struck).back_after(back_s) for node in plan.stages[0].nodes]
    found = Scenario(
        seed,
        plan,
        iterations,
        tuple(faults),
        lost_stage=random.choice(["checkpoint", "neighbours"]),
        kept_every=random.choice([0, 2]),
        uneven=random.random() < 0.3,
        drift=random.choice([0.0, 0.0, 0.5]),
        backup_every=random.choice([0, 1, 2]),
    )
    again = random.choice([0.02, 0.1, 0.4])
    faults.append(stale(*sorted(plan.stage_of), share=again, late_s=random.choice([0.0, 0.0, 0.005, 0.05])))
    if random.random() < 0.1:
        accuser = accuse(random.choice(sorted(plan.stage_of))).at(random.randrange(iterations))
        faults.append(accuser.back_after(random.choice([3.0, 40.0, 400.0])))
    return replace(found, faults=tuple(faults))


# Those who take notes


@dataclass
class Shelf:
    """A keeper of checkpoints that are symbols."""

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

    def saved(self, iterations: int, steps: Sequence[int]) -> None:
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


class Story(Watcher):
    """Events and reports, in the order in which they came."""

    def __init__(self) -> None:
        self.told: list[Event | IterationReport] = []

    def iteration_done(self, report: IterationReport) -> None:
        self.told.append(report)

    def happened(self, event: Event) -> None:
        self.told.append(event)


class Counting(Symbols):
    """Counts its steps as Adam does, which corrects its means by them: replicas that count differently drift apart."""

    def __init__(self, node: int, plan: Plan) -> None:
        super().__init__(node, plan)
        self.steps = 0
        self._visited = False

    def run(self, work: Work) -> Any:
        match work:
            case Study():
                self.steps = work.origin.steps
            case Measure():
                self._visited = work.visits > 0
            case Step() if work.scale > 0 and self._visited:
                self.steps += 1
        return super().run(work)


class Book(list[dict[str, Any]]):
    """A journal like the one on disk, which looks at the ledger whenever an iteration is committed."""

    cluster: VirtualCluster

    def append(self, record: dict[str, Any]) -> None:
        if "commit" in record:
            now = self.cluster.coordinator._iteration
            assert now.ledger.all_back(now._routes), "committed before all microbatches were back"
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
    story: Story
    shelf: Shelf
    took_s: float = 0.0

    @property
    def nothing_left(self) -> bool:
        """Did all who had any state go, before there was a checkpoint? Then there is nothing to go on from."""
        cluster, coordinator = self.cluster, self.cluster.coordinator
        able, roster = coordinator.roster.able, coordinator.roster
        if STAGE_0_LOST in coordinator.failure:
            kept = any(cluster.machines[node].keeps for node in able if roster[node].stage != 0)  # type: ignore[attr-defined]
            return not kept and not any(roster[node].stage == 0 for node in able) and not self.shelf.kept
        return NOTHING_LEFT in coordinator.failure and not able and not self.shelf.kept

    def tale(self) -> str:
        """What happened, for people."""
        lines = [str(self.scenario)]
        for at_ns, event in self.cluster.events:
            lines.append(f"{at_ns / 1e9:10.3f} {event.kind:10} it{event.iteration} {event.node:10} {event.text}")
        coordinator = self.cluster.coordinator
        lines.append(f"{self.cluster.now_ns / 1e9:10.3f} {coordinator.state} {coordinator.failure}")
        lines += [f"           {report.iteration}: visits {report.visits}" for report in self.cluster.reports]
        return "\n".join(lines)


def staged(what: Scenario) -> Played:
    random = Random(what.seed)
    disturb: Callable[[int], int] = lambda duration_ns: int(duration_ns * random.uniform(0, 3))  # noqa: E731
    story, shelf, book = Story(), Shelf(len(what.plan.stages)), Book()
    long = what.plan is published()
    cluster = VirtualCluster(
        what.plan,
        LEARNING,
        what.iterations,
        {node: Counting(node, what.plan) for node in what.plan.stage_of},
        recipe=what.recipe,
        disturb=disturb if what.uneven else lambda duration_ns: duration_ns,
        faults=what.faults,
        survival=Survival(what.lost_stage, what.drift, timedelta(0), what.backup_every),  # type: ignore[arg-type]
        kept_every=what.kept_every,
        keeper=shelf,
        watcher=story,
        deadlines=Deadlines(iteration=timedelta(seconds=900 if long else 60)),
        builder=Counting,
        journal=book,
    )
    book.cluster = cluster
    return Played(what, cluster, story, shelf)


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
    cluster, story = played.cluster, played.story
    coordinator = cluster.coordinator
    if played.nothing_left:
        return
    assert coordinator.state is State.DONE, coordinator.failure or coordinator.state
    wanted = list(range(played.scenario.iterations))
    assert [report.iteration for report in cluster.reports] == wanted, "reported"
    assert [record["commit"] for record in cluster.journal if "commit" in record] == wanted, "noted"
    untouched = check_visits(cluster.journal, story.told)
    states = check_replicas(cluster)
    check_history(played, states, untouched)
    check_ends(played, states[0])
    check_shelf(played, states)


def plans_of(journal: Sequence[Mapping[str, Any]]) -> list[Plan]:
    """Of every iteration: the last that was noted before it was committed."""
    found: list[Plan] = []
    known: dict[int, Plan] = {}
    for number, record in enumerate(journal):
        if "commit" in record:
            noted = plan_records(journal[:number])[-1]
            if id(noted) not in known:
                known[id(noted)] = Plan.from_json(noted["plan"])
            found.append(known[id(noted)])
    return found


def check_visits(journal: Sequence[Mapping[str, Any]], told: Sequence[Event | IterationReport]) -> set[int]:
    """How many microbatches are in every gradient; the iterations that went as planned, perhaps at a second try."""
    plans = plans_of(journal)
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
        plan, visits = plans[each.iteration], list(each.visits)
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


def check_replicas(cluster: VirtualCluster) -> list[list[tuple[Which, ...]]]:
    """All who hold a stage have the same state, and that is what was collected; the state of each stage."""
    coordinator, found = cluster.coordinator, []
    there = [node for node in coordinator.roster.able if node in cluster.lives and node not in cluster.frozen]
    for stage in range(len(coordinator.plan.stages)):
        states: list[list[tuple[Which, ...]]] = []
        for node in there:
            machine = cluster.machines[node]
            assert isinstance(machine, Counting)
            if coordinator.roster[node].stage != stage:
                continue
            states.append(machine.state)
            assert machine.state == states[0], f"stage {stage}: node {node} has {machine.state}, others {states[0]}"
            steps = coordinator.trained.steps[stage]
            assert machine.steps == steps, f"stage {stage}: node {node} took {machine.steps} steps of {steps}"
        collected = cluster.stored[stage]
        assert collected[-1] is None
        assert not states or list(collected[0]) == states[0], f"stage {stage}: what was collected is not what is there"
        found.append(list(collected[0]))
    return found


def check_history(played: Played, states: Sequence[list[tuple[Which, ...]]], untouched: set[int]) -> None:
    """Every step that a stage has taken since its state was last lost was along the gradient that was reported."""
    cluster = played.cluster
    plans = plans_of(cluster.journal)
    taken = [record["commit"] for record in cluster.journal if "commit" in record and record["scale"] > 0]
    for stage, state in enumerate(states):
        since = last_lost(played.story.told, stage)
        steps = [iteration for iteration in taken if iteration >= since]
        if since == 0:
            assert len(state) == len(taken), f"stage {stage}: {len(state)} steps of {len(taken)}"
        tail = state[len(state) - len(steps) :]
        for iteration, found in zip(steps, tail, strict=True):
            counted = cluster.reports[iteration].visits[stage]
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
    for node in coordinator.roster.able:
        if coordinator.roster[node].stage == 0 and node in cluster.lives and node not in cluster.frozen:
            machine = cluster.machines[node]
            assert isinstance(machine, Counting)
            assert machine.ends == ends, f"node {node} has other ends than were collected"
    since = last_lost(played.story.told, 0)
    taken = [record["commit"] for record in cluster.journal if "commit" in record and record["scale"] > 0]
    steps = [iteration for iteration in taken if iteration >= since]
    assert ends[len(ends) - len(steps) :] == state[len(state) - len(steps) :], "they have not stepped with their stage"
    assert len(ends) > len(steps) or len(steps) == len(taken), "they began anew"


def last_lost(told: Sequence[Event | IterationReport], stage: int) -> int:
    """The iteration from which on the stage's state was not lost again: 0 if it never was."""
    since, done, lost = 0, 0, False
    for each in told:
        if isinstance(each, IterationReport):
            done += 1
        elif each.kind == "learning" and each.text.startswith(f"stage {stage} ") and LOST in each.text:
            lost = True
        elif each.kind == "able" and each.text.endswith(f" {stage}") and lost:
            since, lost = done, False
    return since


def check_shelf(played: Played, states: Sequence[list[tuple[Which, ...]]]) -> None:
    """A checkpoint of a stage that was never lost is what the stage was after so many iterations; one is of the end."""
    cluster = played.cluster
    taken = [record["commit"] for record in cluster.journal if "commit" in record and record["scale"] > 0]
    if played.scenario.kept_every:
        assert played.shelf.newest() == played.scenario.iterations, "there is no checkpoint of the end"
        final = [list(played.shelf.kept[-1][2][stage]) for stage in range(len(states))]
        assert final == states, "the checkpoint of the end is not the model"
    for iterations, steps, kept in played.shelf.kept:
        count = sum(iteration < iterations for iteration in taken)
        for stage, state in enumerate(states):
            lost = any(
                isinstance(each, Event) and each.kind == "learning" and f"stage {stage} " in each.text
                and LOST in each.text for each in played.story.told
            )  # fmt: skip
            if not lost:
                assert list(kept[stage]) == state[:count], f"checkpoint {iterations}, stage {stage}"
                visited = sum(bool(each) for each in kept[stage])
                assert steps[stage] == visited, f"checkpoint {iterations}, stage {stage}: {steps[stage]} steps"
