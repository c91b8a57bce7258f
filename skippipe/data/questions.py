"""Questions made of a text: of `skippipe score`, and of studies.

    cloze   the last word of a passage, which has occurred in it before (after LAMBADA)
    choice  which of four sentences goes on with a passage: the true one, and three from elsewhere in the text
    order   which of four sentences is as it was: in the others, two neighbouring words have changed places

The same text and seed give the same questions; a smaller number of them is the beginning of a larger one.

Passages are whole sentences. Line breaks inside a paragraph become spaces; paragraphs of a passage are parted by an
empty line, as in most files of plain text. Written for English: sentences end with a full stop or the like before a
capital letter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any, NamedTuple, TypeVar

from skippipe.data.documents import END, source
from skippipe.data.token_file import TokenFile

Anything = TypeVar("Anything")
Question = dict[str, Any]
"""`context` and `target` of cloze; `choices` and `label`, and of choice also `context`. As the harness reads them."""
CHOICES = 4
MAX_DRAWS = 200  # of sentences, until three suit
MIN_DISTANCE = 20  # sentences between a passage and wrong answers from the same document
MIN_WORDS, MAX_WORDS = 6, 40  # of a sentence to choose from

_LAST_WORD = re.compile(r"""(.+) ([^\W\d_]{4,})[.!?]+["'’”)\]]*""", re.DOTALL)
_LONG_WORD = re.compile(r"[^\W\d_]{4,}")
READ_CHARACTERS = 2**24  # the rest of a longer file is not read
PASSAGE_MIN_WORDS, PASSAGE_MAX_WORDS = 60, 100  # of a passage

_END = re.compile(r"""[.!?]+["'’”)\]]*\s+(?=["'‘“(\[]*[A-ZÀ-Þ])""")
_PARAGRAPHS = re.compile(r"\n\s*\n")
_ABBREVIATION = re.compile("Mr|Mrs|Ms|Dr|St|Messrs|Capt|Col|Gen|Lieut|Rev|Hon|Prof|Esq|Fig|No|Vol|vs|cf|al|[^\\W\\d_]")


def questions_of(kind: str, prose: Prose, seed: int = 0, limit: int | None = None) -> list[Question]:
    """At most `limit` questions of a kind; none, if the text is too short."""
    return list(islice(QUESTION_KINDS[kind].make(prose, Random(f"{seed}/{kind}")), limit))


def _cloze_items(prose: Prose, generator: Random) -> Iterator[Question]:
    for passage in _shuffled(prose.passages(), generator):
        found = _LAST_WORD.fullmatch(passage.text)
        if found is not None and re.search(rf"\b{found[2]}\b", found[1]):
            yield {"context": found[1], "target": " " + found[2]}


def _choice_items(prose: Prose, generator: Random) -> Iterator[Question]:
    """All four stand within a paragraph: the first sentence of one begins in another way, often with a quote."""
    within = [
        (number, place)
        for number, document in enumerate(prose.documents)
        for place in range(1, len(document))
        if document[place - 1].paragraph == document[place].paragraph and _suits(document[place])
    ]
    allowed = set(within)
    for passage in _shuffled(prose.passages(), generator):
        if (passage.document, passage.last + 1) not in allowed:
            continue
        true = prose.documents[passage.document][passage.last + 1]
        others = _distractors(prose, within, passage, true, generator)
        if others:
            yield {"context": passage.text, **_among(true.text, others, generator)}


def _distractors(
    prose: Prose, places: list[tuple[int, int]], passage: Passage, true: Sentence, generator: Random
) -> list[str]:
    """Three wrong answers about as long as the true one; none if they are not found within `MAX_DRAWS`."""
    found: list[str] = []
    for number, place in generator.choices(places, k=MAX_DRAWS):
        sentence = prose.documents[number][place]
        near = number == passage.document and passage.first - MIN_DISTANCE <= place <= passage.last + MIN_DISTANCE
        alike = abs(sentence.words - true.words) <= max(2, true.words // 4)
        if alike and not near and sentence.text not in (true.text, *found):
            found.append(sentence.text)
            if len(found) == CHOICES - 1:
                return found
    return []


def _order_items(prose: Prose, generator: Random) -> Iterator[Question]:
    """Words with a mark at them stay where they are, and so do the first and the last: a comma would give it away."""
    sentences = dict.fromkeys(each.text for document in prose.documents for each in document if _suits(each))
    for text in _shuffled(sentences, generator):
        words = text.split()
        pairs = [
            place
            for place in range(1, len(words) - 2)
            if words[place].isalpha() and words[place + 1].isalpha() and words[place] != words[place + 1]
        ]
        if len(pairs) >= CHOICES - 1:
            swaps = generator.sample(pairs, CHOICES - 1)
            others = [" ".join([*words[:at], words[at + 1], words[at], *words[at + 2 :]]) for at in swaps]
            yield _among(text, others, generator)


def _suits(sentence: Sentence) -> bool:
    return MIN_WORDS <= sentence.words <= MAX_WORDS


def _among(true: str, others: list[str], generator: Random) -> Question:
    label = generator.randrange(CHOICES)
    return {"choices": [*others[:label], true, *others[label:]], "label": label}


def _shuffled(each: Iterable[Anything], generator: Random) -> list[Anything]:
    found = list(each)
    return generator.sample(found, len(found))


@dataclass(frozen=True)
class QuestionKind:
    make: Callable[[Prose, Random], Iterator[Question]]
    chance: Callable[[Question], float]
    """Accuracy of guessing."""


QUESTION_KINDS = {
    "cloze": QuestionKind(_cloze_items, lambda item: 1 / len(set(_LONG_WORD.findall(item["context"])))),
    "choice": QuestionKind(_choice_items, lambda item: 1 / CHOICES),
    "order": QuestionKind(_order_items, lambda item: 1 / CHOICES),
}


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
    """Documents, sentence by sentence."""

    def __init__(self, documents: Iterable[str]) -> None:
        self.documents = [sentences_of(text) for text in documents]

    @classmethod
    def read(cls, name: str) -> Prose:
        """The text of a file, or one that comes with the package (classics-val)."""
        return cls(_documents(name))

    @classmethod
    def decoded(cls, tokens: TokenFile) -> Prose:
        """The text that a token file was made of, as far as its tokenizer gives it back."""
        tokenizer = tokens.tokenizer()
        ids = tokens.ids[: READ_CHARACTERS // 2].tolist()  # a token is mostly longer
        return cls(filter(None, tokenizer.decode(ids)[:READ_CHARACTERS].split(END)))

    def passages(self) -> Iterator[Passage]:
        """For every sentence with enough of its document before it, the longest passage that ends with it."""
        for number, document in enumerate(self.documents):
            for last in range(len(document)):
                first, words = last, document[last].words
                while first > 0 and words + document[first - 1].words <= PASSAGE_MAX_WORDS:
                    first -= 1
                    words += document[first].words
                if PASSAGE_MIN_WORDS <= words <= PASSAGE_MAX_WORDS:
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
