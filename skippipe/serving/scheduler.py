"""The scheduler: puts sequences on routes, steps them, and moves them when nodes are lost.

A state machine: events are its method calls, actions go to its environment, and it knows neither sockets nor HTTP.
Every route has one step in flight at a time: a new sequence of the route takes part with its whole prompt, every other
one with its last token. The gateway sends the step to the nodes of the route, which pass tensors on to each other; the
first node embeds in the beginning and samples in the end.

A sequence that loses its route is put on another one and computed again from its first token. As sampling depends on
seed, position and the tokens before alone, the answer goes on as it would have. A stage that has lost its last node, or
whose nodes no route can reach any more, is waited for; when the grace period is over, routes do without it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from math import inf
from typing import Protocol

from skippipe.cost_model import ns
from skippipe.inference.request import FinishReason, TokenLogprobs
from skippipe.serving.prefill import PrefillLimit, prompt_tokens
from skippipe.serving.routing import LinkStates, Reach, RouteCost, ServingRoute, UniformCost, fastest_route, reach_of
from skippipe.serving.sequence import SequenceRequest, SequenceState

MAX_FAILED_STEPS = 3  # steps of a sequence in a row that nodes may report as failed


@dataclass(frozen=True)
class StepRow:
    """The tokens of one sequence in a step."""

    slot: int
    start: int
    """Tokens of the sequence that are in the KV caches already."""
    tokens: tuple[int, ...]
    """The tokens that follow them."""
    sequence: SequenceState
    allowed: bytes = b""
    """Bits of the tokens that may follow them; empty: all may."""


@dataclass(frozen=True)
class ServingStep:
    number: int
    route: ServingRoute
    rows: tuple[StepRow, ...]
    freed: tuple[int, ...]
    """Slots whose sequences have finished since the route's last step."""


class SchedulerEnv(Protocol):
    """The clock and the actions of a scheduler."""

    def now_ns(self) -> int: ...

    def start_step(self, step: ServingStep) -> None:
        """Send a step to every node of its route."""

    def close_route(self, route: ServingRoute) -> None:
        """Let the nodes of a route free its KV caches."""

    def probe_link(self, number: int, prober: int, peer: int) -> None:
        """Let a node find out whether its link to another works again."""

    def updated(self, sequence: SequenceState) -> None:
        """A sequence has another token, or has finished."""


@dataclass(frozen=True)
class ServingSettings:
    max_sequences: int = 16
    """Sequences on a route at once."""
    routes_per_head: int = 2
    """Routes for every node of stage 0, which has the head."""
    max_waiting: int = 256
    """Requests in the queue at most."""
    max_prompt_tokens: int = 4096
    """Tokens of prompts in a step at most; fewer where nodes or links are slow (see `PrefillLimit`)."""
    cache_tokens: int = 2**16
    """Room of a route's KV caches: its number of slots × the length of its longest sequence."""
    min_coverage: Fraction = Fraction(0)
    """Share of the stages below which nothing is answered."""
    step_timeout: timedelta = timedelta(seconds=20)
    """Time after which a step counts as lost."""
    wait_timeout: timedelta = timedelta(seconds=30)
    """How long a request waits while there is no route at all."""
    grace: timedelta = timedelta(seconds=5)
    """How long a stage that is missing is waited for, before answers go on without it."""
    startup_timeout: timedelta = timedelta(minutes=10)
    """How long requests wait for the first node of every stage, before answers are given without some stages."""


class EngineFull(Exception):
    """The queue or the KV caches have no room for another request."""


@dataclass
class Scheduler:
    stages: int
    env: SchedulerEnv
    settings: ServingSettings = field(default_factory=ServingSettings)
    cost: RouteCost = field(default_factory=UniformCost)
    stage_of: dict[int, int] = field(default_factory=dict)
    """Live node → the stage that it holds."""
    sequences: dict[int, SequenceState] = field(default_factory=dict)
    """Sequences that have not finished, by their number."""
    recomputed_tokens: int = 0
    """Tokens that were in the KV caches of routes when these were closed, of sequences that go on."""
    _waiting: deque[SequenceState] = field(default_factory=deque)
    _routes: dict[int, ServingRoute] = field(default_factory=dict)
    _steps: dict[int, ServingStep] = field(default_factory=dict)
    """Steps in flight, by their number."""
    _links: LinkStates = field(init=False)
    _prefill: PrefillLimit = field(init=False)
    _reach: Reach | None = None
    """None: nodes or links have changed since it was found out."""
    _numbers: Counter[str] = field(default_factory=Counter)
    _startup_until_ns: int | None = field(init=False)
    """None: every stage was there once, or the time for that is over."""
    _there_since_ns: dict[int, int] = field(default_factory=dict)
    """Stage that is there → since when."""
    _lost_stages_ns: dict[int, int] = field(default_factory=dict)
    """Stage that was lost → when, for the first time since it was there for as long as the grace period."""

    def __post_init__(self) -> None:
        self._links = LinkStates(self.cost)
        self._prefill = PrefillLimit(self.settings.max_prompt_tokens, self.settings.step_timeout)
        self._startup_until_ns = self.env.now_ns() + ns(self.settings.startup_timeout.total_seconds())

    # Requests

    def submit(self, request: SequenceRequest) -> SequenceState:
        if len(self._waiting) >= self.settings.max_waiting:
            raise EngineFull(f"{len(self._waiting)} requests wait already")
        if request.max_length > self.settings.cache_tokens:
            raise EngineFull(f"{request.max_length} tokens are more than caches hold, {self.settings.cache_tokens}")
        sequence = SequenceState(self._next("sequence"), request, waiting_since_ns=self.env.now_ns())
        self.sequences[sequence.number] = sequence
        self._waiting.append(sequence)
        self._schedule()
        return sequence

    def cancel(self, number: int) -> None:
        if (sequence := self.sequences.get(number)) is not None:
            self._finish(sequence, FinishReason.CANCELLED)
            self._schedule()

    def close(self) -> None:
        """Cancels every sequence."""
        for sequence in list(self.sequences.values()):
            self._finish(sequence, FinishReason.CANCELLED)

    # Nodes

    def node_joined(self, node: int, stage: int) -> None:
        """A node has its weights and can take steps; one that was here before was started again."""
        if node in self.stage_of:
            self.node_lost(node)
        self.stage_of[node] = stage
        self._links.node_joined(node)
        self._reach = None
        if all(self.holders):
            self._startup_until_ns = None
        self._schedule()

    def node_lost(self, node: int) -> None:
        self.stage_of.pop(node, None)
        self._reach = None
        for route in [each for each in self._routes.values() if node in each.path]:
            self._abandon(route)
        self._schedule()

    def link_reported(self, a: int, b: int) -> None:
        """A node reports that it does not reach another, perhaps for a moment: the link is probed after a while."""
        if (probe_ns := self._links.retry_ns(a, b, self.env.now_ns())) is not None:
            self.link_broken(a, b, probe_ns)

    def link_broken(self, a: int, b: int, probe_ns: float = inf) -> None:
        """Two live nodes cannot reach each other; the link is probed at this time, if nothing has changed till then."""
        self._links.broken(a, b, probe_ns)
        self._reach = None
        for route in [each for each in self._routes.values() if {a, b} in each.links]:
            self._abandon(route)
        self._schedule()

    def link_mended(self, a: int, b: int) -> None:
        """Two nodes can reach each other again."""
        self._links.mended(a, b)
        self._reach = None
        self._schedule()

    def link_retried(self, a: int, b: int) -> None:
        """Two nodes that could not reach each other are to try again: with a probe, before any request does."""
        self._links.retry(a, b)

    def link_probed(self, number: int, node: int) -> None:
        """A node reports that a probe of its link has come through."""
        if (probe := self._links.probed(number, node)) is not None:
            self.link_mended(probe.prober, probe.peer)

    def sampled(self, number: int, tokens: Sequence[int], node: int, logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """A node reports the tokens of a step, one for every row; ValueError if its report cannot be true."""
        step = self._steps.get(number)
        if step is None:  # its route was abandoned
            return
        if node != step.route.path[0] or len(tokens) != len(step.rows):
            raise ValueError(
                f"reports {len(tokens)} tokens for a step of {len(step.rows)} rows that node {step.route.path[0]} ends"
            )
        rows = list(zip(step.rows, tokens, logprobs or [()] * len(tokens), strict=True))
        for row, token, pairs in rows:
            _check_report(row, token, pairs)
        del self._steps[number]
        step.route.step = None
        self._links.step_done(step.route.path)
        self._prefill.done(prompt_tokens(row.tokens for row in step.rows), self.env.now_ns() - step.route.step_began_ns)
        for row, token, pairs in rows:
            sequence = row.sequence
            if sequence.route != step.route.number:  # it was cancelled meanwhile
                continue
            sequence.num_computed_tokens = row.start + len(row.tokens)
            if sequence.num_computed_tokens == len(sequence.tokens):
                sequence.failed_steps = 0
                sequence.append(token, step.route, pairs)
                if sequence.finish_reason is None:
                    self.env.updated(sequence)
                else:
                    self._finish(sequence, sequence.finish_reason)
        self._schedule()

    def step_failed(self, number: int, node: int) -> tuple[int, ...]:
        """A node reports that it cannot compute a step; the step's path, if the node is on it."""
        step = self._steps.get(number)
        if step is None or node not in step.route.path:
            return ()
        self._abandon(step.route)
        for sequence in [row.sequence for row in step.rows if row.sequence.finish_reason is None]:
            sequence.failed_steps += 1
            if sequence.failed_steps >= MAX_FAILED_STEPS:
                self._finish(sequence, FinishReason.FAILED)
        self._schedule()
        return step.route.path

    def tick(self) -> None:
        """Acts on deadlines that have passed; to be called often."""
        now_ns = self.env.now_ns()
        if self._startup_until_ns is not None and now_ns >= self._startup_until_ns:
            self._startup_until_ns = None
        for probe in self._links.due_probes(now_ns):
            self.env.probe_link(*probe)
        late_ns = now_ns - ns(self.settings.step_timeout.total_seconds())
        for step in [each for each in self._steps.values() if each.route.step_began_ns < late_ns]:
            self._links.step_lost(step.route.path)
            self._prefill.late(prompt_tokens(row.tokens for row in step.rows))
            self._abandon(step.route)
        self._note_missing()
        self._schedule()
        expired_ns = now_ns - ns(self.settings.wait_timeout.total_seconds())
        if not (self._routes or self._in_grace):  # there is no route at all, it is not that all are full
            for sequence in [each for each in self._waiting if each.waiting_since_ns < expired_ns]:
                self._finish(sequence, FinishReason.UNAVAILABLE)

    # Routes

    @property
    def num_running(self) -> int:
        """Sequences that are on a route."""
        return len(self.sequences) - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def missing(self) -> tuple[int, ...]:
        """Stages that no live node holds, or that no route can reach."""
        there = self.reach.stages or [stage for stage, nodes in enumerate(self.holders) if nodes]
        return tuple(stage for stage in range(self.stages) if stage not in there)

    @property
    def holders(self) -> list[list[int]]:
        """For every stage, the live nodes that hold it."""
        return [sorted(node for node, held in self.stage_of.items() if held == stage) for stage in range(self.stages)]

    @property
    def coverage(self) -> Fraction:
        """Share of the stages that the next answer gets; 0 without stage 0."""
        return Fraction(len(self.reach.stages), self.stages)

    @property
    def is_ready(self) -> bool:
        """Are there stages enough to answer with?"""
        return self._startup_until_ns is None and self.coverage > 0 and self.coverage >= self.settings.min_coverage

    @property
    def reach(self) -> Reach:
        """The stages that a new request would find a route through."""
        if self._reach is None:
            self._reach = reach_of(self.holders, self._links)
        return self._reach

    def _note_missing(self) -> None:
        """Notes since when stages are missing that were there."""
        now_ns, missing = self.env.now_ns(), set(self.missing)
        for stage in set(range(self.stages)) - missing:
            self._there_since_ns.setdefault(stage, now_ns)
        for stage in missing & self._there_since_ns.keys():
            there_ns = now_ns - self._there_since_ns.pop(stage)
            # one that comes for a moment, again and again, is not waited for each time
            if stage not in self._lost_stages_ns or there_ns >= ns(self.settings.grace.total_seconds()):
                self._lost_stages_ns[stage] = now_ns

    def _schedule(self) -> None:
        """Puts waiting sequences on routes with room, and starts a step on every route without one in flight."""
        if self._waiting:
            self._note_missing()
        while self._waiting and self.is_ready and not self._in_grace:
            route = self._choose_route(self._waiting[0])
            if route is None:
                break
            sequence = self._waiting.popleft()
            sequence.route, sequence.slot, sequence.num_computed_tokens = route.number, route.free_slot(), 0
            if sequence.queue_ns is None:
                sequence.queue_ns = self.env.now_ns() - sequence.waiting_since_ns
            route.slots[sequence.slot] = sequence.number
        for route in list(self._routes.values()):
            if route.step is None:
                self._start_step(route)

    @property
    def _in_grace(self) -> bool:
        """Is a stage missing for so short a time that it is still waited for?"""
        since_ns = self.env.now_ns() - ns(self.settings.grace.total_seconds())
        lost = self._lost_stages_ns.items()
        return any(lost_ns > since_ns for stage, lost_ns in lost if stage not in self._there_since_ns)

    def _choose_route(self, sequence: SequenceState) -> ServingRoute | None:
        """The route with the fewest sequences, a new one if there may be more; None: all are full."""
        usable = [route for route in self._routes.values() if route.missing == self.missing]
        roomy = [route for route in usable if self._has_room(route, sequence)]
        chosen = min(roomy, key=lambda route: len(route.slots), default=None)
        if (chosen is None or chosen.slots) and len(usable) < self.settings.routes_per_head * len(self.holders[0]):
            chosen = self._open_route() or chosen
        return chosen

    def _has_room(self, route: ServingRoute, sequence: SequenceState) -> bool:
        lengths = [self.sequences[number].request.max_length for number in route.slots.values()]
        slots = max([route.free_slot(), *route.slots]) + 1
        longest = max([sequence.request.max_length, *lengths])
        return len(lengths) < self.settings.max_sequences and slots * longest <= self.settings.cache_tokens

    def _open_route(self) -> ServingRoute | None:
        load = Counter(node for route in self._routes.values() for node in route.path)
        missing = self.missing
        holders = [[] if stage in missing else nodes for stage, nodes in enumerate(self.holders)]
        for start in sorted(holders[0], key=lambda node: (load[node], node)):
            path = fastest_route(holders, self._links, load, start)
            if path is not None:
                route = ServingRoute(self._next("route"), path, missing)
                self._routes[route.number] = route
                return route
        return None

    def _start_step(self, route: ServingRoute) -> None:
        if not route.slots:
            if self._routes.pop(route.number, None) is not None:
                self.env.close_route(route)
            return
        rows = self._next_rows(route)
        step = ServingStep(self._next("step"), route, tuple(rows), tuple(route.freed))
        route.freed.clear()
        route.step, route.step_began_ns = step.number, self.env.now_ns()
        self._steps[step.number] = step
        self.env.start_step(step)

    def _next_rows(self, route: ServingRoute) -> list[StepRow]:
        """What the route's next step computes: if a step has failed, its sequences one by one, until each is computed:
        so one that cannot be computed does not take others with it. Of prompts, the oldest sequences' first."""
        numbers = sorted((number, slot) for slot, number in route.slots.items())
        failed = [(number, slot) for number, slot in numbers if self.sequences[number].failed_steps]
        room = self._prefill.tokens
        rows: list[StepRow] = []
        for number, slot in failed[:1] or numbers:
            sequence = self.sequences[number]
            new = sequence.tokens[sequence.num_computed_tokens :]
            if len(new) > 1:  # a prompt, or what is left of one: as much of it as there is room for
                new = new[:room]
                room -= len(new)
            if new:
                start = sequence.num_computed_tokens
                at_end = start + len(new) == len(sequence.tokens)
                allowed = sequence.constraint.allowed() if sequence.constraint is not None and at_end else b""
                rows.append(StepRow(slot, start, tuple(new), sequence, allowed))
        return sorted(rows, key=lambda row: row.slot)  # nodes read neighbouring slots as one

    def _abandon(self, route: ServingRoute) -> None:
        """Closes a route; its sequences wait for another one, before those that came later."""
        del self._routes[route.number]
        if route.step is not None:
            self._steps.pop(route.step, None)
        sequences = [self.sequences[number] for number in route.slots.values()]
        for sequence in sequences:
            self.recomputed_tokens += sequence.num_computed_tokens
            sequence.route, sequence.slot, sequence.num_computed_tokens = None, -1, 0
            sequence.waiting_since_ns = self.env.now_ns()
        self._waiting = deque(sorted([*self._waiting, *sequences], key=lambda each: each.number))
        self.env.close_route(route)

    def _finish(self, sequence: SequenceState, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        del self.sequences[sequence.number]
        if sequence.route is None:
            self._waiting.remove(sequence)
        else:
            route = self._routes[sequence.route]
            del route.slots[sequence.slot]
            route.freed.append(sequence.slot)
            sequence.route = None
        self.env.updated(sequence)

    def _next(self, what: str) -> int:
        self._numbers[what] += 1
        return self._numbers[what]


def _check_report(row: StepRow, token: int, pairs: TokenLogprobs) -> None:
    """ValueError if a node cannot have sampled this token of the row, or reports other tokens than were asked for."""
    wanted, sequence = row.sequence.request.sampling.logprobs, row.sequence
    if (wanted is None and pairs) or (wanted is not None and (not pairs or pairs[0][0] != token)):
        raise ValueError("reports log-probabilities of other tokens than were asked for")
    if wanted is not None and len(pairs) > wanted + 1:
        raise ValueError("reports more log-probabilities than were asked for")
    if row.allowed and sequence.constraint is not None and not sequence.constraint.accepts(token):
        raise ValueError("reports a token that its step does not allow")
