"""What a node that is measured is made of, from the brief."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skippipe.profiling.brief import ProfilingBrief
from skippipe.profiling.node import ProfilingNode
from skippipe.runtime.outside import Outside
from skippipe.runtime.posts import Post
from skippipe.transport.shaping import Link

if TYPE_CHECKING:
    from skippipe.profiling.bench import Bench
    from skippipe.runtime.member import Invitation


def profiling_post(said: dict[str, Any], invitation: Invitation, outside: Outside) -> Post:
    brief = ProfilingBrief.from_json(said)
    return Post(
        machine=ProfilingNode(brief.number[invitation.name], len(brief.names), brief.effort, outside),
        build=lambda: build_bench(brief, invitation),
        numbers=brief.number,
        heartbeat_s=brief.heartbeat_s,
        threads=brief.threads,
        links=_links(brief, invitation.name),
    )


def build_bench(brief: ProfilingBrief, invitation: Invitation) -> Bench:
    from skippipe.profiling.bench import Bench

    return Bench(brief, invitation.device or brief.device)


def _links(brief: ProfilingBrief, name: str) -> dict[str, Link]:
    like = brief.emulated
    if like is None:
        return {}
    own = like.number[name]
    return {
        other: Link(float(like.latency_s[own, at]), float(like.bandwidth_bytes_per_s[own, at]))
        for other, at in like.number.items()
        if other != name
    }
