"""Commands for text: prepare."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from skippipe.errors import UserError
from skippipe.value_ranges import VOCABULARY


def prepare(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="Text files (.txt, .xz), or 'classics'.")],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    vocabulary: Annotated[
        int | None, VOCABULARY, typer.Option(help="Train a byte-level BPE of this size on the texts.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Use this tokenizer: a Hugging Face folder, or a folder of tokens.")
    ] = None,
) -> None:
    """Turn texts into a folder of tokens, once.

    Jobs ('data.folder') and studies ('train', 'tests') take the folder; copied to other machines, it saves them the
    work. Held-out text must have the tokenizer of the text that was trained on.

    Example: skippipe prepare books.txt.xz --vocabulary 8192 --out tokens/books
    """
    from skippipe.data.prepare import prepare as prepared

    if (vocabulary is None) == (tokenizer is None):
        raise UserError("say one of --vocabulary, to train a tokenizer, and --tokenizer, to use one that is there")
    last = ""

    def progress(what: str, share: float) -> None:
        nonlocal last
        line = f"{what} ({share:.0%})" if share else what
        if line != last:
            print(line, file=sys.stderr)
        last = line

    found = prepared(texts, tokenizer or vocabulary or 0, out, progress)
    print(f"{out}: {len(found):,} tokens, a vocabulary of {found.vocabulary:,}")
