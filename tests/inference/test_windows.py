"""The windows of a text that a model is measured on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.random import default_rng

from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import load
from skippipe.inference.eval.perplexity import Windows, beginning_of, default_context, labels
from tests.helpers.exact_training import FULL, plan_of
from tests.helpers.model_folders import export_to

IDS = default_rng(3).integers(0, 300, 500).astype(np.uint16)


def test_windows_predict_every_token_once() -> None:
    every = Windows.of("text", IDS, context=16, tokens=10_000)
    assert every.tokens == 31 * 16 == 499 // 16 * 16
    rows = every.rows(every.numbers)
    assert rows[:, 1:].flatten().tolist() == IDS[1 : 1 + 31 * 16].tolist()
    assert rows[1:, 0].tolist() == rows[:-1, -1].tolist()


def test_windows_that_begin_as_the_tokenizer_wants() -> None:
    every = Windows.of("text", IDS, context=16, tokens=10_000, beginning=7)
    rows = every.rows(every.numbers)
    assert rows[:, 0].tolist() == [7] * 31
    assert rows[:, 1:].flatten().tolist() == IDS[: 31 * 16].tolist()


def test_fewer_windows_are_spread_over_the_text() -> None:
    some = Windows.of("text", IDS, context=16, tokens=100)
    assert some.numbers == (0, 5, 10, 15, 20, 25)
    assert some.others(4).numbers == (1, 8, 16, 23)
    batches = some.batches(50)
    assert batches == [(0, 10, 20), (5, 15, 25)], "each of them is spread over the text"
    nearly = Windows.of("text", IDS, context=16, tokens=30 * 16)
    assert nearly.others(1).numbers == (30,)
    assert nearly.others(2).numbers == (0, 15), "too few others are left"
    assert Windows.of("text", IDS, context=16, tokens=1).tokens == 16
    assert Windows.of("text", IDS[:9], context=16, tokens=100).length == 8, "a short text is one window"
    with pytest.raises(UserError, match="has 1 tokens, too few to predict one"):
        Windows.of("text", IDS[:1], context=16, tokens=100)


def test_names_of_texts() -> None:
    assert labels(["books/a.txt.xz", "tokens/b"]) == ["a", "b"]
    assert labels(["x/a.txt", "y/a.txt"]) == ["x/a.txt", "y/a.txt"]
    with pytest.raises(UserError, match="named twice"):
        labels(["a", "b", "a"])


def test_a_window_is_as_long_as_samples_were_in_training(tmp_path: Path) -> None:
    checkpoint, model = tmp_path / "checkpoints" / "000007", tmp_path / "model"
    assert default_context(checkpoint, 4096) == default_context(model, 4096) == 512
    assert default_context(tmp_path, 64) == 64
    plan, _ = plan_of(FULL)
    plan.save(tmp_path / "plan.json")
    trained = plan.workload.sequence_tokens
    assert default_context(checkpoint, 4096) == default_context(model, 4096) == trained != 512
    assert default_context(tmp_path, 4096) == 512, "a plan that lies about is not the model's"


def test_the_token_that_a_tokenizer_begins_with(tmp_path: Path) -> None:
    class Begins:
        bos_token_id = 3

        def __call__(self, _text: str) -> Any:
            return type("Encoded", (), {"input_ids": [3, 9]})

    assert beginning_of(Begins()) == 3
    export_to(tmp_path)
    assert beginning_of(load(tmp_path).tokenizer) is None
