"""Sampling of the next token, greedy or random, from logits as a request wants them changed.

The noise is a hash of the request's seed, the position of the token and the token: whatever else is in the batch, a
request gets the same tokens, and no state has to be kept between two of them. Each token is worth its logit plus Gumbel
noise, and the one that is worth most is taken, which samples from the softmax (Gumbel-max). Two models that share the
noise often take the same token, so that a draft can be checked by comparison, and the output does not depend on the
draft at all (Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding",
2024).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skippipe.errors import UserError
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
    """The logits of [rows, vocabulary] as the requests want them changed; the given ones if none wants that.

    Every row is changed by what its own sequence holds and by nothing else, so that an answer does not depend on the
    rest of the batch. The order is that of transformers: bias, repetition penalty, presence and frequency penalties,
    and last the tokens that a grammar allows.
    """
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


def _signed(word: int) -> int:
    """A word of 64 bits as torch has it."""
    return word - 2**64 if word >= 2**63 else word


STEP, FIRST, SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # of splitmix64


@torch.inference_mode()
def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """A token for each row of [rows, vocabulary]; `positions` are those that the tokens will have."""
    return TokenReader(*choose(logits, params, positions)).tokens()


@torch.inference_mode()
def sample_with_probabilities(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Tokens as by `sample`, and their probabilities by the model."""
    highest, chosen = choose(logits, params, positions)
    probabilities = (logits.gather(-1, chosen[:, None])[:, 0] - logits.logsumexp(-1)).exp()
    return _check_finite(torch.stack([highest.double(), chosen.double(), probabilities.double()]))


def choose(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The highest logit of each row, and the token that is sampled; both stay on the device."""
    highest, chosen = logits.max(-1)  # NaN counts as the highest
    some = [row for row, sampling in enumerate(params) if sampling.temperature]
    if some:
        rows = logits if len(some) == len(params) else logits[some]
        chosen[some] = _sample_random(rows, [params[row] for row in some], [positions[row] for row in some])
    return highest, chosen


class TokenReader:
    """Tokens on their way from the device. What is launched after them does not make them wait."""

    def __init__(self, highest: Tensor, chosen: Tensor) -> None:
        """As `choose` gives them."""
        self._found = torch.stack([highest.double(), chosen.double()])
        self._arrived: torch.cuda.Event | None = None
        if self._found.is_cuda:
            there = torch.cuda.current_stream(self._found.device)
            here = torch.empty(self._found.shape, dtype=self._found.dtype, pin_memory=True)
            self._found = here.copy_(self._found, non_blocking=True)
            self._arrived = there.record_event()

    def tokens(self) -> list[int]:
        """UserError if a logit is not finite."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return _check_finite(self._found)[0]


def _check_finite(found: Tensor) -> tuple[list[int], list[float]]:
    """Tokens, and their probabilities if given, in one transfer from the device; UserError if a logit is not finite."""
    highest, chosen, *probabilities = found.tolist()
    if not all(map(math.isfinite, highest)):
        raise UserError(
            "the model computes values that are not finite: it is damaged, or --residual-scale too strong for it"
        )
    return [int(token) for token in chosen], probabilities[0] if probabilities else []


def _sample_random(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    temperatures = _column([sampling.temperature for sampling in params], logits)
    values, tokens = _candidates((logits - logits.amax(-1, keepdim=True)).double() / temperatures, params)
    if any(sampling.min_p for sampling in params):  # the likeliest token, which always stays, has the value 0
        least = _column([math.log(sampling.min_p) if sampling.min_p else -math.inf for sampling in params], values)
        values = values.masked_fill(values < least, -torch.inf)
    seeds = torch.tensor([_signed(sampling.seed % 2**64) for sampling in params])
    keys = _mixed(_mixed(seeds + STEP) + torch.tensor(positions) + STEP).to(logits.device)
    best = (values + _gumbel(keys[:, None], tokens)).argmax(-1, keepdim=True)
    return tokens.expand(len(params), -1).gather(-1, best)[:, 0]


def _candidates(values: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Values of the tokens that may be sampled, and their ids."""
    vocabulary = values.shape[-1]
    most = [min(sampling.top_k or vocabulary, vocabulary) for sampling in params]
    if min(most) == vocabulary and all(sampling.top_p == 1 for sampling in params):
        return values, torch.arange(vocabulary, device=values.device)[None]
    values, tokens = values.topk(max(most), -1) if max(most) < vocabulary else values.sort(-1, descending=True)
    left_out = torch.arange(values.shape[-1], device=values.device) >= _column(most, values)
    values = values.masked_fill(left_out, -torch.inf)
    shares = values.softmax(-1)
    top_p = _column([sampling.top_p for sampling in params], values)
    left_out |= (shares.cumsum(-1) - shares >= top_p) & (top_p < 1)  # the likeliest one always stays
    width = int((~left_out).sum(-1).max())
    return values[:, :width].masked_fill(left_out[:, :width], -torch.inf), tokens[:, :width]


def _gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    uniform = (_shift_right(_mixed(keys + tokens * STEP), 12).double() + 0.5) * 2.0**-52  # never 0, never 1
    return -torch.log(-torch.log(uniform))


def _mixed(words: Tensor) -> Tensor:
    words = (words ^ _shift_right(words, 30)) * FIRST
    words = (words ^ _shift_right(words, 27)) * SECOND
    return words ^ _shift_right(words, 31)


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """A logical shift to the right."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.double, device=like.device)[:, None]
