"""A text split into sentences, and passages of whole sentences.

Line breaks inside a paragraph become spaces; paragraphs of a passage are parted by an empty line, as in most files of
plain text. Written for English: sentences end with a full stop or the like before a capital letter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from skippipe.data.documents import source

READ_CHARACTERS = 2**24  # the rest of a longer file is not read
MIN_WORDS, MAX_WORDS = 60, 100

_END = re.compile(r"""[.!?]+["'’”)\]]*\s+(?=["'‘“(\[]*[A-ZÀ-Þ])""")
_PARAGRAPHS = re.compile(r"\n\s*\n")
_ABBREVIATION = re.compile("Mr|Mrs|Ms|Dr|St|Messrs|Capt|Col|Gen|Lieut|Rev|Hon|Prof|Esq|Fig|No|Vol|vs|cf|al|[^\\W\\d_]")


class Sentence(NamedTuple):
    text: str
    paragraph: int
    """Number of its paragraph in the document."""
    words: int


class Passage(NamedTuple):
    """Sentences of a document, from 60 to 100 words of them."""

    text: str
    document: int
    first: int
    last: int
    """Numbers of its first and last sentence."""


class Prose:
    """The documents of a text file, sentence by sentence."""

    def __init__(self, name: str) -> None:
        """The text of a file, or one that comes with the package (classics-val)."""
        self.documents = [sentences_of(text) for text in _documents(name)]

    def passages(self) -> Iterator[Passage]:
        """For every sentence with enough of its document before it, the longest passage that ends with it."""
        for number, document in enumerate(self.documents):
            for last in range(len(document)):
                first, words = last, document[last].words
                while first > 0 and words + document[first - 1].words <= MAX_WORDS:
                    first -= 1
                    words += document[first].words
                if MIN_WORDS <= words <= MAX_WORDS:
                    yield Passage(joined(document[first : last + 1]), number, first, last)


def sentences_of(text: str) -> list[Sentence]:
    found = []
    for number, paragraph in enumerate(_PARAGRAPHS.split(text)):
        found += [Sentence(each, number, len(each.split())) for each in _cut(" ".join(paragraph.split()))]
    return found


def joined(sentences: list[Sentence]) -> str:
    text, before = sentences[0].text, sentences[0].paragraph
    for sentence in sentences[1:]:
        text += (" " if sentence.paragraph == before else "\n\n") + sentence.text
        before = sentence.paragraph
    return text


def _cut(paragraph: str) -> Iterator[str]:
    start = 0
    for end in _END.finditer(paragraph):
        word = paragraph[paragraph.rfind(" ", 0, end.start()) + 1 : end.start()].lstrip("\"'‘“([-")
        if end[0].startswith(".") and _ABBREVIATION.fullmatch(word):
            continue
        yield paragraph[start : end.end()].rstrip()
        start = end.end()
    if paragraph[start:]:
        yield paragraph[start:]


def _documents(name: str) -> Iterator[str]:
    text, read = "", 0
    for piece in source(name).pieces():
        text += piece.text
        read += len(piece.text)
        if piece.last or read > READ_CHARACTERS:
            yield text
            text = ""
        if read > READ_CHARACTERS:
            return
