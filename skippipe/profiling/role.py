"""The role of a node that is measured: its state machine and its benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skippipe.profiling.config import ProfilingConfig
from skippipe.profiling.state_machine import ProfilingNode
from skippipe.runtime.node.interfaces import PROFILING, NodeEnv, Role, Roles
from skippipe.transport.link_emulation import EmulatedLink

if TYPE_CHECKING:
    from skippipe.profiling.compute_bench import ComputeBench
    from skippipe.runtime.node.interfaces import JoinConfig


def profiling_role(config: dict[str, Any], join_config: JoinConfig, env: NodeEnv) -> Role:
    node_config = ProfilingConfig.from_json(config)
    return Role(
        machine=ProfilingNode(node_config.number[join_config.name], len(node_config.names), node_config.effort, env),
        build=lambda: build_bench(node_config, join_config),
        numbers=node_config.number,
        heartbeat_s=node_config.heartbeat_s,
        threads=node_config.threads,
        links=_links(node_config, join_config.name),
    )


ROLES: Roles = {PROFILING: profiling_role}


def build_bench(node_config: ProfilingConfig, join_config: JoinConfig) -> ComputeBench:
    from skippipe.profiling.compute_bench import ComputeBench

    return ComputeBench(node_config, join_config.device or node_config.device)


def _links(node_config: ProfilingConfig, name: str) -> dict[str, EmulatedLink]:
    like = node_config.emulated
    if like is None:
        return {}
    own = like.number[name]
    return {
        other: EmulatedLink(float(like.latency_s[own, at]), float(like.bandwidth_bytes_per_s[own, at]))
        for other, at in like.number.items()
        if other != name
    }
