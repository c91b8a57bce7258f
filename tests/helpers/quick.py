"""Cases of a test of which `make test` runs a few, and `make test-slow` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def others_slow(quick: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """The quick ones first; a tuple is a case of several parameters."""
    rest = [each if isinstance(each, tuple) else (each,) for each in others]
    return [*quick, *(pytest.param(*each, marks=pytest.mark.slow) for each in rest)]


MOST_FAMILIES_SLOW = others_slow(["llama-tied", "qwen3_moe"], ["llama", "qwen3", "mistral", "gemma3", "deepseek_v3"])
"""All model families: with the two, tied embeddings, a head's own norms and experts are among the quick ones."""
