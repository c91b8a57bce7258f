"""Costs of a plan, written from docs/formats.md alone: the first half of the second simulator (see `oracle`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, product

from tests.helpers.oracle_averaging import Json, Link, rounds_of

CAP_NS = 10**15


@dataclass(frozen=True)
class Node:
    stage: int
    slots: int
    workers: int
    times: dict[str, int]  # of forward, backward, weights, head and optimizer


@dataclass(frozen=True)
class Costs:
    nodes: dict[str, Node]  # those in a stage, in the order of the cluster
    hop_bytes: dict[bool, dict[Link, int]]  # of activations, and (True) of their gradients
    gradient_bytes: list[list[int]]  # by stage, like the next two, and round
    fixed_bytes: list[int]
    held_bytes: list[int]
    bandwidth: dict[Link, float]  # in the order of sender, then receiver, in the cluster
    flight: dict[Link, int]
    upload: dict[str, float]  # of nodes that have such a rate, like the next
    download: dict[str, float]


def is_split(plan: Json) -> bool:
    return bool(plan.get("split_backward", False))


def costs(plan: Json) -> Costs:
    work, stages, cluster = plan["workload"], plan["stages"], plan["cluster"]
    model, t, n = work["model"], work["sequence_tokens"], work["samples_per_microbatch"]
    d, f, v, e = model["hidden"], model["intermediate"], model["vocab"], model["experts"]
    h, k = model["heads"] * model["head_dim"], model["kv_heads"] * model["head_dim"]

    def wire(values: int, dtype: str) -> int:
        return {"fp32": 4 * values, "bf16": 2 * values, "int8": values + 4 * -(-values // 128)}[dtype]

    shared = model.get("shared_intermediate", 0)
    blocks, active = 3 if model.get("gated", True) else 2, f * model["experts_active"] + shared
    attention, mapped = d * (2 * h + 2 * k), f if e == 1 else shared
    layer_parameters: int = attention + blocks * d * (f * e + shared) + 2 * d + (d * e if e > 1 else 0)
    layer_forward = n * (2 * t * (attention + blocks * d * active) + 2 * t**2 * h)
    computed = {"fp32": 4, "bf16": 2}[work["compute_dtype"]]
    token_bytes, rounded, tied = computed * n * t, computed == 2, model["tied_embeddings"]
    adapters: int = work.get("adapter_parameters", 0)
    repeats, mean_repeats = work.get("repeats", 0), work.get("mean_repeats", 0.0)
    maps, ranked = 4, 4 * d + 2 * h + 2 * k
    if mapped:
        maps, ranked = maps + blocks, ranked + blocks * (d + mapped)
    values = (8 + blocks if rounded else 6) * d + 2 * h + 2 * k + 2 * (blocks - 1) * mapped
    if adapters:
        values += -(-maps * adapters // (ranked * (1 + repeats))) - 2 * d
    expert_values = model["experts_active"] * (2 * d + 2 * (blocks - 1) * f) if e > 1 else 0
    layer_bytes: int = token_bytes * values + 4 * n * t * expert_values
    checkpointing = work["activation_checkpointing"]
    linear_parameters = attention + blocks * d * mapped
    ends: int = (v if model["tied_embeddings"] else 2 * v) * d + d
    bridges: int = work.get("bridge_parameters", 0)
    bridge_rank = work.get("bridge_rank", 0)
    share = work.get("weight_share", 0.5)
    gradient_dtypes = work.get("gradient_dtypes", [work["gradient_dtype"]] * len(stages))
    ratio = work["backward_ratio"] * (1 - share) if adapters else work["backward_ratio"]

    def trained_by(stage: int, layers: int, bridged: bool = True) -> int:
        model = layers * layer_parameters + (ends if stage == 0 else 0)
        return (layers * adapters if adapters else model) + bridged * bridges

    def rounds_by(stage: int, layers: int, bridged: bool = True) -> list[int]:
        trained, dtype = trained_by(stage, layers, bridged), gradient_dtypes[stage]
        return rounds_of(model, stage == 0, layers, trained, dtype) or [wire(trained, dtype)]

    def fixed_by(stage: int, layers: int, bridged: bool = True) -> int:
        total: int = (20 if gradient_dtypes[stage] == "fp32" else 24) * trained_by(stage, layers, bridged)
        total += 3 * sum(rounds_by(stage, layers, bridged)) if gradient_dtypes[stage].startswith("rank-") else 0
        total += max(work_of_layer() + work_of_repeats(layers), work_of_head() if stage == 0 else 0)
        if rounded and not checkpointing:
            total += 2 * layers * (adapters or linear_parameters)
        if rounded and stage == 0 and not tied and not adapters:
            total += 2 * v * d
        if adapters:
            linear = layers * linear_parameters + (ends if stage == 0 else 0)
            total += 4 * (layers * layer_parameters + (ends if stage == 0 else 0))
            total -= (4 - computed) * linear
        return total

    def work_of_layer() -> int:
        work = token_bytes * (blocks * mapped + d) + checkpointing * layer_bytes
        largest, whole, of_experts = d * mapped, linear_parameters, 0
        if e > 1:
            work += 4 * n * t * blocks * f * model["experts_active"]
            of_experts = 4 * e * (blocks - 1) * f * d
        if adapters:
            largest, whole, of_experts = -(-adapters // ranked) * max(d, h, mapped), adapters, 0
        if rounded and checkpointing:
            return int(work + 2 * whole + max(6 * largest, of_experts))
        return int(work + max(computed * largest, of_experts))

    def work_of_repeats(layers: int) -> int:
        return layers * adapters * (2 if rounded and not checkpointing else 4) if repeats else 0

    def work_of_head() -> int:
        pieces = max(1, -(-n * t * v // 2**27))
        tokens = -(-n * t // pieces)
        logits = (20 if work.get("teacher") else 12) * tokens * v
        if adapters:
            first, second = logits, computed * tokens * v
        elif rounded and tied:
            first, second = logits + 2 * v * d, 2 * tokens * v + 8 * v * d
        else:
            first, second = logits, computed * (tokens * v + v * d)
        return int(max(first, second) + 8 * tokens * d)

    def held_by(layers: int, bridged: bool = True) -> int:
        taught = 8 * n * t * d if work.get("teacher") else 0
        if checkpointing:
            bridge = bool(bridged and bridge_rank)
            total = ((1 + repeats) * (layers + 1) + bridge) * token_bytes * d + taught
            if e > 1 and layers:
                total += (1 + repeats) * (layers - 1) * (4 - computed) * n * t * d
            return int(total)
        total = (1 + repeats) * layers * layer_bytes + repeats * token_bytes * d + 4 * n * t * d + taught
        if bridged and bridge_rank:
            total += token_bytes * ((4 if rounded else 2) * d + bridge_rank) + rounded * 4 * d * bridge_rank
        return int(total)

    def room(node: Json, stage: int, layers: int, bridged: bool = True) -> int:
        free: int = max(
            0, (node["memory_bytes"] - fixed_by(stage, layers, bridged)) // max(1, held_by(layers, bridged))
        )
        most: int = free if work["max_slots"] is None else work["max_slots"]
        return min(free, most)

    def slots_and_workers(node: Json, stage: int) -> tuple[int, int]:
        layers, count, mode = stages[stage]["layers"], node.get("devices", 1), node.get("device_mode")
        alone = room(node, stage, layers)
        if count == 1 or mode == "replicas" or (mode is None and alone >= 1):
            return count * alone, count

        def evenly(layers: int, count: int) -> list[int]:
            return [layers // count + (at >= count - layers % count) for at in range(count)]

        def parts(first: int) -> list[tuple[int, int, bool]]:
            """Of every device, the stage that it counts as, its layers, and whether it has the bridges."""
            found = [(stage, first), *((stage or 1, each) for each in evenly(layers - first, count - 1) if each)]
            return [(*each, at == len(found) - 1) for at, each in enumerate(found)]

        firsts = range(layers // count + 1) if stage == 0 else [layers // count]
        least = min(
            firsts, key=lambda first: (max(fixed_by(*part) + held_by(*part[1:]) for part in parts(first)), -first)
        )
        return min(room(node, *part) for part in parts(least)), 1

    trained = [trained_by(index, stage["layers"]) for index, stage in enumerate(stages)]

    def layers_forward(layers: int) -> int:
        once = layers * layer_forward
        return int(once + round(mean_repeats * once))

    def added_forward(layers: int, mean_repeats: float = mean_repeats) -> int:
        of_adapters = layers * adapters
        if repeats:
            of_adapters = round(of_adapters * (1 + mean_repeats) / (1 + repeats))
        return int(2 * n * t * (of_adapters + 2 * d * bridge_rank))

    def node_costs(node: Json, stage: int) -> Node:
        model_forward, r = layers_forward(stages[stage]["layers"]), added_forward(stages[stage]["layers"])
        forward = model_forward + r
        first = stages[0]["layers"]
        stage_0_forward = first * layer_forward + added_forward(first, mean_repeats=0.0)
        gradients = ratio * model_forward + 2 * r if adapters else ratio * forward
        slots, workers = slots_and_workers(node, stage)
        head = (1 + ratio) * n * (2 * t * d * v)
        head = head if work["head_ratio"] is None else work["head_ratio"] * stage_0_forward
        operations = {
            "forward": forward,
            "backward": gradients + checkpointing * forward if adapters else (ratio + checkpointing) * forward,
            "gradients": gradients,
            "head": (2 * head if work.get("early_exit", False) else head)
            + (head / (1 + ratio) if work.get("teacher") else 0),
            "optimizer": 250 * trained[stage],
        }
        times = {
            kind: max(1, round(min(count / node["flops_per_s"] * 1e9, CAP_NS))) for kind, count in operations.items()
        }
        devices = node.get("devices", 1)
        copies = workers - 1 if workers > 1 else int(devices > 1)
        times["optimizer"] += round(8 * copies * trained[stage] / 25)
        times["weight"], gradients_ns = 0, times.pop("gradients")
        if is_split(plan):
            of_layer = added_forward(1)
            part = of_layer / (ratio * layers_forward(1) + 2 * of_layer) if adapters else share
            times["weight"] = max(1, round(part * gradients_ns))
            times["backward"] = max(1, times["backward"] - times["weight"])
        return Node(stage, slots, workers, times)

    stage_of = {name: index for index, stage in enumerate(stages) for name in stage["nodes"]}
    placed = [node for node in cluster["nodes"] if node["name"] in stage_of]
    links = list(product([node["name"] for node in cluster["nodes"]], repeat=2))
    rates = [
        {node["name"]: node[f"{way}_bytes_per_s"] for node in cluster["nodes"] if f"{way}_bytes_per_s" in node}
        for way in ("upload", "download")
    ]
    hop_dtypes = {way: dict.fromkeys(links, work["wire_dtype"]) for way in (False, True)}
    for sender, receiver, forward, backward in work.get("wire_dtypes", []):
        hop_dtypes[False][sender, receiver], hop_dtypes[True][sender, receiver] = forward, backward
    delays = [latency + cluster.get("hop_overhead_s", 0) for latency in chain(*cluster["latency_s"])]
    return Costs(
        nodes={node["name"]: node_costs(node, stage_of[node["name"]]) for node in placed},
        hop_bytes={
            way: {link: wire(n * t * d, dtype) + work["header_bytes"] for link, dtype in each.items()}
            for way, each in hop_dtypes.items()
        },
        gradient_bytes=[rounds_by(stage, each["layers"]) for stage, each in enumerate(stages)],
        fixed_bytes=[fixed_by(index, stage["layers"]) for index, stage in enumerate(stages)],
        held_bytes=[held_by(stage["layers"]) for stage in stages],
        bandwidth=dict(zip(links, chain(*cluster["bandwidth_bytes_per_s"]), strict=True)),
        flight={link: round(min(delay * 1e9, CAP_NS)) for link, delay in zip(links, delays, strict=True)},
        upload=rates[0],
        download=rates[1],
    )
