"""Conversations to samples: answers are found, none is lost, and none sees another."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe.data.batch_sampler import ANSWER, BEGINS, IGNORED, ConversationSampler
from skippipe.data.prepare import ChatEncoder, messages_of, prepare
from skippipe.data.readers import Record
from skippipe.data.token_file import TokenFile
from skippipe.data.tokenizer import train_bpe
from skippipe.errors import UserError
from tests.helpers.chats import TEMPLATE, TURN_END, chat_tokenizer, chats
from tests.helpers.processes import Command

pytest.importorskip("transformers")

CHAT = [
    {"role": "user", "content": "what is a stage"},
    {"role": "assistant", "content": "the model"},
    {"role": "user", "content": "that"},
    {"role": "assistant", "content": "nodes hold"},
]
MARKED = TEMPLATE.replace(
    "{{ m.content }}<|im_end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}",
)
CHANGING = TEMPLATE.replace(
    "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}(thought){% endif %}{{ m.content }}"
)


def answers(template: str) -> list[tuple[str, list[str]]]:
    """The texts that a template makes of the chat, and the answers that are marked in each."""
    tokenizer = chat_tokenizer(template)
    found = []
    for ids, marks in ChatEncoder(tokenizer, answers_only=True).encode(Record("here", {"messages": CHAT})):
        assert [bool(mark & BEGINS) for mark in marks] == [True] + [False] * (len(ids) - 1)
        pieces: list[list[int]] = []
        before = 0
        for token, mark in zip(ids, marks, strict=True):
            if mark & ANSWER:
                pieces += [] if before else [[]]
                pieces[-1].append(token)
            before = mark & ANSWER
        found.append((tokenizer.decode(ids), [tokenizer.decode(piece) for piece in pieces]))
    return found


def test_answers_are_what_the_template_adds_for_the_assistant() -> None:
    ((text, found),) = answers(TEMPLATE)
    assert text.startswith("<|im_start|>user\nwhat is a stage<|im_end|>\n<|im_start|>assistant\nthe model<|im_end|>")
    assert found == ["the model<|im_end|>\n", "nodes hold<|im_end|>\n"]


def test_answers_that_the_template_marks() -> None:
    ((_, found),) = answers(MARKED)
    assert found == ["the model<|im_end|>", "nodes hold<|im_end|>"]


def test_a_template_that_changes_earlier_turns_gives_each_answer_by_itself() -> None:
    (_, first), (text, second) = answers(CHANGING)
    assert (first, second) == (["(thought)the model<|im_end|>\n"], ["(thought)nodes hold<|im_end|>\n"])
    assert "assistant\nthe model<|im_end|>" in text, "as it is written where others follow"


def test_kinds_of_records() -> None:
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    for fields in (
        {"messages": [asked, {**said, "tool": None}]},
        {"prompt": "a", "completion": "b"},
        {"prompt": [asked], "completion": [said]},
        {"instruction": "a", "output": "b", "input": ""},
    ):
        assert messages_of(Record("here", fields)) == [asked, said]
    both = messages_of(Record("here", {"instruction": "a", "input": "x", "output": "b"}))
    assert both[0]["content"] == "a\n\nx"
    refused: list[dict[str, Any]] = [{"messages": each} for each in ("a", [], [1], [{"role": "user"}])]
    for bad in (*refused, {"prompt": "a"}):
        with pytest.raises(UserError, match=r"^here: "):
            messages_of(Record("here", bad))


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def test_token_file_of_conversations(tmp_path: Path) -> None:
    tokenizer, path = chat_tokenizer(), write(tmp_path / "chats.jsonl", [{"messages": each} for each in chats(9)])
    made = prepare(path, tokenizer, tmp_path / "tokens", loss_on="")
    assert made == TokenFile.open(tmp_path / "tokens", tokenizer)
    assert made.marks is not None
    assert int((made.marks & BEGINS > 0).sum()) == 9
    assert prepare(path, tokenizer, tmp_path / "tokens", loss_on="answers") == made, "the same"
    every = prepare(path, tokenizer, tmp_path / "all", loss_on="all")
    assert every.content_sha256 == made.content_sha256
    assert every.fingerprint != made.fingerprint
    assert every.marks is not None
    assert (every.marks & ANSWER).all()
    settings_there = json.loads((made.folder / "tokenizer_config.json").read_text())
    assert (settings_there["eos_token"], settings_there["chat_template"]) == (TURN_END, TEMPLATE)
    again = prepare(path, made.tokenizer(), tmp_path / "again", loss_on="")
    assert again.fingerprint == made.fingerprint, "its own tokenizer has the template, too"
    other = prepare(path, chat_tokenizer(MARKED), made.folder, loss_on="", overwrite=True)
    assert other.fingerprint != made.fingerprint, "another template makes it anew"
    assert len(list(made.folder.glob("*.bin"))) == 2
    with pytest.raises(UserError, match="holds conversations, which only training takes"):
        other.check_plain()
    marks = other.folder / other.marks_data
    marks.write_bytes(marks.read_bytes()[::-1])
    with pytest.raises(UserError, match="not those that were written"):
        TokenFile.open(other.folder).check_content()


def test_what_is_refused(tmp_path: Path) -> None:
    chat, folder = write(tmp_path / "chats.jsonl", [{"messages": CHAT, "text": "x"}]), tmp_path / "tokens"
    text = write(tmp_path / "text.jsonl", [{"text": "some text"}])
    with pytest.raises(UserError, match=r"chats.jsonl: holds conversations, which only training takes"):
        prepare(chat, chat_tokenizer(), folder)
    with pytest.raises(UserError, match="the tokenizer has no chat template, which conversations need"):
        prepare(chat, train_bpe(["text"], 300), folder, loss_on="")
    with pytest.raises(UserError, match="conversations, which need a tokenizer with a chat template: name that of"):
        prepare(chat, 300, folder, loss_on="")
    with pytest.raises(UserError, match=r"chats.jsonl: holds conversations, and .*text.jsonl none; .* apart"):
        prepare([text, chat], chat_tokenizer(), folder, loss_on="")
    with pytest.raises(UserError, match="loss on answers: is for conversations, and the texts hold none"):
        prepare(text, chat_tokenizer(), folder, loss_on="answers")
    with pytest.raises(UserError, match="loss on 'some': expected 'answers' or 'all'"):
        prepare(chat, chat_tokenizer(), folder, loss_on="some")
    with pytest.raises(UserError, match=r"line 1: the chat template does not take these messages: no users"):
        prepare(chat, chat_tokenizer("{{ raise_exception('no users') }}"), folder, loss_on="")
    with pytest.raises(UserError, match="its chat template does not begin an answer as it asks for one"):
        prepare(chat, chat_tokenizer(TEMPLATE + "{% if add_generation_prompt %}?{% endif %}"), folder, loss_on="")
    assert not folder.exists() or not (folder / "tokens.json").exists()
    found = prepare(chat, chat_tokenizer(), folder, field="text", loss_on=None)
    assert found.marks is None, "a field that is named is text"


def test_command(skippipe: Command, tmp_path: Path) -> None:
    write(tmp_path / "chats.jsonl", [{"prompt": "what is", "completion": "a stage"}])
    chat_tokenizer().save(tmp_path / "tokenizer")
    done = skippipe(
        "prepare", tmp_path / "chats.jsonl", "--tokenizer", tmp_path / "tokenizer", "--output", tmp_path / "tokens"
    )
    assert done.code == 0, done.err
    assert "1 conversations of" in done.out


# Samples

CONVERSATIONS = st.lists(
    st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=30
)  # which tokens are answers


@given(CONVERSATIONS, st.integers(1, 10), st.booleans(), st.integers(1, 3), st.integers(1, 2))
@settings(max_examples=30, deadline=None)
def test_every_epoch_has_every_conversation_once(
    conversations: list[list[bool]], sequence: int, packing: bool, microbatches: int, samples: int
) -> None:
    marks = np.array(
        [ANSWER * counts + BEGINS * (not at) for each in conversations for at, counts in enumerate(each)], np.uint8
    )
    tokens = np.arange(1, 1 + len(marks))  # all different, so that each says where it is from
    kept = [each[: sequence + 1] for each in conversations]
    usable = [any(each[1:]) for each in kept]
    if not any(usable):
        with pytest.raises(UserError, match="no conversation has an answer in its first"):
            ConversationSampler(tokens, marks, sequence, 1, microbatches, samples)
        return
    sampler = ConversationSampler(tokens, marks, sequence, 1, microbatches, samples, packing=packing)
    assert sampler.left_out == usable.count(False)
    assert sampler.cut == sum(len(each) > sequence + 1 for each, use in zip(conversations, usable, strict=True) if use)
    if not packing:
        assert sampler.windows == sum(usable)
    first = np.cumsum([0, *map(len, conversations)])
    expected = {
        tuple(range(1 + begin, begin + len(each))): [
            1 + begin + at if counts else IGNORED for at, counts in enumerate(each) if at
        ]
        for begin, each, use in zip(first.tolist(), kept, usable, strict=False)
        if use
    }
    found: dict[tuple[int, ...], list[int]] = {}
    rows = 0
    for iteration in range(-(-sampler.windows // (microbatches * samples))):
        shares, counted = [], []
        for microbatch in range(microbatches):
            inputs, labels = sampler.batch(iteration, microbatch)
            starts = sampler.starts(iteration, microbatch)
            assert starts is not None
            shares.append(sampler.share(iteration, microbatch))
            counted.append(int((labels != IGNORED).sum()))
            for ids, targets, begins in zip(inputs, labels, starts, strict=True):
                assert begins[0]
                rows += 1
                places = [*begins.nonzero()[0].tolist(), sequence]
                for a, b in itertools.pairwise(places):
                    if rows > sampler.windows or not ids[a]:  # a new epoch, or padding
                        assert ids[a] or (targets[a:b] == IGNORED).all()
                        continue
                    key = tuple(ids[a:b].tolist())
                    assert key not in found
                    found[key] = targets[a:b].tolist()
        assert shares == pytest.approx([microbatches * each / sum(counted) for each in counted])
    assert found == expected


def test_packing_fills_samples() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(10, 400, 2000)
    marks = np.concatenate([[BEGINS, *[ANSWER] * (length - 1)] for length in lengths]).astype(np.uint8)
    sampler = ConversationSampler(np.ones(len(marks)), marks, 1024, 0, 1, 1)
    assert sampler.windows < 1.01 * (lengths - 1).sum() / 1024 + 1
    assert sampler.summary.startswith("2,000 conversations in ")
