"""What is played under virtual time: a seed gives a cluster, a plan, settings and what goes wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from skippipe import constraints
from skippipe.cluster import Cluster
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.published import published20, published_plan
from skippipe.runtime.simulation.fault_injection import DURING, Fault, accuse, drawn, kill, replay_messages
from skippipe.simulator import simulate
from skippipe.skip_schedule import SkipSchedule
from skippipe.timeline import Timing
from skippipe.workload import TEACHERS, Workload
from tests.helpers.plans import TINY, can_be_taught, drawn_averaging, relayed, uniform_cluster


def plan_over(
    stages: Sequence[Sequence[int]],
    lanes: Sequence[tuple[tuple[int, ...], int]],
    split: bool,
    collective: str = "auto",
) -> Plan:
    """All stages average round rings; what is planned later does as the collective says."""
    count = sum(map(len, stages))
    microbatches = sum(each for _, each in lanes)
    workload = Workload(TINY, 16, 1, microbatches, max_slots=3, collective=collective)
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
        if constraints.deadlock_cycle([path for path, _ in lanes], slots) is None:
            return plan_over(stages, lanes, random.random() < 0.3)


def averaging_anyhow(plan: Plan, random: Random) -> Plan:
    """The same plan, but each stage averages in a way that is drawn; one time in three, in two rounds."""
    ways = [drawn_averaging(random, each.nodes) for each in plan.stages]
    nodes = sorted(plan.stage_of)
    ways = [relayed(random, each, nodes) if random.random() < 0.4 else each for each in ways]
    stages = tuple(Stage.of(each.layers, way) for each, way in zip(plan.stages, ways, strict=True))
    plan = replace(plan, stages=stages, cluster=with_rates(plan.cluster, random))
    if random.random() < 1 / 3:
        plan = replace(plan, workload=replace(plan.workload, gradient_dtype="rank-4"))
    return plan.promising(simulate(plan, Timing.FULL))


def with_rates(cluster: Cluster, random: Random) -> Cluster:
    """The same cluster; one time in three, uploads and downloads of some nodes are shared by all their links."""
    if random.random() < 2 / 3:
        return cluster
    rates = [None, None, 3e5, 2e6]
    nodes = [
        replace(each, upload_bytes_per_s=random.choice(rates), download_bytes_per_s=random.choice(rates))
        for each in cluster.nodes
    ]
    return replace(cluster, nodes=tuple(nodes))


NEVER_S = 1e6  # longer than any run


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
    recipe: SkipSchedule = field(default_factory=SkipSchedule)
    backup_every: int = 2
    """Iterations from one copy of what only stage 0 holds to the next; 0: none."""
    validated_every: int = 0
    """Iterations from one evaluation of held-out samples to the next; 0: none."""
    late: Mapping[int, float] = field(default_factory=dict)
    """As in `VirtualCluster`."""
    grows: bool = False
    """In the end the model grows: what counts is the last checkpoint."""

    def __str__(self) -> str:
        nodes = ", ".join(f"{list(stage.ring)} ({stage.averaging.kind})" for stage in self.plan.stages)
        about = f"{self.iterations} iterations on {nodes}" + ", split backward" * self.plan.split_backward
        shared = [at for at, node in enumerate(self.plan.cluster.nodes) if node.download_bytes_per_s]
        about += f", shared downloads of {shared}" * bool(shared)
        about += f", a checkpoint every {self.kept_every}" * bool(self.kept_every) + ", uneven" * self.uneven
        about += f", a copy of the ends every {self.backup_every}" * bool(self.backup_every)
        about += f", held-out samples every {self.validated_every}" * bool(self.validated_every)
        about += f", gradients of {self.plan.workload.gradient_dtype}" * (self.plan.averagings[0].rounds > 1)
        about += f", a drift of {self.drift:g}" * bool(self.drift)
        about += f", skip {self.recipe.skip}" * bool(self.recipe.phases)
        about += f", taught by {self.plan.workload.teacher}" * bool(self.plan.workload.teacher)
        when = (f"{node} after {at:g} s" for node, at in self.late.items())
        about += f", nodes that come late: {', '.join(when)}" * bool(self.late)
        about += ", and the model grows" * self.grows
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
    if plan is not published():
        plan = averaging_anyhow(plan, Random(f"averaging {seed}"))
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
    faults.append(replay_messages(*sorted(plan.stage_of), share=again, late_s=random.choice([0.0, 0.0, 0.005, 0.05])))
    if random.random() < 0.1:
        accuser = accuse(random.choice(sorted(plan.stage_of))).at(random.randrange(iterations))
        faults.append(accuser.back_after(random.choice([3.0, 40.0, 400.0])))
    grows = bool(found.kept_every) and Random(f"grows {seed}").random() < 0.5
    found = replace(found, faults=tuple(faults), late=late(plan, Random(f"late {seed}")), grows=grows)
    return with_teacher(found, Random(f"teacher {seed}"))


def late(plan: Plan, random: Random) -> dict[int, float]:
    """One time in five, some nodes are not there at the start, but as many as there are stages."""
    nodes = sorted(plan.stage_of)
    spare = len(nodes) - len(plan.stages)
    if not spare or random.random() < 0.8:
        return {}
    chosen = random.sample(nodes, random.randint(1, spare))
    return {node: random.choice([5.0, 599.0, 601.0, 630.0, NEVER_S]) for node in chosen}


def with_teacher(what: Scenario, random: Random) -> Scenario:
    """The same; one time in three the whole model teaches, if it can, and some of the faults are of that time."""
    plan = what.plan.edited(workload=replace(what.plan.workload, teacher=random.choice(TEACHERS[1:])))
    if random.random() < 2 / 3 or not can_be_taught(plan):
        return what
    faults = [replace(each, during="teaching") if random.random() < 0.5 else each for each in what.faults]
    return replace(what, plan=plan.promising(simulate(plan, Timing.FULL)), faults=tuple(faults))
