"""The computer of a node that serves: a stage, and a cache for every lane that comes through it.

Between nodes, hidden states are [tokens of all rows, hidden], without padding. Here, single tokens and prompts pass
the stage separately: one padded to the other's length would cost as much (see `inference.cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skippipe.codecs import EncodedTensor, decode, encode
from skippipe.errors import UserError
from skippipe.inference.cached_stage import CachedStage, embed, logits
from skippipe.inference.kv_cache import BatchRows
from skippipe.inference.sampler import sample
from skippipe.model.stage import StageModel
from skippipe.serving.step_protocol import ForwardStep, FreeSlots, InputRow, SampleTokens, ServingWork, StepRefused
from skippipe.transport.message import Message


class NotFinite(UserError):
    """What was given has values that are none."""


class ServingExecutor:
    def __init__(self, stage: int, model: StageModel, *, lane_tokens: int, wire_dtype: str, drive: float = 1.0) -> None:
        """`lane_tokens` that the cache of a lane has room for. UserError if such a model cannot be served."""
        CachedStage(model, lane_tokens)
        self._stage = stage
        self._model = model
        self._lane_tokens = lane_tokens
        self._wire_dtype = wire_dtype
        self._drive = drive if stage else 1.0
        self._lanes: dict[int, CachedStage] = {}
        weight = next(model.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        self._hidden = model.spec.config.hidden_size

    def run(self, work: ServingWork) -> Any:
        """`StepRefused` where it cannot be done: whatever others send, the node goes on."""
        try:
            return self._done(work)
        except UserError as error:
            return StepRefused(str(error), given=isinstance(error, NotFinite))
        except torch.OutOfMemoryError:
            return StepRefused("not enough memory", given=False)

    def _done(self, work: ServingWork) -> Any:
        match work:
            case ForwardStep():
                return encode(self._pass(work), self._wire_dtype)
            case SampleTokens():
                return self._choose(work)
            case FreeSlots():
                self._lanes.pop(work.lane, None)
                return None

    def fits(self, message: Message, at: int, size: int) -> bool:  # noqa: ARG002
        """`at` tokens in all, of `size` rows."""
        body = message.body
        return isinstance(body, EncodedTensor) and body.shape == (at, self._hidden) and body.dtype == self._wire_dtype

    def _pass(self, work: ForwardStep) -> Tensor:
        if work.lane not in self._lanes:
            self._lanes[work.lane] = CachedStage(self._model, self._lane_tokens)
        lane = self._lanes[work.lane]
        for slot in work.freed:
            lane.cache.free(slot)
        for row in work.rows:
            if row.start > lane.cache.length(row.slot):
                raise UserError(f"slot {row.slot} ends before token {row.start}")
        pieces = self._pieces(work)
        for alike in _alike(work.rows):
            rows = [work.rows[number] for number in alike]
            named = BatchRows(tuple(r.slot for r in rows), tuple(r.start for r in rows), tuple(r.count for r in rows))
            padded = torch.nn.utils.rnn.pad_sequence([pieces[number] for number in alike], batch_first=True)
            made = lane.forward(padded, named, self._drive)
            for number, row, each in zip(alike, rows, made, strict=True):
                pieces[number] = each[: row.count]
        return torch.cat(pieces)

    def _pieces(self, work: ForwardStep) -> list[Tensor]:
        """The new tokens of each row: [tokens, hidden]."""
        if self._stage == 0:
            padded = embed(self._model, work.given)
            return [each[: row.count] for each, row in zip(padded, work.rows, strict=True)]
        return list(torch.split(self._unpacked(work.given), [row.count for row in work.rows]))

    def _choose(self, work: SampleTokens) -> list[int]:
        ends = torch.tensor([row.count for row in work.rows]).cumsum(0) - 1
        last = self._unpacked(work.given)[ends.to(self._device)]
        return sample(logits(self._model, last), work.how, [row.start + row.count for row in work.rows])

    def _unpacked(self, given: EncodedTensor) -> Tensor:
        made = decode(given).to(self._device, self._dtype)
        if not made.isfinite().all():
            raise NotFinite("hidden states that are not finite")
        return made


def _alike(rows: Sequence[InputRow]) -> list[list[int]]:
    """Rows of one token, and those of more."""
    single = [number for number, row in enumerate(rows) if row.count == 1]
    longer = [number for number, row in enumerate(rows) if row.count > 1]
    return [each for each in (single, longer) if each]
