"""Files, datasets of the hub, or a stream of documents into a token file."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import chain
from pathlib import Path

import numpy as np

from skippipe.data.documents import END, FIELD, Piece, TextSource, cut, sources
from skippipe.data.token_file import HEADER, WIDTHS, Inputs, TokenFile, cache_folder, width
from skippipe.data.tokenizer import FILE, SETTINGS, TextTokenizer, train_bpe
from skippipe.errors import UserError
from skippipe.json_fields import exists

BATCH_CHARACTERS = 2**20  # encoded at a time, and so what is in memory: some hundred bytes for each
TRAINED_ON_CHARACTERS = 2**26  # more text hardly changes a tokenizer, but takes minutes

PrepareProgress = Callable[[str, float], None]
"""What is being done, and which share of it is behind us (0 throughout for a stream)."""


def prepare(
    texts: str | Path | Sequence[str | Path] | Iterator[str],
    tokenizer: TextTokenizer | str | Path | int = 2048,
    folder: Path | None = None,
    progress: PrepareProgress = lambda what, share: None,
    *,
    field: str = FIELD,
) -> TokenFile:
    """The token file of these texts, made unless the folder has it already.

    `texts` are files, folders of them, datasets of the hub (see `readers`), "classics" or "classics-val"; of records
    the text is in `field`. Or they are an iterator over documents, which is always read anew. `tokenizer` is one that
    is there or its folder, or the size of a vocabulary to train on the texts. Without a folder it is kept in the
    cache, under a name made from the inputs.
    """
    if isinstance(tokenizer, (str, Path)):
        tokenizer = TextTokenizer.load(Path(tokenizer))
    if isinstance(texts, Iterator):
        if folder is None:
            raise UserError("a stream of documents has no name: say in which folder its tokens are to be kept")
        return _make(_Stream(texts), tokenizer, folder, Inputs.of((), tokenizer), progress)
    names = [texts] if isinstance(texts, (str, Path)) else texts
    for name in names:
        if exists(Path(name) / HEADER):
            raise UserError(f"{name}: holds tokens, not text; name the texts, and in a job this folder as data.folder")
    files = _Files(sources(names), field)
    records = any(each.has_records for each in files.sources)
    inputs = Inputs.of(files.sources, tokenizer, f"field {field}" if records else "")
    if folder is None:
        stem = re.sub(r"[^\w.-]+", "-", files.sources[0].name.removesuffix(".xz").removesuffix(".txt"))
        folder = cache_folder(f"{stem}-{sha256(repr(inputs).encode()).hexdigest()[:12]}")
    return _reusable(folder, inputs) or _make(files, tokenizer, folder, inputs, progress)


class _Files:
    def __init__(self, sources: list[TextSource], field: str) -> None:
        if not sources:
            raise UserError("no text to prepare: name a text file, or 'classics'")
        self.sources = sources
        self._field = field

    def sample(self) -> Iterator[str]:
        """An equal share from the start of every file."""
        for each in self.sources:
            yield from _first(each.pieces(field=self._field), TRAINED_ON_CHARACTERS // len(self.sources))

    def pieces(self, on_share: Callable[[float], None]) -> Iterator[Piece]:
        done, total = 0, sum(each.size_bytes for each in self.sources)

        def on_read(count: int) -> None:
            nonlocal done
            done += count
            on_share(min(1.0, done / total) if total else 0.0)

        for each in self.sources:
            yield from each.pieces(on_read, self._field)


class _Stream:
    """Documents that come only once: those the tokenizer was trained on are kept until they are encoded."""

    def __init__(self, documents: Iterator[str]) -> None:
        self._pieces = cut(document + END for document in documents)
        self._seen: list[Piece] = []

    def sample(self) -> Iterator[str]:
        def kept() -> Iterator[Piece]:
            for piece in self._pieces:
                self._seen.append(piece)
                yield piece

        return _first(kept(), TRAINED_ON_CHARACTERS)

    def pieces(self, on_share: Callable[[float], None]) -> Iterator[Piece]:
        on_share(0.0)
        seen, self._seen = self._seen, []
        return chain(seen, self._pieces)


def _first(pieces: Iterable[Piece], characters: int) -> Iterator[str]:
    for piece in pieces:
        yield piece.text
        characters -= len(piece.text)
        if characters <= 0:
            return


def _reusable(folder: Path, inputs: Inputs) -> TokenFile | None:
    try:
        found = TokenFile.open(folder)
        if found.inputs != inputs:
            return None
        found.check_content()
    except (UserError, OSError):  # whatever is wrong with it, it is about to be made anew
        return None
    return found


def _make(
    texts: _Files | _Stream, tokenizer: TextTokenizer | int, folder: Path, inputs: Inputs, progress: PrepareProgress
) -> TokenFile:
    if isinstance(tokenizer, int):
        progress(f"training a tokenizer of {tokenizer:,} tokens", 0.0)
        tokenizer = train_bpe(texts.sample(), tokenizer)
    made = TokenFile(
        folder, "", width(tokenizer.size), 0, tokenizer.size, tokenizer.end_id, "", tokenizer.fingerprint, inputs
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as name:  # of its own: others may do the same
            partial = Path(name)
            pieces = texts.pieces(lambda share: progress("turning text into tokens", share))
            made = _encode(pieces, tokenizer, made, partial)
            tokenizer.save(partial)
            (partial / HEADER).write_text(made.header_text() + "\n", encoding="utf-8")
            for file in (made.data, FILE, SETTINGS, HEADER):  # the header last: it vouches for the others
                (partial / file).replace(folder / file)
        for old in folder.glob("tokens-*.bin"):
            if old.name != made.data:
                old.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: the tokens cannot be written: {error.strerror or error}") from None
    return TokenFile.open(folder, tokenizer)


def _encode(pieces: Iterator[Piece], tokenizer: TextTokenizer, made: TokenFile, folder: Path) -> TokenFile:
    digest, tokens = sha256(), 0
    with (folder / "ids").open("wb") as file:
        for batch in _batches(pieces):
            for piece, ids in zip(batch, tokenizer.encode_pieces([piece.text for piece in batch]), strict=True):
                if piece.last:
                    ids.append(tokenizer.end_id)
                content = np.array(ids, WIDTHS[made.type]).tobytes()
                digest.update(content)
                file.write(content)
                tokens += len(ids)
    if not tokens:
        raise UserError("the stream holds no text: no document, or only empty ones")
    name = f"tokens-{digest.hexdigest()[:16]}.bin"
    (folder / "ids").rename(folder / name)
    return replace(made, data=name, tokens=tokens, content_sha256=digest.hexdigest())


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
