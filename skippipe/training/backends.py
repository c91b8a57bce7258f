"""The ways to run an assembled job."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec

from skippipe.codecs import encode
from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import Callback, IterationReport, StopRequests
from skippipe.training.build_run import RunSetup

Backend = Callable[[RunSetup, Callback, StopRequests], None]


def processes(run_setup: RunSetup, callback: Callback, asked: StopRequests) -> None:
    """Every node as a process of this machine; or, with a list of peers, wherever they join from."""
    run = run_setup.run
    if run_setup.job.transport.peers:
        run.joined(callback, asked)
    else:
        run.here(callback, asked=asked)


def one_process(run_setup: RunSetup, callback: Callback, asked: StopRequests) -> None:
    """No nodes: the oracle."""
    if run_setup.resumed:
        raise UserError("--resume: one process makes no checkpoints; use --engine virtual or processes")
    from skippipe.training.reference import ReferenceTrainer

    job = run_setup.job
    node_config = run_setup.node_config
    oracle = ReferenceTrainer(
        run_setup.plan,
        run_setup.spec,
        job.schedule,
        node_config.sampler(),
        recipe=job.followed,
        plans=run_setup.plans,
        iterations=job.iterations,
        device=job.compute.device,
        compiled=job.compute.compiled,
    )
    for number in range(job.iterations):
        began = time.monotonic()
        done = oracle.iteration(number)
        report = IterationReport(number, done.loss, done.norm, done.rate, time.monotonic() - began, {}, {})
        callback.iteration_done(report)
        if asked():
            break
    stages = ((index, [encode(stage.weights.values.cpu(), "fp32"), None]) for index, stage in enumerate(oracle.stages))
    run_setup.run.store(stages, callback, asked)


def virtual(run_setup: RunSetup, callback: Callback, asked: StopRequests) -> None:
    """Every node's own code on real tensors, in one thread and in virtual time: seconds are those of the plan."""
    from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
    from skippipe.runtime.stage_executor import StageExecutor
    from skippipe.runtime.train_role import build_stage_executor

    run, node_config = run_setup.run, run_setup.node_config
    sampler = node_config.sampler()

    def executor(node: int, plan: Plan) -> StageExecutor:
        return build_stage_executor(plan.stage_of[node], node_config, node_config.device, sampler, packing=False)

    computers = {node: executor(node, node_config.plan) for node in node_config.plan.stage_of}
    cluster = VirtualCluster(
        node_config.plan,
        run.resumed_settings,
        computers,
        callback=callback,
        checkpoint_store=run.keeper,
        stop_requests=asked,
        builder=executor,
    )
    cluster.run()
    run.close(callback)
    if cluster.coordinator.failure:
        raise UserError(cluster.coordinator.failure)
    run.store(sorted(cluster.stored.items()), callback, asked)


def ray(run_setup: RunSetup, callback: Callback, asked: StopRequests) -> None:
    """One actor a node."""
    if find_spec("ray") is None:
        raise UserError("--engine ray: needs Ray; pip install 'skippipe[ray]'")
    from skippipe.training.launch_ray import train_on_ray

    train_on_ray(run_setup, callback, asked)


BACKENDS: dict[str, Backend] = {
    "processes": processes,
    "one-process": one_process,
    "virtual": virtual,
    "ray": ray,
}
