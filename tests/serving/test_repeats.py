"""Stages that take the place of missing ones, on nodes that serve: the memory that they need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skippipe.codecs import encode
from skippipe.inference.checkpoint_loader import fingerprint
from skippipe.model import spread_layers
from skippipe.model.spread_layers import weight_bytes
from skippipe.runtime.node.interfaces import JoinConfig
from skippipe.serving.node import ServingConfig, build_executor
from skippipe.serving.step_protocol import (
    ForwardStep,
    InputRow,
    StepInput,
)
from skippipe.stage_subset import hops_of
from tests.helpers.healed_folders import REPEATS, healed
from tests.helpers.model_folders import LAYERS, TOKENIZER, export_to

torch.set_num_threads(1)
CACHE_TOKENS = 512


@pytest.mark.parametrize("repeats", [True, False])
def test_a_node_counts_adapters_and_a_cache_for_every_turn(
    tmp_path: Path, repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it chooses its devices by is what it holds where all stages after its own are missing."""
    sizes: list[int] = []

    def noted(_device: str, needed_bytes: int, _first: int) -> list[str]:
        sizes.append(needed_bytes)
        return ["cpu"]

    monkeypatch.setattr(spread_layers, "inference_devices", noted)
    plain_bytes = [weight_bytes(stage) for stage in export_to(tmp_path / "plain")[1]]
    if repeats:
        healed(tmp_path / "model", REPEATS)
    else:
        export_to(tmp_path / "model")
    place = tmp_path / "model"
    config = ServingConfig(
        str(place),
        LAYERS,
        {"a": 0, "b": 1, "c": 2},
        TOKENIZER.size,
        fingerprint(place),
        wire_dtype="fp32",
        cache_tokens=CACHE_TOKENS,
    )
    rows = tuple(InputRow(slot, 0, CACHE_TOKENS // 8) for slot in range(8))
    for stage, path in enumerate([(0,), (0, 1), (0, 2)]):
        executor = build_executor(config, stage, JoinConfig("abc"[stage], "127.0.0.1:1"))
        step = StepInput(0, 1, path, rows, (), (), (), hops_of(path, 3)[stage])
        tokens = ((1,) * rows[0].count,) * len(rows)
        executor.run(ForwardStep(step, stage, encode(torch.zeros(CACHE_TOKENS, 32), "fp32") if stage else tokens))
        caches = executor._routes[1]._caches
        held = sum(each.nbytes for cache in caches for each in cache._tensors())
        assert sizes[stage] == weight_bytes(executor._model) + held
        assert len(caches) == (3 - stage if repeats else 1)
        assert (weight_bytes(executor._model) > plain_bytes[stage]) == repeats
