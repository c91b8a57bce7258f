"""The role of a training node, made from its configuration: the state machine, and the executor with its stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from skippipe.cluster import DeviceMode
from skippipe.codecs import compile_on_device
from skippipe.collectives import COLLECTIVES, GroupConfig, MakeAverager
from skippipe.collectives.peer_to_peer import GradientAverager
from skippipe.cost_model import device_layers, device_mode
from skippipe.errors import UserError
from skippipe.model.flat_params import layout
from skippipe.model.model_spec import ModelSpec
from skippipe.model.sharded_stage import ShardedStep, check_blocks, whole_layout
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.model.stage_step import StageStep
from skippipe.model.stand_ins import StagePlace
from skippipe.optim import OPTIMIZERS
from skippipe.plan import Plan
from skippipe.runtime.device_pool import DevicePool
from skippipe.runtime.node.interfaces import TRAINING, NodeEnv, Role, Roles, node_devices
from skippipe.runtime.node.ops import planned_ns
from skippipe.runtime.node.state_machine import TrainingNode
from skippipe.runtime.node_config import NodeConfig
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.transport.link_emulation import EmulatedLink

if TYPE_CHECKING:
    from skippipe.data.batch_sampler import BatchSampler
    from skippipe.runtime.node.interfaces import JoinConfig


def train_role(config: dict[str, Any], join_config: JoinConfig, env: NodeEnv) -> Role:
    """The role of the node that joins, from the configuration that the coordinator has sent."""
    node_config = NodeConfig.from_json(config)
    plan = node_config.plan
    number = plan.cluster.number[join_config.name]
    stage = plan.stage_of[number]
    name = join_config.name
    others = plan.cluster.number.keys() - {name} if node_config.emulated else set()
    nodes = plan.cluster.nodes
    before = sum(node.devices for node in nodes[:number])
    devices = node_devices(join_config.devices, node_config.device, nodes[number].devices, before)
    workers = 1 if _is_sharded(plan, number, devices) else len(devices)
    return Role(
        machine=TrainingNode(number, plan, env, workers),
        build=lambda: build_executor(number, node_config, join_config, devices),
        devices=workers,
        numbers=dict(plan.cluster.number),
        heartbeat_s=node_config.heartbeat_s,
        threads=node_config.threads,
        pace=(lambda work: planned_ns(plan, stage, number, work)) if node_config.emulated else None,
        links={other: EmulatedLink(*there) for other in others if (there := plan.cluster.hop(name, other))[1]},
        links_here={other: EmulatedLink(*here) for other in others if (here := plan.cluster.hop(other, name))[1]},
        upload_bytes_per_s=plan.cluster.nodes[number].upload_bytes_per_s,
        download_bytes_per_s=plan.cluster.nodes[number].download_bytes_per_s,
    )


ROLES: Roles = {TRAINING: train_role}


def build_executor(
    number: int, node_config: NodeConfig, join_config: JoinConfig, devices: Sequence[str]
) -> StageExecutor | DevicePool:
    """The executor of a node in its own process, with its devices and its copy of the text."""
    plan = node_config.plan
    stage = plan.stage_of[number]
    sampler = node_config.sampler(join_config.data_folder) if stage == 0 else None
    held_out = node_config.held_out_sampler(join_config.data_folder) if stage == 0 else None
    averages_on = "cpu" if _is_sharded(plan, number, devices) else devices[0]
    group = GroupConfig(number, tuple(each.ring for each in plan.stages), node_config.rendezvous, averages_on)
    make_averager = COLLECTIVES[plan.workload.collective].join(group)
    return build_node_executor(number, node_config, devices, sampler, make_averager=make_averager, held_out=held_out)


def build_node_executor(
    number: int, node_config: NodeConfig, devices: Sequence[str], sampler: BatchSampler | None, **options: Any
) -> StageExecutor | DevicePool:
    """The executor of a node: its stage on one device, on each of several, or divided over them."""
    stage = node_config.plan.stage_of[number]
    if _is_sharded(node_config.plan, number, devices):
        return build_stage_executor(stage, node_config, devices, sampler, **options)
    made = [build_stage_executor(stage, node_config, [device], sampler, **options) for device in devices]
    return DevicePool(made) if len(made) > 1 else made[0]


def _is_sharded(plan: Plan, number: int, devices: Sequence[object]) -> bool:
    stage, node = plan.stage_of[number], plan.cluster.nodes[number]
    mode = device_mode(node, plan.workload, stage, plan.layers[stage])
    return len(devices) > 1 and mode is DeviceMode.SHARDED


def _device_parts(plan: Plan, stage: int, devices: int) -> list[tuple[int, range]]:
    """The devices that hold a part of a stage, and its layers there."""
    first, counts = layer_ranges(plan.layers)[stage].start, plan.layers[stage]
    parts = layer_ranges(device_layers(plan.workload, stage, counts, devices))
    return [
        (at, range(first + part.start, first + part.stop))
        for at, part in enumerate(parts)
        if part or (stage == 0 and at == 0)
    ]


def check_sharding(plan: Plan, spec: ModelSpec) -> None:
    """UserError if a node is to divide its stage over devices, and its optimizer or healing cannot; nodes find it out
    only when they build their stages."""
    for number, stage in plan.stage_of.items():
        node = plan.cluster.nodes[number]
        if not _is_sharded(plan, number, range(node.devices)):
            continue
        if spec.heals:
            raise UserError(
                f"recipe.heal: '{node.name}' would divide stage {stage} over its {node.devices} devices, and healing "
                'needs a stage on one device: set devices to 1 or device_mode to "replicas" for it in the cluster file'
            )
        held, place = _device_parts(plan, stage, node.devices), StagePlace(stage, len(plan.layers))
        with torch.device("meta"):
            last = held[-1][0]
            models = [
                StageModel(spec, part, ends=stage == 0 and at == 0, place=place if at == last else None)
                for at, part in held
            ]
        trained = [list(each.trained_weights()) for each in models]
        try:
            check_blocks(OPTIMIZERS[plan.workload.optimizer], whole_layout(trained), list(map(layout, trained)))
        except UserError as error:
            raise UserError(
                f"learning.optimizer: {plan.workload.optimizer}, and '{node.name}' divides stage {stage} over its "
                f"{node.devices} devices (devices and device_mode in the cluster file): {error}"
            ) from None


def build_stage_executor(
    stage: int,
    node_config: NodeConfig,
    devices: Sequence[str],
    sampler: BatchSampler | None,
    *,
    packing: bool = True,
    make_averager: MakeAverager = GradientAverager,
    held_out: BatchSampler | None = None,
) -> StageExecutor:
    """The executor of a stage, on one device or divided over several; only the layers of this stage are made."""
    spec, plan = node_config.spec(), node_config.plan
    if node_config.compiled:
        compile_on_device()
    held = _device_parts(plan, stage, len(devices))
    parts = [
        StageStep(
            spec,
            part,
            node_config.learning,
            ends=stage == 0 and at == 0,
            device=devices[at],
            compute_dtype=plan.workload.compute_dtype,
            recompute=plan.workload.activation_checkpointing,
            split_backward=plan.split_backward,
            compiled=node_config.compiled,
            offload=plan.workload.offload == "optimizer",
            place=StagePlace(stage, len(plan.layers)) if at == held[-1][0] else None,
        )
        for at, part in held
    ]
    return StageExecutor(
        stage,
        plan.layers,
        plan.workload,
        spec,
        ShardedStep(parts) if len(parts) > 1 else parts[0],
        sampler,
        recipe=node_config.recipe,
        packing=packing,
        make_averager=make_averager,
        held_out=held_out,
    )
