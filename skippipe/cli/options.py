"""Options that several commands share, and the problem that they specify."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from skippipe.codecs import CODECS, LOW_RANK
from skippipe.errors import UserError
from skippipe.json_fields import exists
from skippipe.model_shape import MODELS, ModelShape, model_named
from skippipe.optim import DEFAULT as DEFAULT_OPTIMIZER
from skippipe.optim import OPTIMIZERS
from skippipe.value_ranges import (
    BUDGET_S,
    DRAWS,
    LARGEST,
    MICROBATCHES,
    NATS,
    SAMPLES,
    SEED,
    SEQUENCE,
    SLOTS,
    STAGES,
    Choices,
    Range,
    number_text,
    split_hint,
)

if TYPE_CHECKING:
    from skippipe.cluster import Cluster
    from skippipe.planner.codec_prices import CodecBudget
    from skippipe.planner.problem import Placement, Problem
    from skippipe.timeline import Timing

PIPELINE, WORKLOAD, SEARCH = "Pipeline", "Workload", "Search"
PART, WORK, NODES = "Part of the model", "Work", "Nodes"
LONGEST_SHOWN = 30  # characters of what is refused
Config = TypeVar("Config")
Number = TypeVar("Number", int, float)


def option(panel: str, help: str, default: str | None = None, *names: str, **more: Any) -> Any:
    """An option in a panel of --help; `default` is shown in place of its default value."""
    return typer.Option(*names, help=help, show_default=default or True, rich_help_panel=panel, **more)


pipeline_option, workload_option, search_option = (partial(option, panel) for panel in (PIPELINE, WORKLOAD, SEARCH))
part_option, work_option, nodes_option = (partial(option, panel) for panel in (PART, WORK, NODES))

ClusterName = Annotated[
    str,
    typer.Argument(
        metavar="CLUSTER",
        help="A cluster file; a built-in example (published18, published20, published42), which brings its workload; "
        "or a preset with a number of nodes: regions:24, datacentre:8, five-sites:15, random:30:7 (30 nodes, seed 7), "
        "homes:30:7 (the same on home lines).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
JsonFile = Annotated[Path | None, typer.Option("--output", "-o", help="Write what --json prints to this file.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace output files that are there already, which is refused otherwise.")
]
OutputFolder = Annotated[Path | None, typer.Option("--output", "-o", metavar="FOLDER", hidden=True)]
Trace = Annotated[
    Path | None,
    typer.Option(help="Write the timeline in Chrome trace format, for chrome://tracing or ui.perfetto.dev."),
]
ContentionOnly = Annotated[
    bool | None,
    typer.Option(
        "--contention-only/--full-timing",
        help="The timing of the SkipPipe paper: links carry any number of transfers at once, and the iteration ends "
        "with the last backward. Or full timing, which counts everything: queues on links, averaging, optimizer step.",
        show_default="full; built-in examples: contention-only; plan files: their own",
    ),
]
Budget = Annotated[float, Range(0, BUDGET_S.most), search_option("Seconds of search for each plan, at most.")]
Seed = Annotated[int, SEED, search_option("Same seed, same plan, unless the budget cuts the search short.")]


def _residual_scale_option(others: str) -> Any:
    return part_option(
        "What the output of the stages that are left, other than stage 0, is multiplied by: plain (1, as trained), "
        f"scaled ((S−1)/(L−1), so that L stages add as much as all S), {others}",
        None,
        "--residual-scale",
    )


_STAGES = "Use only these stages, in this order, as in 0,2,3."
_KEEP = "Or keep this share of the stages, drawn at random: 1/2, 50%, 1 (all)."
Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint; a run's output folder: its newest one; a Hugging Face folder, as 'skippipe export' and "
        "finished runs write it, or any other; or 'austen', a small model that is built in.",
    ),
]
Stages = Annotated[str | None, part_option(_STAGES)]
Keep = Annotated[str | None, part_option(_KEEP, "all")]
SeveralStages = Annotated[list[str] | None, part_option(f"{_STAGES} May be given several times.")]
SeveralKeep = Annotated[list[str] | None, part_option(f"{_KEEP} Also several times.", "all")]
Draws = Annotated[int, DRAWS, part_option("Different subsets to draw for every share.")]
ResidualScale = Annotated[str, _residual_scale_option("or a number.")]
ResidualScaleOrBest = Annotated[
    str,
    _residual_scale_option(
        "a number, or best (what is best on a few windows of the first text, between plain and scaled, for each L)."
    ),
]
Cut = Annotated[
    str | None, part_option("Stages to cut the model into: 6, or the layers of each, as in 2,2,4.", "as it was trained")
]
Keys = Annotated[
    Path | None, nodes_option("Nodes join from other machines ('skippipe node'): the folder that 'skippipe keys' made.")
]
Device = Annotated[str, work_option("cpu, cuda or cuda:N.")]
Devices = Annotated[
    str,
    work_option(
        "cpu, cuda, cuda:N, or several that layers are spread over: cuda:N-M, cpu:K. cuda: as many as are needed.",
        None,
        "--device",
        "--devices",
    ),
]
ReplicaDevices = Annotated[
    str,
    work_option(
        "cpu, cuda (all there are), cuda:N, or several that the work is divided over: cuda:N-M, cpu:K. Layers of a "
        "model that does not fit one of them are spread over as many as it takes.",
        None,
        "--device",
        "--devices",
    ),
]
Dtype = Annotated[Literal["fp32", "bf16"], work_option("What it is computed in.")]


def check_paths(checkpoint: Path, *texts: str) -> None:
    """UserError unless the model and these texts are there: to be called before torch is imported, which takes
    seconds."""
    from skippipe.checkpoint.locate import find_checkpoint
    from skippipe.data.documents import check_found

    find_checkpoint(checkpoint)
    for each in texts:
        check_found(each)


def one_folder(argument: Path | None, option: Path | None) -> Path:
    """The output folder, given as an argument or as an option."""
    if argument is not None and option is not None:
        raise UserError(f"FOLDER: '{argument}' and '{option}' (-o) are both given: leave one out")
    folder = argument or option
    if folder is None:
        raise UserError("FOLDER: missing; say where it goes")
    return folder


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of the workload and the pipeline, but for the number of stages and of skipped ones."""

    contention_only: ContentionOnly = None
    layers: Annotated[str | None, pipeline_option("Layers of each stage, as in 3,5,4,4,4,4.", "even")] = None
    dispatch: Annotated[
        Literal["first-come", "backward-first", "lanes-in-order"] | None,
        pipeline_option("Which task a node runs next.", "what is faster, if the strategy is best; else first-come"),
    ] = None
    split_backward: Annotated[
        bool | None,
        pipeline_option(
            "Compute weight gradients apart from the rest of the backward, when a node would be idle; or not.",
            "what is faster, if the strategy is best; else whole",
            "--split-backward/--whole-backward",
        ),
    ] = None
    model: Annotated[
        str | None,
        workload_option(f"{', '.join(MODELS)}, or a Hugging Face config.json or its folder.", "llama-1.5b"),
    ] = None
    sequence: Annotated[int | None, SEQUENCE, workload_option("Tokens of a sample.", "4096")] = None
    samples: Annotated[int | None, SAMPLES, workload_option("Samples of a microbatch.", "2")] = None
    microbatches: Annotated[
        int | None,
        MICROBATCHES,
        workload_option("Microbatches of an iteration.", "6 a device of data nodes", "-m", "--microbatches"),
    ] = None
    wire: Annotated[
        str | None,
        workload_option(
            f"Codec of activations on links: {', '.join(CODECS)}. Of several (bf16,int8) the smallest.",
            "bf16",
        ),
    ] = None
    gradients: Annotated[
        str | None,
        workload_option(f"Codec of weight gradients, likewise; or of low rank: {', '.join(LOW_RANK)}.", "fp32"),
    ] = None
    nats: Annotated[
        str | None,
        workload_option(
            "Loss, in nats, that codecs may add. Every link and stage then gets its own codec, so that iterations are "
            "shortest: one of --wire and --gradients, or of all with a price. 'sweep' takes several: 0,0.005,0.01.",
            "one codec everywhere: the smallest of --wire, and of --gradients",
        ),
    ] = None
    prices: Annotated[
        Path | None,
        workload_option("What codecs cost your model, in nats: a TOML file.", "what we have measured"),
    ] = None
    lora: Annotated[
        int | None,
        Range(0, 100_000),
        workload_option(
            "Rank of LoRA adapters, which are trained in place of the weights.", "0: all weights are trained"
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        workload_option(
            f"What takes the step: {', '.join(OPTIMIZERS)}. Their state fills more or less memory.", DEFAULT_OPTIMIZER
        ),
    ] = None
    offload: Annotated[
        Literal["none", "averaging", "optimizer"] | None,
        workload_option(
            "Held in host memory instead of the GPU's: sums of gradients (averaging), or these and the optimizer's "
            "state (optimizer).",
            "none",
        ),
    ] = None
    max_slots: Annotated[
        int | None,
        SLOTS,
        workload_option("At most so many microbatches in flight on a node.", "what its memory holds; the examples: 3"),
    ] = None
    checkpointing: Annotated[
        bool | None,
        workload_option(
            "Recompute activations in the backward pass: more slots, and longer backward passes.",
            "best: if memory is short and it is faster; other strategies: no",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """Options for the number of stages and of skipped ones."""

    stages: Annotated[
        int | None, STAGES, pipeline_option("Stages of the pipeline.", "6, or 4 under 12 nodes", "-s", "--stages")
    ] = None
    visit: Annotated[
        int | None, STAGES, pipeline_option("Stages on a path, stage 0 included.", None, "-l", "--visit")
    ] = None
    skip: Annotated[str | None, pipeline_option("Or the share to skip: 0.33, 33%, 1/3.", "1/3, or 1/4 of 4 stages")] = (
        None
    )
    sizes: Annotated[str | None, pipeline_option("Nodes of each stage, as in 5,3,3,3,3,3.", "to match the demand")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class ProblemOptions(SweepOptions, StageOptions):
    """All options that make a problem of a cluster."""


def takes(options_type: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Spread a dataclass of options over the command line of a command, which gets them as one object, `options`."""
    hints = get_type_hints(options_type, include_extras=True)

    def spread(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()

        @wraps(command)
        def called(**given: Any) -> None:
            chosen = options_type(**{field.name: given.pop(field.name) for field in fields(options_type)})
            command(**given, options=chosen)

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [each.replace(kind=keyword) for each in own if each.name != "options"] + [
            inspect.Parameter(field.name, keyword, default=field.default, annotation=hints[field.name])
            for field in fields(options_type)
        ]
        return _with_parameters(called, parameters)

    return spread


def check_ranges_of(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with its numbers checked while the command line is parsed: an error is one line, as in files."""
    parameters = [
        each.replace(annotation=_checked(each.name, each.annotation))
        for each in inspect.signature(command, eval_str=True).parameters.values()
    ]

    @wraps(command)
    def called(**given: Any) -> None:
        command(**given)

    return _with_parameters(called, parameters)


def _with_parameters(command: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _checked(name: str, hint: Any) -> Any:
    """An option that takes numbers, with a parser that checks their range, and help that shows it."""
    inner, within = split_hint(hint)
    number = get_args(inner)[0] if get_origin(inner) is list else inner
    if number not in (int, float):
        return hint
    assert isinstance(within, Range), f"{name} has no range"
    shown = copy.copy(next(note for note in get_args(hint) if isinstance(note, OptionInfo)))
    place = next((each for each in shown.param_decls or () if each.startswith("--")), f"--{name.replace('_', '-')}")

    shown.parser = partial(parse_number, number, within=within, place=place)
    limits = f"{number_text(within.least)} or more" if within.most == LARGEST else str(within)
    shown.help = f"{shown.help} {limits.capitalize()}."
    shown.metavar = shown.metavar or ("INTEGER" if number is int else "NUMBER")
    return Annotated[get_args(hint)[0], shown]


def parse_number(number: type[Number], given: str, within: Range, place: str) -> Number:
    """The number that a text says; UserError if it is none, or out of range."""
    try:
        found = number(given)
    except ValueError:
        kind = "whole number" if number is int else "number"
        shortened = given if len(given) <= LONGEST_SHOWN else f"{given[:LONGEST_SHOWN]}…"
        raise UserError(f"{place}: '{shortened}' is not a {kind}; give {within}") from None
    within.check(found, place)
    return found


def with_given(config: Config, /, **given: Any) -> Config:
    """A dataclass with the options that were given on the command line; None keeps what it has."""
    return replace(config, **{name: value for name, value in given.items() if value is not None})  # type: ignore[type-var]


@cache
def print_doubts(cluster: Cluster) -> None:
    """Notes on figures that look as if they were in another unit, once for a cluster."""
    for doubt in cluster.doubts:
        print(f"note: {doubt}", file=sys.stderr)


def _shape_of(name: str) -> ModelShape:
    """Of a preset, or of a Hugging Face configuration. What that of a model that also reads pictures leaves out of its
    text model, transformers knows, if it is installed."""
    from skippipe.model.model_files import reads_more

    try:
        return model_named(name)
    except UserError:
        if not exists(Path(name)) or not reads_more(Path(name)) or find_spec("transformers") is None:
            raise
    from skippipe.model.model_spec import config_named

    return ModelShape.from_config(config_named(name).to_dict(), name)


def problem_from(cluster_name: str, options: ProblemOptions) -> Problem:
    """The problem: the example's own settings or the defaults, overridden by the command line."""
    from skippipe.dispatch import Dispatch
    from skippipe.planner.problem_spec import PlanSpec, cluster_named, fastest_of, problem_of
    from skippipe.timeline import Timing
    from skippipe.workload import Workload

    if options.optimizer:
        Choices(OPTIMIZERS).check(options.optimizer, "--optimizer")
    cluster, example = cluster_named(cluster_name)
    print_doubts(cluster)
    workload = example.workload if example else Workload(MODELS["llama-1.5b"])
    workload = with_given(
        workload,
        model=_shape_of(options.model) if options.model else None,
        sequence_tokens=options.sequence,
        samples_per_microbatch=options.samples,
        wire_dtype=fastest_of(options.wire, "--wire"),
        gradient_dtype=fastest_of(options.gradients, "--gradients"),
        optimizer=options.optimizer,
        offload=options.offload,
        max_slots=options.max_slots,
        activation_checkpointing=options.checkpointing,
    )
    if options.lora:
        workload = replace(workload, adapter_parameters=workload.model.adapter_parameters(options.lora))
    budget: CodecBudget | None = None
    if options.nats is not None:
        budget = codec_budget(options, *numbers_of(options.nats, "--nats", NATS, most=1))
        workload = replace(workload, wire_dtype=budget.usual[0], gradient_dtype=budget.usual[1])
    elif options.prices:
        raise UserError("--prices: would have no effect without --nats, what codecs may cost; leave it out")
    problem = problem_of(
        cluster,
        workload,
        PlanSpec(
            stages=options.stages,
            visit=options.visit,
            skip=options.skip,
            sizes=options.sizes,
            layers=options.layers,
            microbatches=options.microbatches,
            dispatch=Dispatch(options.dispatch) if options.dispatch else None,
            split_backward=options.split_backward,
            checkpointing=options.checkpointing,
            timing=timing_of(options.contention_only, example.timing if example else Timing.FULL),
        ),
        example,
    )
    return replace(problem, codec_budget=budget) if budget else problem


def codec_budget(options: SweepOptions, nats: float) -> CodecBudget:
    """What codecs may cost, of those that the options name."""
    from skippipe.planner.codec_prices import DEFAULT_PRICES, CodecBudget, read_prices
    from skippipe.planner.problem_spec import codecs_of

    prices = read_prices(options.prices) if options.prices else DEFAULT_PRICES
    accepted = codecs_of(options.wire, "--wire"), codecs_of(options.gradients, "--gradients")
    return CodecBudget.of(nats, prices, *accepted)


def numbers_of(text: str, place: str, within: Range, most: int | None = None) -> list[float]:
    """Numbers of a list such as 0,0.005,0.01; at most so many of them."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{place}: '{text}' is not a number, nor a list such as 0,0.005,0.01; give {within}") from None
    for each in found:
        within.check(each, place)
    if most is not None and len(found) > most:
        raise UserError(f"{place}: {len(found)} numbers, and one plan has one; 'skippipe sweep' takes several")
    return found


def timing_of(contention_only: bool | None, default_timing: Timing) -> Timing:
    """The timing given on the command line, or else the default."""
    from skippipe.timeline import Timing

    if contention_only is None:
        return default_timing
    return Timing.CONTENTION_ONLY if contention_only else Timing.FULL


def with_stages_of(
    text: str | None, cluster_name: str, options: ProblemOptions
) -> tuple[Placement | None, ProblemOptions]:
    """The placement to keep, of an example or of a plan file for the same cluster, and options with its sizes."""
    from skippipe.plan import Plan
    from skippipe.planner.problem_spec import cluster_named
    from skippipe.planner.published import EXAMPLES

    if text is None:
        return None, options
    if options.sizes is not None:
        raise UserError("--keep-stages and --sizes both say how many nodes a stage has: give one of them")
    if text in EXAMPLES:
        example = EXAMPLES[text]()
        if example.placement is None:
            raise UserError(f"--keep-stages: the stages of '{text}' were not published; name a plan file instead")
        kept, placement = example.cluster, example.placement
    else:
        plan = Plan.load(Path(text))
        kept, placement = plan.cluster, plan.placement
    cluster, _ = cluster_named(cluster_name)
    if cluster.fingerprint != kept.fingerprint:
        raise UserError(f"--keep-stages: '{text}' is for the cluster '{kept.name}', not for '{cluster.name}'")
    if options.stages not in (None, len(placement)):
        raise UserError(f"--keep-stages: '{text}' has {len(placement)} stages, and {options.stages} are asked for")
    sizes = ",".join(str(len(nodes)) for nodes in placement)
    return placement, replace(options, sizes=sizes)
