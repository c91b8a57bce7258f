"""Which codec each link and each stage of a plan has: the shortest iteration that a budget of nats allows.

A plan is found with the smallest codecs everywhere. Then precision is given back, link by link and stage by stage: as
long as the budget is exceeded, where that costs the least time for what it saves; after that, wherever it costs no time
at all. What is left of the budget buys smaller codecs where they still shorten the iteration. Every choice is judged by
a simulation of the whole iteration, so links that nobody waits for keep their precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush

import numpy as np

from skippipe.codecs import gradient_codec, smallest
from skippipe.cost_model import NEVER_NS, CostModel, cost_model_of
from skippipe.plan import Plan
from skippipe.planner.averaging import averaging_fastest
from skippipe.planner.codec_prices import ROUNDING, CodecBudget, Message, Price, message_shares, stage_shares
from skippipe.simulator import LAST_NS, Deadlock, PlacementCosts, lane_arrays, simulate
from skippipe.skip_schedule import PathLength
from skippipe.timeline import Timing
from skippipe.whole_paths import planned_teacher_paths
from skippipe.workload import LinkDtypes

ROUNDS = 3  # of codecs and ways to average: each for what the other has chosen
MOST_ROUNDS = 100  # in which one more smaller codec is bought


@dataclass
class _Item:
    """A link in one pass, or a stage, and the codec that it has."""

    which: Message | int
    share: float
    """Of all values of its kind."""
    options: list[tuple[str, float]]
    """Codecs and their prices, the fewest bytes first."""
    level: int = 0
    """Number of its option."""
    kept: bool = False
    """Whether other plans have settled its codec: it changes only for one that is more precise, and only where the
    budget would not hold."""

    @property
    def codec(self) -> str:
        return self.options[self.level][0]

    def nats(self, level: int) -> float:
        return self.share * self.options[level][1]

    def saved(self, level: int) -> float:
        """Nats by which this level is cheaper than the one that it has."""
        return self.nats(self.level) - self.nats(level)


def choose_codecs(plan: Plan, budget: CodecBudget, timing: Timing) -> Plan:
    """The plan with a codec for each link and stage, within the budget, and with its promised timeline."""
    best, best_ns = plan, LAST_NS
    for _ in range(ROUNDS):
        plan = _Choice(plan, budget, timing).plan()
        if timing is Timing.FULL:
            plan = averaging_fastest(plan, thorough=True)
        timeline = simulate(plan, timing)
        if timeline.iteration_ns >= best_ns:
            break
        best, best_ns = plan.promising(timeline), timeline.iteration_ns
    return best


def choose_beside(plan: Plan, settled: Sequence[Plan], budget: CodecBudget) -> Plan:
    """The plan with codecs for what it alone sends, on the stages of the plans that are settled. All else has those of
    the last one; but where links have a larger share here and the budget would not hold, more precise ones."""
    names, work = [node.name for node in plan.cluster.nodes], settled[-1].workload
    plan = plan.edited(workload=work)
    sent = {message for each in settled for message in message_shares(each)}
    kept: dict[Message | int, str] = {each: plan.hop_dtype(*each[1:], backward=bool(each[0])) for each in sent}
    kept |= {stage: work.stage_gradient_dtype(stage) for stage in range(len(plan.stages))}
    choice = _Choice(plan, budget, Timing.FULL, kept)
    choice.settle()
    usual = work.wire_dtype, gradient_codec(work.wire_dtype)
    rows = {(row.sender, row.receiver): [row.forward, row.backward] for row in work.wire_dtypes}
    for item in choice.items:
        if not isinstance(item.which, int):
            kind, a, b = item.which
            rows.setdefault((names[a], names[b]), [*usual])[kind] = item.codec
    found = (LinkDtypes(*link, *both) for link, both in rows.items() if tuple(both) != usual)
    plan = replace(plan, workload=replace(work, wire_dtypes=tuple(found)))
    return plan.promising(simulate(plan, Timing.FULL))


def with_codecs_of(last: Plan, plans: Mapping[PathLength, Plan]) -> dict[PathLength, Plan]:
    """The plans with the workload of the last one for which codecs were chosen beside the others."""
    found = {length: replace(each, workload=last.workload) for length, each in plans.items()}
    return {length: each.promising(simulate(each, Timing.FULL)) for length, each in found.items()}


def with_smallest_elsewhere(plan: Plan) -> Plan:
    """The plan as it would be if links that it does not use had the smallest codec of those that it does: to search
    paths that `choose_beside` gets."""
    names, links = [node.name for node in plan.cluster.nodes], sorted({each[1:] for each in message_shares(plan)})
    rows = tuple(
        LinkDtypes(names[a], names[b], *(plan.hop_dtype(a, b, backward=backward) for backward in (False, True)))
        for a, b in links
    )
    work = replace(plan.workload, wire_dtype=smallest(row.forward for row in rows), wire_dtypes=rows)
    return plan.edited(workload=work)


@dataclass
class _Choice:
    given: Plan
    budget: CodecBudget
    timing: Timing
    kept: Mapping[Message | int, str] = field(default_factory=dict)
    """Codecs that are not chosen any more; of all stages, if of any."""
    _of_gradients: dict[tuple[str, ...], PlacementCosts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan, (hop, gradient) = self.given, self.budget.usual
        plain = {"wire_dtype": hop, "gradient_dtype": gradient, "wire_dtypes": (), "gradient_dtypes": ()}
        self.work = plan.workload if self.kept else replace(plan.workload, **plain)  # type: ignore[arg-type]
        costs = self._costs()
        self.links = [costs.transmit_ns, costs.upload_ns, costs.download_ns]  # changed in place
        used = {codec for kind in (0, 1) for codec, _ in self.budget.options(kind)}
        used |= {codec for which, codec in self.kept.items() if not isinstance(which, int)}
        plain_work = replace(self.work, wire_dtypes=())
        with_codec = {codec: cost_model_of(plan.cluster, replace(plain_work, wire_dtype=codec), plan.layers, None)
                      for codec in used}  # fmt: skip
        self.link_times = {
            codec: [each.transmit_ns, each.upload_ns, each.download_ns] for codec, each in with_codec.items()
        }
        self.items = [self._item(each, part, each[0]) for each, part in message_shares(plan).items()]
        self.items += [self._item(each, part, 2) for each, part in stage_shares(plan).items()]
        self.lanes, self.teacher = lane_arrays(plan), planned_teacher_paths(plan)
        self.nodes, self.through = np.unique([node for lane in plan.lanes for node in lane.path], return_counts=True)
        for item in self.items:
            self._set(item, 0)

    def _item(self, which: Message | int, share: float, kind: int) -> _Item:
        options, kept = self.budget.options(kind), self.kept.get(which)
        if kept:
            nats = self.budget.prices.get(kept, Price())[kind] or 0.0
            cheaper = [] if isinstance(which, int) else [option for option in options if option[1] < nats]
            options = [(kept, nats), *cheaper]
        return _Item(which, share, options, kept=bool(kept))

    def plan(self) -> Plan:
        self.settle()
        return self._plan()

    def settle(self) -> None:
        """Give every item the codec that it has in the end."""
        uniform = self._uniform()
        self._keep_within_budget()
        if uniform and self._taken_ns() > uniform[0]:
            for item, level in zip(self.items, uniform[1], strict=True):
                self._set(item, level)
        self._give_back()
        if self._buy():
            self._give_back()

    @cached_property
    def _free(self) -> list[_Item]:
        return [item for item in self.items if not item.kept]

    def _nats(self) -> float:
        return sum(item.nats(item.level) for item in self.items)

    def _costs(self) -> CostModel:
        return cost_model_of(self.given.cluster, self.work, self.given.layers)

    def _set(self, item: _Item, level: int) -> None:
        item.level = level
        if not isinstance(item.which, int):
            for here, there in zip(self.links, self.link_times[item.codec], strict=True):
                here[item.which] = there[item.which]

    def _gradients(self) -> tuple[str, ...]:
        """Codec of every stage."""
        found = [self.work.stage_gradient_dtype(stage) for stage in range(len(self.given.stages))]
        for item in self.items:
            if isinstance(item.which, int):
                found[item.which] = item.codec
        return tuple(found)

    def _placement_costs(self) -> PlacementCosts:
        gradients = self._gradients()
        if gradients not in self._of_gradients:
            plan = self.given
            costs = cost_model_of(plan.cluster, replace(self.work, gradient_dtypes=gradients), plan.layers)
            found = PlacementCosts.of_plan(plan, self.timing, costs)
            transmit, upload, download = self.links
            self._of_gradients[gradients] = replace(found, transmit_ns=transmit, upload_ns=upload, download_ns=download)
        return self._of_gradients[gradients]

    def _taken_ns(self) -> int:
        """The iteration; NEVER_NS if memory holds fewer lanes than there are, as error feedback takes some."""
        costs = self._placement_costs()
        if (costs.slots[self.nodes] < self.through).any():
            return NEVER_NS
        try:
            return costs.run_iteration(*self.lanes, teacher=self.teacher).iteration_ns
        except Deadlock:
            return NEVER_NS

    def _with(self, item: _Item, level: int) -> int:
        """The iteration if one item had another codec."""
        before = item.level
        self._set(item, level)
        taken_ns = self._taken_ns()
        self._set(item, before)
        return taken_ns

    def _uniform(self) -> tuple[int, list[int]] | None:
        """The shortest iteration with the same codec on all links, and the same on all stages, and its levels; None if
        the smallest of all are within the budget."""
        if self._nats() <= self.budget.nats + ROUNDING:
            return None
        found = []
        choices = [range(len(self.budget.options(kind))) for kind in (0, 1, 2)]
        for levels in np.stack(np.meshgrid(*choices), -1).reshape(-1, 3).tolist():
            of_items = [
                0 if item.kept else levels[2 if isinstance(item.which, int) else item.which[0]] for item in self.items
            ]
            for item, level in zip(self.items, of_items, strict=True):
                self._set(item, level)
            if self._nats() <= self.budget.nats + ROUNDING:
                found.append((self._taken_ns(), of_items))
        for item in self.items:
            self._set(item, 0)
        return min(found, default=None)

    def _keep_within_budget(self) -> None:
        """Give precision back where it costs the least time for what it saves, until the budget holds."""
        now_ns = self._taken_ns()

        def price(item: _Item) -> float:
            """Nanoseconds a nat."""
            return (self._with(item, item.level + 1) - now_ns) / max(item.saved(item.level + 1), 1e-30)

        def more(item: _Item) -> bool:
            return item.level + 1 < len(item.options)

        heap = [(price(item), number) for number, item in enumerate(self.items) if more(item)]
        heapify(heap)
        while heap and self._nats() > self.budget.nats + ROUNDING:
            _, number = heappop(heap)
            item = self.items[number]
            again = price(item)
            if heap and again > heap[0][0]:  # others have changed since it was worked out
                heappush(heap, (again, number))
                continue
            self._set(item, item.level + 1)
            now_ns = self._taken_ns()
            if more(item):
                heappush(heap, (price(item), number))

    def _give_back(self) -> None:
        """Give precision back where that takes no longer, the dearest first."""
        now_ns = self._taken_ns()
        for item in sorted(self._free, key=lambda item: -item.nats(item.level)):
            for level in range(len(item.options) - 1, item.level, -1):
                taken_ns = self._with(item, level)
                if taken_ns <= now_ns:
                    self._set(item, level)
                    now_ns = taken_ns
                    break

    def _buy(self) -> bool:
        """Choose smaller codecs where that helps, the one that helps most first; whether there was one."""
        now_ns, left, bought = self._taken_ns(), self.budget.nats + ROUNDING - self._nats(), False
        for _ in range(MOST_ROUNDS):
            offers = [
                (self._with(item, level), number, level)
                for number, item in enumerate(self._free)
                for level in range(item.level)
                if -item.saved(level) <= left
            ]
            best_ns, number, level = min(offers, default=(now_ns, 0, 0))
            if best_ns >= now_ns:
                break
            left += self._free[number].saved(level)
            self._set(self._free[number], level)
            now_ns, bought = best_ns, True
        return bought

    def _plan(self) -> Plan:
        """With codecs as they are now; where all links, or all stages, have the same, it is the usual one."""
        names = [node.name for node in self.given.cluster.nodes]
        chosen: dict[tuple[int, int], dict[int, str]] = {}
        for item in self.items:
            if not isinstance(item.which, int):
                chosen.setdefault(item.which[1:], {})[item.which[0]] = item.codec
        passes = [{each[kind] for each in chosen.values() if kind in each} for kind in (0, 1)]
        gradients = self._gradients()
        wire = self.work.wire_dtype
        if len(passes[0]) == len(passes[1]) == 1 and {gradient_codec(codec) for codec in passes[0]} == passes[1]:
            wire = passes[0].pop()
        usual = wire, gradient_codec(wire)
        rows = [
            LinkDtypes(names[a], names[b], *(each.get(kind, usual[kind]) for kind in (0, 1)))
            for (a, b), each in chosen.items()
        ]
        kinds: dict[str, object] = {
            "wire_dtype": wire,
            "wire_dtypes": tuple(row for row in rows if (row.forward, row.backward) != usual),
        }
        same = len(set(gradients)) == 1
        kinds |= {"gradient_dtype": gradients[0]} if same else {"gradient_dtypes": gradients}
        work = replace(self.work, **kinds)  # type: ignore[arg-type]
        return self.given.edited(workload=work)
