"""From logits to tokens to text: chance, stop strings, whole characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import chdtrc
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from skippipe.errors import UserError
from skippipe.inference.request import BROKEN, Detokenizer, SamplingParams
from skippipe.inference.sampler import sample
from tests.helpers.model_folders import TOKENIZER

torch.set_num_threads(1)
GREEDY = SamplingParams(temperature=0)
_Tokenizer: Any = PreTrainedTokenizerFast  # untyped
TEXT = _Tokenizer(tokenizer_object=Tokenizer.from_str(TOKENIZER.text))


# ---- chance


def drawn(values: Sequence[float], how: SamplingParams, count: int = 4000) -> torch.Tensor:
    """How often each token comes, at so many positions."""
    chosen = sample(torch.tensor([list(values)] * count), [how] * count, range(count))
    return torch.bincount(torch.tensor(chosen), minlength=len(values))


VALUES = (1.0, 0.5, 0.0, 2.0, -1.0, 1.5, 0.2, -0.3)


def p_value(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of Pearson's chi-squared test. (Importing scipy.stats would take every worker longer than all tests here.)"""
    statistic = ((found.double() - expected) ** 2 / expected).sum()
    return float(chdtrc(len(found) - 1, float(statistic)))


@pytest.mark.parametrize(
    ("how", "shares"),
    [
        (SamplingParams(1.0), torch.tensor(VALUES).softmax(-1)),
        (SamplingParams(0.5, seed=9), (2 * torch.tensor(VALUES)).softmax(-1)),
        (SamplingParams(1.0, top_k=3), torch.tensor([2.0, 1.5, 1.0]).softmax(-1)),
        (SamplingParams(1.0, min_p=0.5), torch.tensor([2.0, 1.5]).softmax(-1)),  # e^-0.5 is 0.61, e^-1 is 0.37
        (
            SamplingParams(0.5, min_p=0.14, top_p=0.9),
            torch.tensor([4.0, 3.0]).softmax(-1),
        ),  # as 1, 0.37, 0.135
        (SamplingParams(1.0, top_p=0.65), torch.tensor([2.0, 1.5, 1.0]).softmax(-1)),  # 0.38 and 0.23 are too little
        (
            SamplingParams(1.0, top_k=3, top_p=0.7),
            torch.tensor([2.0, 1.5]).softmax(-1),
        ),  # of what top_k leaves: 0.51, 0.31
    ],
)
def test_tokens_come_as_often_as_they_should(how: SamplingParams, shares: torch.Tensor) -> None:
    found = drawn(VALUES, how).sort(descending=True).values[: len(shares)]
    expected = shares.double().sort(descending=True).values * 4000
    assert int(found.sum()) == 4000
    assert p_value(found, expected * (4000 / expected.sum())) > 0.01


def test_positions_and_seeds_are_independent() -> None:
    flat = torch.zeros(1000, 10)
    one, other = (sample(flat, [SamplingParams(seed=seed)] * 1000, range(1000)) for seed in (0, 1))
    pairs = torch.bincount(10 * torch.tensor(one) + torch.tensor(other), minlength=100)
    assert p_value(pairs, pairs.double().mean()) > 0.01
    neighbours = torch.bincount(10 * torch.tensor(one[1:]) + torch.tensor(one[:-1]), minlength=100)
    assert p_value(neighbours, neighbours.double().mean()) > 0.01


def test_limits_that_limit_nothing_or_all() -> None:
    rate = torch.Generator().manual_seed(0)
    many = torch.randn(50, 300, generator=rate)
    free = sample(many, [SamplingParams()] * 50, range(50))
    for same in (SamplingParams(top_k=300), SamplingParams(top_k=10**6), SamplingParams(top_p=1.0, top_k=300)):
        assert sample(many, [same] * 50, range(50)) == free
    likeliest = many.argmax(-1).tolist()
    assert free != likeliest
    for only in (GREEDY, SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(temperature=1e-30)):
        assert sample(many, [only] * 50, range(50)) == likeliest


def test_each_row_has_its_own_settings() -> None:
    many = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    how = [
        GREEDY,
        SamplingParams(),
        SamplingParams(0.7, top_k=5),
        SamplingParams(2.0, top_p=0.5, seed=3),
        SamplingParams(1.0, 7, 0.9),
    ]
    alone = [sample(many[row : row + 1], how[row : row + 1], [row]) for row in range(5)]
    assert sample(many, how, range(5)) == [token for (token,) in alone]


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_k": -1}, "top-k -1"),
        ({"top_p": 0.0}, "top-p 0.0"),
        ({"top_p": 1.1}, "top-p 1.1"),
    ],
)
def test_settings_that_cannot_be(how: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        SamplingParams(**how)


@pytest.mark.parametrize("how", [GREEDY, SamplingParams(), SamplingParams(top_k=3)])
def test_values_that_are_not_finite(how: SamplingParams) -> None:
    with pytest.raises(UserError, match="not finite"):
        sample(torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, torch.nan, 1.0, 2.0]]), [how] * 2, [0, 1])


# ---- text


class Letters:
    """A token is a piece of text."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def decode(self, tokens: Sequence[int], **_options: Any) -> str:
        return "".join(self.pieces[token] for token in tokens)


def spoken(pieces: Sequence[str], stop: Sequence[str]) -> tuple[list[str], bool]:
    stream = Detokenizer(Letters(*pieces), [], stop)
    found = []
    for token in range(len(pieces)):
        found.append(stream.push(token))
        if stream.stopped:
            break
    return [*found, stream.flush()], stream.stopped


@pytest.mark.parametrize(
    ("pieces", "stop", "expected", "stopped"),
    [
        (["a", "b", "c"], ["bc"], ["a", "", "", ""], True),
        (["a", "b", "x"], ["bc"], ["a", "", "bx", ""], False),
        (["one EN", "D two"], ["END"], ["one ", "", ""], True),
        (["one EN"], ["END"], ["one ", "EN"], False),
        (["aab", "aac"], ["aac", "abaa"], ["a", "", ""], True),
        (["xENDyend"], ["yend", "END"], ["x", ""], True),
        (["aaa", "ab"], ["aab"], ["a", "a", ""], True),
        (["abc"], [""], ["abc", ""], False),
    ],
)
def test_stop_strings(pieces: list[str], stop: list[str], expected: list[str], stopped: bool) -> None:
    assert spoken(pieces, stop) == (expected, stopped)


def with_byte_fallback() -> Any:
    """As Llama 2 and Mistral have it: a space is part of the word after it, and rare characters are bytes."""
    words = ["▁a", "▁be", "b", "▁", "é", ".", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _Tokenizer(tokenizer_object=backend)


FALLBACK = with_byte_fallback()
CHARACTERS = st.characters(exclude_characters=BROKEN, exclude_categories=["Cs"])


def bytes_of(text: str) -> list[int]:
    """All of them as bytes."""
    return [6 + byte for byte in text.encode()]


def read(tokenizer: Any, tokens: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    stream = Detokenizer(tokenizer, prompt)
    return [*(stream.push(token) for token in tokens), stream.flush()]


@settings(max_examples=30, deadline=None)
@given(st.text(CHARACTERS, max_size=12), st.text(CHARACTERS, max_size=6))
def test_characters_come_whole(text: str, before: str) -> None:
    for tokenizer, encoded in ((TEXT, TOKENIZER.encode), (FALLBACK, bytes_of)):
        pieces = read(tokenizer, encoded(text), [0, *encoded(before)])
        assert "".join(pieces) == text
        assert not any(BROKEN in piece for piece in pieces)


def test_characters_of_several_tokens_are_held_back() -> None:
    tokens = TOKENIZER.encode("a€😀")
    assert len(tokens) == 8
    assert read(TEXT, tokens) == ["a", "", "", "€", "", "", "", "😀", ""]
    assert "".join(read(TEXT, tokens[:-1])) == "a€", "a character that lacks bytes is not said"


def test_bytes_that_make_no_sense() -> None:
    (alone,) = (token for token in range(TOKENIZER.size) if TEXT.convert_ids_to_tokens(token) == "Ģ")  # 0x80
    good = TOKENIZER.encode("€.")
    assert "".join(read(TEXT, [alone, *good])) == BROKEN + "€."
    assert "".join(read(TEXT, [alone] * 20 + good)) == BROKEN * 20 + "€."


def test_spaces_before_words() -> None:
    assert read(FALLBACK, [0, 1, 2, 5, 0], prompt=[1]) == [" a", " be", "b", ".", " a", ""]
    assert read(FALLBACK, [0, 1, 3, 3, 2], prompt=[]) == ["a", " be", " ", " ", "b", ""]
