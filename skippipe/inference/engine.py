"""Many prompts together: a text that ends makes place for the next one at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.decoder import Decoder
from skippipe.inference.kv_cache import CacheFull
from skippipe.inference.request import Generation, GenerationRequest, OutputPiece

PROMPT_TOKENS = 8192  # of prompts that are read in one pass, padding included

Hear = Callable[[OutputPiece], None]


class GenerationEngine:
    def __init__(
        self, staged: StagedModel, decoder: Decoder, together: int = 8, ends: frozenset[int] | None = None
    ) -> None:
        """`ends`: tokens that end a text; None: those that the model names."""
        self._tokenizer = staged.tokenizer
        self._context = staged.context
        self._ends = ending_tokens(staged.stages[0].spec.config, staged.tokenizer) if ends is None else ends
        self._decoder = decoder
        self._together = together
        """Texts at a time, at most."""
        self._waiting: deque[Generation] = deque()
        self._active: list[Generation] = []
        """By slot: 0, 1, 2 and so on, so that the caches are read without copying."""
        self._asked = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._active)

    def ask(self, request: GenerationRequest) -> Generation:
        """It is filled as steps are made."""
        reply = Generation.to(request, self._asked, self._context, self._ends, self._tokenizer)
        if reply.longest > self._decoder.max_tokens:
            raise CacheFull(
                f"a text of up to {reply.longest:,} tokens: there is room for {self._decoder.max_tokens:,}; "
                "ask for fewer, or shorten the prompt"
            )
        self._asked += 1
        self._waiting.append(reply)
        return reply

    def step(self) -> list[OutputPiece]:
        """New texts begin, then all go on by a token or more."""
        new = self._entering()
        pieces = self._heard(new, self._decoder.begin(new)) if new else []
        self._close_gaps()
        if self._active:
            pieces += self._heard(self._active, self._decoder.advance(self._active))
        return pieces

    def run(self, requests: Iterable[GenerationRequest], hear: Hear = lambda piece: None) -> list[Generation]:
        """All of them, to their ends."""
        replies = [self.ask(request) for request in requests]
        while self.busy:
            for piece in self.step():
                hear(piece)
        return replies

    def _entering(self) -> list[Generation]:
        """Those that are next and fit, in the lowest slots that are free."""
        new: list[Generation] = []
        longest = max((reply.longest for reply in self._active), default=0)
        widest = 0
        while self._waiting and len(self._active) + len(new) < self._together:
            reply = self._waiting[0]
            longest, widest = max(longest, reply.longest), max(widest, len(reply.tokens))
            if (len(self._active) + len(new) + 1) * longest > self._decoder.max_tokens:
                break
            if new and (len(new) + 1) * widest > PROMPT_TOKENS:
                break
            new.append(self._waiting.popleft())
        taken = {reply.slot for reply in self._active}
        free = (slot for slot in range(self._together) if slot not in taken)
        for reply, slot in zip(new, free, strict=False):
            reply.slot = slot
        self._active = sorted([*self._active, *new], key=lambda reply: reply.slot)
        self._close_gaps()
        return new

    def _close_gaps(self) -> None:
        """The last ones move into slots that nobody took; never new ones, which took the lowest."""
        for slot in range(len(self._active)):
            if self._active[slot].slot != slot:
                reply = self._active.pop()
                self._decoder.move(reply.slot, slot)
                reply.slot = slot
                self._active.insert(slot, reply)

    def _heard(self, replies: list[Generation], tokens: list[list[int]]) -> list[OutputPiece]:
        pieces = []
        for reply, said in zip(replies, tokens, strict=True):
            for token in said:
                pieces.append(reply.take(token))
                if reply.ending:
                    self._decoder.free(reply.slot)
                    break
        self._active = [reply for reply in self._active if not reply.ending]
        return pieces


def ending_tokens(config: Any, tokenizer: Any) -> frozenset[int]:
    """What the model's configuration and its tokenizer say."""
    named = config.eos_token_id
    found = named if isinstance(named, list) else [named]
    return frozenset(token for token in (*found, tokenizer.eos_token_id) if token is not None)
