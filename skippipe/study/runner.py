"""Variants × seeds, one after another. A line of JSON for every run that is done; those are not done again. Several
processes that write to the same results divide the runs among them.

    {"study", "variant", "seed", "key", "settings", "parameters", "tokens", "lengths", "curve", "whole", "parts",
     "parts_by_wire", "routers", "seconds", "tokens_per_s", "device", "date"}

`curve` has [iteration, tokens, training loss since the last evaluation, held-out loss] for every evaluation, `whole`
the loss on every text in the end, `parts` that of parts of the model, `parts_by_wire` the same with codecs on hops,
`lengths` how many iterations had paths of which length; `questions`, if there are any, the shares that were answered
rightly.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from skippipe.checkpoint.bridges_file import write_bridges
from skippipe.checkpoint.hf_export import ModelFolder
from skippipe.data.batch_sampler import BatchSampler
from skippipe.data.prepare import prepare
from skippipe.data.token_file import HEADER, TokenFile
from skippipe.errors import UserError, first_line
from skippipe.json_fields import check_empty
from skippipe.model.flat_params import FlatParams
from skippipe.model.model_spec import ModelSpec, config_named
from skippipe.study.config import Study, StudyRun, kept_stages, read_results
from skippipe.study.engine import Engine
from skippipe.study.evaluate import EvalText, SubsetLoss, mean_loss, part_losses, router_use
from skippipe.study.healing import redrawn
from skippipe.study.path_sampling import iteration_paths
from skippipe.study.question_scores import part_scores, question_sets
from skippipe.workload import Workload

Clock = Callable[[], float]
RunProgress = Callable[[str, float, str], None]
"""Called with the name of a run, the share of it that is done, and its loss in words."""

WAIT_S = 2.0
"""Between two looks for weights that other processes are training."""


class _WeightsInTraining(Exception):
    """Another process trains the weights with which this run's healing begins."""


@dataclass(frozen=True)
class StudyDevice:
    """Where runs are computed."""

    name: str = "cpu"
    compiled: bool = False

    @property
    def low_precision(self) -> bool:
        return not self.name.startswith("cpu")

    @property
    def model(self) -> str:
        return torch.cuda.get_device_name() if self.low_precision else "CPU"


class Runner:
    def __init__(
        self,
        study: Study,
        results: Path,
        device: StudyDevice,
        progress: RunProgress,
        models: Path | None = None,
        frozen: Path | None = None,
        *,
        ends_at: float = math.inf,
        clock: Clock = time.monotonic,
    ) -> None:
        """Trained models are kept in a folder for each in `models`, if that is given; weights with which healing begins
        in `frozen`, for runs that heal the same model. `ends_at`: when all must be over, by the clock."""
        self._models, self._frozen = models, frozen
        self._ends_at, self._clock = ends_at, clock
        self._paces: list[float] = []
        self.study = study
        self.results = results
        self.device = device
        self._progress = progress
        self.train = _tokens(study.train, study.vocabulary)
        tests = [each.rpartition("=") for each in study.tests]
        folders = {name or Path(where).name: _tokens([where], self.train.folder) for name, _, where in tests}
        sequence = study.batch.sequence
        self.texts = {name: EvalText(each.ids, sequence, device.name) for name, each in folders.items()}
        self._text = EvalText(self.train.ids, sequence, device.name)
        self._questions = question_sets(folders, study.measuring.questions, sequence, device.name)
        self._engines: dict[tuple[str, tuple[int, ...], int, int], Engine] = {}

    def run(self) -> None:
        """Do all runs that are not done yet, and that no other process is doing; but none that would not be over in
        time, by what those before it took. One that fails is reported, and the others go on; UserError in the end,
        which names those that failed."""
        if self._models:
            self._check_folders()
        failed: list[str] = []
        runs = deque(self.study.runs)
        refused = 0  # one after another, for want of weights that other processes are training
        while runs:
            run = runs.popleft()
            began = self._clock()
            if run.key not in done_runs(self.results) and began + self._expected_s(run) <= self._ends_at:
                try:
                    with claimed(self.results, run) as is_ours:
                        if not is_ours:
                            continue
                        self._do(run)
                    refused = 0
                except _WeightsInTraining:
                    runs.append(run)
                    refused += 1
                    if refused >= len(runs):
                        time.sleep(WAIT_S)
                    continue
                except (UserError, OSError):  # those that follow have the same settings, and the same disk
                    raise
                except Exception as error:  # of a compiler, or for want of memory
                    failed.append(f"'{run.variant.name}', seed {run.seed}: {first_line(error)}")
                    print(f"{traceback.format_exc()}failed: {failed[-1]}", file=sys.stderr, flush=True)
                    self._engines.pop(self._kind(run), None)  # it may be in the middle of something, or hold memory
                    continue
                self._paces.append((self._clock() - began) / self._work(run))
        if failed:
            raise UserError(f"not all runs could be done: {'; '.join(failed)}")

    def _folder(self, run: StudyRun) -> str:
        return f"{self.study.name}-{run.variant.name}-{run.seed}".replace("/", "-")

    def _check_folders(self) -> None:
        names = Counter(map(self._folder, self.study.runs))
        both = next((name for name, number in names.items() if number > 1), None)
        if both is not None:
            raise UserError(f"--models: several runs would be kept in one folder, '{both}': give variants other names")

    def _do(self, run: StudyRun) -> None:
        kept = self._models and self._models / self._folder(run)
        if kept:
            check_empty(kept)
        result = self.one(run)
        self.results.parent.mkdir(parents=True, exist_ok=True)
        with self.results.open("ab", buffering=0) as file:  # one line at once, when all of it is there
            file.write((json.dumps(result) + "\n").encode())
        if kept:
            self._keep(run, kept)

    def _expected_s(self, run: StudyRun) -> float:
        """Seconds that a run takes, all included, by the pace of the slowest one so far; the first also compiles."""
        return max(self._paces[1:] or self._paces, default=0.0) * self._work(run)

    def _work(self, run: StudyRun) -> float:
        """What the seconds of a run go by: numbers of layers that its tokens pass."""
        shape = self._model(run)[0].shape
        return run.work * shape.layer_parameters * shape.layers / run.variant.stages

    def one(self, run: StudyRun) -> dict[str, Any]:
        recipe = run.variant.recipe
        kept_file = self._frozen / f"{run.frozen_key}.safetensors" if self._frozen and recipe.heal else None
        with ExitStack() as training:
            if kept_file and not kept_file.exists() and not training.enter_context(locked(kept_file)):
                raise _WeightsInTraining
            return self._trained(run, kept_file, training.close)

    def _trained(self, run: StudyRun, kept_file: Path | None, on_kept: Callable[[], None]) -> dict[str, Any]:
        study, variant, measuring = run.study, run.variant, run.study.measuring
        engine = self._engine(run)
        batch = study.batch
        sampler = BatchSampler(self.train.ids, batch.sequence, run.seed, batch.microbatches, batch.samples)
        first = next(iter(self.texts.values()))
        curve: list[list[float]] = []
        losses: list[torch.Tensor] = []
        began = time.perf_counter()
        evaluation_s = 0.0
        resumed_at = 0
        if kept_file and kept_file.exists():
            resumed_at = run.heals_at
            losses, curve, seconds = load_frozen(engine, kept_file)
            began -= seconds
        for number, paths in enumerate(iteration_paths(run)):
            if number < resumed_at:
                continue
            if kept_file and number == run.heals_at and not resumed_at:
                save_frozen(engine, kept_file, losses, curve, time.perf_counter() - began - evaluation_s)
                on_kept()
            hops = variant.traffic.hops(number, run.iterations)
            if variant.heal_fit and number == run.heals_at:
                texts = map(run.text_of, range(number, min(run.iterations, number + variant.heal_fit)))
                engine.fit_stand_ins((self._text.iteration(sampler, each)[0] for each in texts), hops.wire)
            engine.grow(paths.born, preserving=variant.recipe.grow_preserving)
            young = len(paths.there) < variant.stages
            inputs, labels = self._text.iteration(sampler, run.text_of(number))
            size = batch.microbatches // run.steps(number)[0]
            text = inputs, labels
            for begin in range(0, len(paths.visits), size):
                sent, in_batch = divmod(begin, batch.microbatches)
                if in_batch == 0 and run.is_redrawn(number, sent):
                    inputs, labels = redrawn(engine, *text, variant.heal_drawn, (run.seed, number, begin))
                row = in_batch * batch.samples
                rows = slice(row, row + size * batch.samples)
                loss = engine.iteration(
                    number,
                    inputs[rows],
                    labels[rows],
                    paths.visits[begin : begin + size],
                    young=young,
                    healing=variant.recipe.heals(number, run.iterations),
                    rate=run.rate(number),
                    hops=hops,
                )
                losses.append(loss)
            done = number + 1
            if done % measuring.every == 0 or done == run.iterations:
                training = float(torch.stack(losses).double().mean())
                losses.clear()
                evaluation_start = time.perf_counter()
                held_out = mean_loss(engine, first, measuring.tokens, paths.there)
                evaluation_s += time.perf_counter() - evaluation_start
                curve.append([done, done * batch.tokens, round(training, 5), round(held_out, 5)])
                self._progress(f"{variant.name}, seed {run.seed}", done / run.iterations, f"loss {held_out:.3f}")
        seconds = time.perf_counter() - began - evaluation_s
        kept = [kept_stages(share, variant.stages) for share in measuring.keep]
        kept = sorted({each for each in kept if 2 <= each < variant.stages}, reverse=True)
        parts = self._part_losses(run, engine, kept)
        return {
            "study": study.name,
            "variant": variant.name,
            "seed": run.seed,
            "key": run.key,
            "settings": run.settings,
            "parameters": engine.parameters,
            "tokens": run.iterations * batch.tokens,
            "lengths": run.lengths,
            "curve": curve,
            "whole": {
                name: round(mean_loss(engine, text, measuring.final_tokens, paths.there), 5)
                for name, text in self.texts.items()
            },
            "parts": [each.to_json() for each in parts],
            "parts_by_wire": {
                wire: [each.to_json() for each in self._part_losses(run, engine, kept, wire)] for wire in measuring.wire
            },
            **self._answers(engine, parts),
            "routers": router_use(engine, self.texts, measuring.part_tokens),
            "seconds": round(seconds, 2),
            "tokens_per_s": round(run.iterations * batch.tokens / seconds),
            "device": self.device.model,
            "date": datetime.now(UTC).date().isoformat(),
        }

    def _part_losses(self, run: StudyRun, engine: Engine, kept: list[int], wire: str = "") -> list[SubsetLoss]:
        measuring = run.study.measuring
        return part_losses(engine, self.texts, kept, measuring.draws, measuring.part_tokens, run.seed, wire)

    def _answers(self, engine: Engine, parts: list[SubsetLoss]) -> dict[str, Any]:
        if not self._questions:
            return {}
        asked = {
            name: {kind: {"count": each.counts[kind], "chance": round(each.chance[kind], 5)} for kind in each.counts}
            for name, each in self._questions.items()
        }
        began = time.perf_counter()
        scores = part_scores(engine, self._questions, parts)
        return {"questions": {"asked": asked, "parts": scores, "seconds": round(time.perf_counter() - began, 2)}}

    def _keep(self, run: StudyRun, folder: Path) -> None:
        """In bfloat16, as transformers and `skippipe score` load it; bridges and adapters in a file of their own."""
        spec, layers = self._model(run)
        engine, hop_rank = self._engines[self._kind(run)], run.variant.recipe.hop_rank
        kept = ModelFolder(folder, layers, spec, self.train.tokenizer(), torch.bfloat16)
        for stage, weights in enumerate(engine.weights):
            kept.store_flat(stage, weights.values.cpu())
        if engine.bridges or engine.adapters:
            write_bridges(folder, layers, engine.bridges, engine.adapters, hop_rank=hop_rank, dtype=torch.bfloat16)

    def _model(self, run: StudyRun) -> tuple[ModelSpec, tuple[int, ...]]:
        """The model, and the layers of each of its stages."""
        variant = run.variant
        config = config_named(variant.model or self.study.model, self.train.vocabulary)
        if variant.layers:
            config.num_hidden_layers = variant.layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[: variant.layers]
        spec = ModelSpec(config, run.seed)
        return spec, Workload(spec.shape).layer_split(variant.stages)

    def _kind(self, run: StudyRun) -> tuple[str, tuple[int, ...], int, int]:
        """What runs that share an engine have in common."""
        recipe = run.variant.recipe
        return run.variant.model, self._model(run)[1], recipe.adapters, recipe.repeats

    def _engine(self, run: StudyRun) -> Engine:
        """An engine for the run; models of the same shape share one, so that it is compiled once."""
        variant = run.variant
        spec, layers = self._model(run)
        kind = self._kind(run)
        if kind in self._engines:
            self._engines[kind].begin_again(spec, run.learning, variant.recipe, variant.traffic, run.stand_in_learning)
        else:
            self._engines[kind] = Engine(
                spec,
                layers,
                run.learning,
                variant.recipe,
                traffic=variant.traffic,
                device=self.device.name,
                low_precision=self.device.low_precision,
                compiled=self.device.compiled,
                stand_in_learning=run.stand_in_learning,
            )
        return self._engines[kind]


def done_runs(results: Path) -> set[str]:
    """Keys of the runs whose results are there."""
    return {result["key"] for result in read_results(results)}


def runs_left(study: Study, results: Path) -> int:
    """The number of runs whose results are not there."""
    done = done_runs(results)
    return sum(run.key not in done for run in study.runs)


@contextmanager
def claimed(results: Path, run: StudyRun) -> Iterator[bool]:
    """Whether this process is to do the run: it is not done, and no other process that writes to the same results is
    doing it."""
    with locked(results.with_name(f"{results.name}.{run.key}")) as is_ours:
        yield is_ours and run.key not in done_runs(results)  # another process may have ended it since we looked


@contextmanager
def locked(file: Path) -> Iterator[bool]:
    """Whether no other process makes this file; a file beside it is locked meanwhile, and the lock ends with the
    process."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = file.with_name(f".{file.name}.lock")
    with lock.open("w") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        if not os.fstat(opened.fileno()).st_nlink:  # who had it has ended it since it was opened
            yield False
            return
        try:
            yield True
        finally:
            lock.unlink(missing_ok=True)


def _frozen_parts(engine: Engine) -> dict[str, tuple[FlatParams, range]]:
    """What healing begins with: all weights; of bridges that have learned already also the optimizer's state."""
    found = {f"stage {index}": (each, each.state_parts[0]) for index, each in enumerate(engine.weights)}
    for index, each in enumerate(engine.bridge_weights):
        if each.steps:
            found |= {f"bridges {index} {part}": (each, here) for part, here in enumerate(each.state_parts)}
    return found


def save_frozen(
    engine: Engine, file: Path, losses: list[torch.Tensor], curve: list[list[float]], seconds: float
) -> None:
    """Losses are those since the last evaluation; with the curve and the seconds, results are as without the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    steps = [each.steps for each in engine.bridge_weights]
    kept = {"curve": json.dumps(curve), "seconds": json.dumps(seconds), "steps": json.dumps(steps)}
    parts = _frozen_parts(engine).items()
    tensors = {name: weights.read_state(here.start, len(here)).cpu() for name, (weights, here) in parts}
    tensors["losses"] = torch.stack(losses).cpu() if losses else torch.empty(0)
    partial = file.with_suffix(".partial")
    save_file(tensors, partial, kept)
    partial.replace(file)


def load_frozen(engine: Engine, file: Path) -> tuple[list[torch.Tensor], list[list[float]], float]:
    """Losses, curve and seconds, as they were saved."""
    with safe_open(file, "pt") as saved:
        kept = saved.metadata()
        for each, steps in zip(engine.bridge_weights, json.loads(kept["steps"]), strict=False):
            each.steps = steps
        for name, (weights, here) in _frozen_parts(engine).items():
            weights.write_state(here.start, saved.get_tensor(name).to(engine.device))
        losses = list(saved.get_tensor("losses").to(engine.device))
    return losses, json.loads(kept["curve"]), float(kept["seconds"])


def _tokens(texts: list[str], tokenizer: int | Path) -> TokenFile:
    folder = Path(texts[0])
    return TokenFile.open(folder).check_plain() if (folder / HEADER).exists() else prepare(texts, tokenizer)


PARTS = 10  # of a run, with a line for each


class LineProgress:
    """A line for every tenth of a run."""

    def __init__(self) -> None:
        self._last = ("", 0)

    def __call__(self, run: str, share: float, how: str) -> None:
        part = run, int(PARTS * share)
        if part != self._last and part[1]:
            print(f"{run:<40} {share:>4.0%}  {how}", flush=True)
        self._last = part


def run_study(
    study: Study,
    results: Path,
    device: str,
    compiled: bool,
    progress: RunProgress,
    models: Path | None = None,
    minutes: float = math.inf,
    frozen: Path | None = None,
) -> None:
    """All runs that are not in the results yet; an interrupted one is done again from its start.

    None is begun that would not be over after so many minutes, counted from now.
    """
    ends_at = time.monotonic() + 60 * minutes
    if not device.startswith("cpu") and not torch.cuda.is_available():
        raise UserError(f"--device: there is no '{device}' that torch could use here; use cpu")

    print(f"{study.name}: {runs_left(study, results)} of {len(study.runs)} runs to do, on {device}", flush=True)
    try:
        Runner(study, results, StudyDevice(device, compiled), progress, models, frozen, ends_at=ends_at).run()
    except KeyboardInterrupt:
        left = runs_left(study, results)
        print(f"stopped; {left} runs are left, and the same command goes on with them", file=sys.stderr)
        raise SystemExit(130) from None
    left = runs_left(study, results)
    if left:
        why = "" if math.isinf(minutes) else f" or {minutes:.3g} minutes are too short for them"
        print(f"{left} runs are left: other processes are at them{why}; the same command goes on with them")
    else:
        print(f"done; all {len(study.runs)} runs are in {results}")


def chosen(study: Study, names: list[str] | None) -> Study:
    """The study with only these variants, in their order; None: with all."""
    if names is None:
        return study
    variants = {each.name: each for each in study.variant}
    for name in names:
        if name not in variants:
            raise UserError(f"--only: the study has no variant '{name}', but {', '.join(variants)}")
    return replace(study, variant=[variants[name] for name in dict.fromkeys(names)])
