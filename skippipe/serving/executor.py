"""The executor of a node that serves: a stage, and a KV cache for every route that comes through it.

Between nodes, hidden states are [tokens of all rows, d], without padding. Here, rows of unlike lengths pass the stage
one after another: one padded to the other's length would cost as much (see `inference.cached_stage`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skippipe.codecs import EncodedTensor, decode, encode
from skippipe.errors import UserError
from skippipe.inference.cached_stage import BatchRows, CachedStage, embed, logits
from skippipe.inference.sampler import LogitsContext, process_logits, sample, token_logprobs
from skippipe.inference.static_decoding import StaticStage
from skippipe.model.stage import StageModel
from skippipe.serving.step_protocol import (
    ForwardStep,
    FreeSlots,
    InputRow,
    SampleTokens,
    ServingWork,
    StepOutput,
    StepRefused,
)
from skippipe.transport.message import Message


def alike(rows: Sequence[InputRow]) -> list[list[int]]:
    """Numbers of rows that pass the stage together: none is padded to more than twice its length."""
    groups: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault((row.count - 1).bit_length(), []).append(number)
    return list(groups.values())


class NotFinite(UserError):
    """Hidden states from another node that are not finite."""


class ServingExecutor:
    def __init__(self, stage: int, model: StageModel, *, cache_tokens: int, wire_dtype: str) -> None:
        """Every route's KV cache has room for `cache_tokens`. UserError if such a model cannot be served."""
        CachedStage(model, cache_tokens)
        self._stage = stage
        self._model = model
        self._cache_tokens = cache_tokens
        self._wire_dtype = wire_dtype
        self._routes: dict[int, CachedStage] = {}
        self._paths: dict[int, tuple[int, ...]] = {}
        """Route → its path; on another one, the stage may need caches for other turns, and of other hidden states."""
        self._tokens: dict[tuple[int, int], list[int]] = {}
        """Route and slot → the tokens of its sequence, which penalties look at; on stage 0 alone."""
        weight = next(model.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        self._hidden = model.spec.config.hidden_size

    def run(self, work: ServingWork) -> Any:
        """The result, or StepRefused: the node survives whatever other nodes send."""
        try:
            return self._result(work)
        except UserError as error:
            return StepRefused(str(error), bad_input=isinstance(error, NotFinite))
        except torch.OutOfMemoryError:
            return StepRefused("not enough memory", bad_input=False)

    def _result(self, work: ServingWork) -> Any:
        match work:
            case ForwardStep():
                return encode(self._forward(work), self._wire_dtype)
            case SampleTokens():
                return self._sample(work)
            case FreeSlots():
                self._routes.pop(work.route, None)
                self._paths.pop(work.route, None)
                self._tokens = {key: tokens for key, tokens in self._tokens.items() if key[0] != work.route}
                return None

    def fits(self, message: Message, num_tokens: int) -> bool:
        """Does the message carry the hidden states of so many tokens, in all rows together?"""
        body = message.body
        if not isinstance(body, EncodedTensor):
            return False
        return body.shape == (num_tokens, self._hidden) and body.dtype == self._wire_dtype

    def prefetch(self, given: Any, _device: int) -> Any:
        """A step is short, and its hidden states are few."""
        return given

    def _forward(self, work: ForwardStep) -> Tensor:
        step = work.step
        if step.route not in self._routes:
            kind = StaticStage if self._device.type == "cuda" else CachedStage
            self._routes[step.route] = kind(self._model, self._cache_tokens)
            self._paths[step.route] = step.path
        if step.path != self._paths[step.route]:
            raise UserError(f"route {step.route} goes another way than before")
        stage = self._routes[step.route]
        for slot in step.freed:
            stage.free(slot)
        for row in step.rows:
            if row.start > stage.cache.length(row.slot):
                raise UserError(f"slot {row.slot} ends before token {row.start}")
        hidden = self._hidden_states(work)
        for group in alike(step.rows):
            rows = [step.rows[number] for number in group]
            batch = BatchRows(tuple(r.slot for r in rows), tuple(r.start for r in rows), tuple(r.count for r in rows))
            padded = torch.nn.utils.rnn.pad_sequence([hidden[number] for number in group], batch_first=True)
            outputs = stage.forward(padded, batch, hop=step.hop)
            for number, row, output in zip(group, rows, outputs, strict=True):
                hidden[number] = output[: row.count]
        return torch.cat(hidden)

    def _hidden_states(self, work: ForwardStep) -> list[Tensor]:
        """The inputs of each row's new tokens: [tokens, d]."""
        step = work.step
        if self._stage == 0:
            for row, new in zip(step.rows, work.inputs, strict=True):
                seen = self._tokens.setdefault((step.route, row.slot), [])
                seen[row.start :] = new
            (flat,) = embed(self._model, [[token for new in work.inputs for token in new]])
            return list(torch.split(flat, [row.count for row in step.rows]))
        return list(torch.split(self._decode(work.inputs), [row.count for row in step.rows]))

    def _sample(self, work: SampleTokens) -> StepOutput:
        step = work.step
        ends = torch.tensor([row.count for row in step.rows]).cumsum(0) - 1
        last = self._decode(work.inputs)[ends.to(self._device)]
        contexts = [
            LogitsContext(
                each.params, self._tokens.get((step.route, row.slot), ()), each.num_prompt_tokens, each.allowed
            )
            for row, each in zip(step.rows, step.sampling, strict=True)
        ]
        params = [each.params for each in step.sampling]
        values = logits(self._model, last)
        positions = [row.start + row.count for row in step.rows]
        chosen = sample(process_logits(values, contexts), params, positions)
        return StepOutput(chosen, token_logprobs(values, chosen, params))

    def _decode(self, inputs: EncodedTensor) -> Tensor:
        hidden = decode(inputs).to(self._device, self._dtype)
        if not hidden.isfinite().all():
            raise NotFinite("hidden states that are not finite")
        return hidden
