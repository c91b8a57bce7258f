"""What codecs cost a model, in nats of its loss, and what of that a plan may spend.

A price is what the loss of a run would rise by if all values of a kind went through the codec. Errors of rounding are
small and independent of each other, so what they add to the loss adds up, and a codec on a part of the values costs
that part of its price. Prices are for one model and its recipe: who has measured their own gives them in a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from skippipe.codecs import CODECS, GRADIENTS, LOW_RANK, compared_bytes, gradient_codec
from skippipe.constraints import circle
from skippipe.errors import Infeasible, UserError
from skippipe.json_fields import Fields, read_as
from skippipe.plan import Plan
from skippipe.toml_config import read_table
from skippipe.value_ranges import NATS
from skippipe.workload import Workload

ROUNDING = 1e-9  # of a budget: sums of shares are not exact

Message = tuple[int, int, int]
"""Pass (0: activations, 1: their gradients), sender and receiver."""


class Price(NamedTuple):
    """Nats that a codec adds to the loss where all values of a kind go through it; None: nobody has measured it."""

    activations: float | None = None
    activation_gradients: float | None = None
    weight_gradients: float | None = None


Prices = Mapping[str, Price]
DEFAULT_PRICES: Prices = {
    "fp32": Price(0.0, 0.0, 0.0),
    "bf16": Price(0.0, 0.0, 0.0005),  # weight gradients: no dearer than int8
    "int8": Price(0.0005, 0.0005, 0.0005),
    "fp8": Price(0.004, 0.004, None),
    "int6": Price(0.006, None, None),
    "int6-stochastic": Price(None, 0.002, None),
    "int4": Price(0.137, None, 0.001),
    "int4-stochastic": Price(None, 0.005, None),
    "int4-rank8": Price(0.051, None, None),
    "int4-rank8-stochastic": Price(None, 0.005, None),
    "int2": Price(None, None, 0.042),
    "rank-64": Price(None, None, 0.004),
}
"""By codec, for 46M parameters. From three seeds of 105M tokens (studies/codecs-105m.toml): int8 for all three kinds,
int4 and rank-64 for weight gradients, and int6, which has what int4-stochastic and int4 leave of the 0.012 that they
cost together. int8 and int4 were no worse than without (−0.0006 and −0.0011 ± 0.0008): they have the least prices that
three seeds can tell from nothing. The others are from one seed of 52M tokens (studies/codecs.toml). A codec or kind
that is not here has not been measured, and is not chosen unless a file has a price for it."""


def read_prices(path: Path) -> Prices:
    """The default prices, and on top of them those of a TOML file: a table for each codec."""
    return read_as(prices_of, path, read_table)


def prices_of(table: Any) -> Prices:
    found = dict(DEFAULT_PRICES)
    for codec, row in table.items():
        if codec not in GRADIENTS:
            raise UserError(f"'{codec}' is none of {', '.join(GRADIENTS)}")
        entry = Fields(row, codec)
        kinds = Price._fields[2:] if codec in LOW_RANK else Price._fields
        given = {name: entry.number(name, NATS) for name in kinds if entry.mentions(name)}
        if codec in CODECS and entry.mentions("hops"):  # activations and their gradients were measured together
            if {"activations", "activation_gradients"} & given.keys():
                raise UserError(f"{codec}.hops: says what both passes cost together: leave it or the others out")
            given["activations"] = half = entry.number("hops", NATS) / 2
            back = gradient_codec(codec)
            found[back] = found.get(back, Price())._replace(activation_gradients=half)
        entry.close()
        found[codec] = found.get(codec, Price())._replace(**given)
    return found


def priced_gradients(prices: Prices, *, low_rank: bool = True) -> list[str]:
    """What weight gradients can be averaged as, of all that have a price; `low_rank`: also as factors."""
    priced = [codec for codec in GRADIENTS if prices.get(codec, Price()).weight_gradients is not None]
    return [codec for codec in priced if low_rank or codec not in LOW_RANK]


@dataclass(frozen=True)
class CodecBudget:
    """Codecs that will do, and what they may cost together."""

    nats: float
    prices: Prices
    hops: tuple[str, ...]
    """Codecs for activations and their gradients."""
    gradients: tuple[str, ...]
    """Codecs for weight gradients while they are averaged."""

    @classmethod
    def of(cls, nats: float, prices: Prices, hops: Sequence[str] = (), gradients: Sequence[str] = ()) -> CodecBudget:
        """The budget; without codecs, all that have a price. UserError if one has none."""
        hops = hops or [codec for codec in CODECS if prices.get(codec, Price()).activations is not None]
        gradients = gradients or priced_gradients(prices)
        for codecs, kind, what in ((hops, 0, "activations"), (gradients, 2, "weight gradients")):
            for codec in codecs:
                if prices.get(codec, Price())[kind] is None:
                    raise UserError(f"{codec} has no price for {what}: measure it and give it one, or leave it out")
        budget = cls(nats, prices, tuple(hops), tuple(gradients))
        if budget.uniform_nats(*budget.usual) > nats + ROUNDING:
            raise Infeasible(
                f"the cheapest codecs, {' for hops and '.join(budget.usual)} for gradients, cost "
                f"{budget.uniform_nats(*budget.usual):g} nats: allow as much, or other codecs"
            )
        return budget

    def uniform_nats(self, hop: str, gradient: str) -> float:
        """What these cost on all links and stages; infinite if a price is missing."""
        kinds = (self._price(hop, 0), self._price(gradient_codec(hop), 1), self._price(gradient, 2))
        return sum(inf if nats is None else nats for nats in kinds)

    def _price(self, codec: str, kind: int) -> float | None:
        return self.prices.get(codec, Price())[kind]

    @property
    def usual(self) -> tuple[str, str]:
        """The cheapest codecs of hops and of weight gradients, and of several the smallest: where nothing is gained by
        others."""
        hop = min(self.hops, key=lambda codec: (self.uniform_nats(codec, "fp32"), compared_bytes(codec)))
        return hop, min(
            self.gradients, key=lambda codec: (self.prices[codec].weight_gradients or 0.0, compared_bytes(codec))
        )

    def options(self, kind: int) -> list[tuple[str, float]]:
        """Codecs of a kind of values, in the order of `Price`, with their prices: the fewest bytes first, and each
        cheaper than the one before."""
        codecs = (self.hops, (*self.hops, *map(gradient_codec, self.hops)), self.gradients)[kind]
        priced = [(codec, nats) for codec in codecs if (nats := self._price(codec, kind)) is not None]
        found: list[tuple[str, float]] = []
        for codec, nats in sorted(priced, key=lambda option: (compared_bytes(option[0]), option[1])):
            if not found or nats < found[-1][1]:
                found.append((codec, nats))
        return found

    def workloads(
        self, workload: Workload, visited: int, sizes: Sequence[int], layers: Sequence[int]
    ) -> list[Workload]:
        """Workloads to search plans for: with the smallest codecs on all links and stages; and, if those cost too much,
        with those that send the fewest bytes of what can be had everywhere."""
        pairs = [
            (hop, gradient)
            for hop in dict.fromkeys([self.options(0)[0][0], *self.hops])
            for gradient in dict.fromkeys([self.options(2)[0][0], *self.gradients])
        ]
        having = {pair: _with(workload, *pair) for pair in pairs}

        def sent_bytes(pair: tuple[str, str]) -> int:
            work = having[pair]
            hops = 2 * visited * work.microbatches * work.activation_bytes
            averaged = (
                2 * (size - 1) * work.gradient_bytes(stage, count)
                for stage, (size, count) in enumerate(zip(sizes, layers, strict=True))
            )
            return hops + sum(averaged)

        within = [pair for pair in pairs if self.uniform_nats(*pair) <= self.nats + ROUNDING]
        return [having[pair] for pair in dict.fromkeys([pairs[0], min(within, key=sent_bytes)])]


def _with(workload: Workload, hop: str, gradient: str) -> Workload:
    return replace(workload, wire_dtype=hop, gradient_dtype=gradient, wire_dtypes=(), gradient_dtypes=())


def message_shares(plan: Plan) -> dict[Message, float]:
    """The share of all values of a pass that goes over each link."""
    counts: Counter[Message] = Counter()
    for lane in plan.lanes:
        for a, b in circle(lane.path):
            counts[0, a, b] += lane.microbatches
            counts[1, b, a] += lane.microbatches
    whole = counts.total() / 2
    return {message: count / whole for message, count in sorted(counts.items())}


def stage_shares(plan: Plan) -> dict[int, float]:
    """The share of all trained parameters that each stage averages; a single node has nothing to send."""
    counts = [plan.workload.trained_parameters(stage, layers) for stage, layers in enumerate(plan.layers)]
    return {index: counts[index] / sum(counts) for index, stage in enumerate(plan.stages) if len(stage.nodes) > 1}


def plan_nats(plan: Plan, prices: Prices) -> float:
    """What the codecs of a plan cost; UserError if one of them has no price."""
    found = [(plan.workload.stage_gradient_dtype(stage), 2, part) for stage, part in stage_shares(plan).items()]
    for (kind, a, b), part in message_shares(plan).items():
        found.append((plan.hop_dtype(a, b, backward=bool(kind)), kind, part))
    total = 0.0
    for codec, kind, part in found:
        nats = prices.get(codec, Price())[kind]
        if nats is None:
            raise UserError(f"{codec} has no price for {Price._fields[kind].replace('_', ' ')}")
        total += nats * part
    return total
