"""Biases, penalties and log-probabilities, held to transformers: the same tokens, the same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from skippipe.inference.engine import TokenByToken
from skippipe.inference.request import GenerationRequest, SamplingParams
from skippipe.inference.sampler import LogitsContext, process_logits, sample, token_logprobs
from tests.helpers.staged_models import WHOLE, output_tokens, prompts, staged_once, theirs

torch.set_num_threads(1)
TOKENS = 24


class CountPenalty:
    """Presence and frequency penalties by OpenAI's formula, which transformers does not have: of the output alone."""

    def __init__(self, params: SamplingParams, prompt: int) -> None:
        self._params, self._prompt = params, prompt

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        counts = torch.zeros_like(scores).scatter_add_(1, tokens[:, self._prompt :], torch.ones_like(scores))
        return scores - self._params.frequency_penalty * counts - self._params.presence_penalty * (counts > 0)


def their_processors(params: SamplingParams, prompt: int) -> Any:
    found: list[Any] = []
    if params.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias]))
    if params.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    return LogitsProcessorList([*found, CountPenalty(params, prompt)])


PARAMS = [
    SamplingParams(0.0, repetition_penalty=1.3),
    SamplingParams(0.0, repetition_penalty=0.8),
    SamplingParams(0.0, presence_penalty=1.5),
    SamplingParams(0.0, frequency_penalty=0.7),
    SamplingParams(0.0, frequency_penalty=-0.3, presence_penalty=2.0),
    SamplingParams(0.0, logit_bias=((3, 2.5), (17, -100.0), (40, 0.75))),
    SamplingParams(
        0.0, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.2, logit_bias=((3, 4.0), (9, -3.0))
    ),
]


def test_answers_are_those_of_transformers() -> None:
    """All of them in one batch here, each alone there: what the others ask for makes no difference."""
    model = staged_once()
    requests = [GenerationRequest(prompt, TOKENS, params) for prompt in prompts(1) for params in PARAMS]
    found = output_tokens(model, TokenByToken(model, WHOLE, 10_000), requests, len(requests))
    plain, changed = theirs(model), 0
    for request, tokens in zip(requests, found, strict=True):
        given = torch.tensor([request.prompt])
        settings = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        processors = their_processors(request.sampling, given.shape[1])
        expected = plain.generate(given, logits_processor=processors, **settings)[0, given.shape[1] :].tolist()
        assert tokens == expected
        changed += expected != plain.generate(given, **settings)[0, given.shape[1] :].tolist()
    assert changed >= len(requests) - 2, "nearly every one says something else than without"


def test_every_row_by_its_own_request() -> None:
    """In any batch exactly as alone, and the rows that ask for nothing as they were."""
    logits = torch.randn(len(PARAMS) + 1, 60, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(60, (len(logits), 30), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [LogitsContext(params, each, 10) for params, each in zip([SamplingParams(), *PARAMS], tokens, strict=True)]
    found = process_logits(logits, rows)
    assert torch.equal(found[0], logits[0])
    for number, row in enumerate(rows):
        alone = process_logits(logits[number : number + 1], [row])
        assert torch.equal(found[number : number + 1], alone)
        scores = their_processors(row.params, 10)(torch.tensor([row.tokens]), logits[number : number + 1])
        torch.testing.assert_close(alone, scores)
    assert process_logits(logits, [rows[0]] * len(logits)) is logits


def test_tokens_that_are_not_allowed_never_come() -> None:
    allowed = {2, 31, 32, 49}
    mask = sum(2**token for token in allowed).to_bytes(8, "little")
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).expand(2000, -1)
    for params in (SamplingParams(), SamplingParams(logit_bias=((31, 100.0), (7, 100.0)), top_p=0.5)):
        context = LogitsContext(params, (), 0, mask)
        found = process_logits(logits, [context] * 2000)
        chosen = set(sample(found, [params] * 2000, range(2000)))
        assert chosen == ({31} if params.logit_bias else allowed)


@pytest.mark.parametrize("min_p", [0.05, 0.2, 0.7, 1.0])
def test_min_p_leaves_the_tokens_that_transformers_leaves(min_p: float) -> None:
    values = torch.randn(1, 40, generator=torch.Generator().manual_seed(3))
    warper: Any = MinPLogitsWarper(min_p)
    kept = set(warper(torch.empty(1, 0), values / 0.8).isfinite()[0].nonzero()[:, 0].tolist())
    params = [SamplingParams(0.8, min_p=min_p), SamplingParams(0.8)]
    drawn = sample(values.expand(8000, -1), params * 4000, range(8000))
    assert set(drawn[::2]) == kept
    assert set(drawn[1::2]) > kept, "rows beside it are drawn from all tokens"


def test_log_probabilities_are_the_models_own() -> None:
    model = staged_once()
    prompt = prompts(1)[0]
    raw = theirs(model).generate(
        torch.tensor([prompt]),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(raw.logits)
    chosen = raw.sequences[0, len(prompt) :].tolist()
    params = [replace(SamplingParams(), logprobs=number if number < 7 else None) for number in range(8)]
    found = token_logprobs(logits, chosen, params)
    expected = logits.log_softmax(-1)
    for number, (row, values) in enumerate(zip(found, expected, strict=True)):
        assert len(row) == (number + 1 if number < 7 else 0)
        if row:
            assert row[0][0] == chosen[number]
            assert [token for token, _ in row[1:]] == values.topk(number).indices.tolist()
            for token, logprob in row:
                assert logprob == pytest.approx(float(values[token]), abs=1e-5)
