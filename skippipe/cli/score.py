"""The command `score`: a model, whole or with stages missing, on tasks of the lm-evaluation-harness."""

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
    DeviceOption,
    Draws,
    ResidualScale,
    SeveralKeep,
    SeveralStages,
    work_option,
)
from skippipe.json_fields import check_writable, json_text, write_text
from skippipe.terminal import count_progress
from skippipe.value_ranges import CONTEXT, SEED, Range

if TYPE_CHECKING:
    from skippipe.lm_harness.adapter import Score
    from skippipe.lm_harness.tasks import HarnessTask
    from skippipe.stage_subset import StageSubset

ENVIRONMENT = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TQDM_DISABLE", "DISABLE_MULTIPROC")
"""Variables set to 1: no network; no progress bars but our own; no process for each core to draw samples in."""


def score(
    checkpoint: Checkpoint,
    text: Annotated[
        str,
        work_option(
            "Text file that the questions are made of, plain or .xz; or 'classics-val', which comes with the "
            "package. Take one that the model was not trained on."
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
    device: DeviceOption = "cpu",
    json: Annotated[Path | None, typer.Option(metavar="OUT", help="Write the scores to this file, as JSON.")] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep the tasks' files: 'lm_eval --include_path FOLDER --tasks skippipe' runs them on any model.",
        ),
    ] = None,
) -> None:
    """Score a model, whole or with stages missing, on questions made of a text.

    The lm-evaluation-harness asks (pip install 'skippipe\\[harness]'); nothing is downloaded. Every value comes with
    its standard error, and with what guessing would get; every subset has a column.

    n: questions. acc: share of right answers, where the likeliest one counts as the answer. acc_norm: the same by
    likelihood per character, fairer to long answers. acc_mutual_info: the same by how much likelier the passage makes
    an answer, the first to rise above chance. perplexity: of the word to be said; lower is better.

    Example: skippipe score run --text classics-val --keep 1 --keep 1/2 --drive scaled
    """
    for name in ENVIRONMENT:
        os.environ.setdefault(name, "1")  # most are read when a library is imported
    if json:
        check_writable(json)
    from skippipe.inference.checkpoint_loader import load
    from skippipe.lm_harness.adapter import SubsetLM
    from skippipe.lm_harness.adapter import score as scored
    from skippipe.lm_harness.passages import Prose
    from skippipe.lm_harness.tasks import build_tasks, parse_names, write_tasks
    from skippipe.stage_subset import parse_subsets

    built = build_tasks(parse_names(tasks), Prose(text), seed, limit)
    staged = load(checkpoint, cut, device, context)
    subsets = parse_subsets(len(staged.stages), stages or (), keep or (), residual_scale, draws, seed)
    with TemporaryDirectory() as scratch, count_progress() as progress:
        folder = write or Path(scratch)
        write_tasks(built, folder)
        found = {
            subset: scored(SubsetLM(staged, subset, partial(progress, subset.name)), built, folder)
            for subset in subsets
        }
    _show(built, found)
    if json:
        header = {"checkpoint": str(checkpoint), "text": text, "seed": seed, "layers": list(staged.layers)}
        write_text(json, json_text({**header, "parts": _as_json(built, found)}) + "\n")


Found = dict["StageSubset", dict[str, list["Score"]]]


def _show(tasks: list[HarnessTask], found: Found) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for heading in ("task", "metric", "n", "chance"):
        table.add_column(heading, justify="left" if heading in ("task", "metric") else "right", no_wrap=True)
    for subset in found:
        table.add_column(subset.name, justify="right")
    for task in tasks:
        columns = [scores[task.name] for scores in found.values()]
        for first, *others in zip(*columns, strict=True):
            chance = "–" if first.metric == "perplexity" else f"{task.chance:.3f}"
            values = [_value(each) for each in (first, *others)]
            table.add_row(task.name, first.metric, str(len(task.items)), chance, *values)
    Console(markup=False).print(table)


def _value(score: Score) -> str:
    value, error = (".3g", ".2g") if score.metric == "perplexity" else (".3f", ".3f")
    return f"{score.value:{value}}" + ("" if score.error is None else f" ± {score.error:{error}}")


def _as_json(tasks: list[HarnessTask], found: Found) -> list[dict[str, Any]]:
    return [
        {
            "stages": list(subset.stages),
            "drive": subset.residual_scale,
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
