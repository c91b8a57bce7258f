"""What a request changes in the model's logits before a token is chosen (logit bias, penalties, tokens that a grammar
allows), and the log-probabilities of tokens by the model itself.

Every row is changed by what its own sequence holds and by nothing else, so that an answer does not depend on the rest
of the batch. The order is that of transformers: bias, repetition penalty, presence and frequency penalties, grammar.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skippipe.inference.request import SamplingParams, TokenLogprobs

BITS = torch.arange(8, dtype=torch.uint8)


@dataclass(frozen=True)
class LogitsContext:
    """What the next token of a sequence depends on beside the model."""

    params: SamplingParams
    tokens: Sequence[int]
    """Prompt and output so far."""
    num_prompt_tokens: int
    allowed: bytes = b""
    """Bit i (of byte i // 8, the lowest first) is set if token i may come next; empty: all may."""

    @property
    def is_neutral(self) -> bool:
        return not (self.allowed or self.params.changes_logits)


@torch.inference_mode()
def process_logits(logits: Tensor, contexts: Sequence[LogitsContext]) -> Tensor:
    """The logits of [rows, vocabulary] as the requests want them changed; the given ones if none wants that."""
    changed = [row for row, context in enumerate(contexts) if not context.is_neutral]
    if not changed:
        return logits
    found = logits.clone()
    for row in changed:
        _process_row(found[row], contexts[row])
    return found


def _process_row(values: Tensor, context: LogitsContext) -> None:
    params = context.params
    if params.logit_bias:
        ids = _ids([token for token, _ in params.logit_bias], values)
        values[ids] += torch.tensor([bias for _, bias in params.logit_bias], dtype=values.dtype, device=values.device)
    if params.repetition_penalty != 1:
        ids = _ids(sorted(set(context.tokens)), values)
        seen = values[ids]
        values[ids] = torch.where(seen < 0, seen * params.repetition_penalty, seen / params.repetition_penalty)
    output = context.tokens[context.num_prompt_tokens :]
    if output and (params.presence_penalty or params.frequency_penalty):
        found = Counter(output)
        counts = torch.tensor(list(found.values()), dtype=values.dtype, device=values.device)
        values[_ids(list(found), values)] -= params.frequency_penalty * counts + params.presence_penalty
    if context.allowed:
        mask = torch.frombuffer(bytearray(context.allowed), dtype=torch.uint8)
        bits = (mask[:, None] >> BITS & 1).flatten()[: len(values)].bool()
        values.masked_fill_(~bits.to(values.device), -torch.inf)


def _ids(tokens: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(tokens, device=like.device)


@torch.inference_mode()
def token_logprobs(logits: Tensor, chosen: Sequence[int], params: Sequence[SamplingParams]) -> list[TokenLogprobs]:
    """For each row of the model's own logits, the chosen token and as many of the likeliest as were asked for, with
    their log-probabilities; empty where none were asked for."""
    found: list[TokenLogprobs] = []
    for values, token, sampling in zip(logits, chosen, params, strict=True):
        if sampling.logprobs is None:
            found.append(())
            continue
        logprobs = values.double().log_softmax(-1)
        top, ids = logprobs.topk(min(sampling.logprobs, len(logprobs)))
        pairs = zip([token, *ids.tolist()], [float(logprobs[token]), *top.tolist()], strict=True)
        found.append(tuple(pairs))
    return found
