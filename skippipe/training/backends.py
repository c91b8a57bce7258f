"""The engines of `skippipe train`: real nodes behind a launcher, virtual nodes, or one process without nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe.checkpoint.manager import StateReader
from skippipe.codecs import encode
from skippipe.errors import UserError, install_command
from skippipe.launch.launcher import JoinLauncher
from skippipe.model.model_spec import parse_devices
from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import Callback, Event, IterationReport, StopRequests
from skippipe.runtime.coordinator.validation import Validation
from skippipe.runtime.node.interfaces import node_devices
from skippipe.training.build_run import RunSetup

if TYPE_CHECKING:
    from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
    from skippipe.training.reference import ReferenceTrainer

Backend = Callable[[RunSetup, Callback, StopRequests], None]


def processes(run_setup: RunSetup, callback: Callback, stop_requests: StopRequests) -> None:
    """Every node as a process of this machine; or, with a list of peers, nodes that join from anywhere."""
    run, transport, names = run_setup.run, run_setup.job.transport, run_setup.node_names
    deeper = run_setup.deeper_runs()
    if transport.peers:
        run.launch(JoinLauncher(names, Path(transport.key), Path(transport.peers)), callback, stop_requests, deeper)
    else:
        run.launch_local(callback, stop_requests=stop_requests, deeper=deeper, names=names)


def one_process(run_setup: RunSetup, callback: Callback, stop_requests: StopRequests) -> None:
    """Without nodes: the reference trainer, microbatch after microbatch."""
    validation = Validation(run_setup.coordinator_settings.validation)
    trainer = _reference_trainer(run_setup)
    origin = run_setup.run.origin
    if origin is not None:  # the weights that the job begins with
        reader = StateReader(origin, run_setup.plan.layers, run_setup.spec)
        for index, stage in enumerate(trainer.stages):
            if stage.weights.slots:
                stage.weights.write_state(0, reader.weights(index))
            if stage.weights.frozen_slots:
                stage.weights.write_state(stage.weights.trained_values, reader.weights(index, frozen=True))
    _train_in_process(run_setup, trainer, validation, range(run_setup.job.iterations), callback, stop_requests)
    while run_setup.grows_into is not None and not stop_requests():
        first, run_setup = run_setup.job.iterations, run_setup.grown
        young, trainer = trainer, _reference_trainer(run_setup)
        callback.happened(Event("grown", first, trainer.grow_from(young)))
        settings = replace(run_setup.coordinator_settings.validation, best=(first, validation.best))
        validation = Validation(settings, first_iteration=first)
        iterations = range(first, run_setup.job.iterations)
        _train_in_process(run_setup, trainer, validation, iterations, callback, stop_requests)
    stages = ((index, [encode(stage.weights.values.cpu(), "fp32"), None]) for index, stage in enumerate(trainer.stages))
    run_setup.run.store(stages, callback, stop_requests)


def _reference_trainer(run_setup: RunSetup) -> ReferenceTrainer:
    from skippipe.training.reference import ReferenceTrainer

    job = run_setup.job
    return ReferenceTrainer(
        run_setup.plan,
        run_setup.spec,
        job.schedule,
        run_setup.sampler,
        recipe=job.followed,
        plans=run_setup.plans,
        iterations=job.iterations,
        device=parse_devices(job.compute.device)[0],
        compiled=job.compute.compiled,
    )


def _train_in_process(
    run_setup: RunSetup,
    trainer: ReferenceTrainer,
    validation: Validation,
    iterations: range,
    callback: Callback,
    stop_requests: StopRequests,
) -> None:
    held_out = run_setup.node_config.held_out_sampler()
    for number in iterations:
        began_s = time.monotonic()
        done = trainer.iteration(number)
        took_s = time.monotonic() - began_s
        callback.iteration_done(IterationReport(*done, took_s, {}, {}))
        last = number + 1 == run_setup.whole_job.iterations
        if held_out is not None and validation.is_due(number + 1, last=last):
            loss = trainer.held_out_loss(held_out)
            callback.validated(validation.add(number, loss, time.monotonic() - began_s - took_s))
        if stop_requests() or validation.is_hopeless:
            break


def virtual(run_setup: RunSetup, callback: Callback, stop_requests: StopRequests) -> None:
    """Every node's own code on real tensors, in one thread and in virtual time: seconds are those of the plan."""
    cluster = _run_virtually(run_setup, callback, stop_requests)
    while cluster.coordinator.has_grown:
        run_setup = run_setup.grown
        cluster = _run_virtually(run_setup, callback, stop_requests)
    run_setup.run.store(sorted(cluster.stored.items()), callback, stop_requests)


def _run_virtually(run_setup: RunSetup, callback: Callback, stop_requests: StopRequests) -> VirtualCluster:
    from skippipe.runtime.device_pool import DevicePool
    from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
    from skippipe.runtime.stage_executor import StageExecutor
    from skippipe.runtime.train_role import build_node_executor

    run, node_config = run_setup.run, run_setup.node_config
    sampler, held_out = run_setup.sampler, node_config.held_out_sampler()

    def executor(node: int, plan: Plan) -> StageExecutor | DevicePool:
        devices = node_devices(None, node_config.device, plan.cluster.nodes[node].devices)
        config = replace(node_config, plan=plan)
        return build_node_executor(node, config, devices, sampler, packing=False, held_out=held_out)

    run.report_growth(callback)
    if run.resumed:  # what an earlier coordinator has logged is not about what comes now
        run.begin_journal()
        run.wal.close()
    executors = {node: executor(node, node_config.plan) for node in node_config.plan.stage_of}
    cluster = VirtualCluster(
        node_config.plan,
        run.resumed_settings,
        executors,
        callback=callback,
        checkpoint_store=run.checkpoint_manager,
        stop_requests=stop_requests,
        builder=executor,
    )
    cluster.run()
    run.close(callback)
    if cluster.coordinator.failure:
        raise UserError(cluster.coordinator.failure)
    return cluster


def ray(run_setup: RunSetup, callback: Callback, stop_requests: StopRequests) -> None:
    """One Ray actor a node."""
    if find_spec("ray") is None:
        raise UserError(f"--engine ray: needs Ray; {install_command('ray')}")
    from skippipe.launch.ray_actors import RayLauncher

    run, job = run_setup.run, run_setup.job
    if job.transport.peers:
        raise UserError("transport.peers: is for nodes that join by themselves; Ray's have keys made for the run")
    gpus = int(job.compute.device.startswith("cuda"))
    launcher = RayLauncher(run_setup.node_names, job.compute.threads, gpus, run.security)
    run.launch(launcher, callback, stop_requests, run_setup.deeper_runs())


BACKENDS: dict[str, Backend] = {
    "processes": processes,
    "one-process": one_process,
    "virtual": virtual,
    "ray": ray,
}
