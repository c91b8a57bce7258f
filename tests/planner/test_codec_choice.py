"""Codecs that a plan gets for each link and stage: what they cost, and what they buy."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from skippipe.codecs import GRADIENTS
from skippipe.errors import Infeasible, UserError
from skippipe.model_shape import MODELS
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.codec_choice import choose_beside, choose_codecs, with_codecs_of
from skippipe.planner.codec_prices import DEFAULT_PRICES, CodecBudget, message_shares, plan_nats, prices_of
from skippipe.planner.problem import PlanRequest, Problem, Strategy
from skippipe.planner.strategies import make_plan
from skippipe.planner.sweep import sweep_codecs
from skippipe.presets import five_sites
from skippipe.report.summary import codecs_text
from skippipe.simulator import simulate
from skippipe.timeline import Timing
from skippipe.validate import validate
from skippipe.workload import LinkDtypes, Workload
from tests.helpers.plans import TINY, uniform_cluster
from tests.helpers.processes import Command
from tests.helpers.quick import others_slow

PRICES = prices_of(
    {
        "int8": {"activations": 0.003, "activation_gradients": 0.001, "weight_gradients": 0.002},
        "bf16": {"weight_gradients": 0.0005},
    }
)


def plan_of(bandwidth: float, slow: dict[tuple[int, int], float], paths: dict[tuple[int, ...], int]) -> Plan:
    """Node 0 on stage 0, nodes 1 and 2 on stage 1; links as fast as `bandwidth`, but for slow ones."""
    cluster = uniform_cluster(3, latency_s=0.0, bandwidth=bandwidth)
    rates = cluster.bandwidth_bytes_per_s.copy()
    for link, rate in slow.items():
        rates[link] = rate
    stages = tuple(Stage(layers, nodes, nodes) for layers, nodes in zip((2, 2), ((0,), (1, 2)), strict=True))
    lanes = tuple(Lane(path, count) for path, count in paths.items())
    work = Workload(replace(TINY, layers=4), 16, 1, sum(paths.values()), collective="ring")
    return Plan(replace(cluster, bandwidth_bytes_per_s=rates), work, stages, lanes)


def iteration_ns(plan: Plan, timing: Timing = Timing.FULL) -> int:
    return simulate(plan, timing).iteration_ns


def test_only_what_is_waited_for_gets_a_smaller_codec() -> None:
    """The lane over node 2 has one microbatch, the other three: nobody waits for its links, nor for averaging."""
    plan = plan_of(1e9, {(0, 1): 1e4}, {(0, 1): 3, (0, 2): 1})
    found = choose_codecs(plan, CodecBudget.of(1.0, PRICES), Timing.CONTENTION_ONLY)
    small = replace(plan, workload=replace(plan.workload, wire_dtype="int8"))
    took_ns = iteration_ns(found, Timing.CONTENTION_ONLY)
    assert took_ns <= 1.001 * iteration_ns(small, Timing.CONTENTION_ONLY)
    assert took_ns < 0.6 * iteration_ns(plan, Timing.CONTENTION_ONLY)
    work = found.workload
    assert (work.wire_dtype, work.gradient_dtype, work.gradient_dtypes) == ("bf16", "fp32", ())
    assert {(row.sender, row.receiver) for row in work.wire_dtypes} >= {("n0", "n1")}
    assert not {(row.sender, row.receiver) for row in work.wire_dtypes} & {("n0", "n2"), ("n2", "n0")}
    assert Plan.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize("seed", others_slow([0], [1]))
def test_nearly_the_best_of_all_choices_within_any_budget(seed: int) -> None:
    """By trying all: eight messages, each bf16 or int8, and a stage of two nodes, which averages in three ways."""
    random = np.random.default_rng(seed)
    slow = {link: float(random.uniform(1e4, 1e5)) for link in product(range(3), range(3))}
    plan = plan_of(1e9, slow, {(0, 1): 2, (0, 2): 1})
    messages = list(message_shares(plan))
    every: list[tuple[float, int]] = []
    for codecs in product(("bf16", "int8"), repeat=len(messages)):
        chosen = dict(zip(messages, codecs, strict=True))
        rows = tuple(
            LinkDtypes(f"n{a}", f"n{b}", chosen[0, a, b], chosen[1, a, b]) for a, b in {each[1:] for each in messages}
        )
        for gradients in ("fp32", "bf16", "int8"):
            one = replace(plan.workload, wire_dtypes=rows, gradient_dtypes=("fp32", gradients))
            other = replace(plan, workload=one)
            every.append((plan_nats(other, PRICES), iteration_ns(other)))
    for nats in (0.0, 0.0007, 0.0015, 0.003, 0.006):
        found = choose_codecs(plan, CodecBudget.of(nats, PRICES), Timing.FULL)
        assert plan_nats(found, PRICES) <= nats + 1e-8
        assert validate(found) == []
        best_ns = min(took_ns for cost, took_ns in every if cost <= nats + 1e-8)
        assert iteration_ns(found) <= 1.05 * best_ns


def test_prices_are_shares() -> None:
    plan = plan_of(1e9, {}, {(0, 1): 3, (0, 2): 1})
    assert plan_nats(plan, PRICES) == 0
    of_link = replace(plan.workload, wire_dtypes=(LinkDtypes("n0", "n1", "int8", "bf16"),))
    assert plan_nats(replace(plan, workload=of_link), PRICES) == pytest.approx(3 / 8 * 0.003)
    whole = replace(plan.workload, wire_dtype="int8", gradient_dtype="int8")
    averaged = whole.stage_parameters(1, 2) / (whole.stage_parameters(0, 2) + whole.stage_parameters(1, 2))
    assert plan_nats(replace(plan, workload=whole), PRICES) == pytest.approx(0.004 + averaged * 0.002)
    with pytest.raises(UserError, match="fp8 has no price for"):
        plan_nats(replace(plan, workload=replace(whole, gradient_dtype="fp8")), DEFAULT_PRICES)


def test_all_plans_of_a_run_keep_the_budget_where_links_have_other_shares() -> None:
    """One codec a link in all of them; where more goes over it in one than in those before, it becomes more precise."""
    nats = 0.0008
    budget = CodecBudget.of(nats, PRICES)
    first = choose_codecs(plan_of(1e9, {(0, 1): 1e4}, {(0, 1): 1, (0, 2): 3}), budget, Timing.FULL)
    second = plan_of(1e9, {(0, 1): 1e4}, {(0, 1): 3, (0, 2): 1})
    assert plan_nats(first, PRICES) <= nats < plan_nats(replace(second, workload=first.workload), PRICES)
    last = choose_beside(second, [first], budget)
    for plan in with_codecs_of(last, {2: first, 3: last}).values():
        assert plan_nats(plan, PRICES) <= nats + 1e-8
        assert plan.workload == last.workload and validate(plan) == []
        assert plan.expected == simulate(plan, Timing.FULL)


def test_gradients_go_back_by_the_codec_that_is_for_them() -> None:
    """int4 was measured with stochastic rounding on the way back, and gets half of its price there."""
    prices = prices_of({"int4": {"hops": 0.01, "weight_gradients": 0.001}})
    plan = plan_of(1e5, {}, {(0, 1): 2, (0, 2): 2})
    budget = CodecBudget.of(0.02, prices, ["bf16", "int4"], ["fp32", "int4"])
    assert [codec for codec, _ in budget.options(1)] == ["int4-stochastic", "bf16"]
    uniform = replace(plan, workload=replace(plan.workload, wire_dtype="int4"))
    assert plan_nats(uniform, prices) == pytest.approx(0.01)
    found = choose_codecs(plan, budget, Timing.FULL)
    for (kind, a, b), _ in message_shares(plan).items():
        assert found.hop_dtype(a, b, backward=bool(kind)) in (("int4", "bf16"), ("int4-stochastic", "bf16"))[kind]
    assert iteration_ns(found) <= iteration_ns(
        replace(uniform, workload=replace(uniform.workload, gradient_dtype="int4"))
    )


@pytest.mark.slow
def test_more_nats_are_never_slower() -> None:
    problem = Problem(five_sites(6), Workload(MODELS["llama-500m"], microbatches=12), 4, 3)
    budgets = [CodecBudget.of(nats, PRICES) for nats in (0.006, 0.0, 0.002)]

    def planned(problem: Problem) -> Plan:
        return make_plan(problem, Strategy.BEST, PlanRequest(budget_s=float("inf"), changes=300))

    points = sweep_codecs(problem, budgets, planned)
    assert [point.budget for point in points] == [0, 0.002, 0.006]
    assert points[0].iteration_s > points[1].iteration_s > points[2].iteration_s
    for point in points:
        assert validate(point.plan) == []
        assert point.nats == plan_nats(point.plan, PRICES) <= point.budget + 1e-8


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ({"int7": {}}, "'int7' is none of"),
        ({"int8": {"hop": 1}}, "int8"),
        ({"int4": {"hops": "much"}}, "int4.hops"),
        ({"int8": {"hops": -1}}, "int8.hops"),
        ({"int8": {"hops": 1, "activations": 1}}, "int8.hops: says what both passes cost together"),
    ],
)
def test_bad_prices_are_named(table: dict[str, dict[str, float]], error: str) -> None:
    with pytest.raises(UserError, match=error):
        prices_of(table)


def test_the_documentation_has_the_prices_that_plans_are_made_with() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    numbers = {
        row[0]: [None if each == "–" else float(each) for each in row[1:]] for row in rows if row[0] in GRADIENTS
    }
    assert numbers == {codec: list(price) for codec, price in DEFAULT_PRICES.items()}


def test_a_plan_names_the_codecs_of_each_pass() -> None:
    plan = plan_of(1e9, {}, {(0, 1): 3, (0, 2): 1})
    assert codecs_text(plan) == "hops bf16; weight gradients fp32"
    back = tuple(LinkDtypes(*link, "bf16", "int8") for link in (("n0", "n1"), ("n1", "n0")))
    mixed = replace(plan, workload=replace(plan.workload, wire_dtypes=back, gradient_dtype="int4"))
    assert codecs_text(mixed) == "activations bf16; their gradients int8 75%, bf16 25%; weight gradients int4"


def test_what_has_no_price_is_not_chosen() -> None:
    assert CodecBudget.of(1.0, DEFAULT_PRICES).hops == ("fp32", "bf16", "int8", "fp8", "int4", "int6", "int4-rank8")
    assert CodecBudget.of(1.0, DEFAULT_PRICES).gradients == ("fp32", "bf16", "int8", "int4", "int2", "rank-64")
    with pytest.raises(UserError, match="fp8 has no price for weight gradients"):
        CodecBudget.of(1.0, DEFAULT_PRICES, ["bf16"], ["fp8"])
    with pytest.raises(UserError, match=r"cost 0\.002 nats"):
        CodecBudget.of(0.001, PRICES, ["bf16"], ["int8"])


def test_the_commands_say_what_was_chosen_and_draw_the_trade(tmp_path: Path, skippipe: Command) -> None:
    (tmp_path / "prices.toml").write_text("int8 = {hops = 0.004, weight_gradients = 0.002}\n")
    words = ["five-sites:5", "--model", "llama-500m", "--prices", str(tmp_path / "prices.toml")]
    said = json.loads(skippipe("plan", *words, "--nats", "0.003", "--search-steps", "300", "--json").out)
    chosen = {each["variable"]: each for each in said["choices"]}
    assert chosen["compression"]["instead"] == "bf16 hops and fp32 gradients"
    assert chosen["compression"]["iteration_s"] > said["iteration_s"]
    assert "int6" in said["codecs"]
    png, page = tmp_path / "trade.png", tmp_path / "trade.html"
    drawn = ["--budget", "0", "--png", str(png), "--html", str(page)]
    ran = skippipe("sweep", *words, "--nats", "0,0.006", *drawn)
    assert ran.code == 0, ran.err
    assert "0.006" in ran.out and "off the iteration" in ran.out
    assert png.read_bytes()[:4] == b"\x89PNG" and "What codecs give" in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("missing", "nats"), [(True, 0.002), (True, None), (False, None), (False, 0.002)])
def test_what_a_search_shows_is_what_its_plan_promises(missing: bool, nats: float | None) -> None:
    """Until codecs are chosen, it says that they are not."""
    cluster = five_sites(10)
    if missing:
        bandwidth = cluster.bandwidth_bytes_per_s.copy()
        bandwidth[2, 5] = bandwidth[5, 2] = 0
        cluster = replace(cluster, bandwidth_bytes_per_s=bandwidth)
    budget = None if nats is None else CodecBudget.of(nats, PRICES)
    problem = Problem(cluster, Workload(MODELS["llama-30m"], microbatches=9), 4, 3, codec_budget=budget)
    shown: list[tuple[str, float, float]] = []

    def note(what: str, share: float, best_s: float | None) -> None:
        assert 0 <= share <= 1
        shown.extend([(what, share, best_s)] if best_s is not None else [])

    found = make_plan(problem, Strategy.BEST, PlanRequest(seed=1, changes=12_000, progress=note))
    chosen = [best_s for what, _, best_s in shown if not what.endswith("codecs not yet chosen")]
    assert chosen[-1] == found.promise.iteration_s == min(chosen)
    assert [share for _, share, _ in shown] == sorted(share for _, share, _ in shown)
    assert (len(chosen) < len(shown)) == (nats is not None)


@pytest.mark.parametrize("nats", [0.0, 1.0])
def test_codecs_whose_error_feedback_takes_too_much_memory_are_left_out(nats: float) -> None:
    work = Workload(MODELS["llama-30m"], microbatches=4)
    cluster = uniform_cluster(4)
    memory = max(
        work.fixed_bytes(stage, layers) + work.held_bytes(layers) for stage, layers in enumerate(work.layer_split(2))
    )
    cluster = replace(cluster, nodes=tuple(replace(node, memory_bytes=memory) for node in cluster.nodes))
    problem = Problem(cluster, work, 2, 2, codec_budget=CodecBudget.of(nats, DEFAULT_PRICES))
    with pytest.raises(Infeasible):
        replace(problem, workload=replace(work, gradient_dtype="rank-64"))
    plan = make_plan(problem, Strategy.DTFM_SKIP, PlanRequest(budget_s=0, bound_s=1))
    assert validate(plan) == []
    assert plan_nats(plan, DEFAULT_PRICES) <= nats
