"""Drafts: they change nothing in what is written, and are as long as they pay."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe.errors import UserError
from skippipe.inference.engine import TokenByToken
from skippipe.inference.request import SamplingParams
from skippipe.inference.speculative import (
    AcceptanceEstimate,
    DraftLength,
    Round,
    Speculator,
    StageTimings,
    best_length,
    parse_draft,
    pick_draft,
    shared_stages,
)
from skippipe.stage_subset import StageSubset
from tests.helpers.quick import others_slow
from tests.helpers.staged_models import (
    GREEDY,
    WHOLE,
    asked,
    output_tokens,
    prompts,
    staged,
)

torch.set_num_threads(1)


DRAFTS = [StageSubset((0,), 3), StageSubset((0, 1), 3), StageSubset((0, 2), 3), StageSubset((0, 1), 3, 1.4)]


PENALIZED = SamplingParams(
    0.0, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.8, logit_bias=((5, 3.0), (90, -100.0))
)


@dataclass(frozen=True)
class Case:
    family: str
    late: float
    sampling: SamplingParams
    draft_tokens: int | None
    least: float
    """Tokens a pass."""


CASES = [
    Case("llama", 0.02, GREEDY, 4, 1.8),
    Case("mistral", 0.15, SamplingParams(0.8, top_k=20, seed=4), 3, 1.1),
    Case("qwen3", 0.3, GREEDY, None, 1.0),
    Case("qwen3_moe", 1.0, SamplingParams(seed=7), 1, 1.0),
    Case("llama", 0.02, PENALIZED, 4, 1.3),
    Case("qwen3", 0.1, replace(PENALIZED, temperature=0.9, min_p=0.05, seed=3), 3, 1.05),
]


@pytest.mark.parametrize("case", others_slow(CASES[::2], CASES[1::2]), ids=lambda case: f"{case.family}-{case.late}")
def test_drafts_change_nothing(case: Case) -> None:
    """Whether they are nearly always right, now and then, or hardly ever; the likeliest tokens, or some at random."""
    model = staged(case.family, late=case.late)
    requests = asked(case.sampling)
    expected = output_tokens(model, TokenByToken(model, WHOLE, 1000), requests)
    for draft in DRAFTS:
        decoder = Speculator(model, WHOLE, draft, 1000, case.draft_tokens)
        assert output_tokens(model, decoder, requests) == expected
        assert decoder.record.tokens_per_pass >= case.least


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(DRAFTS), st.floats(0, 0.5), st.integers(1, 9), st.integers(1, 4))
def test_drafts_of_random_models(seed: int, draft: StageSubset, late: float, count: int, max_sequences: int) -> None:
    model = staged("llama-tied", seed, late)
    requests = asked(GREEDY if seed % 3 else SamplingParams(seed=seed), 3, seed)
    decoder = Speculator(model, WHOLE, draft, 1000, count)
    assert output_tokens(model, decoder, requests, max_sequences) == output_tokens(
        model, TokenByToken(model, WHOLE, 1000), requests
    )


def test_a_part_drafts_for_a_part() -> None:
    model = staged(late=0.1)
    subset = StageSubset((0, 2), 3, 2.0)
    expected = output_tokens(model, TokenByToken(model, subset, 1000), asked())
    assert output_tokens(model, Speculator(model, subset, StageSubset((0,), 3), 1000), asked()) == expected


def test_what_both_begin_with_is_shared() -> None:
    assert shared_stages(WHOLE, StageSubset((0, 1), 3)) == 2
    assert shared_stages(WHOLE, StageSubset((0, 2), 3)) == 1
    assert shared_stages(WHOLE, StageSubset((0, 1), 3, 1.4)) == 1, "driven otherwise"


def test_the_length_of_drafts() -> None:
    assert best_length(0.0, 0.3) == (0, 1.0)
    assert best_length(0.2, 0.3)[0] == 0
    length, speedup = best_length(0.8, 0.3)
    assert (length, round(speedup, 2)) == (3, 1.55)
    assert best_length(1.0, 0.1)[0] == 12
    assert best_length(0.8, 0.3, verifying=3.0) == (0, 1.0), "a machine that takes long for several tokens"


def test_drafts_adapt() -> None:
    adapting, fixed = DraftLength(), DraftLength(5)

    def lived(rounds: int, right: float, verifying_s: float = 1.0) -> list[int | None]:
        """Lengths of drafts, None without; each token is right with the same chance, and as many as may be are."""
        lengths: list[int | None] = []
        for _ in range(rounds):
            most, length, rate = adapting.max_tokens(), 0, right
            while length < most and adapting.pays(rate):
                length, rate = length + 1, rate * right
            lengths.append(length if most else None)
            tokens = sum(right**index for index in range(length + 1))
            drafting_s = 0.2 * (length + 1) if most else 0.2
            adapting.update(Round(most > 0, length, tokens, drafting_s, (verifying_s if most else 1.0) - 0.2))
            fixed.update(Round(True, 5, 1.0, 1.0, 1.0))
        return lengths

    assert lived(2, 1.0) == [None, 3], "a pass without, to compare with"
    eager = lived(60, 1.0)
    assert eager.count(12) > 55
    assert eager.count(None) == 1, "is it still slower without?"
    assert set(lived(300, 0.7)[-50:]) <= {2, 3, 4, None}
    assert set(lived(200, 0.1)[-100:]) <= {0, None}, "not even the first token"
    assert lived(200, 1.0)[-30:].count(12) >= 29, "and again if it is right"
    slow = lived(200, 1.0, verifying_s=20.0)[-48:]
    assert slow.count(None) >= 44, "not where verifying takes too long"
    assert slow.count(12) == 4, "after a while, it is tried again"
    assert (fixed.max_tokens(), fixed.pays(0.0)) == (5, True)


def test_trust_is_learned() -> None:
    acceptance = AcceptanceEstimate()
    assert acceptance.rate(0.0) < acceptance.rate(0.5) < acceptance.rate(1.0) < 1
    for index in range(200):
        acceptance.update(0.32, index % 4 > 0)
        acceptance.update(0.97, False)
    assert abs(acceptance.rate(0.38) - 0.75) < 0.05
    assert acceptance.rate(1.0) < 0.01


@pytest.mark.slow
def test_drafts_that_end_early_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is that another token does not seem to pay, with caches of their own or without."""
    model = staged(late=0.15)
    expected = output_tokens(model, TokenByToken(model, WHOLE, 1000), asked())
    for draft in DRAFTS:
        for place in range(4):
            turns = itertools.count()
            monkeypatch.setattr(DraftLength, "pays", lambda _self, _rate, t=turns, p=place: next(t) % 5 != p)
            assert output_tokens(model, Speculator(model, WHOLE, draft, 1000, 5), asked()) == expected


def test_auto_picks_what_agrees() -> None:
    faithful = staged(late=0.01)
    assert pick_draft(faithful, WHOLE, prompts()[3]) == StageSubset((0,), 3)
    assert pick_draft(staged(), WHOLE, prompts()[3]) is None


def test_auto_picks_nothing_slower() -> None:
    """By how long stages take, and how much longer for several tokens."""
    model = staged(late=0.01)
    ticks = itertools.count()
    timing = StageTimings(model, WHOLE, lambda: float(next(ticks)))
    timing.stage_s, timing.head_s, timing.several = {0: 2.0, 1: 1.0, 2: 2.0}, 1.0, 1.0
    early = StageSubset((0,), 3)
    assert timing.speedup(WHOLE, early, 0.0) == 1.0
    assert (
        timing.speedup(WHOLE, early, 0.8)
        == best_length(0.8, 0.5)[1]
        > timing.speedup(WHOLE, StageSubset((0, 1), 3), 0.8)
    )
    timing.several = 3.0
    assert timing.speedup(WHOLE, early, 0.8) == 1.0, "verifying takes too long"


def test_drafts_that_cannot_be() -> None:
    assert parse_draft("0,2", WHOLE) == StageSubset((0, 2), 3)
    assert parse_draft("0,2", WHOLE, "scaled") == StageSubset((0, 2), 3, 2.0)
    for text, complaint in (
        ("1,2", "begin with stage 0"),
        ("0,1,1", "every stage once"),
        ("0,3", "some of the stages 0,1,2"),
        ("0,1,2", "and not all of them"),
        ("x", "--draft: 'x' is not a list"),
    ):
        with pytest.raises(UserError, match=complaint):
            parse_draft(text, WHOLE)
    with pytest.raises(UserError, match="give the number of stages with --cut"):
        parse_draft("0", StageSubset((0,), 1))
    with pytest.raises(UserError, match="nothing to leave out: write with more of them"):
        parse_draft("0", StageSubset((0,), 3))
