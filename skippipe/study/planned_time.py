"""What an iteration of every variant takes on a cluster, by the planner; and from that, what its runs take.

A path of each length is planned twice: with nodes where they are best for that length, and with nodes where they are
best for the length that most iterations of the run have. Nodes do not move while a model is trained, so the second is
what a run takes; the first says what moving them could still win. Only when a model grows, or begins to heal, which is
a job of its own, do nodes find new places.

An iteration with paths of several lengths has one plan for all of them, as in a job. While healing, an iteration in
several passes counts as so many. The forward pass of a teacher counts as a third of a whole iteration, and a stage that
takes the place of others (repeats) as one more visit: at most that, as the first averages no gradients, and the second
has no hop. Bridges are not counted here, though plans of jobs count them: they take a few thousandths. Nor are
adapters, and steps for parts of the microbatches (`heal_split`), which do take long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from skippipe.errors import UserError
from skippipe.json_fields import Fields, as_integer, json_text, read_as, write_text
from skippipe.model_shape import MODELS, model_named
from skippipe.planner.problem import Placement, PlanRequest, Problem, Strategy, lane_unit
from skippipe.planner.problem_spec import PlanSpec, cluster_named, problem_of
from skippipe.planner.published import Example, published_plan
from skippipe.planner.strategies import make_plan_for
from skippipe.simulator import simulate
from skippipe.skip_schedule import PathLength, SkipSchedule, mean_repeats, parts_of, path_length_text
from skippipe.study.config import PlanSettings, Study, Traffic, Variant
from skippipe.timeline import Timing
from skippipe.toml_config import from_table
from skippipe.value_ranges import CENTURY_S, LAYERS, POSITIVE, Range
from skippipe.workload import Workload

FORMAT, VERSION = "skippipe-study-times", 3
SEED = 0  # of the planner
TEACHER_SHARE = 1 / 3  # of a whole iteration: the forward pass
TIME_S = Range(0, CENTURY_S.most, above=True)
PlanningProgress = Callable[[str, float], None]
"""What is planned, and what share of all plans is done."""


class TimedPhase(NamedTuple):
    """Iterations that take the same time."""

    visited: PathLength
    """Stages on a path."""
    young: bool = False
    """The model has no other stages yet."""
    heals: bool = False
    """Only bridges and adapters learn."""


@dataclass(frozen=True)
class PlannedIteration:
    """An iteration to plan."""

    stages: int
    layers: int
    """Layers of the model for which the study's seconds are planned."""
    visited: PathLength
    """Stages on a path."""
    placed_for: PathLength
    """Stages on the paths for which nodes were placed; those of `visited` itself: where they are best."""
    early_exit: bool
    """With a second head, behind stage 0."""

    def __str__(self) -> str:
        head = ", early exit" if self.early_exit else ""
        placed = "" if self.placed_for == self.visited else f", nodes placed for {path_length_text(self.placed_for)}"
        return f"{path_length_text(self.visited)} of {self.stages} stages, {self.layers} layers{head}{placed}"

    @property
    def order(self) -> tuple[object, ...]:
        """What files and progress are sorted by."""
        return self.stages, self.layers, parts_of(self.visited), parts_of(self.placed_for), self.early_exit


@dataclass(frozen=True)
class PlannedTime:
    """What the planner found for it."""

    iteration_s: float | None
    """None: there is no plan."""
    strategy: str = ""
    placement: Placement = ()
    """For each stage, the nodes that hold it."""
    refusal: str = ""
    """Why there is no plan."""

    @classmethod
    def from_json(cls, entry: Fields) -> PlannedTime:
        planned = entry.has("iteration_s")
        return cls(
            iteration_s=entry.number("iteration_s", TIME_S) if planned else entry.take("iteration_s"),
            strategy=entry.take("strategy"),
            placement=tuple(tuple(nodes) for nodes in entry.items("placement")),
            refusal=entry.take("refusal"),
        )


@dataclass(frozen=True)
class PlannedTimes:
    """What a times file has; studies of any model share it."""

    planned: PlanSettings
    seed: int
    model_layers: int
    """Layers of the study's model; not in the file."""
    workload_layers: int
    """Layers of the model for which the study's seconds are planned."""
    published_s: float | None = None
    """The full pipeline as it was published for this cluster, where it was."""
    plans: dict[PlannedIteration, PlannedTime] = field(default_factory=dict)
    """What has been planned so far."""

    def planned_iterations(
        self, variant: Variant, phases: Mapping[TimedPhase, int], *, moving: bool = False
    ) -> dict[TimedPhase, PlannedIteration]:
        """The iteration to plan for every phase, if so many iterations are of that phase. With `moving`, nodes take the
        places that are best for each."""
        whole = self.whole_iteration(variant)
        layers, early_exit, found = whole.layers, whole.early_exit, {}
        for phase in phases:
            if phase.young:  # a pipeline by itself, of fewer stages
                assert isinstance(phase.visited, int), "the same share is skipped until a model grows"
                share = Fraction(phase.visited, variant.stages)
                found[phase] = PlannedIteration(
                    phase.visited, round(layers * share), phase.visited, phase.visited, early_exit
                )
            else:
                usual = phase if moving or phase.heals else most_frequent(phases)
                found[phase] = PlannedIteration(variant.stages, layers, phase.visited, usual.visited, early_exit)
        return found

    def whole_iteration(self, variant: Variant) -> PlannedIteration:
        """The iteration through all stages, on nodes placed for it."""
        layers = round(self.workload_layers * (variant.layers or self.model_layers) / self.model_layers)
        return PlannedIteration(variant.stages, layers, variant.stages, variant.stages, variant.recipe.early_exit > 0)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "planned": asdict(self.planned),
            "seed": self.seed,
            "workload_layers": self.workload_layers,
            "published_s": self.published_s,
            "iterations": [
                {**asdict(work), **asdict(plan_time), "placement": [list(nodes) for nodes in plan_time.placement]}
                for work, plan_time in sorted(self.plans.items(), key=lambda pair: pair[0].order)
            ],
        }

    @classmethod
    def from_json(cls, value: Any, model_layers: int) -> PlannedTimes:
        fields = Fields(value, "")
        fields.header(FORMAT, VERSION)
        plans = {}
        for entry in fields.objects("iterations"):
            stages, layers = (entry.integer(name, POSITIVE) for name in ("stages", "layers"))
            visited, placed_for = (_path_length(entry, name) for name in ("visited", "placed_for"))
            work = PlannedIteration(stages, layers, visited, placed_for, entry.flag("early_exit"))
            plans[work] = PlannedTime.from_json(entry)
            entry.close()
        has_published = fields.has("published_s")
        times = cls(
            planned=from_table(PlanSettings, fields.take("planned"), "planned"),
            seed=fields.integer("seed"),
            model_layers=model_layers,
            workload_layers=fields.integer("workload_layers", LAYERS),
            published_s=fields.number("published_s", TIME_S) if has_published else fields.take("published_s"),
            plans=plans,
        )
        fields.close()
        return times

    @classmethod
    def load(cls, path: Path, model_layers: int) -> PlannedTimes:
        return read_as(lambda value: cls.from_json(value, model_layers), path)

    def save(self, path: Path) -> None:
        write_text(path, json_text(self.to_json()) + "\n")


def _path_length(entry: Fields, name: str) -> PathLength:
    """Several lengths are a list."""
    value, place = entry.take(name), entry.at(name)
    if isinstance(value, list):
        return tuple(as_integer(each, f"{place}[{index}]", POSITIVE) for index, each in enumerate(value))
    return as_integer(value, place, POSITIVE)


def most_frequent(phases: Mapping[TimedPhase, int]) -> TimedPhase:
    """The phase of most iterations of the grown model before it heals; the one with the longest paths, if there are
    several."""
    grown = [phase for phase in phases if not (phase.young or phase.heals)] or list(phases)
    return max(grown, key=lambda phase: (phases[phase], parts_of(phase.visited)))


def variant_of(result: Mapping[str, Any]) -> Variant:
    """The variant that was trained."""
    settings = result["settings"]["variant"]
    traffic = Traffic(**settings.get("traffic", {}))
    return Variant(**{**settings, "recipe": SkipSchedule(**settings["recipe"]), "traffic": traffic})


def elapsed_s(result: Mapping[str, Any], times: PlannedTimes) -> list[float] | None:
    """Planned seconds from the start of a run to each point of its curve; None if something was not planned."""
    variant = variant_of(result)
    phases = phases_of(variant.recipe, variant.stages, result["settings"]["iterations"])
    wanted = times.planned_iterations(variant, Counter(phases))
    plans = {phase: times.plans.get(work) for phase, work in wanted.items()}
    seconds = {phase: each.iteration_s for phase, each in plans.items() if each and each.iteration_s}
    whole = times.plans.get(times.whole_iteration(variant))
    if seconds.keys() != wanted.keys() or (variant.recipe.distill and not (whole and whole.iteration_s)):
        return None
    whole_s = (whole and whole.iteration_s) or 0.0
    for phase, own_s in seconds.items():
        more = _stand_ins_s(variant.recipe, variant.stages, phase, own_s, whole_s)
        seconds[phase] = (own_s + more) * (variant.heal_passes if phase.heals else 1)
    passed = list(accumulate((seconds[phase] for phase in phases), initial=0.0))
    return [passed[int(point[0])] for point in result["curve"]]


def _stand_ins_s(recipe: SkipSchedule, stages: int, phase: TimedPhase, own_s: float, whole_s: float) -> float:
    """What a teacher and repeats add to the seconds of an iteration at most."""
    lengths = parts_of(phase.visited)
    skipping = [length for length in lengths if length < stages]
    if phase.young or (recipe.heal and not phase.heals) or not skipping:
        return 0.0
    taught_s = TEACHER_SHARE * whole_s * len(skipping) / len(lengths) if recipe.distill else 0.0
    return taught_s + own_s * mean_repeats(stages, Counter(lengths), recipe.repeats)


@cache  # used again and again by runs and tables
def phases_of(recipe: SkipSchedule, stages: int, iterations: int) -> tuple[TimedPhase, ...]:
    """The phase of every iteration."""
    return tuple(
        TimedPhase(
            recipe.visited(number, iterations, stages, stages),
            recipe.is_young(number, iterations),
            recipe.heals(number, iterations),
        )
        for number in range(iterations)
    )


def times_file(folder: Path, planned: PlanSettings) -> Path:
    """Where times of studies with these settings are kept."""
    unusual = [planned.timing] if planned.timing != PlanSettings.timing else []
    return folder / ("-".join(["times", *unusual, *planned.codecs]).replace(" ", "-") + ".json")


def planned_times(study: Study, path: Path, progress: PlanningProgress, seed: int = SEED) -> PlannedTimes:
    """Plan all that the study's variants need; the file has what was planned before, and gets what is planned now."""
    times = _begun(study, seed)
    if path.exists():
        found = PlannedTimes.load(path, times.model_layers)
        if _about(found) != _about(times):
            raise UserError(f"{path}: was made for {_about(found)}, and the study asks for {_about(times)}; remove it")
        times = replace(times, plans=found.plans)
    wanted: set[PlannedIteration] = set()
    for run in study.runs:
        phases = Counter(phases_of(run.variant.recipe, run.variant.stages, run.iterations))
        wanted.update(
            times.planned_iterations(run.variant, phases).values(),
            times.planned_iterations(run.variant, phases, moving=True).values(),
            [times.whole_iteration(run.variant)] if run.variant.recipe.distill else [],
        )
    missing = sorted(wanted - times.plans.keys(), key=lambda work: (work.visited != work.placed_for, work.order))
    for number, work in enumerate(missing):  # first those whose placement others take over
        progress(str(work), number / len(missing))
        times = replace(times, plans={**times.plans, work: _plan_time(times, work)})
        times.save(path)
    return times


def _begun(study: Study, seed: int) -> PlannedTimes:
    _, example = cluster_named(study.planned.cluster)
    workload = _workload(example, study.planned)
    published_s = None
    if example and "full_pipeline" in example.paths:
        plan = published_plan(replace(example, workload=workload), "full_pipeline", workload.microbatches)
        published_s = simulate(plan, Timing(study.planned.timing)).iteration_s
    return PlannedTimes(study.planned, seed, model_named(study.model).layers, workload.model.layers, published_s)


def _about(times: PlannedTimes) -> str:
    planned = times.planned
    return f"{planned.cluster}, {planned}, {planned.budget_s:g} s of planning, seed {times.seed}"


def _workload(example: Example | None, planned: PlanSettings) -> Workload:
    workload = example.workload if example else Workload(MODELS["llama-1.5b"])
    return replace(workload, wire_dtype=planned.wire, gradient_dtype=planned.gradients)


def _plan_time(times: PlannedTimes, work: PlannedIteration) -> PlannedTime:
    settled = times.plans[replace(work, visited=work.placed_for)] if work.placed_for != work.visited else None
    if settled and settled.iteration_s is None:
        return settled
    placement = settled.placement if settled else None
    request = PlanRequest(times.seed, times.planned.budget_s, placement)
    try:
        problem, microbatches = _problem(times.planned, work, placement)
        plan = make_plan_for(problem, work.visited, Strategy.BEST, request)
    except UserError as error:
        return PlannedTime(None, refusal=str(error))
    iteration_s = plan.promise.iteration_s * microbatches / plan.microbatches
    return PlannedTime(round(iteration_s, 6), plan.strategy, plan.placement)


def _problem(planned: PlanSettings, work: PlannedIteration, placement: Placement | None) -> tuple[Problem, int]:
    """The problem, and the microbatches that are wanted: if they do not divide over the stages (CC3), it has more."""
    cluster, example = cluster_named(planned.cluster)
    workload = _workload(example, planned)
    wanted, unit = workload.microbatches, lane_unit(work.stages, work.visited)
    plan_spec = PlanSpec(
        stages=work.stages,
        visit=max(parts_of(work.visited)),
        sizes=",".join(str(len(nodes)) for nodes in placement) if placement else None,
        microbatches=-(-wanted // unit) * unit,
        timing=Timing(planned.timing),
    )
    model = replace(workload.model, layers=work.layers)
    workload = replace(workload, model=model, early_exit=work.early_exit)
    problem = problem_of(cluster, workload, plan_spec, example)
    return replace(
        problem, decision_variables=replace(problem.decision_variables, layers=False)
    ), wanted  # they are what was trained
