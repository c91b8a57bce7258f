"""What codecs on the wire do to training, without a wire: hops that round or carry a projection, and gradients that are
summed from what replicas can tell each other of them.

Everything runs within CUDA graphs: the memory of errors lies in one place, and nothing asks for a value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from skippipe.codecs import CODECS, LowRank, after_hop, gradient_codec
from skippipe.codecs.factors import orthonormal
from skippipe.collectives.low_rank import Matrix, factored_matrices
from skippipe.model.flat_params import FlatParams
from skippipe.study.config import Traffic


def sent(hidden: Tensor, wire: str, back: str = "") -> Tensor:
    """What arrives of activations after a hop; wire "": all of them.

    Microbatches are rounded together: the same as one by one, if the values of each fill whole blocks; each sample is a
    matrix of its own for codecs with factors.
    """
    if not wire:
        return hidden
    arrived: Tensor = _Hop.apply(hidden, wire, back or gradient_codec(wire))  # type: ignore[no-untyped-call]
    return arrived


class _Hop(torch.autograd.Function):
    """Activations as they arrive; their gradient as it arrives on its way back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, wire: str, back: str) -> Tensor:
        ctx.back = back
        return after_hop(hidden, wire)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return after_hop(gradient, ctx.back), None, None


class Subspace:
    """Hops that carry a projection (after Ramasinghe et al., arXiv 2506.01260): of activations h of tokens with the
    embeddings e, U'(h − e) with an orthonormal U; what arrives is e + U U'(h − e). Of the gradient g of that, U'g goes
    back, and what arrives is U U'g: e has no gradient by this way.

    One basis serves all hops, as a path may go from any stage to any later one. There the weights that write to the
    hidden states are kept within the subspace, so that nothing is lost; here they are not, and what lies outside is.
    """

    def __init__(self, traffic: Traffic, width: int, device: str) -> None:
        self._traffic = traffic
        self.basis = torch.empty(width, traffic.subspace, device=device)
        self._power = torch.empty_like(self.basis)
        """Of what was sent in this iteration: the sum over tokens of (h − e)(h − e)'U."""
        self.forget()

    def forget(self) -> None:
        """As new: a random basis, the same for all seeds."""
        chance = torch.randn(self.basis.shape, generator=torch.Generator().manual_seed(0))
        self.basis.copy_(torch.linalg.qr(chance)[0])
        self._power.zero_()

    def sent(self, hidden: Tensor, embedded: Tensor, wire: str, back: str = "") -> Tensor:
        """What arrives; codecs round the coefficients."""
        with torch.autocast(hidden.device.type, enabled=False):
            embedded = embedded.detach().float()
            apart = hidden.float() - embedded
            if torch.is_grad_enabled():
                seen = apart.detach().flatten(0, -2)
                self._power.addmm_(seen.T, seen @ self.basis)
            arrived = embedded + sent(apart @ self.basis, wire, back) @ self.basis.T
        return arrived.to(hidden.dtype)

    @torch.no_grad()
    def follow(self) -> None:
        """Turn the basis towards the principal directions of what was sent since the last time."""
        if self._traffic.basis == "tracked":
            self.basis.copy_(orthonormal(self._power))
        self._power.zero_()


class GradientSum(Protocol):
    """The sum of a stage's gradient over its replicas, with what each remembers from one iteration to the next."""

    def add(self, replica: int, learning: Sequence[FlatParams]) -> None:
        """Take the gradients that this replica has found. After the last replica they are the sums."""

    def forget(self) -> None:
        """As new."""


def gradient_sum(traffic: Traffic, held: Sequence[FlatParams]) -> GradientSum | None:
    """None: the gradients of all replicas are added up as they are."""
    if traffic.rank:
        return LowRankSum(traffic.rank, held)
    return EncodedSum(traffic.gradients, traffic.parts, held) if traffic.encodes else None


class EncodedSum:
    """The direct exchange of a stage's nodes: all but one send their gradients to that one, which sends the sum back,
    every message encoded, every sender with error feedback (`GradientAverager`).

    On nodes every replica is the root of a piece. Here the last one is that of the whole gradient: replicas get
    microbatches by chance, so that which of them it is makes no difference.
    """

    def __init__(self, codec: str, replicas: int, held: Sequence[FlatParams]) -> None:
        self._codec = CODECS[codec]
        self._remainders = {each: [torch.zeros_like(each.gradient) for _ in range(replicas)] for each in held}
        self._sums = {each: torch.zeros_like(each.gradient) for each in held}

    @torch.no_grad()
    def add(self, replica: int, learning: Sequence[FlatParams]) -> None:
        for each in learning:
            remainders, total, gradient = self._remainders[each], self._sums[each], each.gradient
            if replica == len(remainders) - 1:
                gradient.add_(total)
            whole = gradient.add_(remainders[replica])
            told = self._codec.rounded(whole).float()
            if self._codec.error_feedback:
                torch.sub(whole, told, out=remainders[replica])
            if replica == len(remainders) - 1:
                gradient.copy_(told)
                total.zero_()
            else:
                total.add_(told)
                gradient.zero_()

    def forget(self) -> None:
        for remainders in self._remainders.values():
            for each in remainders:
                each.zero_()


class LowRankSum:
    """PowerSGD (Vogels, Karimireddy and Jaggi, 2019): of a matrix, replicas sum its product with the factor of the
    iteration before, then that of its transpose with what came out, made orthonormal.

    Both sums are exact and all of it is linear in the gradient: so the sum of the replicas' gradients, with the sum of
    their errors, is all that counts, and there is one of each here. Vectors, and matrices that are no larger than
    their factors, are summed as they are.
    """

    def __init__(self, rank: int, held: Sequence[FlatParams]) -> None:
        self._rank = rank
        self._remainders = {each: torch.zeros_like(each.gradient) for each in held}
        self._factors: dict[tuple[FlatParams, int], Tensor] = {}
        for each in held:
            for matrix in self._matrices(each):
                self._factors[each, matrix.start] = each.gradient.new_empty(matrix.columns, rank)
        self.forget()

    @torch.no_grad()
    def add(self, replica: int, learning: Sequence[FlatParams]) -> None:  # noqa: ARG002
        alike: dict[tuple[int, int], list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
        for each in learning:
            for matrix in self._matrices(each):
                places = matrix.of(each.gradient), matrix.of(self._remainders[each]), self._factors[each, matrix.start]
                alike[matrix.rows, matrix.columns].append(places)
        for group in alike.values():  # those of one shape together: there are many small steps
            gradients, remainders, factors = (list(each) for each in zip(*group, strict=True))
            whole = torch.stack(gradients) + torch.stack(remainders)
            left = orthonormal(whole @ torch.stack(factors))
            right = whole.mT @ left
            told = left @ right.mT
            torch._foreach_copy_(gradients, list(told))
            torch._foreach_copy_(remainders, list(whole - told))
            torch._foreach_copy_(factors, list(right))

    def _matrices(self, weights: FlatParams) -> list[Matrix]:
        return factored_matrices(((slot.start, slot.shape) for slot in weights.slots), LowRank(self._rank))

    def forget(self) -> None:
        chance = torch.Generator().manual_seed(0)
        for factor in self._factors.values():
            factor.copy_(torch.randn(factor.shape, generator=chance))
        for each in self._remainders.values():
            each.zero_()
