"""A disk that is full: what waits, what is said, where the model goes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from skippipe.checkpoint.format import save_tensors
from skippipe.checkpoint.hf_export import ModelFolder
from skippipe.checkpoint.storage import LineFile, ModelStore, check_room
from skippipe.codecs import encode
from skippipe.data.tokenizer import TextTokenizer, train_bpe
from skippipe.errors import UserError
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import layer_ranges
from skippipe.model.stage_step import StageStep
from skippipe.runs.tail import model_run_id
from skippipe.runs.wal import WriteAheadLog
from skippipe.runtime.coordinator.interfaces import WriteFailed
from skippipe.training.run import WalWriter
from tests.helpers.dashboards import RunFolder, plan_of
from tests.helpers.disks import full_disk
from tests.helpers.models import tiny
from tests.helpers.single_node import LEARNING

LAYERS = (2, 1, 2)
WAYS = "ways on"


def test_lines_wait_for_room_and_keep_their_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    file.add("one")
    with full_disk(6):
        for line in ("two", "three", "four"):
            file.add(line)
        assert path.read_text() == "one\ntw", "as much as there is room for"
    file.add("five")
    assert path.read_text().split() == ["one", "two", "three", "four", "five"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: cannot be written: File too large; its lines wait in memory; make room, or mend it",
        f"{path}: can be written again",
    ]


def test_lines_are_cut_wherever_they_are(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("one\ntwo\ntorn")
    file = LineFile(path, kept_bytes=8)
    assert path.read_text() == "one\ntwo\n"
    file.cut(4)
    with full_disk(4):
        file.add("three")
        file.add("four")
        file.cut(4 + 6)
        file.add("five")
        assert path.read_text() == "one\n"
    file.add("six")
    assert path.read_text().split() == ["one", "three", "five", "six"]


def test_metrics_of_a_resumed_run_lose_only_what_is_done_again(tmp_path: Path) -> None:
    plan = plan_of()
    first = RunFolder(tmp_path, plan, run_id="a")
    for number in range(4):
        first.iteration(number, 5.0)
    path = tmp_path / "metrics.jsonl"
    strange = json.dumps({"iteration": 1, "run": "b"})
    path.write_text(f"{strange}\n" + path.read_text() + '{"iteration": 4, "lo')
    again = RunFolder(tmp_path, plan, resumed=True, run_id="a")
    with full_disk(sum(map(len, path.read_text().splitlines()[:3]))):
        again.iteration(2, 4.0)
    again.iteration(3, 4.0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["iteration"], row.get("loss")) for row in rows] == [(1, None), (1, 5.0), (2, 5.0), (3, 4.0), (4, 4.0)]


def test_no_record_is_left_out_of_the_journal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A plan that is missing between commits would be the wrong one for a coordinator that is started again."""
    path = tmp_path / "journal"
    wal = WriteAheadLog(path)
    wal_writer = WalWriter(wal)
    wal_writer.write({"commit": 0})
    with full_disk(path.stat().st_size + 10):
        for record in ({"plan": 1}, {"commit": 1}, {"commit": 2}):
            wal_writer.write(record)
    wal_writer.write({"commit": 3})
    wal.close()
    found = WriteAheadLog(path)
    found.close()
    assert found.records == [{"commit": 0}, {"plan": 1}, {"commit": 1}, {"commit": 2}, {"commit": 3}]
    assert len(caplog.records) == 2
    assert "a coordinator that is killed now goes on from the newest checkpoint" in caplog.records[0].getMessage()


# The model


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_bpe(["some words, and some more words"] * 20, 270)


class Weights:
    """Of a small model, and a folder for it."""

    def __init__(self, folder: Path, tokenizer: TextTokenizer, seed: int = 8) -> None:
        self.spec = ModelSpec(tiny("llama"), seed)
        self.stages = [
            StageStep(self.spec, layers, LEARNING, ends=number == 0).weights.values
            for number, layers in enumerate(layer_ranges(LAYERS))
        ]
        self.folder = ModelFolder(folder, LAYERS, self.spec, tokenizer, run_id="a")

    def into(self, store: ModelStore, *stages: int) -> None:
        for stage in stages:
            for number, piece in enumerate(torch.split(self.stages[stage], 5000)):
                store.store(stage, number, encode(piece, "fp32"))
            store.store(stage, 99, None)

    def assert_in(self, folder: Path) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert sum(each.numel() for each in loaded.parameters()) == sum(map(len, self.stages))
        found = torch.cat([each.detach().flatten() for each in loaded.parameters()]).double().sum()
        torch.testing.assert_close(found, torch.cat(self.stages).double().sum())
        assert model_run_id(folder) == "a"
        assert not (folder / "unfinished").exists()


def no_rescue() -> Path | None:
    return None


def test_bridges_and_adapters_count_with_what_is_missing(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    model = ModelFolder(tmp_path / "plain", LAYERS, ModelSpec(tiny("llama"), 8), tokenizer)
    beside = ModelFolder(tmp_path / "healed", LAYERS, ModelSpec(tiny("llama"), 8, None, 2, adapters=4), tokenizer)
    width, shape = tiny("llama").hidden_size, ModelSpec(tiny("llama")).shape
    bridges = (2 + 1) * width * (2 * 2 + 1)
    adapters = sum(LAYERS) * shape.adapter_parameters(4)
    assert beside.missing_bytes - model.missing_bytes == 4 * (bridges + adapters)


def test_a_model_that_cannot_be_written_is_held_until_it_can(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    weights = Weights(tmp_path / "model", tokenizer)
    store = ModelStore(weights.folder, no_rescue, lambda: WAYS)
    weights.into(store, 0)
    with full_disk(20_000):
        with pytest.raises(WriteFailed, match=r"/model: .* of the model cannot be written: File too large, ") as caught:
            weights.into(store, 1)
        assert caught.value.ways == WAYS
        with pytest.raises(WriteFailed):
            store.store(1, 99, None)
    assert [path.name for path in (tmp_path / "model" / "unfinished").iterdir()] == ["model-00001-of-00003.safetensors"]
    store.store(1, 99, None)
    weights.into(store, 2)
    weights.assert_in(tmp_path / "model")


def test_a_model_that_is_there_stays_until_the_new_one_is_whole(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    earlier = Weights(tmp_path / "model", tokenizer, seed=7)
    earlier.into(ModelStore(earlier.folder, no_rescue, lambda: WAYS), 0, 1, 2)
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    weights = Weights(tmp_path / "model", tokenizer)
    weights.into(ModelStore(weights.folder, no_rescue, lambda: WAYS), 0, 1)
    files = [path for path in (tmp_path / "model").iterdir() if path.is_file()]
    assert {path.name: path.read_bytes() for path in files} == before


def test_a_model_goes_whole_to_the_rescue_folder(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    weights = Weights(tmp_path / "run" / "model", tokenizer)
    rescue = tmp_path / "rescue"
    store = ModelStore(weights.folder, lambda: rescue, lambda: WAYS)
    weights.into(store, 0)
    with full_disk(20_000), pytest.raises(WriteFailed):
        weights.into(store, 1)
    assert store.place == tmp_path / "run" / "model", "there was no room for the stage before"
    (tmp_path / "run" / "model" / "unfinished" / "model-00002-of-00003.safetensors").mkdir()  # cannot be written
    store.store(1, 99, None)
    assert store.place == rescue / "model"
    weights.into(store, 2)
    weights.assert_in(store.place)
    assert not list((tmp_path / "run" / "model").iterdir())


def test_tensors_are_readable_as_any_new_file_is(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    before = os.umask(0o027)
    try:
        save_tensors({"a": torch.ones(2)}, file, {})
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o640


def test_tensors_that_do_not_fit_leave_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_tensors({"a": torch.ones(2)}, file, {})
    before = file.read_bytes()
    with full_disk(1000), pytest.raises(OSError, match="File too large"):
        save_tensors({"a": torch.ones(1000)}, file, {})
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_room_is_looked_for_before_the_start(tmp_path: Path) -> None:
    check_room(tmp_path, "output", 1000, 3000, 3)
    check_room(tmp_path / "not" / "there", "output", 1000, 3000, 3)
    with pytest.raises(UserError, match=r"output: .* has .* free; 1e\+06 TB are needed, 1e\+05 TB for the model and "):
        check_room(tmp_path, "output", 10**17, 3 * 10**17, 3)
