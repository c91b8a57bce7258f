"""Checkpoints: a run that goes on from one is the run that was not interrupted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from skippipe.checkpoint.format import MANIFEST, CheckpointOrigin, Checkpoints, Manifest, verified
from skippipe.checkpoint.manager import CheckpointManager, export, origin_of
from skippipe.codecs import decode, encode
from skippipe.data.tokenizer import TextTokenizer, train_bpe
from skippipe.errors import UserError
from skippipe.model.flat_params import layout_of_stage
from skippipe.model.model_spec import ModelSpec
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane, Plan
from skippipe.runs.tail import model_run_id
from skippipe.runs.wal import WriteAheadLog
from skippipe.runtime.coordinator.interfaces import Callback, CoordinatorState, Event
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.skip_schedule import SkipSchedule
from skippipe.training.run import Run
from tests.helpers.disks import full_disk
from tests.helpers.exact_training import FULL, SKIPPED, brief_of, plan_of, tensors_of
from tests.helpers.executors import state_of
from tests.helpers.quick import others_slow

torch.set_num_threads(1)
LEARNING = OptimConfig(rate=3e-3, warmup=2, iterations=6)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_bpe(["some words, and some more words"] * 20, 270)


def run(
    plan: Plan,
    spec: ModelSpec,
    checkpoints: Checkpoints,
    tokenizer: TextTokenizer,
    *,
    until: int = 6,
    every: int = 2,
    origin: CheckpointOrigin | None = None,
) -> tuple[VirtualCluster, dict[int, StageExecutor], CheckpointManager]:
    """Up to an iteration, from the start or from a checkpoint."""
    computers = tensors_of(plan, spec, LEARNING)
    keeper = CheckpointManager(checkpoints, brief_of(plan, spec), spec, tokenizer, origin)
    resumed_from = origin.manifest.iterations if origin else None
    cluster = VirtualCluster(
        plan,
        CoordinatorSettings(LEARNING, until, checkpoint_every=every, resumed_from=resumed_from),
        computers,
        checkpoint_store=keeper,
    )
    cluster.run()
    keeper.close()
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    return cluster, computers, keeper


def weights_of(computers: dict[int, StageExecutor]) -> dict[str, torch.Tensor]:
    return {name: each.detach() for one in computers.values() for name, each in one.tasks.model.named_weights()}


@pytest.mark.parametrize("split", others_slow([True], [False]))
def test_going_on_is_the_same_as_not_stopping(tmp_path: Path, tokenizer: TextTokenizer, split: bool) -> None:
    plan, spec = plan_of(SKIPPED, split=split)
    whole, expected, _ = run(plan, spec, Checkpoints(tmp_path / "whole"), tokenizer)
    checkpoints = Checkpoints(tmp_path / "cut")
    run(plan, spec, checkpoints, tokenizer, until=4)
    origin = origin_of(checkpoints, brief_of(plan, spec))
    assert origin.manifest.iterations == 4
    rest, found, _ = run(plan, spec, checkpoints, tokenizer, origin=origin)
    assert [report.iteration for report in rest.reports] == [4, 5]
    assert [report.loss for report in rest.reports] == [report.loss for report in whole.reports[4:]]
    for node, executor in expected.items():
        assert torch.equal(state_of(executor), state_of(found[node]))
        assert executor.tasks.weights.steps == found[node].tasks.weights.steps == 6


def test_going_on_with_other_stages_and_other_nodes(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    plan, spec = plan_of(FULL)
    whole, _, _ = run(plan, spec, Checkpoints(tmp_path / "whole"), tokenizer)
    checkpoints = Checkpoints(tmp_path / "cut")
    run(plan, spec, checkpoints, tokenizer, until=4)
    lanes = tuple(Lane((node, 2), 2) for node in (0, 1))  # two stages on three nodes, the same microbatches
    other, _ = plan_of(lanes, (2, 3), stages=((0, 1), (2,)))
    origin = origin_of(checkpoints, brief_of(other, spec))
    rest, _, _ = run(other, spec, checkpoints, tokenizer, origin=origin)
    for ours, theirs in zip(rest.reports, whole.reports[4:], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)


def test_only_the_newest_stay_and_a_damaged_one_is_passed_over(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    plan, spec = plan_of(SKIPPED)
    checkpoints = Checkpoints(tmp_path, keep=2)
    run(plan, spec, checkpoints, tokenizer)
    assert [place.name for place in checkpoints.complete()] == ["000006", "000004"]
    damaged = tmp_path / "000006" / "stage-1.optimizer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(UserError, match="not what was written"):
        verified(tmp_path / "000006")
    node_config = brief_of(plan, spec)
    assert origin_of(checkpoints, node_config).place.name == "000004"
    (tmp_path / "000004" / "stage-0.weights.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="no sound checkpoint"):
        origin_of(checkpoints, node_config)


def test_what_was_cut_short_is_no_checkpoint(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    plan, spec = plan_of(SKIPPED)
    checkpoints = Checkpoints(tmp_path)
    run(plan, spec, checkpoints, tokenizer, until=2)
    (tmp_path / "000002" / MANIFEST).unlink()
    assert checkpoints.complete() == []


def test_a_checkpoint_of_another_job_is_refused(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    plan, spec = plan_of(SKIPPED)
    checkpoints = Checkpoints(tmp_path)
    run(plan, spec, checkpoints, tokenizer, until=2)
    node_config = brief_of(plan, spec)
    for change, name in (
        ({"seed": 12}, "seed"),
        ({"data_fingerprint": "1" * 64}, "text"),
        ({"config": {**node_config.config, "hidden_size": 64}}, "model"),
        ({"learning": replace(LEARNING, optimizer="sgd")}, "optimizer"),
    ):
        with pytest.raises(UserError, match=f"another {name}"):
            origin_of(checkpoints, replace(node_config, **change))


def test_a_full_disk_does_not_stop_training(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    plan, spec = plan_of(SKIPPED)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    cluster, _, keeper = run(plan, spec, checkpoints, tokenizer)
    assert len(cluster.reports) == 6
    assert keeper.failures
    assert checkpoints.complete() == []


# The keeper by itself


def states_of(plan: Plan, spec: ModelSpec, seed: int) -> list[torch.Tensor]:
    """Some numbers for every stage: weights, means and squares."""
    sizes = [
        sum(place.size for place in layout_of_stage(spec, plan.layers, stage)) for stage in range(len(plan.layers))
    ]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3 * size, generator=generator) for size in sizes]


def keep(keeper: CheckpointManager, states: Sequence[torch.Tensor], stages: int | None = None) -> None:
    """In pieces; after so many stages it breaks off in the middle of one."""
    for stage, state in enumerate(states):
        pieces = torch.split(state, 3001)
        for number, piece in enumerate(pieces[: 2 if stage == stages else None]):
            keeper.save(stage, number, encode(piece, "fp32"))
        if stage == stages:
            return
        keeper.save(stage, len(pieces), None)


def test_any_stretch_of_a_state_is_what_was_saved(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    plan, spec = plan_of(SKIPPED)
    node_config = brief_of(plan, spec)
    keeper = CheckpointManager(Checkpoints(tmp_path), node_config, spec, tokenizer)
    assert keeper.newest() is None
    states = states_of(plan, spec, 1)
    keep(keeper, states)
    keeper.saved(7, (7, 6, 5, 0))
    assert keeper.newest() == 7
    assert [keeper.steps(stage) for stage in range(4)] == [7, 6, 5, 0]
    for stage, state in enumerate(states):
        size = len(state)
        for first, count in ((0, size), (0, 1), (size - 1, 1), (size // 3 - 5, 11), (33, 97), (size // 2, 4000)):
            assert torch.equal(decode(keeper.state(stage, first, count)), state[first : first + count])
        for first, count in ((size, 1), (size - 1, 2), (-1, 1), (0, 0)):
            with pytest.raises(ValueError, match="of a state of"):
                keeper.state(stage, first, count)
    keeper.close()
    other, _ = plan_of((Lane((0, 2), 5),), (2, 3), stages=((0,), (1, 2)))
    resumed = CheckpointManager(
        Checkpoints(tmp_path), brief_of(other, spec), spec, tokenizer, origin_of(Checkpoints(tmp_path), node_config)
    )
    assert [resumed.steps(stage) for stage in range(2)] == [7, 5]  # the most of the stages that they are made of
    resumed.close()


def test_what_was_given_up_leaves_no_trace(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    plan, spec = plan_of(SKIPPED)
    keeper = CheckpointManager(Checkpoints(tmp_path), brief_of(plan, spec), spec, tokenizer)
    for stages in range(4):
        keep(keeper, states_of(plan, spec, 2), stages)
        keeper.abandon()
    assert keeper.newest() is None
    assert not list(tmp_path.iterdir())
    states = states_of(plan, spec, 3)
    keep(keeper, states_of(plan, spec, 2), 0)  # starts over, from another node
    keep(keeper, states)
    keeper.saved(4, (4, 4, 4, 4))
    keeper.abandon()  # nothing is being made
    assert keeper.newest() == 4
    assert torch.equal(decode(keeper.state(3, 0, len(states[3]))), states[3])
    keeper.close()
    assert not keeper.failures


def test_a_run_says_in_the_end_that_its_last_checkpoint_could_not_be_written(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    plan, spec = plan_of(SKIPPED)
    told: list[Event] = []
    callback = Callback()
    callback.happened = told.append  # type: ignore[method-assign,assignment]
    for folder, expected in ((tmp_path / "free", 0), (tmp_path / "full", 1)):
        folder.mkdir()
        if expected:
            (folder / "checkpoints").write_text("a file where a folder should be")
        run = Run(brief_of(plan, spec), spec, tokenizer, folder, CoordinatorSettings(LEARNING, 6))
        keep(run.checkpoint_manager, states_of(plan, spec, 1))
        run.checkpoint_manager.saved(6, (6, 6, 6, 6))
        run.close(callback)
        assert len(told) == expected
    assert (told[0].kind, told[0].iteration) == ("checkpoint", 5)
    assert told[0].text.startswith("none after 6 iterations: NotADirectoryError")


def test_a_journal_is_replaced_only_by_a_run_that_begins(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    plan, spec = plan_of(SKIPPED)
    records: list[dict[str, Any]] = [{"run": "ours"}, {"plan": plan.to_json()}, {"commit": 0}]
    wal = WriteAheadLog(tmp_path / "journal")
    wal.rewrite(records)
    wal.close()

    def resumed(nodes_join: bool) -> Run:
        given = brief_of(plan, spec), spec, tokenizer, tmp_path, CoordinatorSettings(LEARNING, 6)
        return Run(*given, resumed=True, run_id="ours", nodes_join=nodes_join)

    def closed(run: Run) -> list[dict[str, Any]]:
        """The records of its journal."""
        run.wal.close()
        wal = WriteAheadLog(tmp_path / "journal")
        wal.close()
        return wal.records

    refused, going_on, beginning = resumed(False), resumed(True), resumed(False)
    with pytest.raises(UserError, match="no sound checkpoint"):
        _ = refused.origin
    assert closed(refused) == records
    going_on.begin_journal()
    assert going_on.recovered_records == closed(going_on) == records, "its nodes may still be there"
    beginning.begin_journal()
    (first,) = closed(beginning)
    assert (first["run"], first["settings"]["seed"]) == ("ours", beginning.node_config.seed)


def test_a_journal_of_more_iterations_than_the_job_wants_is_refused(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Such a run would go on for ever: it ends with the last iteration, which is over."""
    plan, spec = plan_of(SKIPPED)
    wal = WriteAheadLog(tmp_path / "journal")
    wal.rewrite([{"run": "ours"}, {"plan": plan.to_json()}, {"commit": 5}, {"commit": 6}])
    wal.close()

    def recovered(iterations: int) -> list[dict[str, Any]]:
        given = brief_of(plan, spec), spec, tokenizer, tmp_path, CoordinatorSettings(LEARNING, iterations)
        run = Run(*given, resumed=True, run_id="ours", nodes_join=True)
        try:
            return run.recovered_records
        finally:
            run.wal.close()

    with pytest.raises(UserError, match="journal: has 7 iterations already, and the job wants 6: set a higher number"):
        recovered(6)
    assert recovered(7) == recovered(8)


def test_a_journal_of_other_stages_than_the_plans_is_refused(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Their state would not fit into checkpoints and the model."""
    plan, spec = plan_of(SKIPPED)
    before, _ = plan_of(SKIPPED, (2, 1, 1, 1))
    wal = WriteAheadLog(tmp_path / "journal")
    wal.rewrite([{"run": "ours"}, {"plan": before.to_json()}, {"commit": 0}])
    wal.close()
    given = brief_of(plan, spec), spec, tokenizer, tmp_path, CoordinatorSettings(LEARNING, 6)
    run = Run(*given, resumed=True, run_id="ours", nodes_join=True)
    with pytest.raises(UserError, match=r'the plan has 1,1,1,2: set pipeline\.layers = "2,1,1,1", or remove'):
        _ = run.recovered_records
    run.wal.close()


def test_a_journal_of_other_settings_than_the_jobs_is_refused(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Nodes that wait keep theirs, and one that joins would get the new ones."""
    plan, spec = plan_of(SKIPPED)

    def run_with(**changed: Any) -> Run:
        given = replace(brief_of(plan, spec), **changed), spec, tokenizer, tmp_path, CoordinatorSettings(LEARNING, 6)
        return Run(*given, resumed=True, run_id="ours", nodes_join=True)

    first = run_with()
    first.begin_journal()
    first.wal.write({"plan": plan.to_json()})
    first.wal.close()
    for changed, said in (
        ({"learning": replace(LEARNING, beta2=0.5)}, rf"another learning\.beta2 \({LEARNING.beta2}, not 0\.5\)"),
        ({"recipe": SkipSchedule(distill=0.5)}, r"another recipe\.distill \(0\.0, not 0\.5\)"),
        ({"config": {**spec.config.to_dict(), "rms_norm_eps": 0.1}}, "another model: go on"),
    ):
        run = run_with(**changed)
        with pytest.raises(UserError, match=said):
            _ = run.recovered_records
        run.wal.close()
    other_rate = replace(LEARNING, rate=0.5, iterations=99)
    same = run_with(config={**spec.config.to_dict(), "transformers_version": "9"}, learning=other_rate)
    assert same.recovered_records
    same.wal.close()


def test_the_newest_sound_checkpoint_of_this_run(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    plan, spec = plan_of(SKIPPED)
    node_config = brief_of(plan, spec)
    states = {iterations: states_of(plan, spec, iterations) for iterations in (2, 4, 6, 8)}
    before = CheckpointManager(Checkpoints(tmp_path, keep=9, run_id="one"), node_config, spec, tokenizer)
    keep(before, states[8])
    before.saved(8, (8,) * 4)
    before.close()
    keeper = CheckpointManager(Checkpoints(tmp_path, keep=9, run_id="other"), node_config, spec, tokenizer)
    assert keeper.newest() is None, "a run has no use for what another one has made"
    for iterations in (2, 4, 6):
        keep(keeper, states[iterations])
        keeper.saved(iterations, (iterations,) * 4)
        assert keeper.newest() == iterations
    assert torch.equal(decode(keeper.state(2, 10, 5000)), states[6][2][10:5010])
    (tmp_path / "000006" / MANIFEST).unlink()
    torn = tmp_path / "000004" / "stage-1.weights.safetensors"
    content = torn.read_bytes()
    torn.write_bytes(content[:-1])
    assert keeper.newest() == 2
    torn.write_bytes(content)
    assert keeper.newest() == 4
    assert keeper.newest() == 4
    assert keeper.steps(2) == 4
    shutil.rmtree(tmp_path / "000004")  # newer ones have taken its place
    assert torch.equal(decode(keeper.state(2, 10, 5000)), states[4][2][10:5010])
    keeper.close()
    assert (tmp_path / "000008" / MANIFEST).exists()


def test_the_checkpoints_of_another_run_are_not_removed_for_those_of_this_one(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    plan, spec = plan_of(SKIPPED)
    node_config, states = brief_of(plan, spec), states_of(plan, spec, 1)
    for run_id, made in (("one", (7, 9)), ("other", (2, 4, 6))):
        keeper = CheckpointManager(Checkpoints(tmp_path, keep=1, run_id=run_id), node_config, spec, tokenizer)
        for iterations in made:
            keep(keeper, states)
            keeper.saved(iterations, (iterations,) * 4)
            assert not keeper.lack()
        keeper.close()
    assert {place.name for place in tmp_path.iterdir()} == {"000009", "000006"}
    assert origin_of(Checkpoints(tmp_path, run_id="other"), node_config).manifest.iterations == 6
    assert verified(tmp_path / "000009").run == "one"


def test_a_checkpoint_does_not_take_the_place_of_one_of_another_run(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    plan, spec = plan_of(SKIPPED)
    node_config, states = brief_of(plan, spec), states_of(plan, spec, 1)
    for run_id in ("one", "other"):
        keeper = CheckpointManager(Checkpoints(tmp_path, run_id=run_id), node_config, spec, tokenizer)
        keep(keeper, states)
        keeper.saved(4, (4,) * 4)
        lacking = keeper.lack()
        keeper.close()
    assert "is a checkpoint of another run; move it away" in lacking
    assert verified(tmp_path / "000004").run == "one"
    assert [place.name for place in tmp_path.iterdir()] == ["000004"]


def test_a_checkpoint_that_cannot_be_written_leaves_its_room_to_others_and_is_said_once(
    tmp_path: Path, tokenizer: TextTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    plan, spec = plan_of(SKIPPED)
    states = states_of(plan, spec, 1)
    keeper = CheckpointManager(Checkpoints(tmp_path / "kept"), brief_of(plan, spec), spec, tokenizer)
    with full_disk(16_000):
        for iterations in (2, 4):
            keep(keeper, states)
            keeper.saved(iterations, (iterations,) * 4)
            assert f"none after {iterations} iterations: OSError: " in keeper.lack()
            assert list((tmp_path / "kept").iterdir()) == []
    keep(keeper, states)
    keeper.saved(6, (6,) * 4)
    assert not keeper.lack()
    keeper.close()
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"{tmp_path}/kept: cannot be written: File too large; the checkpoints before stay, and training goes on; "
        "make room, or mend it",
        f"{tmp_path}/kept: can be written again",
    ]
    assert verified(tmp_path / "kept" / "000006").iterations == 6


def test_the_last_checkpoint_goes_to_the_rescue_folder(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    plan, spec = plan_of(SKIPPED)
    node_config, states = brief_of(plan, spec), states_of(plan, spec, 1)
    (tmp_path / "run").write_text("a file where a folder should be")
    elsewhere = tmp_path / "elsewhere"
    checkpoints = Checkpoints(tmp_path / "run", run_id="one")
    keeper = CheckpointManager(checkpoints, node_config, spec, tokenizer, rescue=lambda: elsewhere)
    for lacks in (True, False):
        keep(keeper, states)
        keeper.saved(6, (6,) * 4)
        assert bool(keeper.lack()) == lacks
        keeper.move()
    keeper.close()
    assert verified(elsewhere / "checkpoints" / "000006").run == "one"


def test_export_is_what_transformers_loads(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    plan, spec = plan_of(SKIPPED)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    _, computers, _ = run(plan, spec, checkpoints, tokenizer)
    manifest = export(tmp_path / "checkpoints" / "000006", tmp_path / "model")
    stored = json.loads(json.dumps(manifest.to_json()))
    assert Manifest.from_json(stored) == manifest
    with pytest.raises(UserError, match=r"files: '\.\./x' is not the name of a file in this folder"):
        Manifest.from_json(stored | {"files": [{"name": "../x", "size": 1, "sha256": ""}]})
    assert manifest.iterations == 6
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = weights_of(computers)
    for name, each in model.named_parameters():
        assert torch.equal(each, expected[name]), name


def test_an_export_that_cannot_be_written_leaves_nothing(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    plan, spec = plan_of(SKIPPED)
    keeper = CheckpointManager(Checkpoints(tmp_path, run_id="one"), brief_of(plan, spec), spec, tokenizer)
    keep(keeper, states_of(plan, spec, 1))
    keeper.saved(6, (6,) * 4)
    keeper.close()
    with full_disk(16_000), pytest.raises(UserError, match="of the model cannot be written: File too large; make room"):
        export(tmp_path / "000006", tmp_path / "model")
    assert not (tmp_path / "model").exists()
    export(tmp_path / "000006", tmp_path / "model")
    assert model_run_id(tmp_path / "model") == "one"
