"""What limits a plan, and what would help: clusters whose bottleneck is known, and causes that add up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from skippipe.bottlenecks import (
    DOWNLOADS,
    UPLOADS,
    CauseGroup,
    bottlenecks,
    busiest_link,
    busiest_node,
    slowest_lane,
    time_by_cause,
    time_by_group,
)
from skippipe.cluster import DeviceMode
from skippipe.constraints import circle, tc1_overfull
from skippipe.critical_path import Cause, CauseKind, critical_path
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.published import published20, published_plan
from skippipe.planner.whatif import advisor
from skippipe.planner.whatif.advisor import Advice, advise
from skippipe.planner.whatif.candidates import EditKind
from skippipe.planner.whatif.edits import one_more_slot, with_twin, without_node
from skippipe.simulator import simulate
from skippipe.timeline import Timing
from skippipe.validate import validate
from skippipe.workload import Workload
from tests.helpers.bottlenecks import (
    CASES,
    Case,
    a_far_data_node,
    a_popular_node_with_idle_ones_beside_it,
    a_slow_link_one_way,
    close,
    planned,
    too_small_a_memory,
    with_bandwidth,
    with_speed,
)
from tests.helpers.doc_pages import ROOT, documented
from tests.helpers.fault_scenarios import thin
from tests.helpers.plans import TINY, plans, simulated, uniform_cluster
from tests.helpers.processes import Command
from tests.helpers.quick import others_slow

timings = st.sampled_from(list(Timing))


@pytest.fixture(autouse=True, scope="module")
def short_searches() -> Iterator[None]:
    """So many changes find the best paths over eight nodes or fewer."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(advisor, "SEARCHED", 4_000)
        yield


# the critical path


@settings(max_examples=30, deadline=None)
@given(st.one_of(plans(), plans(lost=True)), timings)
def test_causes_add_up_to_the_iteration(plan: Plan, timing: Timing) -> None:
    timeline = simulated(plan, timing)
    path = critical_path(plan, timeline)
    assert path[0].start_ns == 0
    assert path[-1].end_ns == timeline.iteration_ns
    assert all(piece.took_ns > 0 for piece in path)
    assert all(before.end_ns == after.start_ns for before, after in pairwise(path))
    causes = time_by_cause(path)
    assert sum(causes.values()) == timeline.iteration_ns
    assert sum(time_by_group(causes).values()) == timeline.iteration_ns
    named = bottlenecks(causes)
    assert sum(bottleneck.ns for bottleneck in named) == timeline.iteration_ns
    assert sorted(cause for bottleneck in named for cause in bottleneck.causes) == sorted(causes)


@settings(max_examples=20, deadline=None)
@given(plans(), timings)
def test_causes_are_where_they_can_be(plan: Plan, timing: Timing) -> None:
    timeline = simulated(plan, timing)
    paths = [lane.path for lane in plan.lanes]
    hops = {hop for path in paths for a, b in circle(path) for hop in ((a, b), (b, a))}
    overfull = tc1_overfull(paths, plan.slots)
    for piece in critical_path(plan, timeline):
        kind, node, to, stage = piece.cause
        at_work = any(
            task.node == node and task.start_ns <= piece.start_ns and piece.end_ns <= task.end_ns
            for task in timeline.tasks
        )
        match kind:
            case CauseKind.COMPUTING:
                assert at_work
            case CauseKind.SLOT:
                assert plan.split_backward or node in overfull
            case CauseKind.BUSY:
                assert sum(node in path for path in paths) > 1 or plan.split_backward
            case CauseKind.LATENCY | CauseKind.BANDWIDTH:
                assert (node, to) in hops
            case CauseKind.QUEUE:
                assert (node, to) in hops and timing is Timing.FULL
            case CauseKind.AVERAGING_LATENCY | CauseKind.AVERAGING_BANDWIDTH:
                links = set() if stage is None else plan.stages[stage].averaging.links
                links |= {link[::-1] for link in links if plan.cluster.nodes[link[1]].download_bytes_per_s}  # notices
                assert (node, to) in links
            case CauseKind.UPLOAD | CauseKind.AVERAGING_UPLOAD:
                assert plan.cluster.nodes[node].upload_bytes_per_s is not None
                assert (stage is None) == (kind is CauseKind.UPLOAD)
            case CauseKind.DOWNLOAD | CauseKind.AVERAGING_DOWNLOAD:
                assert plan.cluster.nodes[node].download_bytes_per_s is not None
                assert (stage is None) == (kind is CauseKind.DOWNLOAD)
            case CauseKind.OPTIMIZER:
                assert piece.end_ns == timeline.iteration_ns


@settings(max_examples=20, deadline=None)
@given(plans(), timings)
def test_a_lane_by_itself_is_its_own_path(plan: Plan, timing: Timing) -> None:
    """No wait, and every task and hop of the lane is on it."""
    plan = replace(plan, lanes=plan.lanes[:1], split_backward=False)
    timeline = simulated(plan, timing)
    causes = time_by_cause(
        piece for piece in critical_path(plan, timeline) if piece.end_ns <= timeline.last_backward_ns
    )
    assume(sum(causes.values()) == timeline.last_backward_ns)  # a slow ring may have begun before, …
    assume(all(cause.stage is None for cause in causes))  # … or have ended just then
    busy = {Cause(CauseKind.COMPUTING, use.node): use.busy_ns for use in timeline.nodes if use.busy_ns}
    assert {cause: ns for cause, ns in causes.items() if cause.kind is CauseKind.COMPUTING} == busy
    count = plan.lanes[0].microbatches
    sent: Counter[Cause] = Counter()
    flown: Counter[Cause] = Counter()
    for message in [message for a, b in circle(plan.lanes[0].path) for message in ((0, a, b), (1, b, a))]:
        link = message[1:]
        flown[Cause(CauseKind.LATENCY, *link)] += count * int(plan.costs.flight_ns[link])
        sent[sending_cause(plan, link)] += count * int(plan.costs.transmit_ns[message])
    assert all(causes.get(cause, 0) == ns for cause, ns in flown.items())
    sending = {CauseKind.BANDWIDTH, CauseKind.UPLOAD, CauseKind.DOWNLOAD}
    assert {cause: ns for cause, ns in causes.items() if cause.kind in sending} == {
        cause: ns for cause, ns in sent.items() if ns
    }
    assert {cause.kind for cause in causes} <= {CauseKind.COMPUTING, CauseKind.LATENCY, *sending}


def sending_cause(plan: Plan, link: tuple[int, int]) -> Cause:
    """The slowest of a link and the access lines at its ends."""
    sender, receiver = link
    rates = [
        (plan.cluster.bandwidth_bytes_per_s[link], Cause(CauseKind.BANDWIDTH, *link)),
        (plan.cluster.nodes[sender].upload_bytes_per_s or np.inf, Cause(CauseKind.UPLOAD, sender)),
        (plan.cluster.nodes[receiver].download_bytes_per_s or np.inf, Cause(CauseKind.DOWNLOAD, receiver)),
    ]
    return min(rates, key=lambda each: each[0])[1]


def test_a_wait_for_a_busy_node_by_hand() -> None:
    """Two lanes come to a node at the same time; a backward takes twice as long as a forward.

    The second forward waits for the first one; a forward later it is back for its backward, when that of the first lane
    still has as much to do. The path goes back over that one, and so over the first lane, which never waited.
    """
    plan = planned(uniform_cluster(3), [(0, 1), (2,)], [((0, 2), 1), ((1, 2), 1)], max_slots=2)
    plan = replace(plan, split_backward=False)
    causes = time_by_cause(critical_path(plan, simulate(plan, Timing.CONTENTION_ONLY)))
    forward_ns, backward_ns = (int(each[1, 2]) for each in (plan.costs.forward_ns, plan.costs.backward_ns))
    assert backward_ns == 2 * forward_ns
    assert causes[Cause(CauseKind.BUSY, 2)] == forward_ns
    assert causes[Cause(CauseKind.COMPUTING, 2)] == forward_ns + forward_ns + backward_ns


# clusters whose bottleneck is known


@cache
def advised(case: Callable[[], Case]) -> Advice:
    return advise(case().plan, simulate(case().plan, case().timing))


@pytest.mark.parametrize("case", others_slow(CASES[::3], [*CASES[1::3], *CASES[2::3]]), ids=lambda case: case.__name__)
def test_the_bottleneck_is_named_first_and_its_cure_is_the_best_advice(case: Callable[[], Case]) -> None:
    known = case()
    timeline = simulate(known.plan, known.timing)
    first = bottlenecks(time_by_cause(critical_path(known.plan, timeline)))[0]
    assert first.group is known.bottleneck
    places: list[set[Any]] = [set(first.at(*UPLOADS, *DOWNLOADS)), set(first.links), {first.node}]
    assert known.where == next(each for each in places if each)

    best = advised(case).changes[0]
    assert (best.kind, best.what) == (known.kind, known.what)
    assert best.replanned == (known.changed is None)
    after_ns = simulate(known.changed or best.plan, known.timing).iteration_ns
    assert best.after_ns == after_ns < timeline.iteration_ns
    assert best.gain == 1 - after_ns / timeline.iteration_ns > 0.1
    if best.replanned:
        assert validate(best.plan) == []
        extra = {EditKind.MORE: 1, EditKind.LESS: -1}.get(best.kind, 0)
        assert len(best.plan.cluster) == len(known.plan.cluster) + extra


def test_where_all_is_equal_no_single_change_helps() -> None:
    plan = planned(uniform_cluster(4), [(0, 1), (2, 3)], [((0, 2), 1), ((1, 3), 1)], wire_dtype="int4")
    answer = advise(plan, simulate(plan, Timing.CONTENTION_ONLY))
    assert [change.what for change in answer.changes] == []
    assert answer.tried > 10


def test_without_replanning_paths_stay_as_they_are() -> None:
    plan = a_popular_node_with_idle_ones_beside_it().plan
    answer = advise(plan, simulate(plan, Timing.CONTENTION_ONLY), replanning=False)
    assert answer.not_replanned
    assert answer.changes[0].what == "'n3' twice as fast"
    assert not any(change.replanned for change in answer.changes)


def test_a_plan_that_breaks_a_rule_is_not_replanned_and_the_reason_is_given() -> None:
    answer = advised(too_small_a_memory)
    assert "TC1" in answer.not_replanned
    assert not any(change.replanned for change in answer.changes)


def test_what_other_paths_do_by_themselves_is_not_put_down_to_a_change() -> None:
    timeline = simulate(a_far_data_node().plan, Timing.FULL)
    answer = advised(a_far_data_node)
    assert answer.searched_ns is not None and answer.searched_ns < timeline.iteration_ns
    others = [change for change in answer.changes if change.replanned and change.kind is not EditKind.LESS]
    assert others
    assert {change.before_ns for change in others} == {answer.searched_ns}


def test_interrupted_it_keeps_what_was_found() -> None:
    plan = a_popular_node_with_idle_ones_beside_it().plan
    timeline = simulate(plan, Timing.CONTENTION_ONLY)
    asked: list[str] = []
    answer = advise(
        plan, timeline, progress=lambda what, share, best_s: asked.append(what), stopped=lambda: len(asked) > 3
    )
    assert answer.tried == 3
    assert answer.changes


@settings(max_examples=20, deadline=None)
@given(st.one_of(plans(), plans(lost=True)), timings)
def test_any_plan_gets_advice_that_its_simulation_bears_out(plan: Plan, timing: Timing) -> None:
    timeline = simulated(plan, timing)
    answer = advise(plan, timeline, replanning=False)
    gains = [change.gain for change in answer.changes]
    assert gains == sorted(gains, reverse=True)
    for change in answer.changes:
        assert simulate(change.plan, timing).iteration_ns == change.after_ns < timeline.iteration_ns


# single changes


def test_one_more_slot_is_one_on_this_node_alone() -> None:
    plan = published_plan(published20(), "skippipe")
    assert plan.workload.max_slots == 3
    node = plan.lanes[0].path[1]
    changed = one_more_slot(plan, node)
    assert changed.slots == {each: slots + (each == node) for each, slots in plan.slots.items()}
    assert np.array_equal(changed.costs.forward_ns, plan.costs.forward_ns)


@pytest.mark.parametrize("mode", DeviceMode)
def test_one_more_slot_is_one_on_each_worker(mode: DeviceMode) -> None:
    plan = published_plan(published20(), "skippipe")
    nodes = tuple(replace(node, devices=2, device_mode=mode) for node in plan.cluster.nodes)
    plan = replace(plan, cluster=replace(plan.cluster, nodes=nodes), expected=None)
    node, workers = plan.lanes[0].path[1], 2 if mode is DeviceMode.REPLICAS else 1
    changed = one_more_slot(plan, node)
    assert changed.slots == {each: slots + workers * (each == node) for each, slots in plan.slots.items()}


def test_one_more_device_is_advised_where_microbatches_wait_for_those_there_are() -> None:
    cluster = uniform_cluster(4, latency_s=0.0, bandwidth=1e9)
    nodes = (*cluster.nodes[:3], replace(cluster.nodes[3], devices=2))
    stages = (Stage(2, (0, 1, 2), (0, 1, 2)), Stage(6, (3,), (3,)))
    lanes = tuple(Lane((data_node, 3), 2) for data_node in (0, 1, 2))
    plan = Plan(replace(cluster, nodes=nodes), Workload(TINY, 16, 1, 6), stages, lanes)
    advised = {change.what: change for change in advise(plan, simulate(plan), replanning=False).changes}
    change = advised["one more device in 'n3'"]
    assert change.kind is EditKind.DEVICE
    assert simulate(change.plan).collision_s == 0


def test_a_twin_is_as_its_model_and_holds_the_same_stage() -> None:
    plan = published_plan(published20(), "skippipe")
    node = plan.lanes[0].path[1]
    changed = with_twin(plan, node)
    twin = len(plan.cluster)
    assert changed.stage_of[twin] == plan.stage_of[node]
    assert changed.cluster.nodes[twin].name == f"{plan.cluster.nodes[node].name}-twin"
    others = [each for each in range(twin) if each != node]
    for matrix in (changed.cluster.latency_s, changed.cluster.bandwidth_bytes_per_s):
        assert np.array_equal(matrix[twin, others], matrix[node, others])
        assert np.array_equal(matrix[others, twin], matrix[others, node])
    assert with_twin(changed, node).cluster.nodes[-1].name.endswith("-twin-twin")


def test_without_a_node_the_others_keep_their_names_stages_and_links() -> None:
    plan = published_plan(published20(), "skippipe")
    node = plan.lanes[0].path[0]
    changed = without_node(plan, node)
    assert validate(changed) == []
    left = [each for each in range(len(plan.cluster)) if each != node]
    assert [each.name for each in changed.cluster.nodes] == [plan.cluster.nodes[each].name for each in left]
    assert {changed.stage_of[new]: 0 for new in changed.stage_of}.keys() == {*range(len(plan.stages))}
    for new, old in enumerate(left):
        assert changed.stage_of[new] == plan.stage_of[old]
    assert changed.cluster.latency_s[0, 1] == plan.cluster.latency_s[left[0], left[1]]


# who works most


def test_slowest_and_busiest_by_hand() -> None:
    cluster = with_bandwidth(with_speed(close(4), 0.5, 3), 1e5, (3, 1))
    plan = planned(cluster, [(0, 1), (2, 3)], [((0, 2), 2), ((1, 3), 2)])
    timeline = simulate(plan, Timing.CONTENTION_ONLY)
    slowest = slowest_lane(plan, timeline)
    assert slowest.lane == 1
    assert slowest.alone_ns == slowest.back_ns <= timeline.iteration_ns  # the lanes share no node
    assert busiest_node(timeline) == (3, next(use.busy_ns for use in timeline.nodes if use.node == 3))
    assert busiest_link(plan, timeline) == ((3, 1), 4 * int(plan.costs.transmit_ns[0, 3, 1]))


# the command


def test_why_in_words_and_as_data(skippipe: Command, tmp_path: Path) -> None:
    plan = published_plan(published20(), "skippipe")
    timeline = simulate(plan, Timing.CONTENTION_ONLY)
    file = tmp_path / "plan.json"
    replace(plan.promising(timeline), lower_bound_ns=20 * 10**9).save(file)

    said = skippipe("why", file, "--no-replanning")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0].startswith("iteration 32.704 s (contention-only)")
    first = bottlenecks(time_by_cause(critical_path(plan, timeline)))[0]
    assert plan.cluster.nodes[first.node if first.node is not None else first.links[0][0]].name in lines[4]
    assert "slowest lane: " in said.out
    assert "no plan can take less than 20 s (proven); this one is 63.5% above that" in lines
    assert "what would help" in said.out
    assert "no other paths were searched: not asked for" in said.out

    data = json.loads(skippipe("why", file, "--no-replanning", "--suggestions", "2", "--json").out)
    assert data["iteration_s"] == timeline.iteration_s
    assert len(data["changes"]) == 2
    assert data["changes"][0]["iteration_s"] < timeline.iteration_s
    assert sum(data["shares_s"].values()) == pytest.approx(timeline.iteration_s)
    assert sum(bottleneck["seconds"] for bottleneck in data["limits"]) == pytest.approx(timeline.iteration_s)
    assert data["path"][0]["start_s"] == 0
    assert data["path"][-1]["end_s"] == timeline.iteration_s
    assert data["lower_bound_s"] == 20


def test_why_as_data_is_as_documented(skippipe: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    replace(published_plan(published20(), "skippipe"), lower_bound_ns=20 * 10**9).save(file)
    data = skippipe("why", file, "--no-replanning", "--suggestions", "1", "--json").json
    inner = {f"{name}[].{field}" for name in ("limits", "changes") for field in data[name][0]}
    assert {*data, *inner} == documented("docs/formats.md", "skippipe why")
    somewhere, on_a_link = {"kind", "node"}, {"kind", "node", "to"}
    causes = [cause for bottleneck in data["limits"] for cause in bottleneck["causes"]]
    for found, figures in ((causes, {"seconds"}), (data["path"], {"start_s", "end_s"})):
        fields = {frozenset(each) - figures for each in found}
        assert fields == {frozenset(each) for each in (somewhere, on_a_link, {*on_a_link, "stage"})}
    assert [set(data[name]) for name in ("slowest_lane", "busiest_node", "busiest_link")] == [
        {"lane", "back_s", "alone_s"},
        {"node", "busy_s"},
        {"from", "to", "sending_s"},
    ]
    text = (ROOT / "docs" / "formats.md").read_text()
    assert [word for kind in (CauseKind, CauseGroup, EditKind) for word in kind if f"`{word}`" not in text] == []


def test_why_with_other_paths(skippipe: Command, tmp_path: Path) -> None:
    plan = a_far_data_node().plan
    file = tmp_path / "plan.json"
    plan.save(file)  # it promises nothing: then all is counted
    said = skippipe("why", file)
    assert said.code == 0
    assert "(full)" in said.out.splitlines()[0]
    assert "transfers over the links of 'n1'" in said.out
    assert "without 'n1' (other paths; " in said.out


def test_why_where_nothing_helps(skippipe: Command, tmp_path: Path) -> None:
    plan = planned(uniform_cluster(4), [(0, 1), (2, 3)], [((0, 2), 1), ((1, 3), 1)], wire_dtype="int4")
    file = tmp_path / "plan.json"
    plan.promising(simulate(plan, Timing.CONTENTION_ONLY)).save(file)
    assert "no single change helps" in skippipe("why", file, "--no-replanning").out
    said = skippipe("why", file, "--suggestions", "0")
    assert said.code == 0
    assert "change" not in said.out


def test_why_refuses_what_is_no_plan_and_warns_of_a_false_promise(skippipe: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("{}")
    said = skippipe("why", file)
    assert said.code == 2
    assert said.err.startswith("error: ")
    plan = a_slow_link_one_way().plan
    timeline = simulate(plan, Timing.FULL)
    plan.promising(replace(timeline, iteration_ns=timeline.iteration_ns + 1)).save(file)
    said = skippipe("why", file, "--suggestions", "0")
    assert said.code == 0
    assert "promises another timeline than it has" in said.err


def test_why_leaves_the_teachers_passes_out(skippipe: Command, tmp_path: Path) -> None:
    plan = thin(False)
    taught = plan.edited(workload=replace(plan.workload, teacher="logits"))
    taught = taught.promising(simulate(taught, Timing.FULL))
    taught.save(tmp_path / "plan.json")
    done = skippipe("why", tmp_path / "plan.json", "--no-replanning", "--suggestions", "2", "--json")
    assert done.err.splitlines()[0].startswith("note: without the teacher's passes; with them an iteration takes 0.")
    assert done.json["iteration_s"] == simulate(plan, Timing.FULL).iteration_s < taught.promise.iteration_s
