"""The command `heal`: a finished model that is to answer well when stages are missing."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from skippipe.cli.options import Cut, Device, Json, check_paths, option, part_option, work_option
from skippipe.json_fields import check_empty, json_text
from skippipe.terminal import LINE_EVERY_S, count_progress, interruptible, print_table
from skippipe.value_ranges import SEED, SEQUENCE, TOKENS, Range

LEARNING = "Learning"


def heal(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face folder, as 'skippipe export' and finished runs write it, or any other; or 'austen', a "
            "small model that is built in.",
        ),
    ],
    data: Annotated[
        list[str],
        work_option(
            "Text to learn from, like what the model is used for: what 'skippipe prepare' reads, a folder that it made "
            "with the model's tokenizer, or 'classics'. A million tokens are a good start. May be given several times.",
            metavar="FILE",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the healed model: a copy, and bridges.safetensors.")
    ],
    held_out: Annotated[
        str | None,
        work_option("Text to measure on, as --data takes it.", "a part of --data, which is then not learned from"),
    ] = None,
    cut: Cut = None,
    rank: Annotated[
        int | None,
        Range(0, 100_000),
        part_option(
            "Rank of the adapters beside every linear map. More is better, and larger; 0: none.",
            "that of the model's adapters if it has any, or else a quarter of its channels, up to 512",
        ),
    ] = None,
    bridges: Annotated[
        int | None,
        Range(0, 100_000),
        part_option("Rank of the bridges past missing stages; 0: none.", "as for --rank, but up to 128"),
    ] = None,
    repeats: Annotated[
        int | None,
        Range(0, 1000),
        part_option(
            "Of the stages that are missing after a stage, how many it takes the place of: its layers run again, with "
            "adapters of their own, which share the rank. Costs their time wherever stages are missing; 0: none.",
            "that of the model's adapters if it has any, or else 1",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        Range(0, TOKENS.most),
        option(
            LEARNING,
            "Tokens to train on in all; 0: no training, new bridges and repeats are only fitted to the whole model by "
            "least squares, as they are before any training.",
            "8 times the text, up to 20,000,000",
        ),
    ] = None,
    sequence: Annotated[
        int | None, SEQUENCE, option(LEARNING, "Tokens of a sample.", "512, or as many as the model attends to")
    ] = None,
    rate: Annotated[
        float | None,
        Range(0, 100, above=True),
        option(LEARNING, "The highest learning rate.", "0.512 / channels, up to 0.003"),
    ] = None,
    seed: Annotated[int, SEED, option(LEARNING, "Same seed, same result on the same machine.")] = 0,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Make a finished model answer well when stages are missing, in minutes of training.

    The model may be one that was never trained with skipping, and stays as it is: with all its stages it answers as
    before. What is learned is in one more file of the folder, bridges.safetensors: a small map for every hop past
    missing stages, and adapters (LoRA) for the stages that are left. 'skippipe generate', 'eval' and 'serve' use them
    where stages are missing, and other programs read the folder as the model that it was. The whole model is the
    teacher: its parts learn to say what it says. Bridges that were trained with the model (recipe.bridges of a job),
    and what an earlier healing has learned, are trained further, unless another rank is asked for.

    Ctrl-C ends it early and keeps what is learned. In the end a table has the perplexity on held-out text, whole and
    with stages missing, before and after.

    \b
        skippipe heal austen --data classics -o healed --tokens 500000
        skippipe heal model/ --data books.txt --data letters.txt -o healed --device cuda
        skippipe generate healed "It is a truth" --keep 1/2

    Example: skippipe heal model/ --data text.txt -o healed
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # or transformers draws a bar for every folder that it loads
    check_empty(output)
    check_paths(model, *data, *([held_out] if held_out else []))
    from skippipe.study.healing import HealSettings
    from skippipe.study.healing import heal as healed

    settings = HealSettings(cut, rank, bridges, repeats, tokens, sequence, rate, seed, device)
    with interruptible() as stopped, _progress() as progress:
        found = healed(model, data, output, held_out, settings, stopped, progress, _tell)
    if as_json:
        print(json_text({"model": str(model), "output": str(output), **found}))
    else:
        _print(found)
        print(f"written to {output}")
    if worse := worse_parts(found):
        print(f"warning: {worse}", file=sys.stderr)
    if stopped:
        raise KeyboardInterrupt


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar with the time that is left on a terminal; elsewhere a line every few seconds."""
    if sys.stderr.isatty():
        with count_progress() as progress:
            yield progress
        return
    began: dict[int, float] = {}
    last = 0.0

    def show(what: str, done: int, of: int) -> None:
        nonlocal last
        now = time.monotonic()
        if not done or of not in began:
            began[of] = now
        if now - last >= LINE_EVERY_S:
            last = now
            left = f", {(now - began[of]) * (of - done) / done:.0f} s left" if done else ""
            print(f"{what}, {done} of {of}{left}" if of else what, file=sys.stderr, flush=True)

    yield show


def _print(found: dict[str, Any]) -> None:
    share = found["parameters_added"] / found["parameters"]
    steps = f"{found['tokens']:,} tokens in {found['steps']} of {found['steps_wanted']} steps"
    print(
        f"{steps if found['steps_wanted'] else 'fitted without training'}, {found['seconds']:.0f} s; "
        f"{len(found['layers'])} stages of {','.join(map(str, found['layers']))} layers; adapters of rank "
        f"{found['adapters']} and bridges of rank {found['bridges']} add {share:.0%} to the parameters"
    )
    whole = found["perplexity"][0]
    rows = []
    for each in found["perplexity"]:
        cells = [str(each["missing"]), str(each["parts"])]
        for when in ("before", "after", "worst_after"):
            more = f" ({each[when] / whole['before'] - 1:+.1%})" if each["missing"] else ""
            cells.append(f"{each[when]:.5g}{more}")
        rows.append(cells)
    headings = ("stages missing", "parts", "perplexity before", "after", "worst part after")
    print_table(headings, rows, title=f"Held-out text, {found['held_out_tokens']:,} tokens", title_justify="left")


def worse_parts(found: dict[str, Any]) -> str:
    """Which parts say the held-out text worse than before healing, and what to do; empty: none."""
    missing = [str(each["missing"]) for each in found["perplexity"] if each["after"] > each["before"]]
    if not missing:
        return ""
    return (
        f"with {', '.join(missing)} stages missing, perplexity is higher than before healing; train longer (--tokens), "
        "or keep the model as it was"
    )
