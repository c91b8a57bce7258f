"""Preset clusters: the published regions, a data centre, five sites, random unequal machines, also on home lines; and
emulation.

An emulated cluster is to a small model what the real one is to a large one, at a fraction of the time. One machine can
then be a continent: the same ratios between computing, sending and waiting, in seconds instead of minutes. Only the
cluster changes; plan, simulator and runtime know nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from skippipe.cluster import Cluster, Matrix, Node
from skippipe.errors import UserError
from skippipe.model_shape import MODELS
from skippipe.value_ranges import NODES, SEED
from skippipe.workload import Workload

GIB = 2**30
MBIT = 125_000  # bytes a second of 1 Mbit/s
SEEDED = ("random", "homes")
DIGITS = 40  # of a number that are read: more are out of range just as much
REFERENCE_MODEL, REFERENCE_TOKENS = MODELS["llama-1.5b"], 4096


@cache
def data(name: str) -> Any:
    """A JSON file that the package carries."""
    return json.loads(resources.files("skippipe").joinpath("resources", name).read_text(encoding="utf-8"))


def reference_flops_per_s() -> float:
    """The speed at which the paper's nodes take its seconds a layer and sample (1.5B model, 4096 tokens)."""
    per_layer_s: float = data("regions12.json")["forward_s_per_layer_per_sample"]
    return REFERENCE_MODEL.layer_flops(REFERENCE_TOKENS) / per_layer_s


def at_sites(
    name: str,
    sites: Sequence[str],
    site_of: Sequence[int],
    latency_s: Matrix,
    bandwidth: Matrix,
    hop_overhead_s: float = 0.0,
    memory_bytes: int = 24 * GIB,
) -> Cluster:
    """Equal nodes at the given sites; the matrices are between sites, their diagonal is inside a site."""
    seen: dict[int, int] = {}
    nodes = []
    for site in site_of:
        count = seen[site] = seen.get(site, -1) + 1
        label = f"{sites[site].lower().replace(' ', '-')}-{count}"
        nodes.append(Node(label, sites[site], reference_flops_per_s(), memory_bytes))
    pick = np.ix_(site_of, site_of)
    return Cluster(name, tuple(nodes), latency_s[pick], bandwidth[pick], hop_overhead_s)


def regions(nodes: int) -> Cluster:
    """Nodes distributed over the 12 published cloud regions, with the overhead a hop measured there."""
    return _from_table("regions", "regions12.json", nodes, first=1, hop_overhead_s=0.35)  # the paper starts at Belgium


def five_sites(nodes: int) -> Cluster:
    """Five institutes with 10 Gbit/s inside and 0.2 to 1 Gbit/s between them; latencies as between these cities."""
    return _from_table("five-sites", "five_sites.json", nodes)


def _from_table(name: str, file: str, nodes: int, first: int = 0, hop_overhead_s: float = 0.0) -> Cluster:
    """Nodes that are dealt out over the sites of a file, beginning with this one."""
    table = data(file)
    sites = table["locations"]
    site_of = [(index + first) % len(sites) for index in range(nodes)]
    latency_s, bandwidth = np.array(table["latency_s"]), np.array(table["bandwidth_bytes_per_s"])
    return at_sites(f"{name}:{nodes}", sites, site_of, latency_s, bandwidth, hop_overhead_s)


def datacentre(nodes: int) -> Cluster:
    """One room: 50 µs and 100 Gbit/s between any two nodes."""
    each = np.ones((1, 1))
    return at_sites(f"datacentre:{nodes}", ["rack"], [0] * nodes, 50e-6 * each, 12.5e9 * each, memory_bytes=80 * GIB)


def random_cluster(nodes: int, seed: int = 0) -> Cluster:
    """Unequal machines on a map: speeds within a factor of four, 16 to 80 GiB, each link its own each way."""
    rng = np.random.default_rng(seed)
    spots = rng.uniform(0, 1, (nodes, 2))
    distance = np.linalg.norm(spots[:, None] - spots[None, :], axis=2)
    latency_s = 0.001 + 0.12 * distance * rng.uniform(0.8, 1.3, (nodes, nodes))
    bandwidth = 10 ** (rng.uniform(7.3, 8.7, (nodes, nodes)) - 0.8 * distance)
    np.fill_diagonal(latency_s, 0)
    speed = reference_flops_per_s() * 2 ** rng.uniform(-1, 1, nodes)
    memory = rng.choice([16, 24, 24, 48, 80], nodes) * GIB
    machines = tuple(
        Node(f"node-{index}", f"{x:.2f},{y:.2f}", float(speed[index]), int(memory[index]))
        for index, (x, y) in enumerate(spots)
    )
    return Cluster(f"random:{nodes}:{seed}", machines, latency_s, bandwidth)


def homes(nodes: int, seed: int = 0) -> Cluster:
    """Random machines on home lines: all links of a node share an upload of 20 to 200 Mbit/s and a download of 2 to 10
    times that; links themselves carry 1 Gbit/s or more, which is never less than a node's upload."""
    rng = np.random.default_rng([seed, 1])  # other numbers than those of the machines
    cluster = random_cluster(nodes, seed)
    upload = MBIT * np.exp(rng.uniform(np.log(20), np.log(200), nodes))
    download = upload * rng.uniform(2, 10, nodes)
    machines = tuple(
        replace(node, upload_bytes_per_s=float(upload[index]), download_bytes_per_s=float(download[index]))
        for index, node in enumerate(cluster.nodes)
    )
    bandwidth = MBIT * rng.uniform(1000, 2000, (nodes, nodes))
    return replace(cluster, name=f"homes:{nodes}:{seed}", nodes=machines, bandwidth_bytes_per_s=bandwidth)


PRESETS: dict[str, Callable[..., Cluster]] = {
    "regions": regions,
    "datacentre": datacentre,
    "five-sites": five_sites,
    "random": random_cluster,
    "homes": homes,
}


def preset(text: str) -> Cluster:
    """A cluster from its name: `regions:24`, `datacentre:8`, `five-sites:15`, `random:30` or with a seed `random:30:7`,
    `homes:30` or `homes:30:7`; 20 nodes if not given."""
    name, *numbers = text.split(":")
    most = 2 if name in SEEDED else 1
    if name not in PRESETS:
        raise UserError(
            f"'{text}': no such preset; there are {', '.join(PRESETS)}, each with ':' and a number of nodes"
        )
    if len(numbers) > most or not all(number.isascii() and number.isdigit() for number in numbers):
        raise UserError(f"'{text}': write {name}:NODES{':SEED' if most == 2 else ''}, as in {name}:20")
    nodes, *seed = (int(number[:DIGITS]) for number in numbers or ["20"])
    NODES.check(nodes, f"'{text[:DIGITS]}': number of nodes")
    SEED.check(seed[0] if seed else 0, f"'{text[:DIGITS]}': seed")
    return PRESETS[name](nodes, *seed)


def emulated_cluster(cluster: Cluster, like: Workload, small: Workload, time: float) -> Cluster:
    """The emulated cluster: forward passes and hops of `small` take there what those of `like` take on the real
    cluster, times `time`."""
    compute = small.forward_flops(small.model.layers) / (like.forward_flops(like.model.layers) * time)
    carry = small.activation_bytes / (like.activation_bytes * time)
    return replace(
        cluster,
        name=f"{cluster.name} as if for {like.model.name}, {time:g} of the time",
        nodes=tuple(
            replace(
                node,
                flops_per_s=node.flops_per_s * compute,
                upload_bytes_per_s=node.upload_bytes_per_s and node.upload_bytes_per_s * carry,
                download_bytes_per_s=node.download_bytes_per_s and node.download_bytes_per_s * carry,
            )
            for node in cluster.nodes
        ),
        latency_s=cluster.latency_s * time,
        bandwidth_bytes_per_s=cluster.bandwidth_bytes_per_s * carry,
        hop_overhead_s=cluster.hop_overhead_s * time,
    )
