"""A tokenizer with a chat template, and conversations for it."""

from __future__ import annotations

import json

import numpy as np

from skippipe.data.tokenizer import TextTokenizer, train_bpe

WORDS = ("what", "is", "a", "stage", "of", "the", "model", "that", "nodes", "hold", "and", "pass", "along", "paths")
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer(template: str = TEMPLATE) -> TextTokenizer:
    """With tokens of its own for the ends of turns, as those of models that chat."""
    raw = json.loads(train_bpe([" ".join((*WORDS, "user", "assistant"))] * 3, 330).text)
    first = 1 + max(raw["model"]["vocab"].values())
    marks = [{**raw["added_tokens"][0], "id": first + n, "content": each} for n, each in enumerate((TURN, TURN_END))]
    raw["added_tokens"] += marks
    return TextTokenizer(json.dumps(raw), {"eos_token": TURN_END, "chat_template": template})


def chats(count: int) -> list[list[dict[str, str]]]:
    """Conversations of one turn or two, each of a few words."""
    random = np.random.default_rng(0)

    def said() -> str:
        return " ".join(random.choice(WORDS, random.integers(1, 6)))

    return [
        [{"role": role, "content": said()} for _ in range(random.integers(1, 3)) for role in ("user", "assistant")]
        for _ in range(count)
    ]
