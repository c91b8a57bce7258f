"""The skip schedule of a run (`recipe` in a job): how much of the model a microbatch visits in which iteration, and
what makes up for the rest. Planner, runtime and studies use this one definition.

The share of stages to skip is written as:

    1/3                          a third of the stages, all along
    1/3 until 90%, 0             … and the whole model for the last tenth of the run
    1/2 until 25%, 1/3 until 75%, 1/6 until 90%, 0
    9 x 1/3 + 0                  the whole model in every tenth iteration
    1/3 until 75%, 0 + 1/2       in the last quarter, whole model and half of it by turns
    0 & 2 x 1/2                  a sandwich: in every iteration one microbatch goes whole for two that skip half
    1/3 until 60%, 5 x 0 & 1/2   … and in the last phase five go whole for one that skips half

"+" goes on to the next iteration, "&" stays within it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from typing import Annotated, Literal

from skippipe.errors import UserError
from skippipe.value_ranges import SHARE, Range, check_ranges

Residual = Literal["plain", "scaled"]
Gradients = Literal["visitors", "all"]
USUAL = "1/3 until 65%, 0"
"""The default of training: a last phase with the whole model, begun while the learning rate is still high, wins most of
the loss back (docs/results-learning.md)."""
LONGEST_TURN = 10_000  # iterations after which a turn begins again, at most
LARGEST_MIX = 1000  # parts into which the microbatches of an iteration are divided, at most
DIGITS = 20  # of a number in a recipe that are read

Mix = tuple[Fraction, ...]
"""Shares of the stages to skip within one iteration, each by an equal part of the microbatches; mostly a single one."""

PathLength = int | tuple[int, ...]
"""Stages on the paths of an iteration, stage 0 included: of all paths; or, in an iteration with paths of several
lengths, of each of the equal parts into which its microbatches are divided."""


@dataclass(frozen=True)
class Phase:
    """A phase of the run, in which the same shares are skipped in turn."""

    until: Fraction
    """Share of the run at which the next phase begins."""
    turn: tuple[Mix, ...]
    """What is skipped, iteration after iteration, and again from the start."""


@dataclass(frozen=True)
class SkipSchedule:
    skip: str = ""
    """The share of stages to skip over the run: "1/3"; "1/3 until 90%, 0" (the whole model in the end); "9 x 1/3 + 0"
    (the whole model in every tenth iteration); "0 & 2 x 1/2" (in every iteration a third of the microbatches goes
    through the whole model, the others skip half). Empty: pipeline.skip, all along; if that is empty too, a third
    until 65% of the run, then nothing; with model.weights, nothing all along."""
    grow: str = ""
    """Until this share of the run, as in "40%", all microbatches skip the same stages; these are then made as copies of
    trained ones. So a smaller model is trained first, and grows; "50%, 90%": in two steps, as less is skipped. Empty:
    all stages are there from the start. With "40%", and "1/3 until 60%, 0" as skip, a model trained from random weights
    was the best of all that took less time than the full pipeline."""
    grow_preserving: bool = False
    """Whether the copies add nothing at first: their output projections begin as zero, so the model stays as it was."""
    residual: Residual = "plain"
    """"scaled": what a visited stage adds counts for those that are skipped too, (S−1)/(L−1) times, so that the sum
    stays as large as the whole model's."""
    exposure: list[Annotated[float, Range(0, 10**6, above=True)]] | None = None
    """How often stages 1, 2, … are visited, relative to each other, as in [1.2, 1.1, 1, 0.9, 0.8]; left out: equally
    often (CC3)."""
    swaps: Annotated[float, SHARE] = 0.0
    """Share of the microbatches that visit two neighbouring stages in the other order."""
    gradients: Gradients = "visitors"
    """What gradients are averaged over: those microbatches that visited the stage ("visitors"), or all of them, which
    makes the mean smaller."""
    early_exit: Annotated[float, SHARE] = 0.0
    """Weight of a second loss, of what stage 0 alone predicts; 0: none. Costs the data nodes a second head."""
    bridges: Annotated[int, Range(0, 100_000)] = 0
    """Rank of the bridges: a small residual map of its own for every hop that leaves stages out, in their place; 0:
    there are none."""
    adapters: Annotated[int, Range(0, 100_000)] = 0
    """Rank of the adapters (LoRA) that the linear maps of all layers have for microbatches that skip stages; those that
    visit all stages do not use them. 0: there are none."""
    adapters_by_hop: bool = False
    """Whether a stage has adapters of its own for each number of stages that the hop from it leaves out: 0, 1, … up to
    half of them or more. They share the rank."""
    adapters_shared: Annotated[int, Range(0, 100_000)] = 0
    """Of the rank of adapters by hop, so much is the same for all hops; the rest is divided among them."""
    repeats: Annotated[int, Range(0, 1000)] = 0
    """How many of the stages that a hop leaves out the stage before it takes the place of, after its own turn: its
    layers run once more for each of the first so many, with other adapters. All turns share the rank. 0: of none."""
    distill: Annotated[float, SHARE] = 0.0
    """Weight of what the whole model says in the loss of microbatches that skip stages (distillation): the rest is that
    of the text itself. They pass the whole model, too, forward only. 0: none."""
    distill_hidden: Annotated[float, Range(0, 1000)] = 0.0
    """Weight of the distance between hidden states, added to the loss of microbatches that skip stages: what a visited
    stage hands on, and what the whole model has where the path goes on. 0: none."""
    heal: str = ""
    """From this share of the run on, as in "95%", only bridges and adapters learn, all else is frozen: what is skipped
    from then on makes a finished model robust. The learning rate comes down before, and again after. In a job "0%":
    those that 'skippipe heal' has put beside model.weights learn all along. Empty: all learn all along."""

    def __post_init__(self) -> None:
        _ = self.phases
        self._check_growth()
        check_ranges(self, "recipe")
        if self.bridges and self.swaps:
            raise UserError("recipe.bridges: they lead forward: leave out recipe.swaps, or the bridges")
        if self.adapters_by_hop and not self.adapters:
            raise UserError("recipe.adapters_by_hop: there are none; add recipe.adapters, such as 512")
        if self.adapters_shared and not (self.adapters_by_hop and self.adapters_shared < self.adapters):
            raise UserError("recipe.adapters_shared: goes with recipe.adapters_by_hop, and is less than their rank")
        if self.repeats and not self.adapters:
            how = (
                "in a job with recipe.heal both are those beside model.weights: leave it out" if self.heal else "add it"
            )
            raise UserError(f"recipe.repeats: turns share the rank of recipe.adapters, which is not given; {how}")
        if self.repeats and (self.adapters_by_hop or self.adapters % (self.repeats + 1)):
            turns = self.repeats + 1
            raise UserError(f"recipe.repeats: {turns} turns share the rank of recipe.adapters: a multiple, not by hop")
        if self.distill_hidden and not self.distill:
            raise UserError("recipe.distill_hidden: there is no teacher; add recipe.distill, such as 0.9")
        if self.heal and self.growth and self.heal_at <= self.grown_at:
            raise UserError(f"recipe.heal: {self.heal} must be after the model has grown")
        if self.exposure == []:
            raise UserError("recipe.exposure: the list is empty; give a number for each stage but the first")

    def _check_growth(self) -> None:
        if self.grow_preserving and not self.grow:
            raise UserError("recipe.grow_preserving: nothing grows; add recipe.grow, such as 85%")
        begin, before = Fraction(0), Fraction(1)
        if list(self.growth) != sorted(set(self.growth)):
            raise UserError(f"recipe.grow: {self.grow}: a model that grows again does so later; give shares in order")
        for step in self.growth:
            shares = {share for phase in self._between(begin, step) for mix in phase.turn for share in mix}
            if len(shares) != 1:
                raise UserError(f"recipe.grow: until {self.grow} one share must be skipped all along, and be given")
            if begin and min(shares) >= before:
                raise UserError("recipe.grow: a model that grows again skips less until then")
            begin, before = step, min(shares)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of `skip`; empty: none is given."""
        return parse_skip(self.skip) if self.skip.strip() else ()

    @cached_property
    def growth(self) -> tuple[Fraction, ...]:
        """Shares of the run at which the model grows."""
        return tuple(parse_share(each.strip(), "recipe.grow") for each in self.grow.split(",")) if self.grow else ()

    @cached_property
    def young_shares(self) -> tuple[Fraction, ...]:
        """For each step of the growth, the share of the stages that are not there until then."""
        begins = (Fraction(0), *self.growth)
        phases = (self._between(begin, end)[0] for begin, end in zip(begins, self.growth, strict=False))
        return tuple(phase.turn[0][0] for phase in phases)

    def when_grown(self) -> SkipSchedule:
        """The schedule of the whole model, which follows when it has grown."""
        pieces = zip(self.phases, self.skip.split(","), strict=True)
        left = [text.strip() for phase, text in pieces if phase.until > self.grown_at]
        return replace(self, grow="", grow_preserving=False, skip=", ".join(left))

    @property
    def grown_at(self) -> Fraction:
        """Share of the run after which all stages are there."""
        return self.growth[-1] if self.growth else Fraction(0)

    @cached_property
    def heal_at(self) -> Fraction:
        """Share of the run after which only bridges and adapters learn."""
        return parse_share(self.heal, "recipe.heal") if self.heal else Fraction(1)

    @property
    def teacher(self) -> str:
        """What microbatches that skip stages learn from the whole model: one of `workload.TEACHERS`."""
        return "hidden" if self.distill_hidden else "logits" if self.distill else ""

    @property
    def hop_rank(self) -> int:
        """Of the rank of the adapters, what is divided among hops of different length."""
        return self.adapters - self.adapters_shared if self.adapters_by_hop else 0

    def heals(self, iteration: int, iterations: int) -> bool:
        return iteration >= math.ceil(self.heal_at * iterations)

    def is_young(self, iteration: int, iterations: int) -> bool:
        return iteration < math.ceil(self.grown_at * iterations)

    def _between(self, begin: Fraction, end: Fraction) -> list[Phase]:
        """Phases of this part of the run."""
        begins = [Fraction(0), *(phase.until for phase in self.phases)]
        pairs = zip(self.phases, begins, strict=False)
        return [phase for phase, start in pairs if start < end and phase.until > begin]

    def visited(self, iteration: int, iterations: int, stages: int, default_length: int) -> PathLength:
        """Stages on the paths of this iteration; `default_length` is the pipeline's own length."""
        return _path_length(self.mix(iteration, iterations, stages, default_length))

    def mix(self, iteration: int, iterations: int, stages: int, default_length: int) -> tuple[int, ...]:
        """Stages on a path, for each of the equal parts into which this iteration's microbatches are divided."""
        for phase in self.phases:
            begins = math.ceil(phase.until * iterations)
            if iteration < begins:
                mix = phase.turn[iteration % len(phase.turn)]
                return tuple(visited_of(share, stages) for share in mix)
        return (
            (default_length,)
            if not self.phases
            else tuple(visited_of(each, stages) for each in self.phases[-1].turn[0])
        )

    def lengths(self, iterations: int, stages: int, default_length: int, first: int = 0) -> Counter[int]:
        """How many iterations, from the `first` one on, have paths of which length; one with several lengths counts for
        each by its part."""
        exact = self.path_shares(iterations, stages, default_length, first)
        return Counter({length: round(share * (iterations - first)) for length, share in exact.items()})

    def path_shares(self, iterations: int, stages: int, default_length: int, first: int = 0) -> dict[int, Fraction]:
        """The share of the microbatches of all iterations, from the `first` one on, that have paths of each length."""
        shares: dict[int, Fraction] = {}
        for each, times in self.path_lengths(iterations, stages, default_length, first).items():
            parts = parts_of(each)
            for length in parts:
                shares[length] = shares.get(length, Fraction(0)) + Fraction(times, len(parts) * (iterations - first))
        return shares

    def path_lengths(self, iterations: int, stages: int, default_length: int, first: int = 0) -> Counter[PathLength]:
        """How many iterations have which paths, from the `first` one on. Counted by turns, as there may be a thousand
        million."""
        if not self.phases:
            return Counter({default_length: iterations - first})
        found: Counter[PathLength] = Counter()
        begin = first
        for phase in self.phases:
            end = math.ceil(phase.until * iterations)
            turn = len(phase.turn)
            for number in range(begin, min(end, begin + turn)):  # each place in the turn, as often as it comes
                mix = [visited_of(share, stages) for share in phase.turn[number % turn]]
                found[_path_length(mix)] += len(range(number, end, turn))
            begin = max(begin, end)
        return found

    def residual_scale(self, stages: int, visited: int) -> float:
        """By what the contribution of a visited stage, other than stage 0, is multiplied."""
        if self.residual == "plain" or visited <= 1:
            return 1.0
        return (stages - 1) / (visited - 1)

    def divisor(self, stage_microbatches: int, microbatches: int) -> int:
        """What a stage's sum of gradients is divided by; 0: no microbatch visited it, and it takes no step."""
        return microbatches if stage_microbatches and self.gradients == "all" else stage_microbatches


def visited_of(skipped: Fraction, stages: int) -> int:
    """Stages on a path that leaves out this share of them, as near as whole stages come."""
    return max(1, stages - math.floor(skipped * stages + Fraction(1, 2)))


def mean_repeats(stages: int, paths: Mapping[int, Fraction | int], repeats: int) -> float:
    """How often a visited stage takes the place of stages that the hop from it leaves out, up to so many `repeats`: the
    mean over all visits, where so many `paths` have each length, and visit all stages after stage 0 equally often.

    A path through L of S stages divides S − L among L hops, each way as often: a hop gets k or more of them in
    C(S − k − 1, L − 1) of C(S − 1, L − 1) ways.
    """
    times = sum(
        count * Fraction(visited * math.comb(stages - k - 1, visited - 1), math.comb(stages - 1, visited - 1))
        for visited, count in paths.items()
        for k in range(1, min(repeats, stages - visited) + 1)
    )
    return float(times / sum(visited * count for visited, count in paths.items()))


def _path_length(mix: Sequence[int]) -> PathLength:
    return tuple(mix) if len(set(mix)) > 1 else mix[0]


def parts_of(length: PathLength) -> tuple[int, ...]:
    """Stages on a path, for each of the equal parts of an iteration's microbatches."""
    return length if isinstance(length, tuple) else (length,)


def path_length_text(length: PathLength) -> str:
    """As in "4", or "6 & 2 x 3" where one microbatch visits 6 stages for two that visit 3."""
    runs = [(each, len(list(same))) for each, same in groupby(parts_of(length))]
    return " & ".join(f"{count} x {each}" if count > 1 else str(each) for each, count in runs)


def deal_lengths(mix: Sequence[int], microbatches: int) -> list[int]:
    """The length of path of each microbatch; where parts do not come out even, the first ones have one more."""
    share, rest = divmod(microbatches, len(mix))
    counts = [share + (number < rest) for number in range(len(mix))]
    return [length for length, count in zip(mix, counts, strict=True) for _ in range(count)]


def young_stages(stages: int, visited: int) -> tuple[int, ...]:
    """The stages of a model that has yet to grow: the first ones and the last."""
    return (*range(visited - 1), stages - 1)


def donors(stages: int, visited: int) -> dict[int, int]:
    """New stages of a model that grows from `visited` stages to `stages`, and the trained stage, of these, that each is
    a copy of.

    What lies between the first stage and the last is repeated as a block, which works better than to double stage by
    stage (Du et al., "Stacking Your Transformers", 2024); of two stages, the last is.
    """
    if visited < 2:
        raise UserError("recipe.grow: a model of one stage has none after the first to copy")
    return {new: 1 + (new - (visited - 1)) % max(1, visited - 2) for new in range(visited - 1, stages - 1)}


def parse_skip(text: str) -> tuple[Phase, ...]:
    phases = parse_phases(text, "recipe.skip", "0")
    return tuple(Phase(until, tuple(_turn(shares.split("+")))) for until, shares in phases)


def parse_phases(text: str, where: str, example: str) -> list[tuple[Fraction, str]]:
    """Parse "this until 65%, that": the share of the run at which each phase ends, and what it has. `example` is what a
    last phase might have."""
    phases: list[tuple[Fraction, str]] = []
    parts = [part.strip() for part in text.split(",")]
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        what, _, end = (piece.strip() for piece in part.partition(" until "))
        if last and end:
            raise UserError(f"{where}: '{part}' ends before the run does: say what follows, as in '{part}, {example}'")
        if not last and not end:
            raise UserError(f"{where}: '{part}' has no end: write '{part} until 75%'")
        until = Fraction(1) if last else parse_share(end, where)
        if phases and until <= phases[-1][0]:
            raise UserError(f"{where}: '{part}' ends no later than what comes before it")
        phases.append((until, what))
    return phases


def _turn(pieces: Iterable[str]) -> list[Mix]:
    turn: list[Mix] = []
    for piece in pieces:
        if "&" in piece:
            times, mix = 1, _mix(piece)
        else:
            times, share = _times(piece)
            mix = (share,)
        turn += [mix] * min(times, LONGEST_TURN + 1)
        if not 0 < len(turn) <= LONGEST_TURN:
            raise UserError(f"recipe.skip: '{piece.strip()}': a turn has from 1 to {LONGEST_TURN:,} iterations")
    return turn


def _mix(piece: str) -> Mix:
    parts = [_times(part) for part in piece.split("&")]
    if min(times for times, _ in parts) < 1 or sum(times for times, _ in parts) > LARGEST_MIX:
        raise UserError(f"recipe.skip: '{piece.strip()}': microbatches are divided into 1 to {LARGEST_MIX:,} parts")
    return tuple(share for times, share in parts for _ in range(times))


def _times(piece: str) -> tuple[int, Fraction]:
    times, share = re.fullmatch(r"\s*(?:(\d+)\s*x\s+)?(.*?)\s*", piece).groups()  # type: ignore[union-attr]
    return int((times or "1")[:DIGITS]), parse_share(share, "recipe.skip")  # more digits are out of range as much


def parse_share(text: str, where: str) -> Fraction:
    """Parse a share: 0.33, 33% or 1/3."""
    number = text.removesuffix("%").strip()
    try:
        if "e" in number.lower() or len(number) > 2 * DIGITS:  # 1e999999999 takes minutes, and all memory
            raise ValueError
        share = Fraction(number) / (100 if text.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        shown = text if len(text) <= 2 * DIGITS else f"{text[:DIGITS]}…"
        raise UserError(f"{where}: '{shown}' is not a share; write 0.33, 33% or 1/3") from None
    if not 0 <= share < 1:
        raise UserError(f"{where}: {text} is not between 0 and 1; write 0.33, 33% or 1/3")
    return share
