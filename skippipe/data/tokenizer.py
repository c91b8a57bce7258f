"""Text to ids and back: a Hugging Face tokenizer, or a byte-level BPE trained here.

`<|endoftext|>` in a text ends a document and becomes the tokenizer's one id for that, which is the token of that name
or else its end-of-sequence token. All other text is text: what looks like another special token is spelled out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from skippipe.data.documents import END
from skippipe.errors import UserError, first_line, require
from skippipe.json_fields import exists, json_text, read_json, write_text
from skippipe.model.model_files import check_model_folder

EXTRA = "train"
FILE, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
TEMPLATE_FIELD = "chat_template"
KEPT = ("bos_token", "eos_token", "unk_token", "pad_token", TEMPLATE_FIELD)
"""Settings of a tokenizer that are saved with it."""
SMALLEST = 257  # the bytes, so that any text can be spelled, and the end of a document


class TextTokenizer:
    """A tokenizer as its JSON text says it; the fingerprint is of that text, whatever library reads it."""

    def __init__(self, text: str, settings: Mapping[str, Any] | None = None, place: str = "the tokenizer") -> None:
        """`settings` are of KEPT; "eos_token" ends a document if no token is named `<|endoftext|>`."""
        self.text = text
        self.place = place
        library = require("tokenizers", EXTRA, "turning text into tokens")
        try:
            self._backend = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"{place}: not a tokenizer that the library reads: {error}") from None
        self._backend.no_truncation()  # many published files carry the limits of one model
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        given = settings or {}
        names = [name for name in (END, given.get("eos_token")) if name and self._is_token(name)]
        if not names:
            raise UserError(
                f"{place}: no token ends a document: add '{END}' to it, or name its 'eos_token' in {SETTINGS}"
            )
        self.end = names[0]
        self.end_id: int = self._backend.token_to_id(self.end)
        known = {name for name, token in given.items() if name == TEMPLATE_FIELD or self._is_token(token)}
        self.settings: dict[str, Any] = {"eos_token": self.end, **{name: given[name] for name in known}}

    def _is_token(self, name: str) -> bool:
        return self._backend.token_to_id(name) is not None

    @cached_property
    def size(self) -> int:
        """Rows that an embedding needs: one more than the largest id, as some tokenizers leave ids out."""
        return int(max(self._backend.get_vocab(with_added_tokens=True).values())) + 1

    @cached_property
    def fingerprint(self) -> str:
        return sha256(self.text.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Nothing is added: a text without `<|endoftext|>` is a document that goes on."""
        ids: list[int] = []
        for index, piece in enumerate(self.encode_pieces(text.split(END))):
            ids += [self.end_id, *piece] if index else piece
        return ids

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """Many at once, on all cores; `<|endoftext|>` is plain text here."""
        return [found.ids for found in self._backend.encode_batch_fast(list(pieces), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return END.join(self._backend.decode(part, skip_special_tokens=False) for part in self._documents(ids))

    def _documents(self, ids: Sequence[int]) -> list[list[int]]:
        parts: list[list[int]] = [[]]
        for token in map(int, ids):
            if token == self.end_id:
                parts.append([])
            else:
                parts[-1].append(token)
        return parts

    def save(self, folder: Path, **others: str) -> None:
        """As a folder that `load` and transformers' AutoTokenizer read; `others` replace settings."""
        write_text(folder / FILE, self.text)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.settings, **others}
        write_text(folder / SETTINGS, json_text(settings) + "\n")

    @classmethod
    def load(cls, path: Path) -> TextTokenizer:
        """From a folder in the form of Hugging Face, or from a tokenizer.json."""
        if not exists(path):
            raise UserError(f"{path}: no such tokenizer; name a folder with a {FILE}, or such a file")
        folder, file = (path, path / FILE) if path.is_dir() else (path.parent, path)
        check_model_folder(folder)
        if not file.is_file():
            return _converted(folder)
        try:
            text = file.read_bytes().decode()  # as it is: the fingerprint is of these bytes
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from None
        return cls(text, _settings_in(folder), str(file))


def train_bpe(texts: Iterable[str], size: int) -> TextTokenizer:
    """A byte-level BPE: the same for the same texts, on any number of threads. Little text makes a smaller one."""
    if not SMALLEST <= size < 2**31:
        raise UserError(
            f"a vocabulary of {size:,} cannot be: {SMALLEST} or more spell every text; 2,048 suits a small one"
        )
    library = require("tokenizers", EXTRA, "training a tokenizer")
    backend = library.Tokenizer(library.models.BPE())
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return TextTokenizer(backend.to_str())


def _settings_in(folder: Path) -> dict[str, Any]:
    file = folder / SETTINGS
    found = read_json(file) if exists(file) else None
    kept: dict[str, Any] = {}
    for name in KEPT:
        value = found.get(name) if isinstance(found, dict) else None
        if isinstance(value, dict):  # older files spell out how the token is matched
            value = value.get("content")
        if isinstance(value, str) or (name == TEMPLATE_FIELD and isinstance(value, list)):
            kept[name] = value
    if exists(folder / TEMPLATE):
        kept[TEMPLATE_FIELD] = (folder / TEMPLATE).read_text(encoding="utf-8")
    return kept


def _converted(folder: Path) -> TextTokenizer:
    """A folder in one of the older forms (vocab.json and merges.txt, a sentencepiece model), through transformers."""
    transformers = require("transformers", EXTRA, f"{folder}: reading a tokenizer without a {FILE}")
    try:
        found: Any = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        text: str = found.backend_tokenizer.to_str()
    except Exception as error:  # whatever any of its hundred tokenizers raises
        raise UserError(
            f"{folder}: no {FILE} in it, and no other tokenizer that transformers reads: {first_line(error)}"
        ) from None
    kept = {name: getattr(found, name, None) for name in KEPT}
    return TextTokenizer(text, {name: value for name, value in kept.items() if value}, str(folder))
