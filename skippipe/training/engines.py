"""The ways to run an assembled job."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec

from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.runtime.coordinator import IterationReport, Watcher
from skippipe.runtime.surroundings import Asked
from skippipe.training.assembly import Assembly
from skippipe.transport.packed import pack

Engine = Callable[[Assembly, Watcher, Asked], None]


def processes(assembly: Assembly, watcher: Watcher, asked: Asked) -> None:
    """Every node as a process of this machine; or, with a list of peers, wherever they join from."""
    run = assembly.run
    if assembly.job.transport.peers:
        run.joined(watcher, asked)
    else:
        run.here(watcher, asked=asked)


def one_process(assembly: Assembly, watcher: Watcher, asked: Asked) -> None:
    """No nodes: the oracle."""
    if assembly.resumed:
        raise UserError("--resume: one process makes no checkpoints; use --engine virtual or processes")
    from skippipe.training.oneprocess import OneProcess

    job = assembly.job
    brief = assembly.brief
    oracle = OneProcess(
        assembly.plan,
        assembly.blueprint,
        job.schedule,
        brief.sampler(),
        recipe=job.followed,
        plans=assembly.plans,
        iterations=job.iterations,
        device=job.compute.device,
        compiled=job.compute.compiled,
    )
    for number in range(job.iterations):
        began = time.monotonic()
        done = oracle.iteration(number)
        report = IterationReport(number, done.loss, done.norm, done.rate, time.monotonic() - began, {}, {})
        watcher.iteration_done(report)
        if asked():
            break
    stages = ((index, [pack(stage.weights.values.cpu(), "fp32"), None]) for index, stage in enumerate(oracle.stages))
    assembly.run.store(stages, watcher, asked)


def virtual(assembly: Assembly, watcher: Watcher, asked: Asked) -> None:
    """Every node's own code on real tensors, in one thread and in virtual time: seconds are those of the plan."""
    from skippipe.runtime.building import build_tensors
    from skippipe.runtime.tensors import Tensors
    from skippipe.runtime.virtual import VirtualCluster

    run, brief = assembly.run, assembly.brief
    sampler = brief.sampler()

    def computer(node: int, plan: Plan) -> Tensors:
        return build_tensors(plan.stage_of[node], brief, brief.device, sampler, packing=False)

    computers = {node: computer(node, brief.plan) for node in brief.plan.stage_of}
    cluster = VirtualCluster(
        brief.plan,
        brief.learning,
        run.iterations - run.first,
        computers,
        recipe=brief.recipe,
        plans=run.plans,
        recorded=run.recorded,
        watcher=watcher,
        first=run.first,
        kept_every=run.kept_every,
        keeper=run.keeper,
        resumed=run.resumed,
        asked=asked,
        survival=run.survival,
        builder=computer,
    )
    cluster.run()
    run.close(watcher)
    if cluster.coordinator.failure:
        raise UserError(cluster.coordinator.failure)
    run.store(sorted(cluster.stored.items()), watcher, asked)


def ray(assembly: Assembly, watcher: Watcher, asked: Asked) -> None:
    """One actor a node."""
    if find_spec("ray") is None:
        raise UserError("--engine ray: needs Ray; pip install 'skippipe[ray]'")
    from skippipe.training.onray import train_on_ray

    train_on_ray(assembly, watcher, asked)


ENGINES: dict[str, Engine] = {
    "processes": processes,
    "one-process": one_process,
    "virtual": virtual,
    "ray": ray,
}
