"""Generation in one process: decoders, which give the next tokens of a batch of sequences by a subset of the stages,
and the engine with continuous batching, where a sequence that ends makes room for the next one at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from skippipe.inference.cached_stage import BatchRows, CacheFull, StageChain, embed, logits
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.request import Detokenizer, Generation, GenerationRequest, TokenOutput
from skippipe.inference.sampler import LogitsContext, process_logits, sample
from skippipe.stage_subset import StageSubset, Visits

MAX_PROMPT_TOKENS = 8192  # of prompts in one pass, padding included
OutputCallback = Callable[[TokenOutput], None]


class Decoder(ABC):
    """A batch of sequences, whose KV caches hold all tokens but the last."""

    def __init__(self, staged: StagedModel, subset: StageSubset, max_tokens: int) -> None:
        assert subset.total == len(staged.stages), "a subset of another model"
        self.subset = subset
        self.max_tokens = max_tokens
        """Tokens of all sequences together that each stage's KV cache has room for."""
        self._staged = staged
        self._chains: list[StageChain] = []

    @abstractmethod
    def begin(self, generations: Sequence[Generation]) -> list[list[int]]:
        """The first tokens of each sequence, one or more, from its prompt."""

    @abstractmethod
    def advance(self, generations: Sequence[Generation]) -> list[list[int]]:
        """The next tokens of each sequence, one or more."""

    def free(self, slot: int) -> None:
        for chain in self._chains:
            chain.free(slot)

    def move(self, source: int, target: int) -> None:
        for chain in self._chains:
            chain.move(source, target)

    def _chain(self, subset: StageSubset, visits: Visits) -> StageChain:
        """Some of the stages of a subset."""
        models, scale = self._staged.stages, subset.residual_scale
        self._chains.append(StageChain(models, visits, scale, self.max_tokens, subset.hops))
        return self._chains[-1]

    def _embed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        return embed(self._staged.stages[0], tokens)

    def _sample(
        self, hidden: Tensor, generations: Sequence[Generation], drafted: Sequence[Sequence[int]] = ()
    ) -> list[int]:
        """A token for each of [rows, d], which follows each sequence and the drafted tokens after it, if there are."""
        sampling = [generation.request.sampling for generation in generations]
        values = self._logits(hidden, generations, drafted)
        ahead = list(map(len, drafted)) or [0] * len(generations)
        positions = [len(generation.tokens) + more for generation, more in zip(generations, ahead, strict=True)]
        return sample(values, sampling, positions)

    def _logits(self, hidden: Tensor, generations: Sequence[Generation], drafted: Sequence[Sequence[int]]) -> Tensor:
        """Logits with the penalties and biases of the requests."""
        return self._changed(logits(self._staged.stages[0], hidden), generations, drafted)

    def _changed(self, values: Tensor, generations: Sequence[Generation], drafted: Sequence[Sequence[int]]) -> Tensor:
        if not any(generation.request.sampling.changes_logits for generation in generations):
            return values
        new = drafted or [()] * len(generations)
        contexts = [
            LogitsContext(each.request.sampling, [*each.tokens, *more], len(each.request.prompt))
            for each, more in zip(generations, new, strict=True)
        ]
        return process_logits(values, contexts)

    def _sample_last(self, hidden: Tensor, rows: BatchRows, generations: Sequence[Generation]) -> list[list[int]]:
        """The token that follows each row."""
        chosen = self._sample(last(hidden, rows), generations)
        return [[token] for token in chosen]


class TokenByToken(Decoder):
    """All stages of the subset for every token."""

    def __init__(self, staged: StagedModel, subset: StageSubset, max_tokens: int) -> None:
        super().__init__(staged, subset, max_tokens)
        self._whole = self._chain(subset, subset.stages)

    def begin(self, generations: Sequence[Generation]) -> list[list[int]]:
        rows = rows_of_prompts(generations)
        hidden = self._embed([generation.tokens for generation in generations])
        return self._sample_last(self._whole.forward(hidden, rows), rows, generations)

    def advance(self, generations: Sequence[Generation]) -> list[list[int]]:
        rows = rows_after(generations, [1] * len(generations))
        hidden = self._embed([generation.tokens[-1:] for generation in generations])
        return self._sample_last(self._whole.forward(hidden, rows), rows, generations)


def rows_of_prompts(generations: Sequence[Generation]) -> BatchRows:
    return BatchRows(
        _slots(generations), (0,) * len(generations), tuple(len(generation.tokens) for generation in generations)
    )


def rows_after(generations: Sequence[Generation], counts: Sequence[int], ahead: Sequence[int] = ()) -> BatchRows:
    """Rows of `counts` tokens from the last token of each sequence on, or from `ahead` tokens after it."""
    ends = [len(generation.tokens) - 1 for generation in generations]
    starts = [end + more for end, more in zip(ends, ahead, strict=True)] if ahead else ends
    return BatchRows(_slots(generations), tuple(starts), tuple(counts))


def last(hidden: Tensor, rows: BatchRows) -> Tensor:
    """The last token of each row, padding aside: [rows, d]."""
    if rows.uniform:
        return hidden[:, -1]
    return hidden[torch.arange(len(rows.counts)), torch.tensor(rows.counts) - 1]


def _slots(generations: Sequence[Generation]) -> tuple[int, ...]:
    return tuple(generation.slot for generation in generations)


class GenerationEngine:
    def __init__(
        self, staged: StagedModel, decoder: Decoder, max_sequences: int = 8, end_tokens: frozenset[int] | None = None
    ) -> None:
        """`end_tokens` end a text; None: those that the model names."""
        self._tokenizer = staged.tokenizer
        self._context = staged.context
        self._end_tokens = staged.end_tokens if end_tokens is None else end_tokens
        self._decoder = decoder
        self._max_sequences = max_sequences
        self._waiting: deque[Generation] = deque()
        self._active: list[Generation] = []
        """Running sequences by slot: 0, 1, 2 and so on, so that the KV caches are read without copying."""
        self._added = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._active)

    def add_request(self, request: GenerationRequest) -> Generation:
        """Queues a request; the generation grows with every step."""
        detokenizer = Detokenizer(self._tokenizer, request.prompt, request.stop)
        length = request.max_length(self._context)
        generation = Generation(self._added, request, length, self._end_tokens, detokenizer)
        if generation.max_length > self._decoder.max_tokens:
            raise CacheFull(
                f"a text of up to {generation.max_length:,} tokens: there is room for {self._decoder.max_tokens:,}; "
                "ask for fewer, or shorten the prompt"
            )
        self._added += 1
        self._waiting.append(generation)
        return generation

    def step(self) -> list[TokenOutput]:
        """Waiting sequences with room begin, then all go on by a token or more."""
        new = self._admit()
        outputs = self._append(new, self._decoder.begin(new)) if new else []
        self._close_gaps()
        if self._active:
            outputs += self._append(self._active, self._decoder.advance(self._active))
        return outputs

    def run(
        self, requests: Iterable[GenerationRequest], callback: OutputCallback = lambda output: None
    ) -> list[Generation]:
        """Generates all requests to their end."""
        generations = [self.add_request(request) for request in requests]
        while self.busy:
            for output in self.step():
                callback(output)
        return generations

    def _admit(self) -> list[Generation]:
        """Waiting sequences that fit, in the lowest slots that are free."""
        new: list[Generation] = []
        longest = max((generation.max_length for generation in self._active), default=0)
        widest = 0
        while self._waiting and len(self._active) + len(new) < self._max_sequences:
            generation = self._waiting[0]
            longest, widest = max(longest, generation.max_length), max(widest, len(generation.tokens))
            if (len(self._active) + len(new) + 1) * longest > self._decoder.max_tokens:
                break
            if new and (len(new) + 1) * widest > MAX_PROMPT_TOKENS:
                break
            new.append(self._waiting.popleft())
        taken = {generation.slot for generation in self._active}
        free = (slot for slot in range(self._max_sequences) if slot not in taken)
        for generation, slot in zip(new, free, strict=False):
            generation.slot = slot
        self._active = sorted([*self._active, *new], key=lambda generation: generation.slot)
        self._close_gaps()
        return new

    def _close_gaps(self) -> None:
        """The last sequences move into free slots; never new ones, which took the lowest."""
        for slot in range(len(self._active)):
            if self._active[slot].slot != slot:
                generation = self._active.pop()
                self._decoder.move(generation.slot, slot)
                generation.slot = slot
                self._active.insert(slot, generation)

    def _append(self, generations: list[Generation], tokens: list[list[int]]) -> list[TokenOutput]:
        outputs = []
        for generation, new in zip(generations, tokens, strict=True):
            for token in new:
                outputs.append(generation.append(token))
                if generation.finish_reason:
                    self._decoder.free(generation.slot)
                    break
        self._active = [generation for generation in self._active if not generation.finish_reason]
        return outputs
