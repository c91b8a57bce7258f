"""What people type: clusters by name or file, the options that several commands share, and the problem they make."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from skippipe.codecs import CODECS
from skippipe.errors import UserError
from skippipe.value_ranges import (
    BUDGET_S,
    DRAWS,
    MICROBATCHES,
    SAMPLES,
    SEED,
    SEQUENCE,
    SLOTS,
    STAGES,
    Range,
    split_hint,
)

if TYPE_CHECKING:
    from skippipe.planner.problem import Placement, Problem
    from skippipe.timeline import Timing

PIPELINE, WORKLOAD, SEARCH = "Pipeline", "Workload", "Search"
PART, WORK, NODES = "Part of the model", "Work", "Nodes"
LONGEST_SHOWN = 30  # characters of what is refused

ClusterName = Annotated[
    str,
    typer.Argument(
        metavar="CLUSTER",
        help="A cluster file; a built-in example (published18, published20, published42), which brings its workload; "
        "or a preset with a number of nodes: regions:24, datacentre:8, five-sites:15, random:30:7 (30 nodes, seed 7).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
Trace = Annotated[
    Path | None,
    typer.Option(help="Write the timeline in Chrome trace format, for chrome://tracing or ui.perfetto.dev."),
]
ContentionOnly = Annotated[
    bool | None,
    typer.Option(
        "--contention-only/--full-timing",
        help="The study's model of time: links carry any number of transfers at once, and the iteration ends with the "
        "last backward. Or everything: transfers on a link queue, averaging and optimizer step are counted.",
        show_default="full; built-in examples: contention-only; plan files: their own",
    ),
]
Budget = Annotated[
    float,
    Range(0, BUDGET_S.most),
    typer.Option(help="Seconds of planning at most (for each strategy).", rich_help_panel=SEARCH),
]
Seed = Annotated[
    int,
    SEED,
    typer.Option(help="Same seed, same plan, unless the budget cuts the search short.", rich_help_panel=SEARCH),
]


def _drive(others: str) -> Any:
    return typer.Option(
        help="How strongly the stages that are left are driven, other than stage 0: plain (as trained), scaled (by "
        f"(S−1)/(L−1), so that L stages add as much as all S), {others}",
        rich_help_panel=PART,
    )


_STAGES = "Use only these stages, in this order, as in 0,2,3."
_KEEP = "Or keep this share of the stages, drawn at random: 1/2, 50%, 1 (all)."
Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint; a run's output folder: its newest one; or a Hugging Face folder, as 'skippipe export' and "
        "finished runs write it, or any other.",
    ),
]
Stages = Annotated[str | None, typer.Option(help=_STAGES, rich_help_panel=PART)]
Keep = Annotated[str | None, typer.Option(help=_KEEP, show_default="all", rich_help_panel=PART)]
SeveralStages = Annotated[
    list[str] | None, typer.Option(help=f"{_STAGES} May be given several times.", rich_help_panel=PART)
]
SeveralKeep = Annotated[
    list[str] | None, typer.Option(help=f"{_KEEP} Also several times.", show_default="all", rich_help_panel=PART)
]
Draws = Annotated[int, DRAWS, typer.Option(help="Different parts to draw for every share.", rich_help_panel=PART)]
ResidualScale = Annotated[str, _drive("or a number to multiply by.")]
ResidualScaleOrBest = Annotated[
    str,
    _drive(
        "a number to multiply by, or best (what is best on a few windows of the first text, between plain and scaled, "
        "for each L)."
    ),
]
Cut = Annotated[
    str | None,
    typer.Option(
        help="Stages to cut the model into: 6, or the layers of each, as in 2,2,4.",
        show_default="as it was trained",
        rich_help_panel=PART,
    ),
]
Keys = Annotated[
    Path | None,
    typer.Option(
        help="Nodes join from other machines ('skippipe node'): the folder that 'skippipe keys' made.",
        rich_help_panel=NODES,
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.", rich_help_panel=WORK)]
Dtype = Annotated[Literal["fp32", "bf16"], typer.Option(help="What it is computed in.", rich_help_panel=WORK)]


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The workload and the pipeline, but for how many stages there are and how many are skipped."""

    contention_only: ContentionOnly = None
    layers: Annotated[
        str | None,
        typer.Option(help="Layers of each stage, as in 3,5,4,4,4,4.", show_default="even", rich_help_panel=PIPELINE),
    ] = None
    dispatch: Annotated[
        Literal["first-come", "backward-first", "lanes-in-order"] | None,
        typer.Option(
            help="Who goes next on a node.",
            show_default="what is faster, if the strategy is best; else first-come",
            rich_help_panel=PIPELINE,
        ),
    ] = None
    split_backward: Annotated[
        bool | None,
        typer.Option(
            "--split-backward/--whole-backward",
            help="Compute weight gradients apart from the rest of the backward, when a node would be idle; or not.",
            show_default="what is faster, if the strategy is best; else whole",
            rich_help_panel=PIPELINE,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="llama-tiny, llama-30m, llama-500m, llama-1.5b, llama-8b, or a Hugging Face config.json.",
            show_default="llama-1.5b",
            rich_help_panel=WORKLOAD,
        ),
    ] = None
    sequence: Annotated[
        int | None, SEQUENCE, typer.Option(help="Tokens of a sample.", show_default="4096", rich_help_panel=WORKLOAD)
    ] = None
    samples: Annotated[
        int | None, SAMPLES, typer.Option(help="Of a microbatch.", show_default="2", rich_help_panel=WORKLOAD)
    ] = None
    microbatches: Annotated[
        int | None,
        MICROBATCHES,
        typer.Option(
            "-m", "--microbatches", help="Of an iteration.", show_default="6 a data node", rich_help_panel=WORKLOAD
        ),
    ] = None
    wire: Annotated[
        str | None,
        typer.Option(
            help=f"Activations on the wire: {', '.join(CODECS)}; or all that will do, as in bf16,int8.",
            show_default="bf16",
            rich_help_panel=WORKLOAD,
        ),
    ] = None
    gradients: Annotated[
        str | None,
        typer.Option(help="Weight gradients on the wire, likewise.", show_default="fp32", rich_help_panel=WORKLOAD),
    ] = None
    max_slots: Annotated[
        int | None,
        SLOTS,
        typer.Option(
            help="At most so many microbatches in flight on a node.",
            show_default="what its memory holds; the examples: 3",
            rich_help_panel=WORKLOAD,
        ),
    ] = None
    checkpointing: Annotated[
        bool,
        typer.Option("--checkpointing", help="Recompute activations in the backward pass.", rich_help_panel=WORKLOAD),
    ] = False


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """How many there are, and how many are skipped."""

    stages: Annotated[
        int | None,
        STAGES,
        typer.Option(
            "-s", "--stages", help="Of the pipeline.", show_default="6, or 4 under 12 nodes", rich_help_panel=PIPELINE
        ),
    ] = None
    visit: Annotated[
        int | None,
        STAGES,
        typer.Option("-l", "--visit", help="Stages on a path, stage 0 included.", rich_help_panel=PIPELINE),
    ] = None
    skip: Annotated[
        str | None,
        typer.Option(
            help="Or the share to skip: 0.33, 33%, 1/3.",
            show_default="1/3, or 1/4 of 4 stages",
            rich_help_panel=PIPELINE,
        ),
    ] = None
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Nodes of each stage, as in 5,3,3,3,3,3.", show_default="to match the demand", rich_help_panel=PIPELINE
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ProblemOptions(SweepOptions, StageOptions):
    """All that makes a problem of a cluster."""


def takes(options_type: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Spread a dataclass of options over the command line of a command, which gets them as one object, `options`."""
    hints = get_type_hints(options_type, include_extras=True)

    def spread(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()

        @wraps(command)
        def called(**said: Any) -> None:
            chosen = options_type(**{field.name: said.pop(field.name) for field in fields(options_type)})
            command(**said, options=chosen)

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [each.replace(kind=keyword) for each in own if each.name != "options"] + [
            inspect.Parameter(field.name, keyword, default=field.default, annotation=hints[field.name])
            for field in fields(options_type)
        ]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        return called

    return spread


def check_ranges_of(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with its numbers checked while the command line is read: what is wrong is one line, as in files."""
    parameters = [
        each.replace(annotation=_checked(each.name, each.annotation))
        for each in inspect.signature(command, eval_str=True).parameters.values()
    ]

    @wraps(command)
    def called(**said: Any) -> None:
        command(**said)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def _number_in(hint: Any) -> type[Any] | None:
    """int or float, if an option takes such numbers."""
    inner = split_hint(hint)[0]
    inner = get_args(inner)[0] if get_origin(inner) is list else inner
    return inner if inner in (int, float) else None


def _checked(name: str, hint: Any) -> Any:
    """An option that takes numbers, with a reader that knows their range, and help that says it."""
    number = _number_in(hint)
    if number is None:
        return hint
    shown = copy.copy(_option_in(hint))
    place = _option_name(name, hint)
    shown.parser = lambda said: _read_number(hint, said, place)
    shown.help = f"{shown.help} {str(split_hint(hint)[1]).capitalize()}."
    shown.metavar = shown.metavar or ("INTEGER" if number is int else "NUMBER")
    return Annotated[get_args(hint)[0], shown]


def _option_in(hint: Any) -> Any:
    return next(note for note in get_args(hint) if isinstance(note, OptionInfo))


def _option_name(name: str, hint: Any) -> str:
    said = [each for each in _option_in(hint).param_decls or () if each.startswith("--")]
    return said[0] if said else f"--{name.replace('_', '-')}"


def _read_number(hint: Any, said: Any, place: str) -> Any:
    number, within = _number_in(hint), split_hint(hint)[1]
    assert number is not None
    assert within is not None
    try:
        found = number(said)
    except ValueError:
        kind = "whole number" if number is int else "number"
        shown = said if len(said) <= LONGEST_SHOWN else f"{said[:LONGEST_SHOWN]}…"
        raise UserError(f"{place}: '{shown}' is not a {kind}; give {within}") from None
    within.check(found, place)
    return found


def problem_from(cluster_name: str, options: ProblemOptions) -> Problem:
    """The example's own settings, or the defaults, with what was said on the command line on top."""
    from skippipe.dispatch import Dispatch
    from skippipe.planner.problem_spec import PlanSpec, cluster_named, fastest_of, problem_of
    from skippipe.timeline import Timing
    from skippipe.workload import MODELS, Workload, model_named

    cluster, example = cluster_named(cluster_name)
    workload = example.workload if example else Workload(MODELS["llama-1.5b"])
    said = {
        "model": model_named(options.model) if options.model else None,
        "sequence_tokens": options.sequence,
        "samples_per_microbatch": options.samples,
        "wire_dtype": fastest_of(options.wire, "--wire"),
        "gradient_dtype": fastest_of(options.gradients, "--gradients"),
        "max_slots": options.max_slots,
        "activation_checkpointing": options.checkpointing or None,
    }
    changes = {name: value for name, value in said.items() if value is not None}
    workload = replace(workload, **changes)  # type: ignore[arg-type]

    return problem_of(
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
            timing=timing_of(options.contention_only, example.timing if example else Timing.FULL),
        ),
        example,
    )


def timing_of(contention_only: bool | None, usual: Timing) -> Timing:
    """What was said on the command line, or else the usual."""
    from skippipe.timeline import Timing

    if contention_only is None:
        return usual
    return Timing.CONTENTION_ONLY if contention_only else Timing.FULL


def with_stages_of(
    text: str | None, cluster_name: str, options: ProblemOptions
) -> tuple[Placement | None, ProblemOptions]:
    """Stages to keep, those of a built-in example or of a plan file for the same cluster, and the sizes they have."""
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
        kept, placement = plan.cluster, tuple(stage.nodes for stage in plan.stages)
    cluster, _ = cluster_named(cluster_name)
    if cluster.fingerprint != kept.fingerprint:
        raise UserError(f"--keep-stages: '{text}' is for the cluster '{kept.name}', not for '{cluster.name}'")
    if options.stages not in (None, len(placement)):
        raise UserError(f"--keep-stages: '{text}' has {len(placement)} stages, and {options.stages} are asked for")
    sizes = ",".join(str(len(nodes)) for nodes in placement)
    return placement, replace(options, sizes=sizes)
