"""Generation in one process, held to transformers: caches, parts, many together."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skippipe.errors import UserError
from skippipe.inference import cached_stage
from skippipe.inference.cached_stage import (
    BatchRows,
    CachedStage,
    CacheFull,
    StageCache,
    StageChain,
    convert,
    embed,
    logits,
)
from skippipe.inference.checkpoint_loader import context_of, load, read_outline
from skippipe.inference.engine import Decoder, GenerationEngine, TokenByToken
from skippipe.inference.likelihood import SubsetModel
from skippipe.inference.request import FinishReason, Generation, GenerationRequest, SamplingParams, TokenOutput
from skippipe.model.model_spec import ModelSpec, llama_config
from skippipe.model.stage import StageModel
from skippipe.model_shape import MODELS
from skippipe.stage_subset import StageSubset
from tests.helpers.model_folders import TOKENIZER, export_to
from tests.helpers.models import tiny
from tests.helpers.quick import MOST_FAMILIES_SLOW
from tests.helpers.staged_models import (
    GREEDY,
    WHOLE,
    asked,
    output_tokens,
    prompts,
    staged,
    staged_once,
    theirs,
)

torch.set_num_threads(1)


# ---- caches


@torch.no_grad()
@pytest.mark.parametrize("family", MOST_FAMILIES_SLOW)
def test_any_schedule_of_passes_gives_the_logits_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unequal length, with and without a past, padding, slots in any order, cut back, moved and used again."""
    monkeypatch.setattr(cached_stage, "MIN_ROOM", 4)  # so that it grows
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
    new = torch.ones(2, 1, 3, 4)
    store.begin(BatchRows((0, 1), (0, 0), (3, 3))).update(new, new, 0)
    keys, values = store.begin(BatchRows((0, 1), (3, 3), (1, 1))).update(new[:, :, :1], new[:, :, :1], 0)
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


@pytest.mark.parametrize("family", MOST_FAMILIES_SLOW)
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


@settings(max_examples=30, deadline=None)
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


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (None, 100),
        ({"rope_type": "linear", "factor": 4.0}, 400),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50}, 200),
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 50}, 100),
        (
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "original_max_position_embeddings": 50,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            100,
        ),
    ],
)
def test_a_context_beyond_what_the_model_is_made_for_is_warned_of(
    rope: dict[str, Any] | None, longest: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = llama_config(MODELS["llama-tiny"], max_position_embeddings=100, rope_scaling=rope)
    assert (context_of(config, None), context_of(config, 30), context_of(config, longest)) == (100, 30, longest)
    assert "--context" not in caplog.text
    assert context_of(config, longest + 1) == longest + 1
    assert f"--context {longest + 1}: by its config the model is made for {longest} tokens" in caplog.text


def test_tokens_that_end_a_text(tmp_path: Path) -> None:
    """As in transformers, generation_config.json counts: chat models end an answer with tokens that only it names."""
    export_to(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    model = load(tmp_path)
    end = model.tokenizer.eos_token_id
    assert model.end_tokens == ({end} if end is not None else set())
    request = GenerationRequest(asked()[4].prompt, 30, SamplingParams(temperature=0))
    (plain,) = GenerationEngine(model, TokenByToken(model, WHOLE, 1000)).run([request])
    token = plain.output_tokens[5]

    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [token, 4]}))
    model = load(tmp_path)
    assert model.end_tokens >= {token, 4}
    (ended,) = GenerationEngine(model, TokenByToken(model, WHOLE, 1000)).run([request])
    assert ended.finish_reason is FinishReason.STOP
    assert ended.output_tokens == plain.output_tokens[: plain.output_tokens.index(token) + 1]
    assert read_outline(tmp_path).end_tokens(model.tokenizer) == model.end_tokens, "as it is served"


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
