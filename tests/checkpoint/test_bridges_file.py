"""The file with bridges and adapters: there and back, and one line for what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from skippipe.checkpoint.bridges_file import BRIDGES_FILE, StandInsInfo, bridges_info, load_bridges, write_bridges
from skippipe.errors import UserError
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.model.stand_ins import StageAdapters, bridges_of
from tests.helpers.models import tiny

LAYERS = (2, 1, 1, 1)
SPEC = ModelSpec(tiny("qwen3"))
INFO = StandInsInfo(LAYERS, 3, 2, hop_rank=1)


def stages() -> list[StageModel]:
    return [StageModel(SPEC, each, ends=index == 0) for index, each in enumerate(layer_ranges(LAYERS))]


def written(folder: Path) -> tuple[list[Any], list[Any]]:
    bridges = bridges_of(len(LAYERS), 32, 3, seed=1)
    adapters = [StageAdapters(stage, 2, seed=1) for stage in stages()]
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for part in (*bridges, *adapters):
            for each in part.parameters():
                each.normal_(generator=generator)
    write_bridges(folder, LAYERS, bridges, adapters, hop_rank=1)
    return bridges, adapters


def test_bridges_and_adapters_come_back_stage_by_stage(tmp_path: Path) -> None:
    bridges, adapters = written(tmp_path)
    info = bridges_info(tmp_path, 5)
    assert info == INFO
    for number, stage in enumerate(stages()):
        found = load_bridges(tmp_path, info, number, stage)
        held, parts = found.bridges, found.adapters
        assert parts is not None
        assert parts.names[0] == f"model.layers.{stage.numbers.start}.self_attn.q_proj"
        pairs = list(zip(parts.parameters(), adapters[number].parameters(), strict=True))
        assert (held is None) == (number == len(LAYERS) - 1), "after the last stage there is none to skip"
        if held is not None:
            pairs += zip(held.parameters(), bridges[number].parameters(), strict=True)
        assert len(pairs) == 2 * 7 * len(stage.layers) + 3 * (held is not None)
        for one, other in pairs:
            assert torch.equal(one, other)
    assert bridges_info(tmp_path / "elsewhere", 5) is None


@pytest.mark.parametrize(
    ("metadata", "tensors", "reason"),
    [
        ({"skippipe_bridges": "3"}, {}, "has format '3'"),
        ({"repeats": "x"}, {}, "repeats: 'x' in its metadata"),
        ({"repeats": "2"}, {}, "2 repeats do not go with adapters of rank 2"),
        ({"repeats": "1", "adapter_scale": "missing"}, {}, "has no tensor 'gates.0'"),
        ({"layers": "2,1,1"}, {}, "is for 3 stages of 4 layers; the model has 5 layers"),
        ({"layers": "5"}, {}, "is for 1 stages"),
        ({"layers": "2,1,1,0,1"}, {}, "is for 5 stages"),
        ({"layers": ""}, {}, "layers: '' in its metadata is no whole number"),
        ({"layers": "1," * 10**5}, {}, "is for 6 stages"),
        ({"layers": "2,1,2"}, {}, "'bridges.0.down' has the shape .3, 32, 3. of F32, not .2, 32, 3."),
        ({"bridges": "-1"}, {}, "bridges: '-1'"),
        ({"bridges": "0", "adapters": "0"}, {}, "neither bridges nor adapters"),
        ({"adapter_scale": "by moonlight"}, {}, "an adapter_scale that is not known"),
        ({"adapter_scale": "hop 3"}, {}, "an adapter_scale that is not known, 'hop 3'"),
        ({"bridges": "999999", "adapters": "999999"}, {}, "has the shape"),
        ({}, {"bridges.0.up": None}, "has no tensor 'bridges.0.up'"),
        ({}, {"bridges.0.gain": torch.zeros(3, 32, dtype=torch.int64)}, "of I64, not"),
        ({}, {"model.layers.1.mlp.up_proj.adapter_up": torch.zeros(2, 48)}, r"the shape \[2, 48\] of F32, not \[48, 2"),
    ],
)
def test_bad_files_give_one_line(tmp_path: Path, metadata: dict[str, str], tensors: Any, reason: str) -> None:
    written(tmp_path)
    file = tmp_path / BRIDGES_FILE
    kept = {name: each for name, each in {**load_file(file), **tensors}.items() if each is not None}
    save_file(kept, file, INFO.metadata | metadata)
    with pytest.raises(UserError, match=reason) as error:
        info = bridges_info(tmp_path, 5)
        assert info is not None
        load_bridges(tmp_path, info, 0, stages()[0])
    assert "\n" not in str(error.value)
    assert str(file) in str(error.value)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="cannot be read"):
        bridges_info(tmp_path, 5)
