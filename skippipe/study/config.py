"""The study file: variants of training, and what they have in common."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from skippipe.codecs import CODECS, CodecId, GradientsId, gradient_codec
from skippipe.errors import UserError
from skippipe.optim import OPTIMIZERS
from skippipe.optim.config import OptimConfig
from skippipe.skip_schedule import SkipSchedule, deal_lengths, parse_phases, parse_share, visited_of
from skippipe.toml_config import read_toml
from skippipe.value_ranges import (
    BUDGET_S,
    DRAWS,
    ITERATIONS,
    LAYERS,
    MICROBATCHES,
    SAMPLES,
    SEED,
    SEQUENCE,
    STAGES,
    TOKENS,
    VOCABULARY,
    Choices,
    Range,
    check_ranges,
)

LATER = (
    "grow_preserving",
    "bridges",
    "heal",
    "adapters",
    "adapters_by_hop",
    "adapters_shared",
    "repeats",
    "distill",
    "distill_hidden",
)
"""Recipe settings that older results do not have: left out where they are not set."""
Rule = Literal["", "CC1", "CC2", "CC3"]
DIGITS = 6  # of a rank
RANK = Range(0, 10**5)
MOST_ITERATIONS = Range(1, 10**6)  # of a run: reports read every single one


@dataclass(frozen=True)
class StudyBatch:
    """The batch of an iteration."""

    sequence: Annotated[int, SEQUENCE] = 512
    """Tokens of a sample."""
    samples: Annotated[int, SAMPLES] = 2
    """Samples of a microbatch."""
    microbatches: Annotated[int, MICROBATCHES] = 30
    """Microbatches of an iteration."""

    @property
    def tokens(self) -> int:
        return self.sequence * self.samples * self.microbatches


@dataclass(frozen=True)
class EvalSettings:
    """When and on how much text models are evaluated."""

    every: Annotated[int, ITERATIONS] = 50
    """Iterations from one evaluation on held-out text to the next."""
    tokens: Annotated[int, TOKENS] = 131_072
    """Tokens of the first text, for each of these."""
    final_tokens: Annotated[int, TOKENS] = 1_048_576
    """Tokens of every text in the end, for the whole model."""
    part_tokens: Annotated[int, TOKENS] = 131_072
    """Tokens of every text, for each part of the model."""
    keep: list[str] = field(default_factory=lambda: ["5/6", "2/3", "1/2"])
    """Shares of the stages of which parts are evaluated in the end, as fractions of the whole."""
    draws: Annotated[int, DRAWS] = 12
    """Parts to draw of each share; all there are, if they are fewer."""
    wire: list[str] = field(default_factory=list)
    """Codecs: with each of them on all hops, parts are evaluated once more."""
    questions: Annotated[int, Range(0, 100_000)] = 0
    """Questions of each kind to make of every text in the end, at most, for the whole model and its parts; 0: none."""

    def __post_init__(self) -> None:
        for share in self.keep:
            parse_share(share, "measuring.keep")
        for each in self.wire:
            _check_codec(each, "measuring.wire")


@dataclass(frozen=True)
class PlanSettings:
    """The cluster on which iterations are planned, for their seconds."""

    cluster: str = "published20"
    """A built-in example, a preset, or a cluster file."""
    timing: Literal["contention-only", "full"] = "contention-only"
    budget_s: Annotated[float, BUDGET_S] = 30.0
    """Seconds of planning for each plan."""
    wire: CodecId = "bf16"
    """Codec of activations on all hops; their gradients have the one that goes with it."""
    gradients: GradientsId = "fp32"
    """Codec of weight gradients while they are averaged."""

    def __str__(self) -> str:
        return ", ".join([self.timing, *self.codecs])

    @property
    def codecs(self) -> list[str]:
        """What is not as usual on the way between nodes, as people read it."""
        usual = PlanSettings
        hops = [f"{self.wire} hops"] if self.wire != usual.wire else []
        return hops + ([f"{self.gradients} gradients"] if self.gradients != usual.gradients else [])


class HopCodecs(NamedTuple):
    """Ids of codecs; empty: nothing is rounded."""

    wire: str = ""
    """Of activations."""
    back: str = ""
    """Of their gradients."""


@dataclass(frozen=True)
class Traffic:
    """What is rounded on its way between nodes; ids of codecs, or empty: nothing is."""

    wire: str = ""
    """Codec of activations on a hop; "bf16 until 65%, int4": one after another."""
    wire_back: str = ""
    """Codec of their gradients on the way back, or several, likewise; empty: the one that goes with it."""
    gradients: str = ""
    """Codec of weight gradients while they are averaged, in a direct exchange and with error feedback; or "rank-16":
    factors of this rank of every matrix (PowerSGD). In older results that is "rank 16"."""
    replicas: Annotated[int, MICROBATCHES] = 1
    """Nodes that hold each stage. Each gets an equal part of the microbatches, with paths that keep the rules."""
    subspace: Annotated[int, RANK] = 0
    """Hops carry so many numbers a token: activations without the token's embedding, which the receiver adds again,
    projected on a basis of this rank; their gradients likewise. 0: hops carry all of them."""
    basis: Literal["tracked", "fixed"] = "tracked"
    """That basis: after every iteration the principal directions of what was sent, as far as one step of a power
    iteration finds them; or random, all along."""

    def __post_init__(self) -> None:
        check_ranges(self, "traffic")
        if self.basis != "tracked" and not self.subspace:
            raise UserError("traffic.basis: needs traffic.subspace, the rank of the basis")
        for name in ("wire", "wire_back"):
            for _, codec in self._phases(name):
                _check_codec(codec, f"traffic.{name}")
        if self.gradients and not self.rank:
            _check_codec(self.gradients, "traffic.gradients")
        if self.wire_back and not self.wire:
            raise UserError("traffic.wire_back: needs traffic.wire")

    def _phases(self, name: str) -> list[tuple[Fraction, str]]:
        """Codecs of `wire` or `wire_back`, and the share of the run at which each gives way to the next."""
        text = getattr(self, name)
        return parse_phases(text, f"traffic.{name}", "int4") if text else []

    def hops(self, iteration: int = 0, iterations: int = 1) -> HopCodecs:
        """The codecs of hops in an iteration of so many; empty: none."""
        wire, back = (
            next((codec for until, codec in self._phases(name) if iteration < ceil(until * iterations)), "")
            for name in ("wire", "wire_back")
        )
        return HopCodecs(wire, back or (gradient_codec(wire) if wire else ""))

    @property
    def back_text(self) -> str:
        """As `wire_back`, with the codecs that go with those of `wire` where it is empty."""
        pairs = [(until, gradient_codec(codec)) for until, codec in self._phases("wire")]
        texts = [codec if until == 1 else f"{codec} until {float(100 * until):g}%" for until, codec in pairs]
        return self.wire_back or ", ".join(texts)

    @property
    def settings(self) -> dict[str, Any]:
        """As results have them: without a subspace, where there is none, as older ones."""
        found = asdict(self)
        if not self.subspace:
            del found["subspace"], found["basis"]
        return found

    @property
    def rank(self) -> int:
        """Of the factors that are averaged instead of matrices; 0: there are none."""
        kind, _, rank = self.gradients.replace(" ", "-").partition("-")
        return int(rank) if kind == "rank" and rank.isdecimal() and len(rank) < DIGITS else 0

    @property
    def encodes(self) -> bool:
        """Whether the gradient of each replica is rounded by itself."""
        return bool(self.gradients) and not self.rank and not CODECS[self.gradients].lossless

    @property
    def parts(self) -> int:
        """Into which the microbatches of an iteration are divided, with a backward pass for each."""
        return self.replicas if self.encodes else 1


def _check_codec(codec: str, place: str) -> None:
    if codec not in CODECS:
        raise UserError(f"{place}: there is no codec '{codec}', but {', '.join(CODECS)}")


@dataclass(frozen=True)
class Variant:
    """One way to train the model."""

    name: str
    recipe: SkipSchedule = field(default_factory=lambda: SkipSchedule(skip="0"))
    """How stages are skipped and what makes up for it."""
    stages: Annotated[int, STAGES] = 6
    model: str = ""
    """A model other than the study's."""
    layers: Annotated[int, Range(0, LAYERS.most)] = 0
    """Layers of the model; 0: as its configuration has them. Fewer make a smaller dense model to compare with."""
    tokens: Annotated[int, Range(0, TOKENS.most)] = 0
    """Tokens to train on; 0: the study's."""
    rate: Annotated[float, Range(0, 100)] = 0.0
    """The highest learning rate; 0: the study's."""
    optimizer: Annotated[str, Choices(("", *OPTIMIZERS))] = ""
    """The optimizer; empty: the study's."""
    heal_rate: Annotated[float, Range(0, 100, above=True)] = 1.0
    """By what the learning rate is multiplied while only bridges and adapters learn."""
    heal_optimizer: Annotated[str, Choices(("", *OPTIMIZERS))] = ""
    """The optimizer of bridges and adapters; empty: that of the rest."""
    heal_split: Annotated[int, MICROBATCHES] = 1
    """Steps that are taken in an iteration while only bridges and adapters learn, each with an equal part of the
    microbatches."""
    heal_passes: Annotated[int, ITERATIONS] = 1
    """How often the microbatches of an iteration are sent, on other paths each time, while only these learn."""
    heal_epochs: Annotated[int, ITERATIONS] = 1
    """How often the text is gone over while only these learn, from its first to its last and on other paths each time:
    so much less of it there is."""
    heal_drawn: Annotated[float, Range(0, 1)] = 0.0
    """Share of the tokens that are drawn anew, each from what the whole model predicts at its place, where only these
    have learned from the text before, in another pass or epoch; with one pass and one epoch, of all text while only
    these learn: training may have had it before."""
    heal_fit: Annotated[int, Range(0, 10_000)] = 0
    """When only these begin to learn, bridges and repeats become the maps of their rank that come closest to what they
    stand for, by the hidden states of the whole model on the text of the next so many iterations; 0: they begin as they
    are."""
    breaks: Rule = ""
    """A rule to break on purpose: CC1 (stage 0 is skipped like any other), CC2 (stages come in one of several random
    orders), CC3 (some stages are visited often, others seldom)."""
    traffic: Traffic = Traffic()
    """Codecs between nodes."""
    seeds: list[Annotated[int, SEED]] | None = None
    """Seeds instead of the study's."""

    def __post_init__(self) -> None:
        if not self.recipe.phases:
            raise UserError(f"variant '{self.name}': recipe.skip: say which share of the stages is skipped; '0': none")
        if self.breaks and self.recipe.bridges:
            raise UserError(f"variant '{self.name}': bridges need the rules: leave out 'breaks', or recipe.bridges")
        if self.recipe.heal and not (self.recipe.bridges or self.recipe.adapters):
            raise UserError(
                f"variant '{self.name}': recipe.heal: there is nothing to train; add recipe.adapters or "
                "recipe.bridges, such as 32"
            )
        if self.recipe.heal and not self.recipe.heal_at:
            raise UserError(f"variant '{self.name}': recipe.heal: must be more than 0: a study trains a model first")
        if self.recipe.heal and self.traffic.gradients:
            raise UserError(f"variant '{self.name}': traffic.gradients: not with recipe.heal; leave out one of them")
        if self.heal_epochs > 1 and not self.recipe.heal:
            raise UserError(
                f"variant '{self.name}': heal_epochs: add recipe.heal, from where on text is gone over again"
            )
        if self.heal_drawn and not self.recipe.heal:
            raise UserError(f"variant '{self.name}': heal_drawn: add recipe.heal, from where on tokens are drawn")
        if self.heal_fit and not (self.recipe.heal and (self.recipe.bridges or self.recipe.repeats)):
            raise UserError(
                f"variant '{self.name}': heal_fit: add recipe.heal, and bridges or repeats, which are fitted"
            )


@dataclass(frozen=True)
class Study:
    """A study file."""

    name: str
    variant: list[Variant]
    model: str = "llama-46m"
    """A preset, a Hugging Face config.json or its folder."""
    train: list[str] = field(default_factory=lambda: ["classics"])
    """Texts (.txt, .xz), or one folder with prepared tokens."""
    tests: list[str] = field(default_factory=lambda: ["classics-val"])
    """Held-out texts, likewise, as 'name=folder'; the first is evaluated while training."""
    vocabulary: Annotated[int, VOCABULARY] = 2048
    """Size of the tokenizer to train, if `train` is not a folder of tokens."""
    tokens: Annotated[int, TOKENS] = 100_000_000
    """Tokens to train on."""
    seeds: list[Annotated[int, SEED]] = field(default_factory=lambda: [0])
    batch: StudyBatch = StudyBatch()
    learning: OptimConfig = field(default_factory=lambda: OptimConfig(rate=1e-3, warmup=100))
    measuring: EvalSettings = EvalSettings()
    planned: PlanSettings = PlanSettings()

    def __post_init__(self) -> None:
        names = [each.name for each in self.variant]
        if not names or len(set(names)) < len(names):
            raise UserError("variant: a study has one or more, each with a name of its own")
        for each in self.variant:
            left = self.batch.microbatches
            for place, parts in (("heal_split", each.heal_split), ("traffic.replicas", each.traffic.replicas)):
                if left % parts:
                    raise UserError(
                        f"variant '{each.name}': {place}: {left} microbatches do not divide into {parts} equal parts"
                    )
                left //= parts
        for run in self.runs:
            MOST_ITERATIONS.check(run.iterations, f"variant '{run.variant.name}': iterations that its tokens make")

    @property
    def runs(self) -> list[StudyRun]:
        """Seed by seed, so that an unfinished study has some of everything."""
        found = [
            (seed, number, each)
            for number, each in enumerate(self.variant)
            for seed in (self.seeds if each.seeds is None else each.seeds)
        ]
        return [StudyRun(self, each, seed) for seed, _, each in sorted(found, key=lambda run: run[:2])]


@dataclass(frozen=True)
class StudyRun:
    """One variant with one seed."""

    study: Study
    variant: Variant
    seed: int

    @property
    def iterations(self) -> int:
        return max(1, round((self.variant.tokens or self.study.tokens) / self.study.batch.tokens))

    @property
    def learning(self) -> OptimConfig:
        chosen, iterations = self.study.learning, self.heals_at
        warmup = min(chosen.warmup, max(1, iterations // 10))
        rate, optimizer = self.variant.rate or chosen.rate, self.variant.optimizer or chosen.optimizer
        return replace(chosen, optimizer=optimizer, rate=rate, warmup=warmup, iterations=max(iterations, warmup + 1))

    @property
    def stand_in_learning(self) -> OptimConfig:
        """That of bridges and adapters."""
        return replace(self.learning, optimizer=self.variant.heal_optimizer or self.learning.optimizer)

    def rate(self, iteration: int) -> float:
        """The learning rate; that of healing has a schedule of its own, over what it has of the run."""
        heals_at = self.heals_at
        if iteration < heals_at:
            return self.learning.rate_at(iteration)
        left = self.iterations - heals_at
        warmup = min(self.learning.warmup, max(1, left // 10))
        schedule = replace(self.learning, warmup=warmup, iterations=max(left, warmup + 1))
        return self.variant.heal_rate * schedule.rate_at(iteration - heals_at)

    @property
    def heals_at(self) -> int:
        """Iterations in which the whole model is trained; then only bridges and adapters are."""
        return ceil(self.variant.recipe.heal_at * self.iterations)

    def text_of(self, iteration: int) -> int:
        """The iteration whose text this one has: its own, or while healing one that was there before."""
        begin = self.heals_at
        if iteration < begin or self.variant.heal_epochs == 1:
            return iteration
        return begin + (iteration - begin) % ceil((self.iterations - begin) / self.variant.heal_epochs)

    def is_redrawn(self, iteration: int, sent: int) -> bool:
        """Are tokens of this iteration drawn anew, after its microbatches were sent so many times?"""
        if not self.variant.heal_drawn or iteration < self.heals_at:
            return False
        once = self.variant.heal_passes == self.variant.heal_epochs == 1
        return once or sent > 0 or self.text_of(iteration) != iteration

    def steps(self, iteration: int) -> tuple[int, int]:
        """Parts of the microbatches with a step for each, and how often all of them are sent."""
        heals = iteration >= self.heals_at
        return (self.variant.heal_split, self.variant.heal_passes) if heals else (1, 1)

    def path_lengths(self, iteration: int, parts: int = 1) -> list[int]:
        """Stages on the path of each microbatch of a step that is one of so many."""
        stages = self.variant.stages
        mix = self.variant.recipe.mix(iteration, self.iterations, stages, stages)
        return deal_lengths(mix, self.study.batch.microbatches // parts)

    @property
    def lengths(self) -> dict[int, int]:
        """Stages on a path → how many iterations have such paths."""
        stages = self.variant.stages
        counts = self.variant.recipe.lengths(self.iterations, stages, stages)
        if self.variant.heal_passes > 1:
            healing = range(self.heals_at, self.iterations)
            visits = Counter(length for number in healing for length in self.path_lengths(number))
            for length, count in visits.items():
                counts[length] += round(count * (self.variant.heal_passes - 1) / self.study.batch.microbatches)
        return dict(sorted(counts.items()))

    @property
    def work(self) -> float:
        """Tokens × stages that they visit."""
        visits = sum(length * count for length, count in self.lengths.items())
        return float(max(1, visits) * self.study.batch.tokens)  # the counts of very short runs round to 0

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that the result depends on."""
        study = self.study
        variant = asdict(replace(self.variant, seeds=None))
        for name in LATER:
            if not variant["recipe"][name]:
                del variant["recipe"][name]
        for name in ("heal_rate", "heal_split", "heal_passes", "heal_epochs"):
            if variant[name] == 1:
                del variant[name]
        for name in ("heal_fit", "heal_optimizer", "heal_drawn"):
            if not variant[name]:
                del variant[name]
        variant["traffic"] = self.variant.traffic.settings
        if self.variant.traffic == Traffic():
            del variant["traffic"]
        measuring = asdict(study.measuring)
        if not study.measuring.wire:
            del measuring["wire"]
        if not study.measuring.questions:
            del measuring["questions"]
        del variant["model"], variant["optimizer"]
        return {
            "model": self.variant.model or study.model,
            "variant": variant,
            "iterations": self.iterations,
            "batch": asdict(study.batch),
            "learning": self.learning.to_json(),
            "measuring": measuring,
            "train": [Path(each).name for each in study.train],
            "tests": [each.split("=")[0] for each in study.tests],
        }

    @property
    def key(self) -> str:
        """A hash of settings and seed."""
        return _hash([self.settings, self.seed])

    @property
    def frozen_key(self) -> str:
        """A hash of all that decides the weights with which healing begins, and how they were evaluated until then."""
        settings, recipe = self.settings, asdict(self.variant.recipe)
        lengths = [self.path_lengths(number) for number in range(self.heals_at)]
        young = sum(self.variant.recipe.is_young(number, self.iterations) for number in range(self.heals_at))
        for name in {"skip", "grow", *LATER} - {"bridges"}:
            if name != "grow_preserving" or not recipe[name]:
                del recipe[name]
        if min(map(min, lengths)) == self.variant.stages:
            del recipe["bridges"]  # nothing goes over them before
        del settings["variant"], settings["iterations"]
        settings["measuring"].pop("questions", None)  # they are asked in the end
        variant = self.variant
        traffic = [variant.traffic.settings] if variant.traffic != Traffic() else []
        if variant.heal_optimizer and "bridges" in recipe:  # they have learned before, by it
            recipe["heal_optimizer"] = variant.heal_optimizer
        known = settings, variant.stages, variant.layers, variant.breaks, recipe, lengths, young, self.seed
        return _hash([*known, *traffic])


def _hash(what: Any) -> str:
    return sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def load_study(path: Path) -> Study:
    return read_toml(Study, path)


def read_results(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            raise UserError(f"{path}: line {number} is not JSON; take it out, and its run is done again") from None
    return found


def kept_stages(share: str, stages: int) -> int:
    """Stages that are left of a model of which this share is kept."""
    return visited_of(1 - parse_share(share, "measuring.keep"), stages)
