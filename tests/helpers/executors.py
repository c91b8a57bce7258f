"""The computers of nodes, on a tiny model: made, averaged and stepped by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import torch

from skippipe.collectives import MakeAverager
from skippipe.collectives.peer_to_peer import GradientAverager
from skippipe.collectives.schedule import Averaging
from skippipe.data.batch_sampler import BatchSampler
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import layer_ranges
from skippipe.model.stage_step import StageStep
from skippipe.optim.config import OptimConfig
from skippipe.runtime.device_copies import Copies
from skippipe.runtime.node.averaging_protocol import AveragingProtocol
from skippipe.runtime.node.ops import AdoptPiece, ContributePiece, GradNorm, OptimizerStep
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.transport.message import GradientPiece, Message
from skippipe.workload import Workload
from tests.helpers.models import tiny

LAYERS = (2, 1, 2)
SEQUENCE, SAMPLES, MICROBATCHES = 10, 2, 4
RATE = 1e-2


def computer_of(
    stage: int,
    family: str = "llama",
    *,
    layers: tuple[int, ...] = LAYERS,
    seed: int = 7,
    config: dict[str, Any] | None = None,
    split: bool = False,
    recompute: bool = False,
    make_averager: MakeAverager = GradientAverager,
    optimizer: str = "adamw",
    copies: Copies | None = None,
    **workload: Any,
) -> StageExecutor:
    spec = ModelSpec(tiny(family, num_hidden_layers=sum(layers), **(config or {})), seed)
    said = {"wire_dtype": "fp32", "compute_dtype": "fp32", **workload}
    work = Workload(spec.shape, SEQUENCE, SAMPLES, MICROBATCHES, **said)
    tasks = StageStep(
        spec,
        layer_ranges(layers)[stage],
        OptimConfig(optimizer, clip=0),
        ends=stage == 0,
        compute_dtype=work.compute_dtype,
        recompute=recompute,
        split_backward=split,
    )
    text = np.random.default_rng(1).integers(0, 97, 2000)
    sampler = BatchSampler(text, SEQUENCE, 3, MICROBATCHES, SAMPLES) if stage == 0 else None
    return StageExecutor(stage, layers, work, spec, tasks, sampler, make_averager=make_averager, copies=copies)


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (SAMPLES, SEQUENCE, 32), generator=torch.Generator().manual_seed(seed))


def gradient_of(executor: StageExecutor) -> torch.Tensor:
    return executor.tasks.weights.gradient.clone()


def state_of(executor: StageExecutor) -> torch.Tensor:
    weights = executor.tasks.weights
    return weights.read_state(0, weights.state_values)


def drive(
    runs: Sequence[Callable[[Any], Any]], averaging: Averaging, ops: int | None = None, random: Random | None = None
) -> int:
    """Have the nodes of a schedule run so many of its operations, or all, in any order that is possible; node n's are
    run by runs[n]. Relays of other stages only forward. Gives how many there were."""
    outside = averaging.nodes[len(averaging.order) :]
    stages = [averaging, *(Averaging((relay,)) for relay in outside)]
    at = {**dict.fromkeys(averaging.order, 0), **{relay: 1 + place for place, relay in enumerate(outside)}}
    protocols = {node: AveragingProtocol(node, stage, stages, in_messages=True) for node, stage in at.items()}
    for protocol in protocols.values():
        protocol.begin()
    done = 0
    while ops is None or done < ops:
        nodes = random.sample(averaging.order, len(averaging.order)) if random else averaging.order
        possible = ((node, protocols[node].next(1)) for node in nodes)
        node, op = next(((node, op) for node, op in possible if op and not isinstance(op, GradNorm)), (-1, None))
        if op is None:
            assert all(isinstance(each.next(1), GradNorm) for each in protocols.values()), "it came to a halt"
            break
        made = runs[node](op)
        done += 1
        if isinstance(op, (ContributePiece, AdoptPiece)):
            protocols[node].finished(op, made if isinstance(op, ContributePiece) else op.given)
            _deliver(protocols, node)
    return done


def _deliver(protocols: dict[int, AveragingProtocol], node: int) -> None:
    """What the node has to send goes where it should, by way of relays if there are any."""
    for each in protocols[node].take_outgoing(()):
        header = GradientPiece(0, each.stage, each.transfer)
        assert protocols[each.receiver].expects(node, header)
        assert protocols[each.receiver].take(node, Message(header, each.body), 0)
        _deliver(protocols, each.receiver)


def average(executors: Sequence[StageExecutor], averaging: Averaging | None = None, ops: int | None = None) -> int:
    """The same with executors; round a ring, unless it is told otherwise."""
    return drive([each.run for each in executors], averaging or Averaging(tuple(range(len(executors)))), ops)


def stepped(executor: StageExecutor, stage_microbatches: int, *, alone: bool = True) -> tuple[float, torch.Tensor]:
    norm = executor.run(GradNorm(stage_microbatches, alone))
    executor.run(OptimizerStep(RATE, 1.0))
    assert not gradient_of(executor).any()
    return norm, state_of(executor)
