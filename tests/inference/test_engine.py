"""Generation in one process, held to transformers: caches, parts, many together, drafts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from skippipe.errors import UserError
from skippipe.inference import kv_cache
from skippipe.inference.cached_stage import CachedStage, StageChain, convert, embed, logits
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.decoder import Decoder, TokenByToken
from skippipe.inference.draft_policy import (
    AcceptanceEstimate,
    DraftLength,
    Round,
    StageTimings,
    best_length,
    parse_draft,
    pick_draft,
    shared_stages,
)
from skippipe.inference.engine import GenerationEngine, model_end_tokens
from skippipe.inference.kv_cache import BatchRows, CacheFull, StageCache
from skippipe.inference.likelihood import SubsetModel
from skippipe.inference.request import FinishReason, Generation, GenerationRequest, SamplingParams, TokenOutput
from skippipe.inference.speculative import Speculator
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.stage_subset import StageSubset
from tests.helpers.model_folders import TOKENIZER
from tests.helpers.models import FAMILIES, tiny, whole_model

torch.set_num_threads(1)
LAYERS = (2, 1, 2)
WHOLE = StageSubset((0, 1, 2), 3)
GREEDY = SamplingParams(temperature=0)
_Tokenizer: Any = PreTrainedTokenizerFast  # untyped
TEXT = _Tokenizer(tokenizer_object=Tokenizer.from_str(TOKENIZER.text))


def staged(family: str = "llama", seed: int = 5, late: float = 1.0) -> StagedModel:
    """Weights so large that parts differ a lot, unless what the `late` stages add is made small."""
    spec = ModelSpec(tiny(family, vocab_size=TOKENIZER.size, initializer_range=0.2), seed)
    ranges = layer_ranges(LAYERS)
    stages = [StageModel(spec, each, ends=index == 0).eval() for index, each in enumerate(ranges)]
    with torch.no_grad():
        for stage in stages[1:]:
            for name, each in stage.named_weights():
                if "o_proj" in name or "down_proj" in name:
                    each.mul_(late)
    return StagedModel(stages, TEXT, 0, 64, "cpu")


staged_once = lru_cache(staged)


def theirs(model: StagedModel) -> Any:
    return whole_model(model.stages[0].spec.config, model.stages).eval()


def prompts(count: int = 5, seed: int = 0) -> list[tuple[int, ...]]:
    rate = random.Random(seed)
    return [tuple(rate.choices(range(TOKENIZER.size), k=rate.randint(1, 20))) for _ in range(count)]


def asked(sampling: SamplingParams = GREEDY, count: int = 5, seed: int = 0) -> list[GenerationRequest]:
    """Of all lengths."""
    return [GenerationRequest(each, 2 + 3 * index, sampling) for index, each in enumerate(prompts(count, seed))]


def output_tokens(
    model: StagedModel, decoder: Decoder, requests: Sequence[GenerationRequest], max_sequences: int = 3
) -> list[list[int]]:
    generations = GenerationEngine(model, decoder, max_sequences, end_tokens=frozenset()).run(requests)
    return [generation.output_tokens for generation in generations]


# ---- caches


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_any_schedule_of_passes_gives_the_logits_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unequal length, with and without a past, padding, slots in any order, cut back, moved and used again."""
    monkeypatch.setattr(kv_cache, "MIN_ROOM", 4)  # so that it grows
    model, rate = staged(family), random.Random(family)
    texts = torch.randint(TOKENIZER.size, (6, 24), generator=torch.Generator().manual_seed(1))
    expected = theirs(model)(texts).logits
    chain = StageChain(model.stages, WHOLE.stages, WHOLE.residual_scale, 400)
    holds: dict[int, tuple[int, int]] = {}  # slot → which text, and how much of it

    def fed(slots: Sequence[int], counts: Sequence[int], junk: bool = False) -> None:
        rows = BatchRows(tuple(slots), tuple(holds[slot][1] for slot in slots), tuple(counts))
        tokens = [
            texts[holds[slot][0], holds[slot][1] :][: rows.width].flip(0 if junk else ()).tolist() for slot in slots
        ]
        padded = [[*row, *[0] * (rows.width - len(row))] for row in tokens]
        made = logits(model.stages[0], chain.forward(embed(model.stages[0], padded), rows))
        for slot, count, row in zip(slots, counts, made, strict=True):
            text, begin = holds[slot]
            if not junk:
                assert torch.allclose(row[:count], expected[text, begin : begin + count], atol=1e-4)
                holds[slot] = text, begin + count

    for turn in range(36):
        for slot in set(rate.sample(range(6), 2)) - holds.keys():
            holds[slot] = rate.randrange(6), 0
        for slot in list(holds):
            text, begin = holds[slot]
            if begin > 18 or rate.random() < 0.05:
                chain.free(slot)
                del holds[slot]
            elif begin > 2 and rate.random() < 0.15:
                holds[slot] = text, rate.randrange(1, begin)
        full = [slot for slot, (_, begin) in holds.items() if begin]
        empty = [slot for slot in range(max(full, default=0)) if slot not in holds]
        if full and empty and turn % 5 == 0:
            chain.move(full[0], empty[0])
            holds[empty[0]] = holds.pop(full[0])
        started = [slot for slot, (_, begin) in holds.items() if begin]
        new = sorted(holds.keys() - set(started))
        if new:
            fed(new, [rate.randint(1, 6) for _ in new])
        if started:
            slots = rate.sample(started, rate.randint(1, len(started)))
            slots = sorted(slots) if rate.random() < 0.5 else slots
            if rate.random() < 0.2:
                fed(slots, [rate.randint(1, 3) for _ in slots], junk=True)
            if rate.random() < 0.4:
                fed(slots, [1] * len(slots))
            else:
                fed(slots, [4, *[rate.randint(0, 4) for _ in slots[1:]]])


def test_slots_that_follow_one_another_are_read_without_copying() -> None:
    store = StageCache(0, [None], 1000)
    device = torch.device("cpu")
    new = torch.ones(2, 1, 3, 4)
    store.begin(BatchRows((0, 1), (0, 0), (3, 3)), device).update(new, new, 0)
    keys, values = store.begin(BatchRows((0, 1), (3, 3), (1, 1)), device).update(new[:, :, :1], new[:, :, :1], 0)
    pair = store.stores[0]
    assert pair is not None
    assert keys.untyped_storage().data_ptr() == pair[0].untyped_storage().data_ptr()
    assert keys.shape == values.shape == (2, 1, 4, 4)


@pytest.mark.parametrize("counts", [(4, 2), (2, 4)])
def test_a_freed_slot_is_wiped(counts: tuple[int, int]) -> None:
    """What a row must not see is multiplied by 0: NaN would stay."""
    model = staged()
    used, new = (StageChain(model.stages, WHOLE.stages, 1.0, 400) for _ in range(2))
    used.forward(torch.full((1, 9, 32), torch.nan), BatchRows((1,), (0,), (9,)))
    used.move(1, 0)
    used.free(0)
    hidden = torch.randn(2, 4, 32)
    found = []
    for chain in (used, new):
        chain.forward(hidden, BatchRows((0, 1), (0, 0), counts))
        found.append(chain.forward(hidden[:, :1], BatchRows((0, 1), counts, (1, 1))))
    assert torch.equal(*found)


def test_room_is_bounded() -> None:
    model = staged()
    stage = CachedStage(model.stages[0], 100)
    stage.forward(torch.zeros(1, 60, 32), BatchRows((0,), (0,), (60,)))
    stage.forward(torch.zeros(1, 39, 32), BatchRows((0,), (60,), (39,)))
    with pytest.raises(CacheFull, match="2 texts of up to 99 tokens need room for 198, and there is room for 100"):
        stage.forward(torch.zeros(1, 1, 32), BatchRows((1,), (0,), (1,)))
    stage.cache.free(0)
    stage.forward(torch.zeros(4, 25, 32), BatchRows((0, 1, 2, 3), (0,) * 4, (25,) * 4))
    with pytest.raises(AssertionError, match="ends before token 30"):
        stage.forward(torch.zeros(1, 1, 32), BatchRows((0,), (30,), (1,)))


def test_rotations_that_change_with_the_length_are_refused() -> None:
    config = tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(UserError, match="rope_type 'dynamic' depends on the length"):
        CachedStage(StageModel(ModelSpec(config), range(2), ends=True), 100)


@pytest.mark.parametrize("family", ["llama-tied", "qwen3"])
def test_bf16(family: str) -> None:
    model = staged(family)
    whole = theirs(model).to(torch.bfloat16)
    whole.model.rotary_emb = whole.model.rotary_emb.to(torch.float32)
    whole.model.rotary_emb.inv_freq = model.stages[0].rotary.inv_freq
    convert(model, "bf16")
    assert model.stages[0].rotary.inv_freq.dtype == torch.float32
    assert model.stages[0].head is not None
    assert model.stages[0].embedding is not None
    tied = model.stages[0].head.weight is model.stages[0].embedding.weight
    assert tied == (family == "llama-tied")
    row = list(prompts()[2])
    hidden = embed(model.stages[0], [row])
    assert hidden.dtype == torch.bfloat16
    chain = StageChain(model.stages, WHOLE.stages, 1.0, 400)
    found = logits(model.stages[0], chain.forward(hidden, BatchRows((0,), (0,), (len(row),))))
    with torch.no_grad():
        expected = whole(torch.tensor([row])).logits
    assert torch.allclose(found, expected.float(), atol=0.05)


# ---- many together


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_transformers(family: str) -> None:
    model = staged(family)
    whole = theirs(model)
    expected = []
    for request in asked():
        row = torch.tensor([request.prompt])
        made = whole.generate(
            row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=request.max_tokens
        )
        expected.append(made[0, len(request.prompt) :].tolist())
    assert output_tokens(model, TokenByToken(model, WHOLE, 1000), asked()) == expected
    assert output_tokens(model, TokenByToken(model, WHOLE, 90), asked(), max_sequences=8) == expected, (
        "when there is little room"
    )


@pytest.mark.parametrize("subset", [StageSubset((0, 2), 3, 1.7), StageSubset((0, 2, 1), 3), StageSubset((0,), 3)])
def test_a_part_writes_what_it_writes_without_a_cache(subset: StageSubset) -> None:
    model = staged()
    plain = SubsetModel(model, subset)
    rows = [list(request.prompt) for request in asked(count=3)]
    for _ in range(6):
        for row, token in zip(rows, plain.most_likely(rows), strict=True):
            row.append(token)
    requests = [GenerationRequest(prompt, 6, GREEDY) for prompt in prompts(3)]
    found = output_tokens(model, TokenByToken(model, subset, 1000), requests)
    assert found == [row[len(request.prompt) :] for row, request in zip(rows, requests, strict=True)]


class Pretending(Decoder):
    """Says something, and knows what must be true of slots."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.holds: dict[int, Generation] = {}
        self.most = 0

    def begin(self, generations: Sequence[Generation]) -> list[list[int]]:
        for generation in generations:
            assert generation.slot not in self.holds
            self.holds[generation.slot] = generation
        return self._output_tokens(generations)

    def advance(self, generations: Sequence[Generation]) -> list[list[int]]:
        assert [self.holds[slot] for slot in range(len(self.holds))] == generations
        return self._output_tokens(generations)

    def _output_tokens(self, generations: Sequence[Generation]) -> list[list[int]]:
        assert (max(self.holds) + 1) * max(
            generation.max_length for generation in self.holds.values()
        ) <= self.max_tokens
        self.most = max(self.most, len(self.holds))
        return [[7] * (1 + generation.number % 3) for generation in generations]

    def free(self, slot: int) -> None:
        del self.holds[slot]

    def move(self, source: int, target: int) -> None:
        assert target not in self.holds
        self.holds[target] = self.holds.pop(source)


LENGTHS = st.tuples(st.integers(1, 30), st.integers(1, 30))


@settings(max_examples=60, deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=14), st.integers(1, 6), st.integers(60, 300))
@example([(1, 2), (1, 4), (1, 6), (1, 2), (1, 4), (25, 25), (30, 30)], 6, 300)  # one is left in the highest slot
def test_texts_come_and_go(lengths: list[tuple[int, int]], max_sequences: int, room: int) -> None:
    decoder = Pretending(room)
    requests = [GenerationRequest((1,) * prompt, count, GREEDY) for prompt, count in lengths]
    generations = GenerationEngine(staged_once(), decoder, max_sequences).run(requests)
    assert [len(generation.output_tokens) for generation in generations] == [count for _, count in lengths]
    assert not decoder.holds
    assert decoder.most <= max_sequences
    if max_sequences * 60 <= room:
        assert decoder.most == min(max_sequences, len(lengths))


def test_every_token_is_heard_and_texts_end() -> None:
    model = staged()
    (whole,) = GenerationEngine(model, TokenByToken(model, WHOLE, 1000), end_tokens=frozenset()).run([asked()[3]])
    last = whole.output_tokens[5]
    pieces: list[TokenOutput] = []
    decoder = TokenByToken(model, WHOLE, 1000)
    (cut,) = GenerationEngine(model, decoder, end_tokens=frozenset({last})).run([asked()[3]], pieces.append)
    assert cut.output_tokens == whole.output_tokens[: whole.output_tokens.index(last) + 1]
    assert [piece.token for piece in pieces] == cut.output_tokens
    assert "".join(piece.text for piece in pieces) == cut.text
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [FinishReason.STOP]
    assert whole.finish_reason is FinishReason.LENGTH


def test_the_context_ends_a_text() -> None:
    model = replace(staged(), context=12)
    decoder = TokenByToken(model, WHOLE, 1000)
    (generation,) = GenerationEngine(model, decoder, end_tokens=frozenset()).run(
        [GenerationRequest(tuple(range(9)), 50, GREEDY)]
    )
    assert (len(generation.output_tokens), generation.finish_reason) == (3, FinishReason.LENGTH)
    with pytest.raises(UserError, match="a prompt of 12 tokens: the model looks at 12"):
        GenerationEngine(model, decoder).add_request(GenerationRequest(tuple(range(12)), 1))
    with pytest.raises(CacheFull, match="a text of up to 12 tokens: there is room for 11"):
        GenerationEngine(model, TokenByToken(model, WHOLE, 11)).add_request(GenerationRequest((1,), 50))
    for prompt, count in (((), 1), ((1,), 0)):
        with pytest.raises(UserError, match="one"):
            GenerationRequest(prompt, count)


def test_tokens_that_end_a_text() -> None:
    config = staged().stages[0].spec.config
    assert model_end_tokens(config, TEXT) == frozenset()
    config.eos_token_id = [3, 4]
    assert model_end_tokens(config, TEXT) == {3, 4}


def test_a_stop_string_ends_a_reply() -> None:
    model = staged()
    decoder = TokenByToken(model, WHOLE, 1000)
    request = replace(asked()[4], max_tokens=30)
    (plain,) = GenerationEngine(model, decoder, end_tokens=frozenset()).run([request])
    stop = plain.text[9:14]
    (generation,) = GenerationEngine(model, decoder, end_tokens=frozenset()).run([replace(request, stop=(stop,))])
    assert generation.text == plain.text[: plain.text.index(stop)]
    assert generation.finish_reason is FinishReason.STOP


def test_company_does_not_matter() -> None:
    model = staged()
    requests = [
        GenerationRequest(each, 8, SamplingParams(1.0, top_p=0.95, seed=index)) for index, each in enumerate(prompts())
    ]
    max_sequences = output_tokens(model, TokenByToken(model, WHOLE, 1000), requests, max_sequences=8)
    backwards = output_tokens(model, TokenByToken(model, WHOLE, 1000), requests[::-1], max_sequences=3)[::-1]
    single_ablations = [output_tokens(model, TokenByToken(model, WHOLE, 1000), [request])[0] for request in requests]
    assert max_sequences == backwards == single_ablations
    other = output_tokens(
        model, TokenByToken(model, WHOLE, 1000), [replace(requests[0], sampling=SamplingParams(seed=77))]
    )
    assert other[0] != single_ablations[0]


# ---- drafts

DRAFTS = [StageSubset((0,), 3), StageSubset((0, 1), 3), StageSubset((0, 2), 3), StageSubset((0, 1), 3, 1.4)]


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
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.family)
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
