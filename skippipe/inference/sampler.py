"""Which token comes next: the likeliest one, or one at random.

Chance comes from a hash of the request's seed, the position of the token and the token: whoever else is in the batch, a
request gets the same tokens, and nothing has to be kept between two of them. Each token is worth its logit plus Gumbel
noise, and the one that is worth most is taken, which samples from the softmax (Gumbel-max). Two models that share the
noise often take the same token, so that a draft can be checked by comparison, and what comes out does not depend on
the draft at all (Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding",
2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from skippipe.errors import UserError
from skippipe.inference.request import SamplingParams

WORD = 2**64 - 1
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64


@torch.inference_mode()
def sample(logits: Tensor, how: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """A token for each row of [rows, vocabulary]; `positions` are those that the tokens will have."""
    highest, chosen = _highest(logits, how, positions)
    return _finite(torch.stack([highest.double(), chosen.double()]))[0]


@torch.inference_mode()
def sample_with_logprobs(
    logits: Tensor, how: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """The same, and how likely the model holds each of these tokens to be."""
    highest, chosen = _highest(logits, how, positions)
    shares = (logits.gather(-1, chosen[:, None])[:, 0] - logits.logsumexp(-1)).exp()
    return _finite(torch.stack([highest.double(), chosen.double(), shares.double()]))


def _highest(logits: Tensor, how: Sequence[SamplingParams], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    highest, chosen = logits.max(-1)  # NaN counts as the highest
    some = [row for row, sampling in enumerate(how) if sampling.temperature]
    if some:
        rows = logits if len(some) == len(how) else logits[some]
        chosen[some] = _sampled(rows, [how[row] for row in some], [positions[row] for row in some])
    return highest, chosen


def _finite(found: Tensor) -> tuple[list[int], list[float]]:
    """In one transfer from the device: of the highest logits, the tokens, and their shares if there are any."""
    highest, chosen, *shares = found.tolist()
    if not all(map(math.isfinite, highest)):
        raise UserError("the model makes values that are not finite: it is damaged, or --drive too strong for it")
    return [int(token) for token in chosen], shares[0] if shares else []


def _sampled(logits: Tensor, how: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    temperatures = _column([sampling.temperature for sampling in how], logits)
    values, tokens = _candidates((logits - logits.amax(-1, keepdim=True)).double() / temperatures, how)
    keys = [_key(sampling.seed, position) for sampling, position in zip(how, positions, strict=True)]
    best = (values + _gumbel(torch.tensor(keys, device=logits.device)[:, None], tokens)).argmax(-1, keepdim=True)
    return tokens.expand(len(how), -1).gather(-1, best)[:, 0]


def _candidates(values: Tensor, how: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Values of the tokens that may be taken, and which tokens they are."""
    vocabulary = values.shape[-1]
    most = [min(sampling.top_k or vocabulary, vocabulary) for sampling in how]
    if min(most) == vocabulary and all(sampling.top_p == 1 for sampling in how):
        return values, torch.arange(vocabulary, device=values.device)[None]
    values, tokens = values.topk(max(most), -1) if max(most) < vocabulary else values.sort(-1, descending=True)
    left_out = torch.arange(values.shape[-1], device=values.device) >= _column(most, values)
    values = values.masked_fill(left_out, -torch.inf)
    shares = values.softmax(-1)
    top_p = _column([sampling.top_p for sampling in how], values)
    left_out |= (shares.cumsum(-1) - shares >= top_p) & (top_p < 1)  # the likeliest one always stays
    width = int((~left_out).sum(-1).max())
    return values[:, :width].masked_fill(left_out[:, :width], -torch.inf), tokens[:, :width]


def _gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    mixed = keys + tokens * _signed(STEP)
    mixed = (mixed ^ _right(mixed, 30)) * _signed(FIRST)
    mixed = (mixed ^ _right(mixed, 27)) * _signed(SECOND)
    mixed = mixed ^ _right(mixed, 31)
    uniform = (_right(mixed, 12).double() + 0.5) * 2.0**-52  # never 0, never 1
    return -torch.log(-torch.log(uniform))


def _key(seed: int, position: int) -> int:
    return _signed(_mixed((_mixed(seed & WORD) + position) & WORD))


def _mixed(word: int) -> int:
    word = (word + STEP) & WORD
    word = ((word ^ (word >> 30)) * FIRST) & WORD
    word = ((word ^ (word >> 27)) * SECOND) & WORD
    return word ^ (word >> 31)


def _right(words: Tensor, bits: int) -> Tensor:
    """Shifted as if they had no sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.double, device=like.device)[:, None]
