"""What is computed again when steps, nodes or stages are lost, and that every answer gets on all the same."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest

from skippipe.inference.request import FinishReason
from skippipe.serving.scheduler import ServingSettings, ServingStep
from skippipe.serving.sequence import SequenceRequest, SequenceState
from tests.helpers.echo_engine import VOCABULARY, expected_tokens
from tests.helpers.virtual_nodes import World


def prompt(length: int) -> tuple[int, ...]:
    return tuple(number % VOCABULARY for number in range(length))


def assert_complete(*sequences: SequenceState) -> None:
    for sequence in sequences:
        assert sequence.finish_reason is FinishReason.LENGTH
        assert sequence.output_tokens == expected_tokens(sequence.request)


# Slow nodes


def test_a_long_prompt_for_slow_nodes_costs_no_other_answer_its_caches() -> None:
    world = World(1, ServingSettings(routes_per_head=1, step_timeout=timedelta(seconds=2)))
    world.token_s = 0.01
    asked = [world.scheduler.submit(SequenceRequest(prompt(150), 80)) for _ in range(4)]
    world.at(1, lambda: asked.append(world.scheduler.submit(SequenceRequest(prompt(1500), 3))))
    world.run()
    assert_complete(*asked)
    assert len(asked) == 5
    assert world.scheduler.recomputed_tokens == 0


def test_pieces_of_prompts_grow_where_nodes_are_quick() -> None:
    world = World(1)
    sequence = world.scheduler.submit(SequenceRequest(prompt(20_000), 1))
    world.run()
    assert_complete(sequence)
    counts = [len(step.rows[0].tokens) for step in world.steps]
    assert counts[:7] == [64, 128, 256, 512, 1024, 2048, 4096]
    assert max(counts) == 4096


def test_prompts_that_would_be_late_for_ever_go_in_smaller_pieces() -> None:
    world = World(1, ServingSettings(step_timeout=timedelta(seconds=2)))
    world.token_s = 0.05
    for second in range(600):
        world.at(second, lambda: None)
    asked = [world.scheduler.submit(SequenceRequest(prompt(length), 3)) for length in (600, 40)]
    world.run()
    assert_complete(*asked)
    assert [len(step.rows[0].tokens) for step in world.steps[:2]] == [64, 40], "two routes, both late"
    assert max(sum(len(row.tokens) for row in step.rows) for step in world.steps[2:]) <= 32
    assert world.clock_ns < 60e9


# Steps that fail


def test_a_sequence_that_cannot_be_computed_ends_alone() -> None:
    """The fourth token of one of six sequences on a route."""
    world = World(2, ServingSettings(routes_per_head=1))
    world.scheduler.node_lost(1)
    asked = [world.scheduler.submit(SequenceRequest(prompt(30), 20)) for _ in range(6)]
    bad = asked[2]
    world.fails = lambda step: any(row.sequence is bad and row.start + len(row.tokens) == 33 for row in step.rows)
    world.run()
    assert bad.finish_reason is FinishReason.FAILED
    assert bad.output_tokens == expected_tokens(bad.request)[:3]
    assert_complete(*[each for each in asked if each is not bad])


def test_steps_that_fail_now_and_then_end_no_answer() -> None:
    world = World(3)
    world.fails = lambda step: step.number % 10 == 9
    asked = [world.scheduler.submit(SequenceRequest(prompt(length), 40)) for length in range(10, 60, 5)]
    world.run()
    assert_complete(*asked)


# Fairness


def test_prompts_are_computed_in_the_order_in_which_they_came() -> None:
    """Two places on one route: the first one is free again and again, for prompts that came later."""
    world = World(4, ServingSettings(routes_per_head=1, max_sequences=2, max_prompt_tokens=8))
    world.scheduler.node_lost(1)
    lengths = [20, 60, *[20] * 10]
    asked = [world.scheduler.submit(SequenceRequest(prompt(length), 1)) for length in lengths]
    world.run()
    assert_complete(*asked)
    assert world.updates.index(asked[1]) == 1


def test_sequences_of_several_lost_routes_wait_in_the_order_in_which_they_came() -> None:
    world = World(5, ServingSettings(routes_per_head=2, max_sequences=1))
    asked = [world.scheduler.submit(SequenceRequest(prompt(5), 20)) for _ in range(8)]
    world.scheduler.node_lost(1)
    world.scheduler.node_lost(6)
    waiting: list[ServingStep] = []
    world.start_step = waiting.append  # type: ignore[method-assign, assignment]
    world.scheduler.node_joined(6, 3)
    assert [step.rows[0].sequence for step in waiting] == asked[:2]


# A stage that comes and goes


@pytest.mark.parametrize("seed", range(3))
def test_a_stage_that_comes_only_to_be_lost_again_holds_answers_up_for_one_grace_period(seed: int) -> None:
    """The only node of stage 3 is back every two seconds, for half a second."""
    world = World(seed, ServingSettings(grace=timedelta(seconds=5)))
    sequence = world.scheduler.submit(SequenceRequest(prompt(10), 200))
    for number in range(30):
        world.at(0.5 + 2 * number, partial(world.kill, 6, 1.3))
    world.run()
    assert_complete(sequence)
    assert sequence.missing == {3}
    assert world.clock_ns < 14e9, "six seconds of steps, and one grace period"
