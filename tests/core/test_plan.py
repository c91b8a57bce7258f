"""Plans: file and back, what is malformed, and what `check` finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe.errors import UserError
from skippipe.json_fields import json_text
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.published import published20, published_plan
from skippipe.presets import data
from skippipe.simulator import Deadlock, simulate
from skippipe.timeline import Timing
from skippipe.validate import validate
from tests.helpers.plans import change as edit
from tests.helpers.plans import may_skip, plans


@pytest.fixture(scope="module")
def published() -> Plan:
    plan = published_plan(published20(), "skippipe")
    return plan.promising(simulate(plan, Timing.FULL))


@pytest.mark.slow
@may_skip(Deadlock)
@settings(max_examples=50, deadline=None)
@given(st.booleans().flatmap(plans), st.sampled_from([None, *Timing]))
def test_file_and_back_unchanged(plan: Plan, timing: Timing | None) -> None:
    if timing:
        plan = plan.promising(simulate(plan, timing))
    raw = json.loads(json_text(plan.to_json()))
    again = Plan.from_json(raw)
    assert again == plan
    assert json_text(again.to_json()) == json_text(plan.to_json())
    jsonschema.validate(raw, data("plan.schema.json"))
    jsonschema.validate(raw["cluster"], data("cluster.schema.json"))


def test_save_and_load(published: Plan, tmp_path: Path) -> None:
    published.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == published
    assert validate(Plan.load(tmp_path / "plan.json")) == []


def test_files_from_before_the_split_backward_mean_the_same(published: Plan) -> None:
    raw = json.loads(json.dumps(published.to_json()))
    del raw["split_backward"], raw["workload"]["weight_share"]
    for node in raw["expected"]["nodes"]:
        del node["weight_s"]
    jsonschema.validate(raw, data("plan.schema.json"))
    assert Plan.from_json(raw) == published


def test_files_from_before_schedules_and_rates_mean_the_same(published: Plan) -> None:
    """They are written as before, too: without either, no field and no version tells of them."""
    rings = tuple(replace(stage, pieces=()) for stage in published.stages)
    plan = replace(published, stages=rings, workload=replace(published.workload, collective="ring"))
    plan = plan.promising(simulate(plan, Timing.FULL))
    raw = json.loads(json.dumps(plan.to_json()))
    assert (raw["version"], raw["cluster"]["version"]) == (1, 1)
    assert not any("averaging" in stage for stage in raw["stages"])
    assert all(node.keys() == {"name", "location", "flops_per_s", "memory_bytes"} for node in raw["cluster"]["nodes"])
    raw["workload"].pop("collective", None)
    again = Plan.from_json(raw)
    assert again == plan
    assert validate(again) == []
    assert [stage.averaging.kind for stage in again.stages] == ["ring"] * len(again.stages)


def test_a_plan_with_a_schedule_and_rates_is_another_version_of_a_cluster(published: Plan) -> None:
    raw = json.loads(json.dumps(published.to_json())) | {"expected": None}
    first, second, *_ = raw["stages"][0]["nodes"]
    relay = raw["stages"][1]["nodes"][0]
    raw["workload"]["collective"] = "auto"
    raw["stages"][0]["averaging"] = [{"root": first, "share": 3, "relays": {second: relay}}]
    raw["cluster"]["nodes"][0] |= {"upload_bytes_per_s": 1e6, "download_bytes_per_s": 2e6}
    raw["cluster"]["version"] = 2
    jsonschema.validate(raw, data("plan.schema.json"))
    jsonschema.validate(raw["cluster"], data("cluster.schema.json"))
    plan = Plan.from_json(raw)
    written = json.loads(json_text(plan.to_json()))
    assert written["cluster"] == raw["cluster"]
    assert written["stages"] == raw["stages"]
    assert simulate(plan).iteration_ns > simulate(published).iteration_ns


def test_a_promise_with_a_split_backward_is_another_one(published: Plan) -> None:
    split = replace(published, split_backward=True)
    assert {rule for rule, _ in found(split)} == {"promise"}
    assert validate(split.promising(simulate(split, Timing.FULL))) == []


@pytest.mark.parametrize("paths", ["skippipe", "skippipe_no_tc2", "dtfm_skip", "full_pipeline"])
def test_published_plans_hold(paths: str) -> None:
    plan = published_plan(published20(), paths)
    for timing in Timing:
        assert validate(plan.promising(simulate(plan, timing))) == []


def with_path(plan: Plan, lane: int, *path: str) -> Plan:
    """The plan with another path, nodes given by name, and a promise that is true again."""
    nodes = tuple(plan.cluster.number[name] for name in path)
    lanes = (*plan.lanes[:lane], replace(plan.lanes[lane], path=nodes), *plan.lanes[lane + 1 :])
    return replace(plan, lanes=lanes, expected=None)


def found(plan: Plan) -> list[tuple[str, str]]:
    return [(each.rule, each.where) for each in validate(plan)]


def test_cc1_is_named_with_lane_and_hop(published: Plan) -> None:
    assert ("CC1", "lane 2, hop 0") in found(with_path(published, 2, "germany-1", "nl-0", "belgium-1", "la-0"))
    assert ("CC1", "lane 0, hop 2") in found(with_path(published, 0, "belgium-0", "germany-1", "iowa-0", "la-0"))


def test_cc2_is_named_with_lane_and_hop(published: Plan) -> None:
    far = with_path(published, 4, "iowa-0", "la-1", "canada-0", "la-0")  # stages 0, 5, 2, 4
    assert ("CC2", "lane 4, hop 2") in found(far)


def test_cc3_and_tc1_are_named(published: Plan) -> None:
    moved = with_path(published, 0, "belgium-0", "germany-1", "nl-0", "la-0")  # stage 4 instead of 3, a busy node
    problems = found(moved)
    assert ("CC3", "stage 3") in problems
    assert ("CC3", "stage 4") in problems
    assert ("TC1", "node 'la-0'") in problems


def test_a_lost_microbatch_is_named(published: Plan) -> None:
    short = replace(published, lanes=(replace(published.lanes[0], microbatches=1), *published.lanes[1:]), expected=None)
    assert ("microbatches", "lanes") in found(short)


def test_a_stage_that_nobody_holds_is_named(published: Plan) -> None:
    raw = published.to_json()
    raw["stages"][3] |= {"nodes": [], "ring": [], "averaging": []}
    raw["lanes"] = [{"path": ["belgium-0", "germany-1"], "microbatches": 30}]
    raw["expected"] = None
    plan = Plan.from_json(raw)
    assert ("stages", "stage 3") in found(plan)
    timeline = simulate(plan, Timing.FULL)
    assert timeline.averaging_ns[3] == (0, 0)
    assert "promise" not in dict(found(plan.promising(timeline)))


def test_an_unreachable_hop_is_named(published: Plan) -> None:
    raw = published.to_json()
    names = [node["name"] for node in raw["cluster"]["nodes"]]
    raw["cluster"]["bandwidth_bytes_per_s"][names.index("germany-1")][names.index("belgium-0")] = 0.0
    raw["expected"] = None
    assert ("link", "lane 0, hop 0") in found(Plan.from_json(raw))


def test_an_unreachable_relay_is_named(published: Plan) -> None:
    raw = json.loads(json.dumps(published.to_json())) | {"expected": None}
    first, second, *_ = raw["stages"][0]["nodes"]
    relay = raw["stages"][1]["nodes"][0]
    raw["workload"]["collective"] = "auto"
    raw["stages"][0]["averaging"] = [{"root": first, "share": 1, "relays": {second: relay}}]
    assert found(Plan.from_json(raw)) == []
    names = [node["name"] for node in raw["cluster"]["nodes"]]
    raw["cluster"]["bandwidth_bytes_per_s"][names.index(relay)][names.index(first)] = 0.0
    assert ("link", "stage 0, averaging") in found(Plan.from_json(raw))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("iteration_s", lambda value: value - 1),
        ("last_backward_s", lambda value: value + 1e-9),
        ("averaging_s", lambda value: value[:-1]),
        ("nodes", lambda value: [{**value[0], "forward_s": 0.1}, *value[1:]]),
        ("nodes", lambda value: [{**value[0], "slots": 9}, *value[1:]]),
        ("links", lambda value: [[*value[0][:2], 7], *value[1:]]),
        ("tasks", lambda value: [value[1], value[0], *value[2:]]),
    ],
)
def test_a_false_promise_is_named(published: Plan, field: str, change: Callable[[Any], Any]) -> None:
    raw = published.to_json()
    raw["expected"][field] = change(raw["expected"][field])
    (violation,) = validate(Plan.from_json(raw))
    assert violation.rule == "promise"
    assert violation.where.startswith(f"expected.{field.removesuffix('_s')}")


MALFORMED = {
    "unknown node": (edit("lanes.0.path.1", "atlantis"), "lanes[0].path[1]: the cluster has no node 'atlantis'"),
    "node without a stage": (edit("stages.1.nodes", ["iowa-1"]), "stages[1].ring"),
    "short path": (edit("lanes.3.path", ["iowa-0"]), "lanes[3].path: a path visits at least 2 nodes"),
    "node twice": (edit("lanes.3.path.2", "iowa-0"), "lanes[3].path[2]: 'iowa-0' is on this path already"),
    "promise of years": (edit("expected.iteration_s", 1e8), "expected: an iteration of over forty-eight days"),
    "no lanes": (edit("lanes", []), "lanes: the list is empty"),
    "no microbatches": (edit("lanes.1.microbatches", 0), "lanes[1].microbatches: 0 is out of range; give 1 to 100,000"),
    "two stages for a node": (edit("stages.1.nodes.0", "belgium-0"), "'belgium-0' already holds stage 0"),
    "too few layers": (edit("stages.2.layers", 3), "stages: they hold 23 layers, but llama-1.5b has 24"),
    "unknown dispatch": (
        edit("dispatch", "random"),
        "dispatch: 'random' is none of first-come, backward-first, lanes-in-order",
    ),
    "split or not": (edit("split_backward", "yes"), "split_backward: expected true or false"),
    "all weights": (
        edit("workload.weight_share", 1),
        "workload.weight_share: 1 is out of range; give above 0",
    ),
    "unknown field": (edit("lanes.0.color", 3), "lanes[0].color: unknown field"),
    "bad cluster": (edit("cluster.latency_s.0.1", -1.0), "latency_s[0][1]"),
    "bad model": (edit("workload.model.layers", 0), "workload.model.layers: 0 is out of range; give 1 to 10,000"),
    "task of another width": (edit("expected.tasks.0", [1, 2]), "expected.tasks[0]: expected a list of 7 values"),
    "unknown timing": (edit("expected.timing", "fast"), "expected.timing: 'fast' is none of"),
    "unknown root": (
        edit("stages.0.averaging", [{"root": "atlantis", "share": 1}]),
        "stages[0].averaging[0].root: the cluster has no node 'atlantis'",
    ),
    "root of another stage": (
        edit("stages.0.averaging", [{"root": "germany-1", "share": 1}]),
        "stages[0].averaging: piece 0 names a node that does not hold the stage",
    ),
    "no share": (
        edit("stages.0.averaging", [{"root": "belgium-0", "share": 0}]),
        "stages[0].averaging[0].share: 0 is out of range; give 1 to 2,147,483,648",
    ),
    "a way round in a circle": (
        edit("stages.0.averaging", [{"root": "belgium-0", "share": 1, "via": {"iowa-0": "iowa-0"}}]),
        "stages[0].averaging: piece 0 goes in a circle instead of to its root",
    ),
    "a way from the root": (
        edit("stages.0.averaging", [{"root": "belgium-0", "share": 1, "via": {"belgium-0": "iowa-0"}}]),
        "stages[0].averaging: piece 0 has two ways for one node, or one for its root",
    ),
    "a relay that receives": (
        edit("stages.0.averaging", [{"root": "belgium-0", "share": 1, "relays": {"iowa-0": "belgium-0"}}]),
        "stages[0].averaging: piece 0 has a relay that is the sender or the receiver",
    ),
    "relays in a list": (
        edit("stages.0.averaging", [{"root": "belgium-0", "share": 1, "relays": ["iowa-0"]}]),
        "stages[0].averaging[0].relays: must be an object of node names",
    ),
    "an upload of nothing": (
        edit("cluster.nodes.0.upload_bytes_per_s", 0),
        "nodes[0].upload_bytes_per_s: 0 is out of range; give 1 to",
    ),
    "no promise field": (edit("expected", ...), "expected: missing"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_plans_are_named_in_one_line(kind: str, published: Plan, tmp_path: Path) -> None:
    spoil, message = MALFORMED[kind]
    raw = json.loads(json.dumps(published.to_json()))
    spoil(raw)
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(UserError) as caught:
        Plan.load(file)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(file))


def test_a_path_over_a_node_without_a_stage(published: Plan) -> None:
    stages = tuple(
        Stage(stage.layers, stage.nodes[1:], stage.nodes[1:]) if index == 0 else stage
        for index, stage in enumerate(published.stages)
    )
    with pytest.raises(UserError, match=r"lanes\[0\]\.path\[0\]: 'belgium-0' holds no stage"):
        replace(published, stages=stages)


def test_skipped_share(published: Plan) -> None:
    assert published.skipped == pytest.approx(1 / 3)
    assert replace(published, lanes=(Lane(published.lanes[0].path[:2], 1),)).skipped == pytest.approx(2 / 3)
