"""Gradients averaged by schedules: the same bits everywhere, also after a loss; what rounding takes away comes back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import combinations
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from skippipe.codecs import LOW_RANK, EncodedTensor, encode
from skippipe.collectives.low_rank import LowRankAverager, Matrix, multiply, orthonormal_factors
from skippipe.collectives.peer_to_peer import GradientAverager
from skippipe.collectives.schedule import Averaging, Piece
from skippipe.collectives.torch_allreduce import InPlaceAverager
from skippipe.runtime.node.ops import AdoptPiece, BeginAveraging, ContributePiece, GradNorm, OptimizerStep
from skippipe.runtime.stage_executor import StageExecutor
from tests.helpers.executors import RATE, average, computer_of, drive, gradient_of, noise, state_of, stepped
from tests.helpers.plans import ALL_AVERAGING_KINDS, averaging_of, drawn_averaging
from tests.helpers.quick import others_slow

torch.set_num_threads(1)
VALUES = 301
CODECS = ["fp32", "bf16", "int8", "int2"]
MATRICES = [Matrix(0, 16, 12), Matrix(200, 9, 10)]
REST = [*range(192, 200), *range(290, VALUES)]
TREES = Averaging((0, 1, 2), (Piece(0, 5, ((1, 2),)), Piece(2, 3, ((0, 1),)), Piece(1, 1)))


def in_rounds(averaging: Averaging, codec: str) -> Averaging:
    return averaging.in_rounds(2 if codec in LOW_RANK else 1)


def averagers_of(gradients: Iterable[torch.Tensor], codec: str) -> list[GradientAverager | LowRankAverager]:
    return [averager_of(gradient, codec) for gradient in gradients]


def averager_of(gradient: torch.Tensor, codec: str) -> GradientAverager | LowRankAverager:
    if codec in LOW_RANK:
        return LowRankAverager(gradient, LOW_RANK[codec], MATRICES, GradientAverager)
    return GradientAverager(gradient, codec)


def run_op(averager: GradientAverager | LowRankAverager, op: Any) -> Any:
    match op:
        case BeginAveraging():
            averager.begin(op.schedule)
        case ContributePiece():
            return averager.contribute(op.piece, op.given, total=op.total)
        case AdoptPiece():
            averager.adopt(op.piece, op.given)
    return None


def summed(
    averagers: Sequence[GradientAverager | LowRankAverager], averaging: Averaging, seed: int = 0
) -> torch.Tensor:
    """What all of them hold in the end; the iteration is over then."""
    drive([partial(run_op, each) for each in averagers], averaging, random=Random(seed))
    sums = [averagers[node].summed.clone() for node in averaging.order]
    for each in averagers:
        each.close(followed=True)
    assert all(torch.equal(sums[0], other) for other in sums[1:]), "replicas are no longer alike"
    return sums[0]


@pytest.mark.parametrize("kind", ALL_AVERAGING_KINDS)
@pytest.mark.parametrize(
    ("size", "codec"), others_slow([(2, "fp32"), *((3, codec) for codec in CODECS), (4, "int8")], [(7, "int2")])
)
def test_all_nodes_end_with_the_bits_of_the_sum_whatever_comes_first(kind: str, size: int, codec: str) -> None:
    averaging = averaging_of(size, kind, size)
    gradients = [noise(seed, VALUES) for seed in range(size)]
    found = summed(averagers_of(gradients, codec), averaging)
    expected = torch.stack(gradients).double().sum(0)
    assert float((found - expected).abs().max()) < {"fp32": 1e-5, "bf16": 0.05, "int8": 0.25, "int2": 10}[codec]
    for seed in range(1, 4):
        assert torch.equal(found, summed(averagers_of(gradients, codec), averaging, seed))
    assert all(torch.equal(each, noise(seed, VALUES)) for seed, each in enumerate(gradients)), (
        "a gradient was written to"
    )


@pytest.mark.parametrize(
    ("size", "codec", "kind"),
    [
        *((3, "bf16", kind) for kind in ALL_AVERAGING_KINDS),
        *(
            pytest.param(4, "fp32", kind, marks=pytest.mark.slow)
            for kind in ALL_AVERAGING_KINDS
            if kind == "ring" or " " in kind or "trees" in kind
        ),
        *(pytest.param(3, "int8", kind, marks=pytest.mark.slow) for kind in ALL_AVERAGING_KINDS),
        *(pytest.param(3, "rank-4", kind, marks=pytest.mark.slow) for kind in ALL_AVERAGING_KINDS),
        (2, "rank-4", "ring"),
    ],
)
def test_averaging_begun_again_is_averaging_that_was_not_given_up(kind: str, size: int, codec: str) -> None:
    """At every moment at which a node may be lost, with any of the others left."""
    averaging = in_rounds(averaging_of(3, kind, size), codec)
    gradients = [noise(seed, VALUES) for seed in range(size)]
    expected = {
        gone: summed(averagers_of(gradients, codec), averaging.without(gone))
        for count in range(size - 1)
        for gone in combinations(range(size), count)
    }
    moments = drive([partial(run_op, each) for each in averagers_of(gradients, codec)], averaging)
    assert moments > 4
    for moment in range(1, moments + 1):
        for gone, wanted in expected.items():
            averagers = averagers_of(gradients, codec)
            drive([partial(run_op, each) for each in averagers], averaging, moment, Random(moment))
            assert torch.equal(summed(averagers, averaging.without(gone)), wanted), (moment, gone)
    assert all(torch.equal(each, noise(seed, VALUES)) for seed, each in enumerate(gradients))


@pytest.mark.parametrize("codec", others_slow(["bf16", "int8"], ["int2"]))
def test_what_rounding_takes_away_is_given_back(codec: str) -> None:
    """With the same gradient in every iteration, the mean of what is applied tends to the true one, also if the
    gradient is cut in another way each time; the error of a single iteration stays what it was."""
    true = [noise(seed, VALUES) * torch.logspace(-3, 0, VALUES) for seed in range(3)]
    expected = torch.stack(true).double().sum(0)
    ways = [Averaging((0, 1, 2)), TREES, drawn_averaging(Random(1), range(3), "direct exchange")]
    for chosen in (ways[:1], ways):
        gradients = [torch.empty(VALUES) for _ in true]
        averagers = averagers_of(gradients, codec)
        applied = torch.zeros(VALUES, dtype=torch.float64)
        errors = []
        for iteration in range(1, 33):
            for gradient, each in zip(gradients, true, strict=True):
                gradient.copy_(each)
            applied += summed(averagers, chosen[iteration % len(chosen)])
            errors.append(float((applied / iteration - expected).abs().max()))
        assert errors[0] > 1e-4
        assert errors[-1] < errors[0] / 12
        bias = float((summed(averagers_of(true, codec), chosen[0]) - expected).abs().max())
        assert errors[-1] < bias / 12, "without feedback the error would stay"


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["rank-4", "int2"])
def test_nothing_is_lost_or_doubled_when_a_node_with_a_remainder_is_lost(codec: str) -> None:
    """Whenever node 2 is lost in its third iteration: what was applied and what the others keep is all that they have
    had, and what node 2 had passed on before. Then node 1 is lost, too, and node 0 goes on alone."""
    trees = in_rounds(TREES, codec)
    moments = drive([partial(run_op, each) for each in averagers_of([noise(0, VALUES)] * 3, codec)], trees)
    for moment in range(1, moments + 1):
        gradients = [torch.zeros(VALUES) for _ in range(3)]
        averagers = averagers_of(gradients, codec)
        had, applied = torch.zeros(VALUES, dtype=torch.float64), torch.zeros(VALUES, dtype=torch.float64)

        def iteration(number: int, left: int, gradients: Any = gradients, had: torch.Tensor = had) -> None:
            for node in range(left):
                gradients[node].copy_(noise(10 * number + node, VALUES))
                had += gradients[node]

        for number in range(2):
            iteration(number, 3)
            applied += summed(averagers, trees)
        had -= averagers[2].remainder
        iteration(2, 2)
        drive([partial(run_op, each) for each in averagers], trees, moment, Random(moment))
        applied += summed(averagers[:2], trees.without({2}))
        kept = averagers[0].remainder + averagers[1].remainder
        assert kept.abs().max() > 0.01
        torch.testing.assert_close(applied + kept, had, rtol=1e-4, atol=1e-4)
        had -= averagers[1].remainder
        iteration(3, 1)
        drive([partial(run_op, each) for each in averagers[:2]], trees.without({2}), min(moment, 6))
        applied += gradients[0]
        averagers[0].close(followed=False)
        assert not averagers[0].remainder.any()
        torch.testing.assert_close(applied, had, rtol=1e-4, atol=1e-4)


def test_what_was_sent_is_not_written_to_afterwards() -> None:
    """It may have to be sent again for as long as the attempt lasts."""
    for codec in (*CODECS, "rank-4"):
        for averaging in (in_rounds(Averaging((0, 1, 2)), codec), in_rounds(TREES, codec)):
            averagers = averagers_of([noise(seed, VALUES) for seed in range(3)], codec)
            sent: list[tuple[EncodedTensor, bytes]] = []

            def run(averager: Any, op: Any, sent: list[tuple[EncodedTensor, bytes]] = sent) -> Any:
                made = run_op(averager, op)
                if made is not None:
                    sent.append((made, bytes(made.data)))
                return made

            drive([partial(run, each) for each in averagers], averaging)
            assert len(sent) == 3 * averaging.schedule.pieces
            assert all(bytes(made.data) == before for made, before in sent)


def test_a_piece_is_encoded_once_in_an_attempt() -> None:
    averager = GradientAverager(noise(0, VALUES), "bf16")
    averager.begin(TREES.schedule)
    averager.contribute(1, (), total=False)
    with pytest.raises(AssertionError, match="piece 1 was encoded before"):
        averager.contribute(1, (), total=False)
    averager.begin(TREES.schedule)
    averager.contribute(1, (), total=False)


@pytest.mark.parametrize(
    "wrong", [encode(torch.ones(1), "fp32"), encode(torch.ones(34), "fp32"), encode(torch.ones(50), "bf16")]
)
def test_a_piece_of_another_shape_is_not_taken(wrong: EncodedTensor) -> None:
    gradient = torch.zeros(100)
    averager, schedule = GradientAverager(gradient, "fp32"), Averaging((0, 1)).schedule
    averager.begin(schedule)
    assert averager.fits(encode(torch.ones(50), "fp32"), schedule, 1)
    assert not averager.fits(wrong, schedule, 1)
    with pytest.raises(ValueError, match="came instead of fp32"):
        averager.contribute(1, [wrong], total=False)
    with pytest.raises(ValueError, match="came instead of fp32"):
        averager.adopt(1, wrong)
    assert not gradient.any()


def test_every_piece_has_a_value_however_small_its_share() -> None:
    schedule = Averaging((0, 1, 2), (Piece(0, 1), Piece(1, 10**6), Piece(2, 1))).schedule
    assert schedule.bounds(1000) == [0, 1, 998, 1000]
    assert Averaging((0, 1, 2)).schedule.bounds(100) == [0, 33, 66, 100]
    averagers = averagers_of([noise(seed, 3) for seed in range(3)], "int8")
    summed(averagers, Averaging((0, 1, 2), (Piece(0, 1), Piece(1, 10**6), Piece(2, 1))))


# Low rank


@pytest.mark.parametrize("kind", ALL_AVERAGING_KINDS)
def test_low_rank_sums_what_lies_in_the_directions_that_it_has_found(kind: str) -> None:
    """As published, with errors of its own for each node; the same bits everywhere, whatever comes first."""
    averaging = averaging_of(4, kind, 4).in_rounds(2)
    random, gradients = torch.Generator().manual_seed(1), [torch.zeros(VALUES) for _ in range(4)]
    orders = [averagers_of(gradients, "rank-4"), averagers_of([each.clone() for each in gradients], "rank-4")]
    errors = torch.zeros(4, VALUES, dtype=torch.float64)
    factors = [each.clone().double() for each in orders[0][0]._right]  # type: ignore[union-attr]
    for iteration in range(3):
        new = torch.randn(4, VALUES, generator=random)
        for averagers in orders:
            for averager, gradient in zip(averagers, new, strict=True):
                averager._gradient.copy_(gradient)
        found = summed(orders[0], averaging)
        assert torch.equal(found, summed(orders[1], averaging, seed=1 + iteration)), "it depends on what came first"
        whole = new.double() + errors
        torch.testing.assert_close(found[REST], new[:, REST].sum(0))
        for number, matrix in enumerate(MATRICES):
            each = [matrix.of(row) for row in whole]
            left, _ = torch.linalg.qr(sum(one @ factors[number] for one in each))
            factors[number] = sum(one.T @ left for one in each)
            assert matrix.of(found).double() == pytest.approx((left @ factors[number].T).numpy(), abs=1e-4)
            for error, one in zip(errors, each, strict=True):
                matrix.of(error).copy_(one - left @ (left.T @ one))
        for averager, error in zip(orders[0], errors, strict=True):
            torch.testing.assert_close(averager.remainder.double(), error, rtol=1e-3, atol=1e-4)


def test_what_low_rank_leaves_out_comes_later() -> None:
    """With the same gradient in every iteration, the mean of what is applied tends to the true one."""
    true = [noise(seed, VALUES) for seed in range(3)]
    gradients = [torch.empty(VALUES) for _ in true]
    averagers, applied, errors = averagers_of(gradients, "rank-4"), torch.zeros(VALUES), []
    for iteration in range(1, 49):
        for gradient, each in zip(gradients, true, strict=True):
            gradient.copy_(each)
        applied += summed(averagers, TREES.in_rounds(2))
        errors.append(float((applied / iteration - sum(true)).abs().max()))
    assert errors[0] > 1
    assert errors[-1] < errors[0] / 12


def test_a_newcomer_takes_part_in_low_rank_with_nothing_kept_and_factors_of_its_own() -> None:
    """All have the same bits at once; what nodes have found out before counts, and nothing is lost or doubled."""
    gradients = [torch.zeros(VALUES) for _ in range(3)]
    averagers, pair = averagers_of(gradients[:2], "rank-4"), Averaging((0, 1), rounds=2)
    had, applied = torch.zeros(VALUES), torch.zeros(VALUES)
    lasting = noise(50, VALUES)  # what there is to be found out
    matrix = MATRICES[0]
    matrix.of(lasting).copy_(noise(51, 16, 4) @ noise(52, 4, 12))

    def iteration(number: int, taking_part: int, averaging: Averaging) -> None:
        nonlocal had, applied
        for node in range(taking_part):
            gradients[node].copy_(lasting + 0.01 * noise(10 * number + node, VALUES))
            had = had + gradients[node]
        applied = applied + summed(averagers, averaging)

    for number in range(4):
        iteration(number, 2, pair)
    averagers += averagers_of(gradients[2:], "rank-4")
    before = had - applied
    iteration(4, 3, Averaging((0, 1, 2), rounds=2))
    kept = sum((each.remainder for each in averagers), torch.zeros(VALUES))
    torch.testing.assert_close(applied + kept, had, rtol=1e-4, atol=1e-4)
    assert matrix.of(had - applied).norm() < matrix.of(before).norm() + 1, "the first factors of the newcomer counted"
    rights = [each._right for each in averagers]  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for right in rights[1:] for one, other in zip(rights[0], right, strict=True))


def test_what_every_replica_works_out_has_the_bits_of_single_operations_in_a_fixed_order() -> None:
    """So it is the same on every device. Here in numpy, number by number, beside all devices that there are."""
    factor, right = noise(1, 11, 3), noise(2, 7, 3)
    factor[:, 1] = -2 * factor[:, 0]
    expected = factor.numpy().copy()

    def total(values: Any) -> Any:
        values = list(values)
        while len(values) > 1:
            half = len(values) - len(values) // 2
            values = [values[at] + values[half + at] if half + at < len(values) else values[at] for at in range(half)]
        return values[0]

    for at in (0, 1, 2):
        column, earlier = expected[:, at], [expected[:, other] for other in range(at)]
        column /= abs(column).max()
        for _ in range(2 if at else 0):
            column -= total([other * total(other * column) for other in earlier])
        column /= np.sqrt(total(column * column)) or np.float32(1)
        column *= at != 1  # it depends on the first
    columns = zip(expected.T, right.numpy().T, strict=True)
    first, second, third = (np.multiply.outer(column, other) for column, other in columns)
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        (found,) = orthonormal_factors([factor.to(device)])
        assert np.array_equal(found.cpu().numpy(), expected)
        product = torch.empty(11, 7, device=device)
        multiply(found, right.to(device), product)
        assert np.array_equal(product.cpu().numpy(), first + second + third)
    torch.testing.assert_close((found.T @ found).cpu(), torch.diag(torch.tensor([1.0, 0.0, 1.0])))


# In the executor of a node


def replicas(count: int, dtype: str = "fp32") -> list[StageExecutor]:
    """With gradients of their own."""
    made = [computer_of(1, gradient_dtype=dtype) for _ in range(count)]
    for number, each in enumerate(made):
        each.tasks.weights.gradient.copy_(noise(number, len(each.tasks.weights.gradient)))
    return made


@pytest.mark.parametrize("dtype", CODECS)
@pytest.mark.parametrize("left", [(0, 1), (1, 2), (2, 0), (1,)])
def test_steps_after_averaging_begun_again_are_those_without_a_loss(dtype: str, left: tuple[int, ...]) -> None:
    broken, fresh = replicas(3, dtype), replicas(3, dtype)
    average(broken, TREES)
    for each in broken:
        each.run(GradNorm(9, alone=False))
    averaging = TREES.without({0, 1, 2}.difference(left))
    ends = []
    for members in (broken, fresh):
        if len(left) > 1:
            average(members, averaging)
        ends.append([stepped(members[node], 5, alone=len(left) == 1) for node in left])
    for norm, state in ends[0]:
        assert norm == ends[0][0][0]
        assert torch.equal(state, ends[0][0][1]), "replicas are no longer alike"
    norm, state = ends[1][0]
    assert ends[0][0][0] == norm  # low precision too: there was no remainder of an iteration before
    assert torch.equal(ends[0][0][1], state)


@pytest.mark.parametrize("averaging", [Averaging((0, 1, 2)), TREES], ids=["ring", "trees"])
def test_after_averaging_was_given_up_the_remainder_is_dropped_and_sums_stay_close(averaging: Averaging) -> None:
    members = replicas(3, "bf16")
    average(members, averaging)
    for each in members:
        stepped(each, 3, alone=False)
    own = [noise(40 + at, len(each.tasks.weights.gradient)) for at, each in enumerate(members)]
    for each, gradient in zip(members, own, strict=True):
        each.tasks.weights.gradient.copy_(gradient)
    average(members, averaging, ops=9)
    average(members, averaging.without({2}))
    norms = [each.run(GradNorm(1, alone=False)) for each in members[:2]]
    assert norms[0] == norms[1]
    assert norms[0] == pytest.approx(float((own[0] + own[1]).double().square().sum()), rel=1e-3)


@pytest.mark.parametrize("size", [1, 2])
def test_measuring_twice_is_measuring_once(size: int) -> None:
    computers, once = replicas(size), replicas(size)
    alone = size == 1
    if not alone:
        average(computers)
        average(once)
    own = gradient_of(computers[0])
    whole = computers[0].run(GradNorm(1, alone))
    assert computers[0].run(GradNorm(3, alone)) == pytest.approx(whole / 9)
    assert computers[0].run(GradNorm(1, alone)) == whole
    assert torch.equal(gradient_of(computers[0]), own)
    for each, other in zip(computers, once, strict=True):
        assert stepped(each, 4, alone=alone)[0] == pytest.approx(whole / 16)
        stepped(other, 4, alone=alone)
        assert torch.equal(state_of(each), state_of(other))


def test_two_then_alone_then_two_again() -> None:
    one, other = replicas(2)
    own = gradient_of(one).double().square().sum()
    average([one, other])
    both = one.run(GradNorm(4, alone=False))
    assert one.run(GradNorm(2, alone=True)) == pytest.approx(float(own) / 4)
    average([one, other])
    assert one.run(GradNorm(4, alone=False)) == both
    assert other.run(GradNorm(4, alone=False)) == both
    average([one, other], ops=4)
    with pytest.raises(AssertionError, match="not complete"):
        one.run(GradNorm(4, alone=False))


def doubled(gradient: torch.Tensor) -> None:
    gradient.mul_(2)


def test_gradients_summed_by_other_means_are_measured_where_they_are() -> None:
    executor = computer_of(1, make_averager=lambda gradient, codec, offload: InPlaceAverager(gradient, doubled))
    executor.tasks.weights.gradient.fill_(1.0)
    executor.run(BeginAveraging(Averaging((0, 1)).schedule))
    assert executor.run(GradNorm(2, alone=False)) == len(gradient_of(executor))


@pytest.mark.parametrize("averaging", [Averaging((0, 1, 2)), TREES], ids=["ring", "trees"])
def test_a_step_is_along_the_mean(averaging: Averaging) -> None:
    computers = replicas(3)
    mean = torch.stack([gradient_of(each).double() for each in computers]).sum(0) / 7
    before = computers[0].tasks.weights.values.clone()
    average(computers, averaging)
    for each in computers:
        norm, _ = stepped(each, 7, alone=False)
        assert norm == pytest.approx(float(mean.square().sum()))
        torch.testing.assert_close(
            each.tasks.weights.optimizer.state["exp_avg"].double(), 0.1 * mean, rtol=1e-5, atol=1e-7
        )
        assert each.tasks.weights.steps == 1
    assert not torch.equal(computers[0].tasks.weights.values, before)


@pytest.mark.parametrize("dtype", ["bf16", "rank-4"])
@pytest.mark.parametrize(("stage_microbatches", "scale"), [(0, 1.0), (3, 0.0)])
def test_no_step_leaves_all_but_the_gradient(stage_microbatches: int, scale: float, dtype: str) -> None:
    computers, pair = replicas(2, dtype), in_rounds(Averaging((0, 1)), dtype)
    for each in computers:
        stepped(each, 1)
        each.tasks.weights.gradient.fill_(float("nan") if scale == 0 else 0.0)
    before = state_of(computers[0])
    average(computers, pair)
    for each in computers:
        each.run(GradNorm(stage_microbatches, alone=False))
        each.run(OptimizerStep(RATE, scale))
        assert not gradient_of(each).any()
        assert each.tasks.weights.steps == 1
    assert torch.equal(state_of(computers[0]), before)
    for each in computers:
        each.tasks.weights.gradient.fill_(1.0)
    average(computers, pair)
    norm = computers[0].run(GradNorm(2, alone=False))
    assert norm == pytest.approx(len(before) / 3), "what was not finite lives on in the remainder"
