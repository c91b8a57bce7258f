"""Nodes with several devices: the same training, one node to all others, and slower when a device is lost."""

from __future__ import annotations

from dataclasses import replace

from skippipe.plan import Plan
from tests.helpers.exact_training import SKIPPED, assert_exact, plan_of


def with_devices(plan: Plan, devices: dict[int, int]) -> Plan:
    nodes = tuple(replace(node, devices=devices.get(at, 1)) for at, node in enumerate(plan.cluster.nodes))
    return replace(plan, cluster=replace(plan.cluster, nodes=nodes))


def test_nodes_of_one_and_of_several_devices_are_one_process() -> None:
    """Stage 0 has a node of three devices beside one of a single one, stage 2 is a node of two."""
    plan, spec = plan_of(SKIPPED, split=True)
    assert_exact(with_devices(plan, {0: 3, 5: 2, 7: 2}), spec)
