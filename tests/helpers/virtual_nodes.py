"""Nodes that serve, under virtual time: they are lost, come back, and fail."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random

from skippipe.serving.routing import ServingRoute, links
from skippipe.serving.scheduler import Scheduler, ServingSettings, ServingStep
from skippipe.serving.sequence import SequenceRequest, SequenceState
from tests.helpers.echo_engine import PLACES, VOCABULARY, next_token

END = 7


class World:
    """Nodes that keep the tokens of every slot, and take a while for a step."""

    def __init__(self, seed: int, settings: ServingSettings | None = None) -> None:
        self.random = Random(seed)
        self.clock_ns = 0
        self.token_s = 0.0
        """Seconds that a step takes for each of its tokens."""
        self.fails: Callable[[ServingStep], bool] = lambda _step: False
        """Is a step one that nodes cannot compute?"""
        self.caches: dict[tuple[int, int, int], list[int]] = {}
        """Node, route, slot → tokens."""
        self.alive = {node for nodes in PLACES.values() for node in nodes}
        self.cut: set[frozenset[int]] = set()
        self.updates: list[SequenceState] = []
        self.closed: set[int] = set()
        self.probes: list[float] = []
        """When links were probed, in seconds."""
        self.steps: list[ServingStep] = []
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self.scheduler = Scheduler(len(PLACES), self, settings or ServingSettings())
        for stage, nodes in PLACES.items():
            for node in nodes:
                self.scheduler.node_joined(node, stage)

    def now_ns(self) -> int:
        return self.clock_ns

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock_ns + int(delay_s * 1e9), next(self._order), what))

    def start_step(self, step: ServingStep) -> None:
        self.steps.append(step)
        assert len({row.slot for row in step.rows}) == len(step.rows)
        took_s = self.random.uniform(0.01, 0.05) + self.token_s * sum(len(row.tokens) for row in step.rows)
        self.at(took_s, lambda: self._run(step))

    def _run(self, step: ServingStep) -> None:
        path = step.route.path
        if not set(path) <= self.alive or self.cut & links(path) or step.route.number in self.closed:
            return  # it never comes back
        if self.fails(step):
            self.scheduler.step_failed(step.number, path[1])
            return
        made = []
        for node in path:
            for slot in step.freed:
                self.caches.pop((node, step.route.number, slot), None)
        for row in step.rows:
            for node in path:
                cache = self.caches.setdefault((node, step.route.number, row.slot), [])
                assert len(cache) == row.start, "new tokens follow those that were computed"
                cache.extend(row.tokens)
            made.append(next_token(cache, row.sequence.request.sampling.seed))
        self.scheduler.sampled(step.number, made, path[0])

    def close_route(self, route: ServingRoute) -> None:
        self.closed.add(route.number)
        for key in [key for key in self.caches if key[1] == route.number]:
            del self.caches[key]

    def probe_link(self, number: int, prober: int, peer: int) -> None:
        self.probes.append(self.clock_ns / 1e9)
        if {prober, peer} <= self.alive and {prober, peer} not in self.cut:
            self.at(0.1, lambda: self.scheduler.link_probed(number, prober))

    def updated(self, sequence: SequenceState) -> None:
        self.updates.append(sequence)

    def kill(self, node: int, back_after_s: float | None = None) -> None:
        self.alive.discard(node)
        self.at(0.1, lambda: self.scheduler.node_lost(node))
        if back_after_s is not None:
            self.at(0.2 + back_after_s, lambda: self._back(node))

    def _back(self, node: int) -> None:
        self.alive.add(node)
        self.caches = {key: each for key, each in self.caches.items() if key[0] != node}
        self.scheduler.node_joined(node, next(stage for stage, nodes in PLACES.items() if node in nodes))

    def run(self, until_s: float = 600) -> None:
        while self._events and self.clock_ns < until_s * 1e9:
            self.clock_ns, _, what = heapq.heappop(self._events)
            what()
            self.scheduler.tick()
            if not self.scheduler.sequences:
                return
            if not self._events:
                self.at(1.0, lambda: None)

    def request(self) -> SequenceRequest:
        prompt = tuple(self.random.randrange(VOCABULARY) for _ in range(self.random.randint(1, 40)))
        end_tokens = frozenset({END}) if self.random.random() < 0.5 else frozenset()
        request = SequenceRequest(prompt, self.random.randint(1, 30), end_tokens)
        return replace(request, sampling=replace(request.sampling, seed=self.random.randrange(1000)))
