"""Nodes as Ray actors, on a Ray of three machines that are all this one. Not part of the suite, since Ray is large:

make test-ray
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from skippipe.errors import UserError
from skippipe.plan import Lane, Plan
from skippipe.runtime.coordinator.interfaces import Callback
from tests.helpers.processes import Place, end, only_error, start
from tests.helpers.serve_process import Command

pytest.importorskip("ray")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
MACHINES = 3
LONG_ENOUGH = 100  # iterations, for a machine to be lost on the way
DONE_S = 300.0
HERE: dict[str, Any] = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """One processor each, so that three nodes need all three; one is meant for 'iowa-0'."""
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(initialize_head=True, head_node_args={**HERE, "include_dashboard": False})
    for number in range(1, MACHINES):
        cluster.add_node(**HERE, resources={"skippipe:iowa-0": 1} if number == 1 else {})
    yield cluster
    cluster.shutdown()


def test_trains(place: Place, machines: Any) -> None:
    job = place.job("actors", nodes=3, stages=3)
    code, out, err = end(start("train", job, "--engine", "ray", "--ray-address", machines.address))
    assert code == 0, f"{out}{err}"
    assert place.is_trained("actors")
    assert len(place.losses("actors")) == 2


def test_no_room(place: Place, machines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from skippipe.launch import ray_actors
    from skippipe.training.backends import BACKENDS
    from skippipe.training.build_run import build_run
    from skippipe.training.job_config import load_job

    run_setup = build_run(load_job(place.job("crowd", nodes=4, stages=4)))
    monkeypatch.setattr(ray_actors, "PLACEMENT_TIMEOUT", timedelta(seconds=2))
    monkeypatch.setenv("RAY_ADDRESS", machines.address)
    with pytest.raises(
        UserError, match=r"waited 2 s for Ray to find room for 4 nodes of 1 CPU each; free are \d of 3 CPU"
    ):
        BACKENDS["ray"](run_setup, Nobody(), lambda: 0)


class Nobody(Callback):
    def iteration_done(self, report: Any) -> None:
        del report


def test_a_machine_is_lost(place: Place, machines: Any) -> None:
    """Training goes on with the nodes that are left, as it does without Ray; its model has all stages."""
    plan = place.folder / "two-and-one.json"
    batch = ("--sequence", 16, "--samples", 1, "--microbatches", 4, "--max-slots", 4)
    shape = ("--model", place.folder / "actors" / "model", "--stages", 2, "--skip", 0)
    code, out, err = end(start("plan", "regions:3", *shape, *batch, "--budget", 2, "--output", plan))
    assert code == 0, f"{out}{err}"
    made = Plan.load(plan)  # it may do without the third node, which has to be there to lose one
    (first, *_), (last, *_) = (stage.nodes for stage in made.stages)
    (second,) = {0, 1, 2} - {first, last}
    both = first, second
    lanes = tuple(Lane((node, last), 2) for node in both)
    stages = replace(made.stages[0], nodes=tuple(sorted(both)), ring=both), made.stages[1]
    replace(made, stages=stages, lanes=lanes, expected=None, lower_bound_ns=None).save(plan)
    name = min({made.cluster.nodes[node].name for node in both} - {"iowa-0"})  # which has a machine already
    job = place.job("lost", nodes=3, stages=2)
    job.write_text(re.sub(r"(?m)^pipeline = .*$", f"pipeline.plan = '{plan}'", job.read_text()))
    machine = machines.add_node(**HERE, resources={f"skippipe:{name}": 1})
    run = Command("train", job, "--engine", "ray", "--ray-address", machines.address, "--iterations", LONG_ENOUGH)
    try:
        run.says(r"^iteration +\d+/")
        machines.remove_node(machine, allow_graceful=False)
        run.says(f"lost: '{name}'", within_s=DONE_S)
        run.says(rf"^iteration +{LONG_ENOUGH}/", within_s=DONE_S)
    finally:
        ended = run.end(0)
    assert ended == 0, "\n".join(run.lines)
    assert place.is_trained("lost")
    assert len(place.losses("lost")) == LONG_ENOUGH


def test_no_such_cluster(place: Place) -> None:
    job = place.job("nowhere", nodes=3, stages=3)
    code, _, err = end(start("train", job, "--engine", "ray", "--ray-address", "127.0.0.1:1"))
    assert code == 2
    assert only_error(err) == "Ray at 127.0.0.1:1: [Errno 111] Connection refused"
