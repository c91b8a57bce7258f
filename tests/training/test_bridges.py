"""Bridges in a job: trained with the stages, kept through losses, and one more file beside the exported model."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skippipe.checkpoint.bridges_file import BRIDGES_FILE, StandInsInfo, bridges_info
from skippipe.checkpoint.manager import export, origin_of
from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import load, load_stage, read_outline
from skippipe.model.stand_ins import is_bridge
from skippipe.plan import Plan
from skippipe.planner.problem import PlanRequest
from skippipe.runtime.coordinator.interfaces import Callback, CoordinatorState
from skippipe.runtime.simulation.fault_injection import Fault, kill, kill_coordinator
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.runtime.train_role import build_stage_executor
from skippipe.toml_config import from_table
from skippipe.training.backends import BACKENDS
from skippipe.training.build_run import RunSetup, build_run
from skippipe.training.job_config import JobConfig
from skippipe.training.run import RunOptions
from skippipe.validate import validate
from tests.helpers.models import tiny
from tests.helpers.pretrained_jobs import Losses

torch.set_num_threads(1)

RANK = 4
QUICK = PlanRequest(budget_s=0.2, changes=500)


def bridged(folder: Path, *, resumed: bool = False, **tables: Any) -> RunSetup:
    """Four stages on eight nodes; a quarter of the microbatches goes whole, the others leave one stage or two out."""
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times. " * 99)
    (folder / "model.json").write_text(json.dumps(tiny("llama").to_dict()))
    said = {
        "output": str(folder / "run"),
        "model": {"config": str(folder / "model.json")},
        "data": {"texts": str(folder / "text.txt"), "vocabulary": 300, "folder": str(folder / "tokens")},
        "batch": {"sequence": 16, "samples": 1, "microbatches": 12},
        "cluster": "datacentre:8",
        "iterations": 6,
        "pipeline": {"stages": 4, "strategy": "skippipe", "layers": "1,1,1,2"},
        "recipe": {"skip": "1/4 until 30%, 0 & 1/4 & 2 x 1/2", "bridges": RANK},
        "checkpoint": {"every": 2},
        "transport": {"wire": "fp32"},
        "learning": {"warmup": 0},
        **tables,
    }
    return build_run(from_table(JobConfig, said), request=QUICK, options=RunOptions(resumed=resumed))


def trained(run_setup: RunSetup, backend: str, until: int = 99) -> list[float]:
    losses = Losses()
    BACKENDS[backend](run_setup, losses, lambda: len(losses.found) >= until)
    return losses.found


def elsewhere(run_setup: RunSetup, output: Path) -> RunSetup:
    """The same plans, in another folder."""
    output.mkdir()
    return replace(run_setup, job=replace(run_setup.job, output=str(output)))


def test_a_job_with_bridges_from_the_plan_to_the_exported_folder(tmp_path: Path) -> None:
    made = bridged(tmp_path)
    for plan in made.plans.values():
        assert validate(plan) == []
        assert all(a < b for lane in plan.lanes for a, b in pairwise(plan.visits(lane))), "bridges lead forward"
    assert made.plan.workload.bridge_parameters == 3 * 32 * (2 * RANK + 1)
    without = replace(made.plan.workload, bridge_rank=0)
    extra = made.plan.workload.forward_flops(1) - without.forward_flops(1)
    assert extra == 16 * 2 * (32 * RANK + RANK * 32), "two a weight and token"
    losses = trained(made, "virtual")
    once = elsewhere(made, tmp_path / "once")
    assert trained(once, "one-process") == pytest.approx(losses, rel=1e-4)
    model, run = Path(made.job.output) / "model", Path(made.job.output)
    assert bridges_info(model, 5) == StandInsInfo((1, 1, 1, 2), bridges=RANK)
    stored = load_file(model / BRIDGES_FILE)
    other = load_file(Path(once.job.output) / "model" / BRIDGES_FILE)
    for name, each in stored.items():
        torch.testing.assert_close(other[name], each, rtol=1e-3, atol=1e-5, msg=name)
    assert {name: tuple(each.shape) for name, each in stored.items() if "up" in name} == {
        f"bridges.{stage}.up": (3 - stage, RANK, 32) for stage in range(3)
    }
    assert any(each.abs().max() > 0 for name, each in stored.items() if "gain" in name)

    # The checkpoint answers as the folder does, whole and with stages missing, also stage by stage
    from_checkpoint, from_folder = load(run), load(model)
    outline = read_outline(run)
    assert from_checkpoint.stand_ins and outline.stand_ins == StandInsInfo((1, 1, 1, 2), bridges=RANK)
    for number, stage in enumerate(from_checkpoint.stages):
        for same in (from_folder.stages[number], load_stage(outline, number)):
            assert all(torch.equal(same.state_dict()[name], each) for name, each in stage.state_dict().items())
    with pytest.raises(
        UserError, match=r"--cut 5: the bridges of .* are for stages of 1,1,1,2 layers; leave --cut out"
    ):
        read_outline(run, "5")
    assert not load(run, "5", stand_ins=False).stand_ins

    # The checkpoint becomes the same folder, and without that file it is an ordinary model.
    export(run / "checkpoints" / "000006", tmp_path / "exported")
    again = load_file(tmp_path / "exported" / BRIDGES_FILE)
    assert all(torch.equal(again[name], each) for name, each in stored.items())
    (tmp_path / "exported" / BRIDGES_FILE).unlink()
    from_transformers: Any = AutoModelForCausalLM.from_pretrained
    loaded, info = from_transformers(model, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    plain = from_transformers(tmp_path / "exported").state_dict()
    assert all(torch.equal(plain[name], each) for name, each in loaded.state_dict().items())
    assert not any(is_bridge(name) for name in plain)


@pytest.mark.slow  # test_bridges_file.py
def test_a_resumed_run_goes_on_with_its_bridges(tmp_path: Path) -> None:
    made = bridged(tmp_path)
    made.save_plans()
    whole = trained(elsewhere(made, tmp_path / "whole"), "virtual")
    begun = trained(made, "virtual", until=3)
    assert 3 <= len(begun) < len(whole)
    assert begun + trained(bridged(tmp_path, resumed=True), "virtual") == pytest.approx(whole, rel=1e-5)
    config, checkpoints = made.node_config, made.run.checkpoints
    assert origin_of(checkpoints, config).manifest.bridges == RANK
    with pytest.raises(UserError, match=r"another recipe\.bridges; resume with the job"):
        origin_of(checkpoints, replace(config, recipe=replace(config.recipe, bridges=2)))
    stages = tuple(replace(each, layers=count) for each, count in zip(made.plan.stages, (2, 1, 1, 1), strict=True))
    with pytest.raises(UserError, match="bridges are for stages of 1,1,1,2 layers, and the plan has 2,1,1,1"):
        origin_of(checkpoints, replace(config, plan=replace(made.plan, stages=stages, expected=None)))


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 1], ids=["by neighbours", "by checkpoints"])
def test_bridges_survive_whoever_is_lost(kept: int, tmp_path: Path) -> None:
    """A replica, all of stage 0, all of another stage, and the coordinator; with real tensors under virtual time."""
    made = bridged(tmp_path, iterations=9, checkpoint={"every": kept}, survive={"backup_every": 1, "planning_s": 0.0})
    plan, config, sampler = made.plan, made.node_config, made.sampler

    def executor(node: int, current: Plan) -> StageExecutor:
        return build_stage_executor(current.stage_of[node], config, ["cpu"], sampler)

    def lost(stage: int, iteration: int) -> list[Fault]:
        return [kill(node).at(iteration, during="forward").back_after(1e-3) for node in plan.stages[stage].nodes]

    first = plan.stages[1].nodes[0]
    cluster = VirtualCluster(
        plan,
        made.run.resumed_settings,
        {node: executor(node, plan) for node in plan.stage_of},
        checkpoint_store=made.run.checkpoint_manager if kept else None,
        builder=executor,
        faults=[
            kill(first).at(1, during="backward").back_after(1e-3),
            *lost(0, 3),
            kill_coordinator().at(5, during="averaging"),
            *lost(2, 6),
        ],
    )
    cluster.run()
    made.run.close(Callback())
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    texts = [event.text for _, event in cluster.events]
    for stage in (0, 2):
        assert any(text.startswith(f"stage {stage} ") and "no node holds it any more" in text for text in texts), texts
    membership = cluster.coordinator.membership
    states: dict[int, list[dict[str, torch.Tensor]]] = {}
    for node in membership.active:
        machine = cluster.executor_of[node]
        assert isinstance(machine, StageExecutor)
        held: dict[str, torch.Tensor] = {
            name: each for name, each in machine.tasks.model.trained_weights() if is_bridge(name)
        }
        states.setdefault(membership[node].stage, []).append(held)
    assert sorted(states) == [0, 1, 2, 3]
    for stage, replicas in states.items():
        assert len(replicas[0]) == (3 if stage < 3 else 0)
        for other in replicas[1:]:
            assert all(torch.equal(other[name], each) for name, each in replicas[0].items()), f"stage {stage}"
    assert states[0][0]["bridges.0.gain"].abs().max() > 3e-4, "older than what was trained since the loss"


def test_what_cannot_be_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe\.bridges: would have no effect: no path leaves a stage out"):
        bridged(tmp_path, recipe={"skip": "0", "bridges": RANK})
    made = bridged(tmp_path, recipe={"skip": "1/4"})
    stage_of = made.plan.stage_of
    lanes = tuple(
        replace(lane, path=(first, max(a, b, key=stage_of.__getitem__), min(a, b, key=stage_of.__getitem__)))
        if abs(stage_of[a] - stage_of[b]) == 1
        else lane
        for lane in made.plan.lanes
        for first, a, b in [lane.path]
    )
    replace(made.plan, lanes=lanes, expected=None).save(tmp_path / "swapped.json")
    given: dict[str, Any] = {"pipeline": {"plan": str(tmp_path / "swapped.json")}, "recipe": {"bridges": RANK}}
    with pytest.raises(UserError, match=r"CC2 .* bridges lead forward, and 0→[23]→[12] has swapped stages"):
        bridged(tmp_path, **given, cluster="datacentre:8")
