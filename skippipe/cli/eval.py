"""The command `eval`: perplexity of a model, whole or with stages missing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skippipe.cli import options as cli_options
from skippipe.errors import UserError
from skippipe.json_fields import check_writable, json_text, write_text
from skippipe.terminal import count_progress
from skippipe.value_ranges import CONTEXT, SEED, TOKENS, Range

if TYPE_CHECKING:
    from skippipe.inference.eval.evaluate import Evaluation

OUTPUT = "Output"
FILE_COLUMNS = 1000  # width of a table that goes into a file


def evaluate(
    checkpoint: cli_options.Checkpoint,
    text: Annotated[
        list[str],
        typer.Option(
            metavar="FILE",
            help="Text to measure on: a file, plain or .xz; a folder that 'skippipe prepare' made with the model's "
            "tokenizer; or 'classics-val', which comes with the package. May be given several times.",
            rich_help_panel=cli_options.WORK,
        ),
    ],
    tokens: Annotated[
        int,
        TOKENS,
        typer.Option(help="Of each text, at most; spread evenly over it.", rich_help_panel=cli_options.WORK),
    ] = 65_536,
    context: Annotated[
        int | None,
        Range(1, CONTEXT.most),
        typer.Option(
            help="Tokens of a window, which is all that the model sees at a time.",
            show_default="as in the run's plan, or else 512; at most what the model's config allows",
            rich_help_panel=cli_options.WORK,
        ),
    ] = None,
    stages: cli_options.SeveralStages = None,
    keep: cli_options.SeveralKeep = None,
    draws: cli_options.Draws = 10,
    seed: Annotated[int, SEED, typer.Option(help="Same seed, same subsets.", rich_help_panel=cli_options.PART)] = 0,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Measure all 2^(S−1) subsets of S stages that keep stage 0.", rich_help_panel=cli_options.PART
        ),
    ] = False,
    losing: Annotated[
        bool,
        typer.Option(
            "--losing",
            help="Which stage costs most to lose, and in which order are stages best dropped?",
            rich_help_panel=cli_options.PART,
        ),
    ] = False,
    residual_scale: cli_options.ResidualScaleOrBest = "plain",
    cut: cli_options.Cut = None,
    device: cli_options.DeviceOption = "cpu",
    dtype: cli_options.Dtype = "fp32",
    json: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write all figures, as JSON.", rich_help_panel=OUTPUT)
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="Draw perplexity by share of stages kept.", rich_help_panel=OUTPUT),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT", help="The same and the tables as a page that needs no other file.", rich_help_panel=OUTPUT
        ),
    ] = None,
) -> None:
    """Measure the perplexity of a model, whole or with stages missing.

    Subsets that begin alike share that work: all 32 of 6 stages cost as much as about 9 passes through the whole.
    Ctrl-C shows what was found until then.

    Example: skippipe eval run --text classics-val --keep 2/3 --keep 1/2 --drive best
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # or transformers draws a bar for every folder that it loads
    for path in (json, png, html):
        if path:
            check_writable(path)
    from skippipe.data.tokenizer import TextTokenizer
    from skippipe.inference.checkpoint_loader import load, locate_checkpoint
    from skippipe.inference.eval.evaluate import Selection
    from skippipe.inference.eval.evaluate import evaluate as evaluated
    from skippipe.inference.eval.perplexity import Windows, beginning_of, default_context, labels, open_text

    place = locate_checkpoint(checkpoint)
    tokenizer = TextTokenizer.load(place)
    names = labels(text)
    selection = Selection(stages or (), keep or (), draws, seed, everything, losing, residual_scale)
    with count_progress() as progress:
        ids = [open_text(name, tokenizer, lambda what, share: progress(what, round(100 * share), 100)) for name in text]
        staged = load(checkpoint, cut, device)
        if (context or 0) > staged.context:
            raise UserError(
                f"--context {context}: the model has a context of {staged.context:,} tokens; give that many or fewer"
            )
        window, beginning = context or default_context(place, staged.context), beginning_of(staged.tokenizer)
        windows = [Windows.of(name, each, window, tokens, beginning) for name, each in zip(names, ids, strict=True)]
        found = evaluated(staged, windows, selection, dtype, progress)
    _show(found)
    title = f"Perplexity of {checkpoint}"
    if json:
        from skippipe.inference.eval.tables import as_json

        header = {"checkpoint": str(checkpoint), "device": device, "dtype": dtype, "seed": seed}
        write_text(json, json_text({**header, **as_json(found)}) + "\n")
    if png:
        from skippipe.inference.eval.plots import write_png

        write_png(found, title, png)
    if html:
        from skippipe.inference.eval.plots import write_page

        write_page(found, title, html)
    if found.interrupted:
        raise KeyboardInterrupt


def _show(found: Evaluation) -> None:
    from rich.console import Console
    from rich.table import Table

    from skippipe.inference.eval.tables import notes, tables

    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else FILE_COLUMNS)
    for note in notes(found):
        console.print(note, soft_wrap=True)
    for each in tables(found):
        shown = Table(title=each.title, caption=each.note, title_justify="left", caption_justify="left")
        for heading in each.headings:
            shown.add_column(heading, justify="right")
        for row in each.rows:
            shown.add_row(*row)
        console.print(shown)
