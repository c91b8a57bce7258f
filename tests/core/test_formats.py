"""docs/formats.md says all there is to say: a checker and a simulator written from it alone agree with ours."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.planner.published import published20, published_plan
from skippipe.simulator import Deadlock, simulate
from skippipe.timeline import Timing
from skippipe.validate import validate
from tests.helpers import oracle, oracle_costs
from tests.helpers.oracle_averaging import Json
from tests.helpers.plans import averagings, may_skip

FLOPS = [
    1e9,
    2e9,
    4e9,
    8e9,
    3e9,
    7.3e9,
    123456789.0,
    1024.0**3,
    1e-3,
    1e-6,
]  # 4e9 and the like: durations that end in a half
LATENCIES_S = [0, 0, 1e-9, 2.5e-9, 1e-6, 3e-5, 0.0123]
BANDWIDTHS = [1e9, 1e9, 2e9, 8e9, 1e6, 3e8, 12345.678, 1024.0**3, 0]
WILD_LATENCIES_S = [*LATENCIES_S, 1e9]  # beyond the caps
WILD_BANDWIDTHS = [*BANDWIDTHS, 1e-4, 1e-300]
RATES = [None, None, None, 1e9, 2e9, 1e6, 12345.678]
LONGEST_S = 48 * 86400


@st.composite
def workloads(draw: DrawFn, layers: int) -> Json:
    experts = draw(st.sampled_from([1, 1, 2, 5]))
    workload: Json = {
        "model": {
            "name": "tiny",
            "layers": layers,
            "hidden": draw(st.sampled_from([8, 24, 64])),
            "heads": (heads := draw(st.sampled_from([1, 2, 4]))),
            "kv_heads": draw(st.sampled_from([heads, 1])),
            "head_dim": draw(st.sampled_from([2, 8])),
            "intermediate": draw(st.sampled_from([5, 32])),
            "vocab": draw(st.sampled_from([17, 256])),
            "tied_embeddings": draw(st.booleans()),
            "experts": experts,
            "experts_active": draw(st.integers(1, experts)),
            **draw(st.sampled_from([{}, {}, {"gated": False}])),
            **draw(st.sampled_from([{}, {}, {"shared_intermediate": 48}] if experts > 1 else [{}])),
        },
        "sequence_tokens": draw(st.sampled_from([1, 7, 32])),
        "samples_per_microbatch": draw(st.integers(1, 3)),
        "microbatches": 1,
        "wire_dtype": draw(st.sampled_from(["fp32", "bf16", "int8"])),
        "gradient_dtype": draw(st.sampled_from(["fp32", "bf16", "int8"])),
        "compute_dtype": draw(st.sampled_from(["fp32", "bf16"])),
        "activation_checkpointing": draw(st.booleans()),
        "backward_ratio": draw(st.sampled_from([2, 1.0, 0.5, 2.7])),
        "head_ratio": draw(st.sampled_from([None, 1, 0.25, 0.333])),
        "header_bytes": draw(st.sampled_from([0, 1, 64])),
        "max_slots": draw(st.sampled_from([None, None, 1, 2])),
        "collective": "auto",
    }
    early = draw(st.sampled_from([None, False, True]))
    workload |= {} if early is None else {"early_exit": early}
    adapters = draw(st.sampled_from([None, None, 1, 40]))
    workload |= {} if adapters is None else {"adapter_parameters": adapters}
    bridges = draw(st.sampled_from([None, None, None, 1000]))
    workload |= (
        {} if bridges is None else {"bridge_parameters": bridges, "bridge_rank": draw(st.sampled_from([0, 1, 9]))}
    )
    if adapters is not None and bridges is not None and draw(st.booleans()):
        workload |= {"repeats": draw(st.sampled_from([1, 3])), "mean_repeats": draw(st.sampled_from([0.3, 0.875]))}
    teacher = draw(st.sampled_from([None, None, None, "logits", "hidden"]))
    workload |= {} if teacher is None else {"teacher": teacher}
    share = draw(st.sampled_from([None, 0.5, 0.25, 0.9, 1e-300, 0.9999999999999999]))  # the last two: max(1, …)
    return workload if share is None else workload | {"weight_share": share}


@st.composite
def clusters(draw: DrawFn, nodes: int, wild: bool) -> Json:
    def matrix(values: list[float]) -> list[list[float]]:
        palette = draw(st.lists(st.sampled_from(values), min_size=1, max_size=4))  # few values: many ties
        row = st.lists(st.sampled_from(palette), min_size=nodes, max_size=nodes)
        return draw(st.lists(row, min_size=nodes, max_size=nodes))

    palette = draw(st.lists(st.sampled_from([*RATES, 1] if wild else RATES), min_size=1, max_size=3))
    rates = st.sampled_from(palette) if draw(st.booleans()) else st.none()

    devices = st.sampled_from([None, 1, 2, 2, 3, 4]) if draw(st.booleans()) else st.none()

    def optional() -> Json:
        drawn: Json = {name: draw(rates) for name in ("upload_bytes_per_s", "download_bytes_per_s")}
        drawn["devices"] = draw(devices)
        if drawn["devices"]:
            drawn["device_mode"] = draw(st.sampled_from([None, None, "replicas", "sharded"]))
        return {name: value for name, value in drawn.items() if value is not None}

    cluster: Json = {
        "format": "skippipe-cluster",
        "version": 3,
        "name": "drawn",
        "nodes": [
            {"name": f"n{i}", "location": "here", "flops_per_s": draw(st.sampled_from(FLOPS)), "memory_bytes": 1}
            | optional()
            for i in range(nodes)
        ],
        "latency_s": matrix(WILD_LATENCIES_S if wild else LATENCIES_S),
        "bandwidth_bytes_per_s": matrix(WILD_BANDWIDTHS if wild else BANDWIDTHS),
    }
    overhead = draw(st.sampled_from([None, 0, 1.5e-9, 0.002]))
    return cluster if overhead is None else cluster | {"hop_overhead_s": overhead}


@st.composite
def paths(draw: DrawFn, stages: list[Json], wild: bool) -> list[str]:
    """Stages in order, swapped in pairs or shuffled, all or some, a few without stage 0; wild ones go anywhere."""
    nodes = [stage["nodes"] for stage in stages]
    if wild and draw(st.booleans()):
        anywhere = st.sampled_from([name for names in nodes for name in names])
        return draw(st.lists(anywhere, min_size=2, max_size=6, unique=True))
    visits = list(range(1, len(stages)))
    order = draw(st.sampled_from(["kept", "pairs swapped", "shuffled"]))
    if order == "pairs swapped":
        for i in range(draw(st.integers(0, 1)), len(visits) - 1, 2):
            visits[i : i + 2] = visits[i + 1], visits[i]
    elif order == "shuffled":
        visits = draw(st.permutations(visits))
    if draw(st.booleans()):
        visits = visits[: draw(st.integers(1, len(visits)))]
    if order != "kept" or len(visits) < 2 or draw(st.integers(0, 4)) < 4:
        visits = [0, *visits]
    held = [stage for stage in range(len(stages)) if nodes[stage]]
    visits = [stage for stage in visits if stage in held]
    if len(visits) < 2:
        visits = held[:2]
    return [draw(st.sampled_from(nodes[stage])) for stage in visits]


@st.composite
def plans(draw: DrawFn, wild: bool = False) -> Json:
    """Well-formed plans; many break a rule or two."""
    count = draw(st.integers(2, 7))  # 7: the first that can swap three pairs
    names = draw(st.permutations([f"n{i}" for i in range(draw(st.integers(count, 10)))]))
    spare = len(names) - count
    homes = [*range(count), *draw(st.lists(st.integers(0, count), min_size=spare, max_size=spare))]
    stages: list[Json] = []
    lost = draw(st.sampled_from([-1, -1, -1, *range(count)])) if count > 2 else -1  # nobody holds it
    for index in range(count):  # who is at home in `count` is left out
        nodes = [name for name, home in zip(names, homes, strict=True) if home == index and index != lost]
        stages.append({"layers": draw(st.integers(1, 3)), "nodes": nodes, "ring": draw(st.permutations(nodes))})
    holders = sorted(name for stage in stages for name in stage["nodes"])
    for stage in stages:
        averaging = draw(averagings(stage["ring"], holders))
        stage |= {"averaging": averaging} if averaging else {}
    lane = st.fixed_dictionaries({"path": paths(stages, wild), "microbatches": st.integers(1, 3)})
    plan: Json = {
        "format": "skippipe-plan",
        "version": 1,
        "strategy": "drawn",
        "dispatch": draw(st.sampled_from(["first-come", "backward-first", "lanes-in-order"])),
        "stages": stages,
        "lanes": draw(st.lists(lane, min_size=1, max_size=6)),
        "workload": draw(workloads(layers=sum(stage["layers"] for stage in stages))),
        "cluster": draw(clusters(len(names), wild)),
        "expected": None,
    }
    split = draw(st.sampled_from([None, False, True, True]))
    if split is not None:
        plan["split_backward"] = split
    microbatches = sum(lane["microbatches"] for lane in plan["lanes"])
    plan["workload"]["microbatches"] = microbatches + draw(st.sampled_from([0, 0, 0, 1]))
    codecs = st.sampled_from(["fp32", "bf16", "int8"])
    if draw(st.booleans()):
        plan["workload"]["gradient_dtypes"] = draw(st.lists(codecs, min_size=count, max_size=count))
    link, ends = st.tuples(*[st.sampled_from(names)] * 2, codecs, codecs), lambda row: row[:2]
    links = draw(st.sampled_from([(), draw(st.lists(link, min_size=1, max_size=40, unique_by=ends))]))
    if links:
        plan["workload"]["wire_dtypes"] = [list(each) for each in links]
    costs = oracle_costs.costs(plan)
    for node in plan["cluster"]["nodes"]:
        held = costs.nodes[node["name"]].stage if node["name"] in costs.nodes else 0
        slots, more = draw(st.sampled_from([6, 5, 4, 3, 3, 2, 2, 2, 2, 1, 1, 0])), draw(st.sampled_from([0, 0, 1, -1]))
        memory = costs.fixed_bytes[held] + slots * costs.held_bytes[held] + more
        node["memory_bytes"] = memory // draw(st.sampled_from([1, node.get("devices", 1)]))
    return plan


def our_times(plan: Json, timing: Timing) -> Json | None:
    try:
        timeline = simulate(Plan.from_json(plan), timing)
    except UserError:  # a deadlock; or there is no path for a teacher
        return None
    return timeline.to_json([node["name"] for node in plan["cluster"]["nodes"]])


def oracle_times(plan: Json, timing: Timing) -> Json | None:
    try:
        return oracle.simulate(plan, timing.value)
    except oracle.LockedUp:
        return None


def promise(plan: Json, timing: Timing) -> Json | None:
    """None also where seconds do not give back the nanoseconds."""
    times = oracle_times(plan, timing)
    exact = times and all(holder[key] < LONGEST_S for holder, key in numbers_in(times))
    return times if exact else None


def our_rules(plan: Json) -> set[str]:
    return {violation.rule for violation in validate(Plan.from_json(plan))}


@pytest.mark.parametrize("timing", Timing)
@may_skip(Deadlock)
@settings(max_examples=20, deadline=None)
@given(plan=plans(wild=True))
def test_times_agree_to_the_nanosecond(timing: Timing, plan: Json) -> None:
    times = our_times(plan, timing)
    assert times == oracle_times(plan, timing)
    if times is None:
        raise Deadlock("both say so, and there are no times")


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(plan=st.booleans().flatmap(lambda wild: plans(wild)), timing=st.sampled_from([None, *Timing]))
def test_the_same_rules_are_broken(plan: Json, timing: Timing | None) -> None:
    plan["expected"] = timing and promise(plan, timing)
    broken = our_rules(plan)
    assert broken == oracle.violations(plan)
    assert "promise" not in broken


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(plan=plans(), timing=st.sampled_from(Timing), data=st.data())
def test_no_figure_of_a_promise_can_be_changed(plan: Json, timing: Timing, data: st.DataObject) -> None:
    plan["expected"] = promise(plan, timing)
    assume(plan["expected"] is not None)
    figures = numbers_in(plan["expected"])
    holder, key = figures[data.draw(st.integers(0, len(figures) - 1), label="figure")]
    step = data.draw(st.sampled_from([1, 1000, 10**9]), label="step")
    if isinstance(holder[key], float):
        holder[key] = (round(holder[key] * 1e9) + step) / 1e9
    else:
        holder[key] += step
    broken = our_rules(plan)
    assert broken == oracle.violations(plan)
    assert "promise" in broken


def numbers_in(value: Any) -> list[tuple[Any, Any]]:
    """Where in nested lists and dicts there is a number: the list or dict, and the index or key in it."""
    found: list[tuple[Any, Any]] = []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, dict | list):
            found += numbers_in(item)
        elif not isinstance(item, str):
            found.append((value, key))
    return found


@pytest.mark.parametrize(
    ("paths", "published_s"),
    [("skippipe", 32.70), ("skippipe_no_tc2", 34.82), ("dtfm_skip", 48.21), ("full_pipeline", 78.85)],
)
def test_published_plans_agree(paths: str, published_s: float) -> None:
    plan = published_plan(published20(), paths)
    for timing in Timing:
        promising = plan.promising(simulate(plan, timing)).to_json()
        assert promising["expected"] == oracle_times(promising, timing)
        assert our_rules(promising) == oracle.violations(promising) == set()
        if timing is Timing.CONTENTION_ONLY:
            assert promising["expected"]["iteration_s"] == pytest.approx(published_s, abs=0.01)


def small_plan(paths: list[str], bandwidth: float, slots: int) -> Json:
    """Nodes a and b hold stage 0, c and d stage 1, e stage 2. A path is its nodes' letters."""
    model = {"name": "small", "layers": 3, "hidden": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "intermediate": 5}
    workload = {
        "model": model | {"vocab": 17, "tied_embeddings": False, "experts": 1, "experts_active": 1},
        "sequence_tokens": 1,
        "samples_per_microbatch": 1,
        "microbatches": len(paths),
        "wire_dtype": "fp32",
        "gradient_dtype": "fp32",
        "compute_dtype": "fp32",
        "activation_checkpointing": False,
        "backward_ratio": 2,
        "head_ratio": None,
        "header_bytes": 0,
        "max_slots": slots,
    }
    cluster = {
        "format": "skippipe-cluster",
        "version": 1,
        "name": "small",
        "nodes": [{"name": n, "location": "here", "flops_per_s": 1e9, "memory_bytes": 10**6} for n in "abcde"],
        "latency_s": [[0.001] * 5] * 5,
        "bandwidth_bytes_per_s": [[bandwidth] * 5] * 5,
    }
    return {
        "format": "skippipe-plan",
        "version": 1,
        "strategy": "small",
        "dispatch": "first-come",
        "stages": [{"layers": 1, "nodes": list(names), "ring": list(names)} for names in ("ab", "cd", "e")],
        "lanes": [{"path": list(path), "microbatches": 1} for path in paths],
        "workload": workload,
        "cluster": cluster,
        "expected": None,
    }


@pytest.mark.parametrize(
    ("path", "bandwidth", "broken"),
    [
        ("eac", 1e6, {"CC1", "CC2"}),
        ("aced", 1e6, {"CC2"}),
        ("ace", 1e-300, set()),
        ("ace", 0, {"link"}),
    ],
)
def test_odd_plans_agree(path: str, bandwidth: float, broken: set[str]) -> None:
    """CC2 beside a broken CC1; a stage twice counts once for CC3; a link too slow for any use is still a link."""
    plan = small_plan([path], bandwidth, slots=1)
    assert our_rules(plan) == oracle.violations(plan) == broken
    for timing in Timing:
        assert our_times(plan, timing) == oracle_times(plan, timing)
