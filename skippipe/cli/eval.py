"""Commands that measure a model, whole or with stages missing.

`eval`: its perplexity. `score`: its answers to tasks of the lm-evaluation-harness.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skippipe.cli.options import (
    Checkpoint,
    Cut,
    Draws,
    Dtype,
    Json,
    JsonFile,
    Overwrite,
    ReplicaDevices,
    ResidualScale,
    ResidualScaleOrBest,
    SeveralKeep,
    SeveralStages,
    check_paths,
    option,
    part_option,
    work_option,
)
from skippipe.codecs import CodecId
from skippipe.errors import UserError
from skippipe.json_fields import check_empty, check_output, json_text, write_text
from skippipe.terminal import count_progress, print_table
from skippipe.value_ranges import CONTEXT, SEED, TOKENS, Range

if TYPE_CHECKING:
    from skippipe.inference.eval.evaluate import Evaluation
    from skippipe.lm_harness.adapter import Score
    from skippipe.lm_harness.tasks import HarnessTask
    from skippipe.stage_subset import StageSubset

OUTPUT = "Output"
FILE_COLUMNS = 1000  # width of a table that goes into a file
ENVIRONMENT = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TQDM_DISABLE", "DISABLE_MULTIPROC")
"""Variables set to 1: no network; no progress bars but our own; no process for each core to draw samples in."""


def evaluate(
    checkpoint: Checkpoint,
    text: Annotated[
        list[str],
        work_option(
            "Text to measure on: what 'skippipe prepare' reads; a folder that 'skippipe prepare' made with the model's "
            "tokenizer; or 'classics-val', which comes with the package. May be given several times.",
            metavar="FILE",
        ),
    ],
    tokens: Annotated[int, TOKENS, work_option("Of each text, at most; spread evenly over it.")] = 65_536,
    context: Annotated[
        int | None,
        Range(1, CONTEXT.most),
        work_option(
            "Tokens of a window, which is all that the model sees at a time.",
            "as in the run's plan, or else 512; at most what the model's config allows",
        ),
    ] = None,
    stages: SeveralStages = None,
    keep: SeveralKeep = None,
    draws: Draws = 10,
    seed: Annotated[int, SEED, part_option("Same seed, same subsets.")] = 0,
    everything: Annotated[
        bool, part_option("Measure all 2^(S−1) subsets of S stages that keep stage 0.", None, "--all")
    ] = False,
    ablation: Annotated[
        bool,
        part_option("Which stage costs most to lose, and in which order are stages best dropped?", None, "--ablation"),
    ] = False,
    residual_scale: ResidualScaleOrBest = "plain",
    cut: Cut = None,
    device: ReplicaDevices = "cpu",
    dtype: Dtype = "fp32",
    wire: Annotated[
        CodecId | None,
        work_option("Codec of hidden states between stages, as in 'skippipe serve --wire': what it costs.", "none"),
    ] = None,
    output: JsonFile = None,
    png: Annotated[Path | None, option(OUTPUT, "Draw perplexity by share of stages kept.", metavar="OUT")] = None,
    html: Annotated[
        Path | None, option(OUTPUT, "The same and the tables as a page that needs no other file.", metavar="OUT")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Measure the perplexity of a model, whole or with stages missing.

    Subsets that begin alike share that work: all 32 of 6 stages cost as much as about 9 passes through the whole.
    Ctrl-C shows what was found until then.

    Example: skippipe eval run --text classics-val --keep 2/3 --keep 1/2 --residual-scale best
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # or transformers draws a bar for every folder that it loads
    files = [path for path in (output, png, html) if path]
    for path in files:
        check_output(path, overwrite=overwrite)
    check_draws(draws, keep, 10)
    check_paths(checkpoint, *text)
    from skippipe.checkpoint.locate import locate_checkpoint
    from skippipe.data.tokenizer import TextTokenizer
    from skippipe.inference.checkpoint_loader import load_replicas
    from skippipe.inference.eval.evaluate import Selection
    from skippipe.inference.eval.evaluate import evaluate as evaluated
    from skippipe.inference.eval.perplexity import Windows, beginning_of, default_context, labels, open_text

    place = locate_checkpoint(checkpoint)
    tokenizer = TextTokenizer.load(place)
    names = labels(text)
    selection = Selection(stages or (), keep or (), draws, seed, everything, ablation, residual_scale)
    with count_progress() as progress:
        ids = [open_text(name, tokenizer, lambda what, share: progress(what, round(100 * share), 100)) for name in text]
        staged, *replicas = load_replicas(checkpoint, cut, device)
        if (context or 0) > staged.context:
            raise UserError(
                f"--context {context}: the model has a context of {staged.context:,} tokens; give that many or fewer"
            )
        window, beginning = context or default_context(place, staged.context), beginning_of(staged.tokenizer)
        windows = [Windows.of(name, each, window, tokens, beginning) for name, each in zip(names, ids, strict=True)]
        found = evaluated(staged, windows, selection, dtype, progress, wire=wire or "", replicas=replicas)
    from skippipe.inference.eval.tables import as_json as figures_of

    header = {"checkpoint": str(checkpoint), "device": device, "dtype": dtype, "seed": seed}
    figures = json_text({**header, **figures_of(found)}) + "\n"
    if as_json:
        print(figures, end="")
    else:
        _print_perplexities(found)
    title = f"Perplexity of {checkpoint}" + (f", with codec {wire} between stages" if wire else "")
    if output:
        write_text(output, figures)
    if png:
        from skippipe.inference.eval.plots import write_png

        write_png(found, title, png)
    if html:
        from skippipe.inference.eval.plots import write_page

        write_page(found, title, html)
    if files and not as_json:
        print(f"written to {', '.join(map(str, files))}")
    if found.interrupted:
        raise KeyboardInterrupt


def _print_perplexities(found: Evaluation) -> None:
    from skippipe.inference.eval.tables import notes, tables

    for note in notes(found):
        print(note)
    for each in tables(found):
        justify: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
        print_table(each.headings, each.rows, (), 0, FILE_COLUMNS, title=each.title, caption=each.note, **justify)


def score(
    checkpoint: Checkpoint,
    text: Annotated[
        str,
        work_option(
            "Text that the questions are made of, in sentences: what 'skippipe prepare' reads; or 'classics-val', "
            "which comes with the package. Take one that the model was not trained on."
        ),
    ],
    tasks: Annotated[
        str,
        work_option(
            "cloze: say the last word of a passage, which occurred before. choice: which of four sentences goes "
            "on with a passage. order: which of four sentences has its words in order."
        ),
    ] = "cloze,choice,order",
    stages: SeveralStages = None,
    keep: SeveralKeep = None,
    draws: Draws = 1,
    residual_scale: ResidualScale = "plain",
    cut: Cut = None,
    limit: Annotated[int, Range(1, 10**6), work_option("Questions of each task, at most.")] = 500,
    seed: Annotated[int, SEED, work_option("Same seed, same questions and same subsets.")] = 0,
    context: Annotated[
        int | None,
        CONTEXT,
        work_option(
            "Tokens of context, at most; longer texts lose their beginning. Set it if the model was "
            "trained on shorter samples than a passage, about 200 tokens.",
            "as the model's config says",
        ),
    ] = None,
    device: ReplicaDevices = "cpu",
    output: JsonFile = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep the tasks' files: 'lm_eval --include_path FOLDER --tasks skippipe' runs them on any model.",
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Score a model, whole or with stages missing, on questions made of a text.

    The lm-evaluation-harness asks (the extra harness); nothing is downloaded. Every value comes with
    its standard error, and with what guessing would get; every subset has a column.

    n: questions. acc: share of right answers, where the likeliest one counts as the answer. acc_norm: the same by
    likelihood per character, fairer to long answers. acc_mutual_info: the same by how much likelier the passage makes
    an answer, the first to rise above chance. perplexity: of the word to be said; lower is better.

    Example: skippipe score run --text classics-val --keep 1 --keep 1/2 --residual-scale scaled
    """
    for name in ENVIRONMENT:
        os.environ.setdefault(name, "1")  # most are read when a library is imported
    if output:
        check_output(output, overwrite=overwrite)
    if write and not overwrite:
        check_empty(write, "--overwrite replaces what is written; or name another folder")
    check_draws(draws, keep, 1)
    check_paths(checkpoint, text)
    from skippipe.data.questions import Prose
    from skippipe.inference.checkpoint_loader import load_replicas
    from skippipe.lm_harness.adapter import SubsetLM
    from skippipe.lm_harness.adapter import score as scored
    from skippipe.lm_harness.tasks import build_tasks, parse_names, write_tasks
    from skippipe.stage_subset import parse_subsets

    built = build_tasks(parse_names(tasks), Prose.read(text), seed, limit)
    staged, *replicas = load_replicas(checkpoint, cut, device, context)
    subsets = parse_subsets(len(staged.stages), stages or (), keep or (), residual_scale, draws, seed)
    with TemporaryDirectory() as scratch, count_progress() as progress:
        folder = write or Path(scratch)
        write_tasks(built, folder)
        found = {
            subset: scored(SubsetLM(staged, subset, partial(progress, subset.name), replicas), built, folder)
            for subset in subsets
        }
    header = {"checkpoint": str(checkpoint), "text": text, "seed": seed, "layers": list(staged.layers)}
    figures = json_text({**header, "parts": _as_json(built, found)}) + "\n"
    if as_json:
        print(figures, end="")
    else:
        _print_scores(built, found)
    if output:
        write_text(output, figures)
    written = [str(path) for path in (output, write) if path]
    if written and not as_json:
        print(f"written to {', '.join(written)}")


def check_draws(draws: int, keep: list[str] | None, default: int) -> None:
    """Refuse a number of draws where nothing is drawn."""
    if draws != default and not keep:
        raise UserError("--draws: goes with --keep, which draws stages; with --stages they are named: leave it out")


Found = dict["StageSubset", dict[str, list["Score"]]]


def _print_scores(tasks: list[HarnessTask], found: Found) -> None:
    rows = []
    for task in tasks:
        for scores in zip(*(scores[task.name] for scores in found.values()), strict=True):
            metric = scores[0].metric
            chance = "–" if metric == "perplexity" else f"{task.chance:.3f}"
            rows.append([task.name, metric, str(len(task.items)), chance, *map(_value, scores)])
    headings = ("task", "metric", "n", "chance", *(subset.name for subset in found))
    print_table(headings, rows, left=(0, 1), unwrapped=4)


def _value(score: Score) -> str:
    value, error = (".3g", ".2g") if score.metric == "perplexity" else (".3f", ".3f")
    return f"{score.value:{value}}" + ("" if score.error is None else f" ± {score.error:{error}}")


def _as_json(tasks: list[HarnessTask], found: Found) -> list[dict[str, Any]]:
    return [
        {
            "stages": list(subset.stages),
            "residual_scale": subset.residual_scale,
            "tasks": {
                task.name: {
                    "questions": len(task.items),
                    "chance": task.chance,
                    "scores": [each._asdict() for each in scores[task.name]],
                }
                for task in tasks
            },
        }
        for subset, scores in found.items()
    ]
