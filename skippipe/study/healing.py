"""Healing: minutes of training after which a finished model answers well when stages are missing.

The model itself is frozen and stays as it is. Bridges and adapters (see `stand_ins`) learn from it: the part of the
model that a path visits is to say what the whole model says, and its hidden states are to be those of the whole model
where the path goes on. Settings are the best that were tried (docs/results-robust.md); parts of every size, from one
missing stage to half of them, get the same share of the text. From its second time on, the text is partly drawn anew
from the whole model (`redrawn`). New bridges and repeats are fitted to what they stand for before the first step
(`least_squares`). Bridges and adapters that the model has already, of the rank that is asked for, are trained further;
but beside new repeats, bridges are fitted anew.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.random import default_rng
from safetensors import SafetensorError, safe_open
from torch import Tensor

from skippipe.checkpoint.bridges_file import (
    BRIDGES_FILE,
    StandInsInfo,
    fill_stand_ins,
    read_stand_ins,
    write_bridges,
)
from skippipe.checkpoint.format import MANIFEST
from skippipe.data.prepare import prepare
from skippipe.data.token_file import Ids
from skippipe.data.tokenizer import TextTokenizer
from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import StagedModel, layers_of, load, read_outline
from skippipe.inference.eval.evaluate import StepProgress
from skippipe.inference.eval.perplexity import DEFAULT_CONTEXT, Windows, beginning_of, open_text
from skippipe.json_fields import json_text, write_text
from skippipe.model.model_files import INDEX
from skippipe.model.model_spec import check_device
from skippipe.optim.config import OptimConfig
from skippipe.skip_schedule import SkipSchedule
from skippipe.stage_subset import Visits, draw_subsets
from skippipe.study.engine import Engine
from skippipe.study.path_sampling import sample_paths_of_lengths

STAGES, EQUAL_STAGES = 6, range(4, 9)  # of a model that is in one piece; rather than 6, so many that are equal
REPEATS = 1  # where the model has no adapters yet
SMALLEST_RANK, LARGEST_RANK, LARGEST_BRIDGES = 8, 512, 128
RATE, RATE_WIDTH, MOST_RATE = 1e-3, 512, 3e-3  # the learning rate for so many channels; of fewer it is more, up to this
STEP_TOKENS = 5120  # of a step, or a few more
FIT_STEPS, FIT_TOKENS = 8, 16  # whose text what is new is fitted on, at most; tokens of it for a channel
PASSES, MOST_TOKENS = 8, 20_000_000  # by default: so often over the text, but not more
HELD_OUT, HELD_OUT_TOKENS = 20, 16_384  # every 20th window, and up to so many tokens, if no text is given for it
LEAST_WINDOWS = 32  # to learn from
PARTS = 8  # of each size that are measured
DRAWN, DRAWN_AT_ONCE = 0.3, 1024  # share of a text that comes again, and tokens of it
SHOWN_STEPS = 10  # whose mean loss is shown
KINDS = (".safetensors", ".json", ".jinja", ".model", ".tiktoken", ".txt", ".md")
"""How the files of a model folder end that are copied."""


@dataclass(frozen=True)
class HealSettings:
    cut: str | None = None
    """As for `load`; None: as the model was exported, or else in `usual_stages`."""
    rank: int | None = None
    """Rank of the adapters; 0: none. None: that of the adapters which the model has, or else a quarter of its channels,
    up to `LARGEST_RANK`."""
    bridges: int | None = None
    """Rank of the bridges, likewise, up to `LARGEST_BRIDGES`."""
    repeats: int | None = None
    """Of the stages that are missing after a stage, how many it takes the place of; None: as with the adapters that the
    model has, or else `REPEATS`."""
    tokens: int | None = None
    """Tokens to train on; 0: new bridges and repeats are only fitted. None: `PASSES` times all of the text, up to
    `MOST_TOKENS`."""
    sequence: int | None = None
    """Tokens of a sample; None: 512, or as many as the model attends to."""
    rate: float | None = None
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class PartsLoss:
    """Losses of parts of the model that miss the same number of stages."""

    missing: int
    losses: dict[Visits, float]

    @property
    def perplexity(self) -> float:
        return fmean(math.exp(loss) for loss in self.losses.values())

    @property
    def worst(self) -> float:
        return math.exp(max(self.losses.values()))


@dataclass
class Healing:
    """A model that is being healed."""

    engine: Engine
    layers: tuple[int, ...]
    train: Windows
    held_out: Windows
    tokens: int
    """Tokens to train on; 0: new bridges and repeats are only fitted."""
    rate: float
    """The highest learning rate."""
    seed: int
    place: Path
    """The folder of the model."""
    stored: StandInsInfo
    """Bridges and adapters that the folder has."""
    kept: StandInsInfo
    """What of these is trained further; the others are new."""
    steps_done: int = field(init=False, default=0)

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def fits_repeats(self) -> bool:
        return bool(self.engine.recipe.repeats and not self.kept.adapters)

    @property
    def fits_bridges(self) -> bool:
        """Those that the model has, too, if new repeats take over a part of what they stand for."""
        return bool(self.engine.bridges and (self.fits_repeats or not self.kept.bridges))

    @property
    def begins_with(self) -> str:
        """Which bridges and adapters it begins with, and why not with those of the folder."""
        recipe, stored, kept = self.engine.recipe, self.stored, self.kept
        words = []
        for what, rank, theirs, same, repeats in (
            ("bridges", recipe.bridges, stored.bridges, kept.bridges, 0),
            ("adapters", recipe.adapters, stored.adapters, kept.adapters, stored.repeats),
        ):
            other = stored.layers != self.layers
            unlike = f"for stages of {','.join(map(str, stored.layers))} layers" if other else f"of rank {theirs}"
            unlike += f" with repeats {repeats}" if repeats else ""
            why = f" (the model's are {unlike})" if theirs and not same else ""
            whose = f"the model's {what}" if same else f"new {what}" if rank else f"no {what}"
            words.append(whose + (f" of rank {rank}" if rank else "") + why)
        if kept.bridges and self.fits_repeats:
            words[0] += " (fitted anew, beside repeats)"
        alone = "" if self.steps else "; fits them without training"
        return f"begins with {' and '.join(words)}{alone}"

    @property
    def lengths(self) -> list[int]:
        """Stages on the path of each sample of a step. Every length comes equally often; if the step stays small
        enough, so many samples that every stage can be visited equally often, too."""
        length, sizes = self.train.length, len(self._sizes)
        even = sizes * (self.stages - 1)
        count = max(1, STEP_TOKENS // (sizes * length))
        if even * length <= 2 * STEP_TOKENS:
            count = math.ceil(STEP_TOKENS / (even * length)) * (self.stages - 1)
        return [self.stages - missing for missing in self._sizes for _ in range(count)]

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self._step_tokens) if self.tokens else 0

    def run(self, stopped: Sequence[Any], progress: StepProgress) -> None:
        """Fit what is new and take all steps, or those until something is in `stopped`."""
        engine, rows, steps = self.engine, self._rows(), self.steps
        batches = [next(rows) for _ in range(self._fit_steps)]
        if self.fits_bridges or self.fits_repeats:
            texts = (each[:, :-1] for each, _ in batches)
            told = partial(progress, "fitting bridges and adapters")
            engine.fit_stand_ins(texts, bridges=self.fits_bridges, repeats=self.fits_repeats, progress=told)
        generator, warmup = default_rng([self.seed, 1]), min(100, steps // 10)
        schedule = OptimConfig(rate=self.rate, warmup=warmup, iterations=max(steps, warmup + 1), floor=0.05)
        losses: list[Tensor] = []
        for number in range(steps):
            given, again = batches[number] if number < len(batches) else next(rows)
            inputs, labels = given[:, :-1], given[:, 1:]
            if again:
                inputs, labels = redrawn(engine, inputs, labels, DRAWN, (self.seed, 3, number))
            visits = sample_paths_of_lengths(generator, self.lengths, self.stages, engine.recipe)
            rate = schedule.rate_at(number)
            losses.append(engine.iteration(number, inputs, labels, visits, healing=True, rate=rate))
            self.steps_done = number + 1
            if len(losses) == SHOWN_STEPS or self.steps_done == steps:
                mean = float(torch.stack(losses).mean())
                progress(f"healing, loss without stages {mean:.3f}", self.steps_done, steps)
                losses.clear()
            if stopped:
                break

    def measure(self, progress: StepProgress = lambda what, done, of: None) -> list[PartsLoss]:
        """Losses on held-out text of the whole model, and of parts that miss 1, 2, … up to half of the stages."""
        sizes = (0, *self._sizes)
        parts = {missing: draw_subsets(self.stages, self.stages - missing, PARTS, self.seed) for missing in sizes}
        found, done, of = [PartsLoss(missing, {}) for missing in sizes], 0, sum(map(len, parts.values()))
        for each in found:
            for part in parts[each.missing]:
                progress("measuring on held-out text", done, of)
                each.losses[part] = self._loss(part)
                done += 1
        return found

    def write(self, folder: Path) -> Path:
        """Write bridges and adapters; UserError if they cannot be."""
        engine, config = self.engine, self.engine.stages[0].spec.config
        dtype = torch.bfloat16 if config.dtype == torch.bfloat16 else torch.float32
        try:
            folder.mkdir(parents=True, exist_ok=True)
            hop_rank = engine.recipe.hop_rank
            return write_bridges(folder, self.layers, engine.bridges, engine.adapters, hop_rank=hop_rank, dtype=dtype)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / BRIDGES_FILE}: cannot be written: {error}") from None

    def figures(self, before: Sequence[PartsLoss], after: Sequence[PartsLoss], seconds: float) -> dict[str, Any]:
        """What `heal` gives back."""
        engine = self.engine
        return {
            "layers": list(self.layers),
            "bridges": engine.recipe.bridges,
            "adapters": engine.recipe.adapters,
            "repeats": engine.recipe.repeats,
            "new_bridges": self.fits_bridges,
            "new_adapters": bool(engine.adapters and not self.kept.adapters),
            "parameters": sum(each.numel() for stage in engine.stages for _, each in stage.named_weights()),
            "parameters_added": engine.parameters,
            "steps": self.steps_done,
            "steps_wanted": self.steps,
            "tokens": self.steps_done * self._step_tokens,
            "text_tokens": self.train.tokens,
            "held_out_tokens": self.held_out.tokens,
            "seconds": round(seconds, 1),
            "perplexity": [
                {
                    "missing": old.missing,
                    "parts": len(old.losses),
                    "before": round(old.perplexity, 4),
                    "after": round(new.perplexity, 4),
                    "worst_before": round(old.worst, 4),
                    "worst_after": round(new.worst, 4),
                }
                for old, new in zip(before, after, strict=True)
            ],
        }

    @property
    def _step_tokens(self) -> int:
        return len(self.lengths) * self.train.length

    @property
    def _fit_steps(self) -> int:
        """Steps on whose text new bridges and repeats are fitted: the more the wider the linear maps are."""
        widest = max(each.in_features for stage in self.engine.stages for _, each in stage.linear_maps())
        return min(FIT_STEPS, max(1, FIT_TOKENS * widest // self._step_tokens))

    @property
    def _sizes(self) -> range:
        """How many stages are missing."""
        return range(1, self.stages // 2 + 1)

    def _rows(self) -> Iterator[tuple[Tensor, bool]]:
        """The samples of step after step, and whether they have been there before: all windows of the text in random
        order, and again in another one."""
        generator, size, left = default_rng([self.seed, 2]), len(self.lengths), np.empty(0, dtype=np.int64)
        given = 0
        while True:
            while len(left) < size:
                left = np.concatenate([left, generator.permutation(np.array(self.train.numbers))])
            yield self.train.rows(left[:size].tolist()).to(self.engine.device), given >= len(self.train.numbers)
            left, given = left[size:], given + size

    def _loss(self, part: Visits) -> float:
        sums = 0.0
        for numbers in self.held_out.batches(self._step_tokens):
            rows = self.held_out.rows(numbers).to(self.engine.device)
            sums += len(numbers) * float(self.engine.loss_of(rows[:, :-1], rows[:, 1:], part, 1.0))
        return sums / len(self.held_out.numbers)


@torch.no_grad()
def redrawn(engine: Engine, inputs: Tensor, labels: Tensor, share: float, seed: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Inputs and labels with this share of their tokens drawn anew, each from what the whole model predicts at its
    place. So a text that comes again is another one, which the whole model can explain as well, instead of one that is
    learned by heart."""
    generator = torch.Generator(engine.device).manual_seed(int(default_rng(seed).integers(2**62)))
    norm, head = engine.stages[0].norm, engine.stages[0].head
    assert norm is not None and head is not None
    hidden = engine.hidden_of(inputs, tuple(range(len(engine.stages))), 1.0)
    chosen = torch.rand(labels.shape, generator=generator, device=labels.device) < share
    labels = labels.clone()
    for rows in torch.split(chosen.nonzero(), DRAWN_AT_ONCE):  # a few at a time: vocabularies may be large
        at = rows.unbind(1)
        with engine.autocast():
            shares = head(norm(hidden[at])).float().softmax(-1)
        labels[at] = torch.multinomial(shares, 1, generator=generator).squeeze(-1)
    return torch.cat((inputs[:, :1], labels[:, :-1]), 1), labels


def heal(
    model: Path,
    texts: Sequence[str],
    output: Path,
    held_out: str | None,
    settings: HealSettings,
    stopped: Sequence[Any] = (),
    progress: StepProgress = lambda what, done, of: None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Heal a model, and write it with its bridges and adapters to a folder; the figures, as --json prints them.

    When something is in `stopped`, it ends with what is learned until then. `tell` gets a line about what it begins
    with.
    """
    began = time.monotonic()
    healing = begin_healing(model, texts, held_out, settings, progress)
    tell(healing.begins_with)
    before = healing.measure(progress)
    if stopped:
        raise KeyboardInterrupt  # nothing is learned yet
    healing.run(stopped, progress)
    healing.write(output)
    copy_model(healing.place, output)
    return healing.figures(before, healing.measure(progress), time.monotonic() - began)


def begin_healing(
    model: Path,
    texts: Sequence[str],
    held_out: str | None,
    settings: HealSettings,
    progress: StepProgress = lambda what, done, of: None,
) -> Healing:
    """A model and the text that it is healed on; UserError if it cannot be."""
    check_device(settings.device)
    outline = read_outline(model)
    place, spec = outline.place, outline.spec
    if (place / MANIFEST).is_file():
        raise UserError(f"{place}: is a checkpoint; 'skippipe export {model} FOLDER' makes a folder of it, to heal")
    if spec.router is not None:
        raise UserError(f"{place}: a mixture of experts cannot be healed yet; dense models can")
    in_stages = settings.cut or (str(usual_stages(spec.layers)) if len(outline.layers) == 1 else None)
    layers = outline.layers if in_stages is None else layers_of(in_stages, spec)
    if len(layers) < 2:
        more = "cut the model into 2 or more, as by --cut 2" if spec.layers > 1 else "the model has one layer"
        raise UserError(f"{place}: of one stage none can be missing; {more}")
    width, stored = spec.config.hidden_size, outline.stand_ins or StandInsInfo(layers)
    usable = stored if stored.layers == layers else StandInsInfo(layers)
    wanted = _wanted(settings, usable, width)
    same = wanted.adapters, wanted.hop_rank, wanted.repeats
    if same != (usable.adapters, usable.hop_rank, usable.repeats):
        same = 0, 0, 0
    kept = StandInsInfo(layers, wanted.bridges if wanted.bridges == usable.bridges else 0, *same)
    recipe = SkipSchedule(
        "1/2",
        bridges=wanted.bridges,
        adapters=wanted.adapters,
        adapters_by_hop=bool(wanted.hop_rank),
        adapters_shared=wanted.adapters - wanted.hop_rank if wanted.hop_rank else 0,
        repeats=wanted.repeats,
        distill=0.9,
        distill_hidden=3.0,
    )
    if not (recipe.bridges or recipe.adapters):
        raise UserError("--rank 0 and --bridges 0 leave nothing that could learn; give one of them")
    tokenizer = TextTokenizer.load(place)

    def reading(what: str, share: float) -> None:
        progress(what, round(100 * share), 100)

    several = len(texts) > 1
    ids = prepare(texts, tokenizer, progress=reading).ids if several else open_text(texts[0], tokenizer, reading)
    other = open_text(held_out, tokenizer, reading) if held_out else None
    staged = load(model, ",".join(map(str, layers)), stand_ins=False)
    train, test = _split(staged, ids, other, settings.sequence)
    learned = [read_stand_ins(place, kept, number, stage) for number, stage in enumerate(staged.stages)]
    low_precision = not settings.device.startswith("cpu")
    for stage in staged.stages if low_precision else ():
        stage.requires_grad_(False).frozen_to(torch.bfloat16)
    engine = Engine(
        spec, layers, OptimConfig(), recipe, device=settings.device, low_precision=low_precision, frozen=staged.stages
    )
    for number, each in enumerate(learned):
        begun = engine.bridges[number] if kept.bridges and number < len(engine.bridges) else None
        parts = (begun, engine.adapters[number] if kept.adapters else None)
        fill_stand_ins(each, *(part for part in parts if part is not None))
    if not kept.adapters:
        _set_gates(engine, 0.0)  # until it begins, the model is as it was
    tokens = min(MOST_TOKENS, PASSES * train.tokens) if settings.tokens is None else settings.tokens
    rate = settings.rate or min(MOST_RATE, RATE * RATE_WIDTH / width)
    healing = Healing(engine, layers, train, test, tokens, rate, settings.seed, place, stored, kept)
    if not (tokens or healing.fits_bridges or healing.fits_repeats):
        raise UserError("--tokens 0: there are no new bridges or repeats to fit; give some tokens to train on")
    return healing


def usual_stages(layers: int) -> int:
    """The stages of a model with so many layers: about `STAGES`, and equal if that can be, as a stage can be fitted
    only to others with as many layers."""
    equal = [each for each in EQUAL_STAGES if layers % each == 0]
    return min(equal, key=lambda each: (abs(each - STAGES), -each), default=min(STAGES, layers))


@torch.no_grad()
def _set_gates(engine: Engine, value: float) -> None:
    for each in engine.adapters if engine.recipe.repeats else ():
        each.gates.fill_(value)


def _wanted(settings: HealSettings, stored: StandInsInfo, width: int) -> StandInsInfo:
    """The bridges and adapters to train: as the settings say, else those of the model, else the usual ones."""
    bridges = _rank(settings.bridges, stored.bridges, width, LARGEST_BRIDGES)
    rank = _rank(settings.rank, stored.adapters, width, LARGEST_RANK)
    if rank == stored.adapters and settings.repeats in (None, stored.repeats):
        return replace(stored, bridges=bridges)
    repeats = REPEATS if settings.repeats is None else settings.repeats
    rest = rank % (repeats + 1)
    if rest and settings.rank and settings.repeats is not None:
        raise UserError(f"--rank {rank}: {repeats + 1} turns share it (--repeats); give a multiple of {repeats + 1}")
    return StandInsInfo(stored.layers, bridges, rank - rest, repeats=repeats if rank > rest else 0)


def _rank(given: int | None, stored: int, width: int, largest: int) -> int:
    return given if given is not None else stored or min(largest, max(SMALLEST_RANK, width // 4))


def _split(staged: StagedModel, ids: Ids, other: Ids | None, sequence: int | None) -> tuple[Windows, Windows]:
    """Windows to learn from, and held-out ones: of another text, or every so manieth of this one."""
    if (sequence or 0) > staged.context:
        raise UserError(
            f"--sequence {sequence}: the model attends to {staged.context:,} tokens; give that many or fewer"
        )
    length, beginning = sequence or min(staged.context, DEFAULT_CONTEXT), beginning_of(staged.tokenizer)
    total = max(0, len(ids) - (beginning is None)) // length
    least = LEAST_WINDOWS + (HELD_OUT if other is None else 0)
    if total < least:
        raise UserError(
            f"--data: {len(ids):,} tokens are too little to learn from; give {least * length:,} or more, or a smaller "
            "--sequence"
        )
    every = Windows("data", ids, length, beginning, tuple(range(total)))
    if other is not None:
        return every, Windows.of("held-out", other, length, HELD_OUT_TOKENS, beginning)
    tests = tuple(range(HELD_OUT - 1, total, HELD_OUT))
    wanted = min(len(tests), max(1, HELD_OUT_TOKENS // length))
    chosen = tuple(tests[at * len(tests) // wanted] for at in range(wanted))
    learned = tuple(number for number in range(total) if number not in set(chosen))
    return Windows("data", ids, length, beginning, learned), Windows("data", ids, length, beginning, chosen)


def copy_model(place: Path, folder: Path) -> None:
    """Copy what makes a model of a folder; UserError if it cannot be.

    A single file of weights gets an index beside it: some programs read all files of weights that they find where
    there is none, and these would read the bridges, too.
    """
    try:
        for file in sorted(place.iterdir()):
            if file.is_file() and file.suffix in KINDS and file.name != BRIDGES_FILE:
                shutil.copyfile(file, folder / file.name)
        single = folder / "model.safetensors"
        if single.is_file() and not (folder / INDEX).is_file():
            with safe_open(single, "pt") as opened:
                names = sorted(opened.keys())
            size = single.stat().st_size
            index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(names, single.name)}
            write_text(folder / INDEX, json_text(index) + "\n")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot be written: {error}") from None
