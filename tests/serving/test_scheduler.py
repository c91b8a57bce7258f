"""The scheduler under virtual time: answers are right, whichever nodes are lost on the way."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from functools import partial
from itertools import product

import pytest

from skippipe.errors import UserError
from skippipe.inference.request import FinishReason, SamplingParams, TokenLogprobs
from skippipe.model_shape import MODELS
from skippipe.serving.routing import (
    ClusterCost,
    Reach,
    UniformCost,
    assign_stages,
    fastest_route,
    links,
    local_node_names,
    reach_of,
)
from skippipe.serving.scheduler import EngineFull, Scheduler, ServingSettings, ServingStep
from skippipe.serving.sequence import SequenceRequest, SequenceState
from tests.helpers.echo_engine import PLACES, VOCABULARY, expected_tokens
from tests.helpers.plans import uniform_cluster
from tests.helpers.virtual_nodes import World


@pytest.mark.parametrize("seed", range(40))
def test_answers_are_right_whichever_nodes_are_lost(seed: int) -> None:
    world = World(
        seed,
        ServingSettings(
            max_sequences=3,
            routes_per_head=1,
            max_prompt_tokens=16,
            step_timeout=timedelta(seconds=2),
            grace=timedelta(seconds=seed % 3 / 2),
        ),
    )
    random = world.random
    sequences: list[SequenceState] = []
    for _ in range(20):
        world.at(random.uniform(0, 3), lambda: sequences.append(world.scheduler.submit(world.request())))
    cancelled: set[int] = set()

    def cancel() -> None:
        if world.scheduler.sequences:
            number = random.choice(sorted(world.scheduler.sequences))
            cancelled.add(number)
            world.scheduler.cancel(number)

    world.at(1.0, cancel)
    for _ in range(4):  # stage 0 keeps one node, or nobody could answer at all for a while
        world.at(random.uniform(0, 3), lambda: world.kill(random.randrange(1, 7), random.uniform(0.1, 2)))

    def sever() -> None:
        world.cut.add(frozenset((0, 2)))
        world.at(0.2, lambda: world.scheduler.link_broken(0, 2))

    world.at(random.uniform(0, 3), sever)
    world.at(4, lambda: None)
    world.run()
    while len(sequences) < 20:
        world.run()
    assert not world.scheduler.sequences
    for sequence in sequences:
        if sequence.number in cancelled:
            assert sequence.finish_reason is FinishReason.CANCELLED
            assert sequence.output_tokens == expected_tokens(sequence.request)[: len(sequence.output_tokens)]
        else:
            assert sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert sequence.output_tokens == expected_tokens(sequence.request)
            assert 2 <= sequence.num_stages <= 4
            assert bool(sequence.missing) == (sequence.num_stages < 4) and 0 not in sequence.missing
    assert {each.number for each in world.updates if each.finish_reason} == {each.number for each in sequences}
    assert not world.caches, "nothing is kept for nobody"


def test_a_link_that_stays_broken_is_probed_and_no_request_goes_over_it() -> None:
    """All links between stages 1 and 2 are cut; there is a request every ten seconds."""
    world = World(0, ServingSettings(grace=timedelta(0)))
    scheduler = world.scheduler
    pairs = list(product(*(scheduler.holders[stage] for stage in (1, 2))))
    world.cut.update(frozenset(pair) for pair in pairs)

    def ask_until(until_s: float) -> set[int]:
        asked = []
        while world.clock_ns < until_s * 1e9:
            asked.append(scheduler.submit(SequenceRequest((1, 2), 3)))
            world.run(until_s)
            world.at(10, lambda: None)
            world.run(until_s)
        return {each.num_stages for each in asked}

    for a, b in 2 * pairs:  # a second report of the same is not counted
        scheduler.link_reported(a, b)
    assert ask_until(500) == {3}
    assert not any(world.cut & links(step.route.path) for step in world.steps), "requests found out that it is broken"
    assert sorted({round(at_s, -1) for at_s in world.probes}) == [60, 180, 420], "after a while that grows"
    world.cut.clear()
    assert ask_until(890) == {3}, "no probe has come through yet"
    assert ask_until(920) == {3, 4}
    assert scheduler.reach == Reach((0, 1, 2, 3))


@pytest.mark.parametrize("grace_s", [0, 8])
def test_a_stage_that_cannot_be_reached_is_done_without_until_it_can(grace_s: float) -> None:
    """All nodes are alive; the only one of stage 3 loses its links to all nodes of stage 2, and to those of stage 0."""
    world = World(1, ServingSettings(grace=timedelta(seconds=grace_s), min_coverage=Fraction(3, 4)))
    scheduler = world.scheduler
    begun = scheduler.submit(SequenceRequest((1, 2, 3), 40))
    for peer in (0, 1, 4, 5):
        world.at(0.3, partial(scheduler.link_reported, 6, peer))
    late: list[SequenceState] = []
    world.at(1.0, lambda: late.append(scheduler.submit(SequenceRequest((1,), 2))))
    world.run()
    for sequence in (begun, *late):
        assert sequence.output_tokens == expected_tokens(sequence.request)
        assert (sequence.num_stages, sequence.missing) == (3, {3})
    assert late[0].queue_ns == pytest.approx(max(grace_s - 0.7, 0) * 1e9, abs=1.1e9)
    assert (scheduler.missing, scheduler.coverage) == ((3,), Fraction(3, 4))
    assert scheduler.reach == Reach((0, 1, 2), ((2, 3), (3, 0)))

    world.at(61, lambda: None)
    while world._events:
        world.run()
    whole = scheduler.submit(SequenceRequest((5,), 3))
    world.run()
    assert (whole.num_stages, whole.missing) == (4, set()), "its links were probed, and work"
    assert not scheduler.missing
    assert scheduler.coverage == 1


def test_routes_leave_out_as_few_stages_as_they_can() -> None:
    """Node 4 is reached from node 2 alone, and only node 0 reaches node 2: what other nodes lead to is shorter."""
    holders = [[0, 1], [2, 3], [4], [5]]
    broken = {frozenset(link) for link in ((1, 2), (3, 4), (0, 4), (1, 4), (5, 2), (4, 5))}

    class Sparse(UniformCost):
        def hop_s(self, sender: int, receiver: int) -> float:
            return float("inf") if {sender, receiver} in broken else super().hop_s(sender, receiver)

    assert reach_of(holders, Sparse()) == Reach((0, 1, 3), ((2, 3),)), "stage 2 is reached, and nothing from there"
    broken.discard(frozenset((4, 5)))
    assert reach_of(holders, Sparse()) == Reach((0, 1, 2, 3))
    assert reach_of([[], [2]], Sparse()) == Reach()
    broken.update(frozenset((0, other)) for other in (2, 3, 5))
    broken.update(frozenset((1, other)) for other in (2, 3, 5))
    assert reach_of(holders, Sparse()).stages == (0,)


def test_many_share_a_step() -> None:
    world = World(0, ServingSettings(routes_per_head=1))
    for _ in range(8):
        world.scheduler.submit(world.request())
    world.run()
    assert max(len(step.rows) for step in world.steps) >= 4


def test_prompts_are_fed_in_pieces() -> None:
    world = World(0, ServingSettings(routes_per_head=1, max_prompt_tokens=8))
    sequence = world.scheduler.submit(SequenceRequest(tuple(range(30)), 3))
    world.run()
    assert [len(step.rows[0].tokens) for step in world.steps] == [8, 8, 8, 6, 1, 1]
    assert sequence.output_tokens == expected_tokens(sequence.request)


@pytest.mark.parametrize("patience_s", [1, 30])
def test_a_stage_that_nobody_holds_is_done_without_when_its_grace_period_is_over(patience_s: float) -> None:
    world = World(1, ServingSettings(grace=timedelta(seconds=8), wait_timeout=timedelta(seconds=patience_s)))
    sequence = world.scheduler.submit(SequenceRequest((1, 2, 3), 40))
    world.at(0.3, lambda: world.kill(6))
    gone_on: list[bool] = []
    world.at(8.3, lambda: gone_on.append(sequence.route is not None))
    world.at(8.45, lambda: None)  # when the scheduler looks at the clock
    world.at(8.5, lambda: gone_on.append(sequence.route is not None))
    world.run()
    assert gone_on == [False, True], "lost after 0.4 s"
    assert sequence.output_tokens == expected_tokens(sequence.request)
    assert (sequence.num_stages, sequence.missing) == (3, {3})
    assert world.scheduler.missing == (3,)
    assert world.scheduler.coverage == Fraction(3, 4)
    assert {len(step.route.path) for step in world.steps} == {4, 3}


def test_a_stage_that_comes_back_within_its_grace_period_is_not_missed() -> None:
    world = World(1, ServingSettings(grace=timedelta(seconds=3)))
    begun = world.scheduler.submit(SequenceRequest((1, 2, 3), 40))
    late: list[SequenceState] = []
    world.at(0.3, lambda: world.kill(6, back_after_s=2.5))
    world.at(1.0, lambda: late.append(world.scheduler.submit(SequenceRequest((1,), 2))))
    world.run()
    for sequence in (begun, *late):
        assert sequence.output_tokens == expected_tokens(sequence.request)
        assert (sequence.num_stages, sequence.missing) == (4, set())
    assert late[0].queue_ns is not None and 1.9e9 < late[0].queue_ns < 2.1e9
    assert {len(step.route.path) for step in world.steps} == {4}


class Rising:
    """Allows tokens above the last one alone, up to the end."""

    def __init__(self) -> None:
        self.last = -1

    def allowed(self) -> bytes:
        bits: int = 2**VOCABULARY - 2 ** (self.last + 1)
        return bits.to_bytes(7, "little")

    def accepts(self, token: int) -> bool:
        return token > self.last

    def append(self, token: int) -> FinishReason | None:
        self.last = token
        return FinishReason.STOP if token == VOCABULARY - 1 else None


def test_an_answer_with_a_constraint() -> None:
    """It outlives a lost node, and a node that does not keep to it is not believed."""
    world = World(4, ServingSettings(routes_per_head=1, max_prompt_tokens=8))
    sequence = world.scheduler.submit(SequenceRequest(tuple(range(20)), 40, constraint=Rising))
    pieces: list[ServingStep] = []
    while len(pieces) < 3:
        pieces.append(world.steps[-1])
        world.scheduler.sampled(world.steps[-1].number, [0], pieces[-1].route.path[0])
    assert [bool(step.rows[0].allowed) for step in pieces] == [False, False, True], "the end of the prompt alone"
    assert world.steps[-1].rows[0].allowed == bytes([254, *[255] * 5, 3])
    with pytest.raises(ValueError, match="does not allow"):
        world.scheduler.sampled(world.steps[-1].number, [0], world.steps[-1].route.path[0])
    world.scheduler.node_lost(world.steps[-1].route.path[1])
    while sequence.finish_reason is None:
        step = world.steps[-1]
        token = min(sequence.output_tokens[-1] + 17, VOCABULARY - 1) if step.rows[0].allowed else 0
        world.scheduler.sampled(step.number, [token], step.route.path[0])
    assert (sequence.output_tokens, sequence.finish_reason) == ([0, 17, 34, 49], FinishReason.STOP)


LOGPROBS = ((7, -0.5), (7, -0.5), (3, -1.0))


@pytest.mark.parametrize(
    ("wanted", "reported"), [(2, ()), (2, (LOGPROBS[1:],)), (1, (LOGPROBS,)), (None, (LOGPROBS,)), (2, (LOGPROBS,) * 2)]
)
def test_log_probabilities_that_nobody_asked_for(wanted: int | None, reported: tuple[TokenLogprobs, ...]) -> None:
    world = World(4)
    world.scheduler.submit(SequenceRequest((1,), 3, sampling=SamplingParams(logprobs=wanted)))
    token = 7 if reported != (LOGPROBS[1:],) else 3
    with pytest.raises(ValueError, match=r"report|argument"):
        world.scheduler.sampled(world.steps[-1].number, [token], 0, reported)


def test_below_the_floor_nobody_is_answered() -> None:
    world = World(1, ServingSettings(min_coverage=Fraction(1), wait_timeout=timedelta(seconds=5)))
    begun = world.scheduler.submit(SequenceRequest((1, 2, 3), 40))
    world.at(0.3, lambda: world.kill(6))
    late: list[SequenceState] = []
    world.at(0.5, lambda: late.append(world.scheduler.submit(SequenceRequest((1,), 2))))
    world.run()
    assert begun.finish_reason is FinishReason.UNAVAILABLE
    assert late[0].finish_reason is FinishReason.UNAVAILABLE
    assert late[0].output_tokens == []


def test_who_waits_is_answered_when_nodes_come_back() -> None:
    world = World(2, ServingSettings(min_coverage=Fraction(1)))
    sequence = world.scheduler.submit(SequenceRequest((1, 2, 3), 20))
    world.at(0.2, lambda: world.kill(6, back_after_s=4))
    world.run()
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.output_tokens == expected_tokens(sequence.request)
    assert sequence.num_stages == 4


def test_the_queue_is_bounded() -> None:
    world = World(3, ServingSettings(max_sequences=1, routes_per_head=1, max_waiting=2))
    for _ in range(4):
        world.scheduler.submit(SequenceRequest((1,), 5))
    with pytest.raises(EngineFull):
        world.scheduler.submit(SequenceRequest((1,), 5))


def test_routes_are_the_fastest_and_spread() -> None:
    class Far(UniformCost):
        def hop_s(self, sender: int, receiver: int) -> float:
            return 10.0 if 2 in (sender, receiver) else super().hop_s(sender, receiver)

    holders = [list(nodes) for nodes in PLACES.values()]
    assert fastest_route(holders, Far(), {}, 0) == (0, 3, 4, 6)
    assert fastest_route(holders, UniformCost(), {3: 1, 4: 2}, 1) == (1, 2, 5, 6)
    assert fastest_route([[0], [], [4]], UniformCost(), {}, 0) == (0, 4)

    class Nowhere(UniformCost):
        def hop_s(self, sender: int, receiver: int) -> float:
            return float("inf") if 6 in (sender, receiver) else super().hop_s(sender, receiver)

    assert fastest_route(holders, Nowhere(), {}, 0) is None


def test_sequences_share_a_route_only_as_far_as_its_caches_go() -> None:
    world = World(4, ServingSettings(max_sequences=8, routes_per_head=1, cache_tokens=60))
    short = [world.scheduler.submit(SequenceRequest((1, 2), 8)) for _ in range(8)]
    long = world.scheduler.submit(SequenceRequest(tuple(range(30)), 30))
    with pytest.raises(EngineFull, match="61 tokens"):
        world.scheduler.submit(SequenceRequest(tuple(range(30)), 31))
    world.run()
    for sequence in (*short, long):
        assert sequence.output_tokens == expected_tokens(sequence.request)
    for step in world.steps:
        max_length = max(row.sequence.request.max_length for row in step.rows)
        assert (max(row.slot for row in step.rows) + 1) * max_length <= 60


def test_nobody_is_answered_before_every_stage_was_there_once() -> None:
    world = World(5, ServingSettings(startup_timeout=timedelta(seconds=100), wait_timeout=timedelta(seconds=200)))
    world.scheduler = Scheduler(len(PLACES), world, world.scheduler.settings)
    for node in (0, 2, 4):
        world._back(node)
    sequence = world.scheduler.submit(SequenceRequest((1, 2), 3))
    assert not world.scheduler.is_ready
    world.at(5, lambda: world._back(6))
    world.run()
    assert (sequence.output_tokens, sequence.num_stages) == (expected_tokens(sequence.request), 4)

    world = World(5, world.scheduler.settings)
    world.scheduler = Scheduler(len(PLACES), world, world.scheduler.settings)
    world._back(0)
    sequence = world.scheduler.submit(SequenceRequest((1, 2), 3))
    world.at(1, lambda: None)
    world.run()
    assert (sequence.output_tokens, sequence.num_stages) == (expected_tokens(sequence.request), 1), (
        "those who are there after a while will do"
    )


def test_a_stream_that_cannot_be_done_ends() -> None:
    world = World(6, ServingSettings(routes_per_head=1))
    world.start_step = world.steps.append  # type: ignore[method-assign, assignment]
    sequence = world.scheduler.submit(SequenceRequest((1, 2), 3))
    for tried in range(3):
        step = world.steps[-1]
        assert world.scheduler.step_failed(step.number, 77) == (), "not on its path"
        assert world.scheduler.step_failed(step.number, step.route.path[1]) == step.route.path
        assert world.scheduler.step_failed(step.number, step.route.path[1]) == (), "said twice"
        assert len(world.steps) == min(tried + 2, 3)
    assert sequence.finish_reason is FinishReason.FAILED
    assert not world.scheduler.sequences


def test_whoever_waits_is_told_when_all_is_over() -> None:
    world = World(7, ServingSettings(max_sequences=1, routes_per_head=1))
    sequences = [world.scheduler.submit(SequenceRequest((1, 2), 30)) for _ in range(6)]
    world.scheduler.close()
    assert [sequence.finish_reason for sequence in sequences] == [FinishReason.CANCELLED] * 6
    assert world.updates == sequences


def test_the_cluster_file_says_what_is_near() -> None:
    cluster = uniform_cluster(4, latency_s=0.1, bandwidth=1e6, flops_per_s=1e9)
    latency_s = cluster.latency_s.copy()
    latency_s[0, 1] = 5.0
    bandwidth = cluster.bandwidth_bytes_per_s.copy()
    bandwidth[3, 0] = 0.0
    near = ClusterCost.of(replace(cluster, latency_s=latency_s), MODELS["llama-tiny"], (6, 6), "bf16")
    assert assign_stages(["a", "b", "c", "d"], 2) == {"a": 0, "b": 1, "c": 0, "d": 1}
    assert fastest_route([[0, 2], [1, 3]], near, {}, 0) == (0, 3)
    assert near.hop_s(2, 2) == 0.0
    assert near.hop_s(0, 1) == pytest.approx(5.0 + 128 / 1e6)
    assert near.task_s(0, 0) > near.task_s(1, 0) > 0, "stage 0 has the head"
    cut = replace(near, cluster=replace(cluster, bandwidth_bytes_per_s=bandwidth))
    assert fastest_route([[0], [3]], cut, {}, 0) is None
    assert local_node_names(3, 4) == ["stage0.0", "stage1.0", "stage2.0", "stage0.1"]
    assert len(local_node_names(3, None)) == 6
    assert len(local_node_names(20, None)) == 20
    with pytest.raises(UserError, match="2 nodes cannot hold 3 stages"):
        assign_stages(["a", "b"], 3)
