"""A collective is one file and one line: planner, simulator and nodes ask the registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
import torch

from skippipe.codecs import EncodedTensor, decode, encode
from skippipe.collectives import COLLECTIVES, Collective, CollectiveId, GroupConfig, MakeAverager, topology
from skippipe.collectives.schedule import Averaging, Piece, Schedule
from skippipe.collectives.transfers import free_links, takes_ns
from skippipe.cost_model import cost_model_of
from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.planner.published import published20
from skippipe.runtime.coordinator.interfaces import IterationReport
from skippipe.runtime.node.averaging_protocol import AveragingProtocol
from skippipe.runtime.node.ops import BeginAveraging, GradNorm
from skippipe.simulator import simulate
from skippipe.timeline import Timing
from skippipe.transport.message import GradientPiece
from skippipe.workload import Workload
from tests.helpers.plans import TINY, uniform_cluster
from tests.helpers.small_run import small_run

torch.set_num_threads(1)
DIRECT = (Piece(1, 3), Piece(3, 1), Piece(2, 2))
BY_WAY_OF_2 = (Piece(1, 2, ((3, 2),)), Piece(3, 1, ((1, 2),)))


class InDouble(Collective):
    """Adds up in fp64, and cares for nothing else."""

    id = "in-double"
    elastic = True

    def join(self, group: GroupConfig) -> MakeAverager:  # noqa: ARG002
        return InDoubleAverager


class InDoubleAverager:
    def __init__(self, gradient: torch.Tensor, codec: str, offload: bool) -> None:  # noqa: ARG002
        self.gradient, self.codec = gradient, codec
        self.totals: dict[int, torch.Tensor] = {}

    def begin(self, schedule: Schedule) -> None:
        self.totals, self.bounds = {}, schedule.bounds(len(self.gradient))

    def contribute(self, piece: int, given: Sequence[EncodedTensor], *, total: bool) -> EncodedTensor:
        own = self.gradient[self.bounds[piece] : self.bounds[piece + 1]].double()
        encoded = encode(sum((decode(each).double() for each in given), own).float(), self.codec)
        if total:
            self.adopt(piece, encoded)
        return encoded

    def adopt(self, piece: int, given: EncodedTensor) -> None:
        self.totals[piece] = decode(given)

    def fits(self, given: EncodedTensor, schedule: Schedule, piece: int) -> bool:
        bounds = schedule.bounds(len(self.gradient))
        return given.shape == (bounds[piece + 1] - bounds[piece],) and given.dtype == self.codec

    @property
    def summed(self) -> torch.Tensor:
        return torch.cat([self.totals[piece] for piece in sorted(self.totals)])

    def close(self, *, followed: bool) -> None:
        pass


def test_ids_are_those_of_job_files_from_before() -> None:
    assert tuple(COLLECTIVES) == get_args(CollectiveId) == ("auto", "ring", "torch")


@pytest.mark.parametrize(
    "pieces", [(), pytest.param(DIRECT, marks=pytest.mark.slow), BY_WAY_OF_2], ids=["ring", "direct", "trees"]
)
def test_every_schedule_is_simulated_and_run_alike(pieces: tuple[Piece, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLLECTIVES, InDouble.id, InDouble())
    ringed = small_run(1)
    for engine in ("auto", InDouble.id):
        run = small_run(1, pieces, collective=engine)
        assert run.cluster.finished_ns == simulate(run.plan, Timing.FULL).iteration_ns
        for stage, replicas in enumerate(run.weights):
            assert all(torch.equal(replicas[0], other) for other in replicas[1:])
            torch.testing.assert_close(replicas[0], ringed.weights[stage][0])
        (report,) = run.cluster.reports
        assert sent_within_stage_1(report) == pytest.approx(planned_bytes(run.plan), rel=0.01)


def planned_bytes(plan: Plan) -> int:
    """That the three nodes of stage 1 send to each other."""
    return sum(plan.stages[1].averaging.link_bytes(*plan.costs.gradient_rounds[1]).values())


def sent_within_stage_1(report: IterationReport) -> int:
    return sum(count for (a, b), count in report.sent_bytes.items() if {a, b} <= {1, 2, 3})


@pytest.mark.parametrize("pieces", [(), DIRECT, BY_WAY_OF_2], ids=["ring", "direct", "trees"])
def test_two_rounds_are_simulated_and_run_alike(pieces: tuple[Piece, ...]) -> None:
    run = small_run(1, pieces, gradient_dtype="rank-4")
    assert len(run.plan.costs.gradient_rounds[1]) == 2
    taken_ns = simulate(run.plan, Timing.FULL).iteration_ns
    assert run.cluster.finished_ns == taken_ns
    in_one = replace(run.plan.costs, gradient_rounds=tuple((size,) for size in run.plan.costs.gradient_bytes))
    averaging = run.plan.stages[1].averaging
    flights_ns = takes_ns(run.plan.costs, 1, averaging) - takes_ns(in_one, 1, averaging)
    assert flights_ns >= 2 * in_one.flight_ns[1, 2], "what is sent flies twice"
    assert sent_within_stage_1(run.cluster.reports[0]) == pytest.approx(planned_bytes(run.plan), rel=0.01)


def test_an_unknown_collective_is_named() -> None:
    with pytest.raises(UserError, match=r"workload\.collective: 'tree' is none of auto, ring, torch"):
        cost_model_of(uniform_cluster(2), replace(Workload(TINY), collective="tree"), (4, 4))
    assert "collective" not in Workload(TINY, collective="ring").to_json()  # a file that older releases read


def test_a_library_averages_at_once_without_messages() -> None:
    averaging = Averaging((4, 3, 5))
    by_library, by_ring = (
        AveragingProtocol(3, 1, [Averaging((0,)), averaging], in_messages=each) for each in (False, True)
    )
    first = next(number for number, each in enumerate(averaging.schedule.transfers) if each.receiver == 1)
    piece = GradientPiece(0, stage=1, transfer=first)
    assert by_ring.expects(4, piece) and not by_library.expects(4, piece)
    by_library.begin()
    assert by_library.next(6) == BeginAveraging(averaging.schedule)
    assert by_library.next(6) == GradNorm(6, alone=False)


def test_a_gradient_of_few_bytes_has_pieces_enough_for_all_links(monkeypatch: pytest.MonkeyPatch) -> None:
    example, nodes = published20(), (1, 3, 4, 5, 12)

    def divided(dtype: str, stage: int) -> tuple[int, int]:
        costs = cost_model_of(example.cluster, replace(example.workload, gradient_dtype=dtype), (4,) * example.stages)
        averaging = topology.exchange(costs, stage, nodes, free_links(20), range(20))
        return len(averaging.pieces), costs.averaging_ns(stage, averaging)

    (large, _), (usual, _), (small, small_ns) = divided("fp32", 0), divided("fp32", 1), divided("int4", 0)
    assert (large, usual, small) == (192, 99, 96)
    monkeypatch.setattr(topology, "SMALLEST_PIECE_BYTES", topology.PIECE_BYTES)
    few, few_ns = divided("int4", 0)
    assert few == 26
    assert small_ns < 0.9 * few_ns
