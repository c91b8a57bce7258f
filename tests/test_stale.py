"""Messages of the past: of an earlier epoch, iteration, life or coordinator, late or twice. They change nothing."""

from __future__ import annotations

from skippipe.runtime.control import Control, Returned, Settle
from skippipe.runtime.iteration import Iteration
from tests.benches import small_plan


def book(epoch: int, told: list[Control]) -> Iteration:
    """Of iteration 3, begun in an epoch."""

    def throw_out(node: int, why: str) -> None:
        raise AssertionError(f"node {node} is thrown out: {why}")

    plan = small_plan()
    return Iteration(3, plan, epoch, set(plan.stage_of), told.append, throw_out)


def returns(page: Iteration, epoch: int) -> None:
    """Everything comes back, as far as nodes in this epoch can tell."""
    for lane, way in enumerate(page.plan.lanes):
        for microbatch in range(way.microbatches):
            page.hear(way.path[0], Returned(3, epoch, lane, microbatch, 2.0))


def test_what_was_back_before_an_iteration_was_begun_again_is_not_back() -> None:
    told: list[Control] = []
    page = book(epoch=5, told=told)
    returns(page, epoch=4)
    assert not page.ledger.returned and not page.ledger.losses
    assert page.without(4, sorted(page.nodes - {4})) is not None
    assert not any(isinstance(each, Settle) for each in told), "healthy microbatches are on their way"
    returns(page, epoch=5)
    assert isinstance(told[-1], Settle)


def test_what_was_back_before_ways_changed_is_back() -> None:
    told: list[Control] = []
    page = book(epoch=5, told=told)
    assert page.without(4, sorted(page.nodes - {4})) is not None
    assert page.epoch == 6
    returns(page, epoch=5)
    assert isinstance(told[-1], Settle), "whoever has not heard of it yet still says what is true"
