# ruff: noqa: ARG002
"""A collective is one file and one line: simulator, planner and nodes ask the registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe.codecs import EncodedTensor, decode, encode
from skippipe.collectives import COLLECTIVES, Collective, CollectiveId, GroupConfig, MakeAverager
from skippipe.collectives.ring import RING
from skippipe.cost_model import cost_model_of
from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.planner.problem import Problem
from skippipe.planner.strategies import PlanRequest, Strategy, make_plan
from skippipe.runtime.node.ops import GradNorm, RingStep
from skippipe.runtime.node.ring_protocol import RingProtocol
from skippipe.simulator import simulate
from skippipe.timeline import Timing
from skippipe.transport.message import RingPiece
from skippipe.validate import validate
from skippipe.workload import Workload
from tests.helpers.plans import TINY, clusters, plans, uniform_cluster
from tests.helpers.small_run import small_run

torch.set_num_threads(1)


class Direct(Collective):
    """Every node sends its whole gradient to every other one, one after another."""

    id = "direct"
    elastic = True

    def rounds(self, size: int) -> int:
        return size - 1

    def receiver(self, at: int, round_: int, size: int) -> int:
        return (at + 1 + round_) % size

    def sender(self, at: int, round_: int, size: int) -> int:
        return (at - 1 - round_) % size

    def message_bytes(self, gradient_bytes: int, size: int) -> int:
        return gradient_bytes

    def join(self, group: GroupConfig) -> MakeAverager:
        return DirectAverager


class DirectAverager:
    def __init__(self, gradient: torch.Tensor, codec: str) -> None:
        self.gradient, self.codec = gradient, codec
        self.parts: dict[int, torch.Tensor] = {}

    def turn(self, round_: int, at: int, size: int, given: EncodedTensor | None) -> EncodedTensor | None:
        own = encode(self.gradient, self.codec)
        if round_ == 0:
            self.parts = {at: decode(own)}
        else:
            assert given is not None
            self.parts[Direct().sender(at, round_ - 1, size)] = decode(given)
        return own if round_ < size - 1 else None

    def fits(self, given: EncodedTensor, round_: int, at: int, size: int) -> bool:
        return given.shape == self.gradient.shape and given.dtype == self.codec

    @property
    def summed(self) -> torch.Tensor:
        return torch.stack([self.parts[place] for place in sorted(self.parts)]).sum(0)

    def close(self, *, followed: bool) -> None:
        self.parts = {}


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(COLLECTIVES, Direct.id, Direct())
    return Direct.id


def test_ids_are_those_of_job_files_from_before() -> None:
    assert tuple(COLLECTIVES) == get_args(CollectiveId) == ("ring", "torch")


@settings(max_examples=60, deadline=None)
@given(clusters(least=2, most=9), st.lists(st.integers(0, 10**9), min_size=9, max_size=9))
def test_the_ring_by_its_schedule_takes_what_the_compiled_one_takes(cluster: object, done: Sequence[int]) -> None:
    costs = cost_model_of(cluster, Workload(TINY, 32, 1, 4), (4, 4))  # type: ignore[arg-type]
    order = tuple(range(costs.nodes))
    assert Collective.averaged_ns(RING, costs, 1, order, done[: len(order)]) == RING.averaged_ns(
        costs, 1, order, done[: len(order)]
    )


@settings(max_examples=30, deadline=None)
@given(plans())
def test_stages_by_their_schedules_average_when_the_compiled_ones_do(plan: Plan) -> None:
    orders = [stage.ring for stage in plan.stages]
    done = plan.costs.head_ns
    assert Collective.spans(RING, plan.costs, orders)(done) == RING.spans(plan.costs, orders)(done)


def test_a_collective_of_its_own_is_simulated_and_run_alike(direct: str) -> None:
    run, ringed = small_run(1, collective=direct), small_run(1)
    assert run.cluster.finished_ns == simulate(run.plan, Timing.FULL).iteration_ns
    assert ringed.cluster.finished_ns == simulate(ringed.plan, Timing.FULL).iteration_ns != run.cluster.finished_ns
    for stage, replicas in enumerate(run.weights):
        assert all(torch.equal(replicas[0], other) for other in replicas[1:])
        torch.testing.assert_close(replicas[0], ringed.weights[stage][0])
    sent = {(link.sender, link.receiver): link.sent_bytes for link in simulate(run.plan).links}
    assert sent[1, 2] >= run.plan.costs.gradient_bytes[1]


def test_a_plan_for_a_collective_of_its_own_keeps_its_promise(direct: str) -> None:
    workload = Workload(TINY, 32, 1, 8, collective=direct)
    problem = Problem(uniform_cluster(7), workload, 3, 3, timing=Timing.FULL)
    plan = make_plan(problem, Strategy.BEST, PlanRequest(changes=300, bound_s=1))
    assert plan.costs.collective.id == direct and not validate(plan)
    assert plan.expected is not None and plan.expected == simulate(plan, Timing.FULL)
    assert plan.lower_bound_ns is None or plan.lower_bound_ns <= plan.expected.iteration_ns
    assert Plan.from_json(plan.to_json()) == plan


def test_an_unknown_collective_is_named() -> None:
    with pytest.raises(UserError, match=r"workload\.collective: 'tree' is none of ring, torch"):
        cost_model_of(uniform_cluster(2), replace(Workload(TINY), collective="tree"), (4, 4))
    assert "collective" not in Workload(TINY).to_json()  # a file that older releases read


def test_a_library_averages_in_one_round_without_messages() -> None:
    protocol = RingProtocol(3, 1, (4, 3, 5), COLLECTIVES["torch"])
    assert protocol.begin() == RingStep(0, 1, 3)
    piece = RingPiece(0, stage=1, round=0)
    assert not protocol.expects(4, piece)
    assert RingProtocol(3, 1, (4, 3, 5), COLLECTIVES["ring"]).expects(4, piece)
    assert protocol.next(6) is None
    assert not protocol.round_done(0)
    assert protocol.next(6) == GradNorm(6, alone=False)
