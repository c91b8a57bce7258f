"""The results of a study as tables, and the figures that its pictures show too.

    headline      every variant in a line
    texts         loss of the whole model on every text
    codecs        what codecs in training cost
    time_to_loss  when a variant is as good as the full model
    equal_time    how good it is when another one ends
    regime        at how many tokens a parameter skipping is ahead of a smaller dense model
    curves        loss while training
    routers       are experts used evenly, and do they specialise?
    iterations    seconds by the planner

and those of `part_tables`.

A table for which there is nothing is None. Differences are taken seed by seed; ± is the standard deviation over seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from skippipe.report.summary import NOTHING, Table
from skippipe.skip_schedule import parts_of, path_length_text
from skippipe.study.config import Traffic, Variant
from skippipe.study.part_tables import parts, parts_by_wire, questions
from skippipe.study.planned_time import PlannedTimes, elapsed_s, phases_of, variant_of
from skippipe.study.results import FULL, Result, Runs, Seeds, first_text, gaps, held_out, skipped, spread, whole_loss

COLUMNS = 6  # of a curve
PLAIN = Variant("")  # whole all along
SAME_TIME = 1.01  # planned times that differ by less are the same


def all_tables(runs: Runs, times: PlannedTimes | None) -> list[Table]:
    found = [headline(runs, times), texts(runs), codecs(runs), parts(runs), parts_by_wire(runs), questions(runs)]
    if times:
        found += [time_to_loss(runs, times), equal_time(runs, times), regime(runs, times)]
    found += [curves(runs), routers(runs)]
    if times:
        found.append(iterations(runs, times))
    return [table for table in found if table is not None]


def headline(runs: Runs, times: PlannedTimes | None) -> Table | None:
    if not runs:
        return None
    totals = {name: total_s(seeds, times) for name, seeds in runs.items()}
    full_s = totals.get(FULL)
    rows = []
    for name, seeds in runs.items():
        one = next(iter(seeds.values()))
        took_s = totals[name]
        row = [
            name,
            f"{one['parameters'] / 1e6:.1f}M",
            str(len(seeds)),
            f"{one['tokens'] / 1e6:.3g}M",
            f"{skipped(one):.0%}",
            spread([whole_loss(result) for result in seeds.values()], ".4f"),
            spread(gaps(runs, name, whole_loss), "+.4f"),
        ]
        if times:
            row.append(f"{took_s / full_s:.2f}" if took_s and full_s else NOTHING)
        rows.append(row)
    headings = ["variant", "parameters", "seeds", "tokens", "skipped", "loss", f"gap to {FULL}"]
    note = f"Loss of the whole model on '{first_text(runs)}', held out."
    if times:
        headings.append(f"time / {FULL}")
        note += (
            f" Time as planned for {times.planned.cluster} ({times.planned}), nodes staying where they are best "
            "for the length of path that most iterations have."
        )
    return Table("Variants", note, headings, rows)


def texts(runs: Runs) -> Table | None:
    names = list(
        dict.fromkeys(text for seeds in runs.values() for result in seeds.values() for text in result["whole"])
    )
    rows = []
    for name, seeds in runs.items():
        row = [name]
        for text in names:

            def loss(result: Result, text: str = text) -> float | None:
                found: float | None = result["whole"].get(text)
                return found

            mean = spread([each for result in seeds.values() if (each := loss(result)) is not None], ".4f")
            apart = gaps(runs, name, loss)
            row.append(f"{mean} ({spread(apart, '+.4f')})" if apart else mean)
        rows.append(row)
    note = f"Loss of the whole model; in brackets the gap to {FULL}."
    return Table("Texts", note, ("variant", *names), rows) if len(names) > 1 else None


def codecs(runs: Runs) -> Table | None:
    """Variants with codecs beside the one that has the same recipe and none."""

    def settings(seeds: Seeds) -> tuple[dict[str, Any], dict[str, Any]]:
        variant = next(iter(seeds.values()))["settings"]["variant"]
        return variant["recipe"], {**asdict(Traffic()), **variant.get("traffic", {})}

    rows = []
    for name, seeds in runs.items():
        recipe, traffic = settings(seeds)
        plain = {**asdict(Traffic()), "replicas": traffic["replicas"]}
        control = next((other for other, each in runs.items() if settings(each) == (recipe, plain)), None)
        if traffic != plain and control:
            apart = spread(gaps(runs, name, whole_loss, control), "+.4f")
            hops: tuple[str, ...] = (traffic["wire"], Traffic(**traffic).back_text)
            if traffic["subspace"]:
                rank = f"rank {traffic['subspace']}{', fixed' * (traffic['basis'] == 'fixed')}"
                hops = tuple(f"{rank}, {each}" if each else rank for each in hops)
            names = (each or NOTHING for each in (*hops, traffic["gradients"]))
            rows.append((name, *names, spread([whole_loss(result) for result in seeds.values()], ".4f"), apart))
    headings = ("variant", "activations", "their gradients", "weight gradients", "loss", "gap")
    note = (
        "Loss of the whole model, evaluated without codecs, but in the subspace that it was trained with; gap to the "
        "same recipe trained without."
    )
    return Table("Codecs in training", note, headings, rows) if rows else None


def time_to_loss(runs: Runs, times: PlannedTimes) -> Table | None:
    full_s = total_s(runs.get(FULL, {}), times)
    if not full_s:
        return None
    published_s = _published_s(runs[FULL], times)
    rows = []
    for name, seeds in runs.items():
        reached: list[float] = []
        cells = []
        for seed, result in seeds.items():
            at = elapsed_s(result, times)
            if at is None or seed not in runs[FULL]:
                continue
            target = held_out(runs[FULL][seed])[-1]
            when_s = first_reach(at, held_out(result), target)
            if when_s is None:
                closest = min(held_out(result))
                cells.append(f"not reached (closest {closest:.4f}, {closest - target:+.4f})")
            else:
                reached.append(when_s)
                cells.append(f"{when_s / full_s:.3f}")
        if not cells:
            continue
        some = f" ({len(reached)} of {len(cells)} seeds)" if 0 < len(reached) < len(cells) else ""
        row = [name, ", ".join(cells), spread([each / full_s for each in reached], ".3f") + some]
        if published_s:
            row.append(spread([each / published_s for each in reached], ".3f") + some)
        rows.append(row)
    headings = ["variant", "each seed", f"time / {FULL}"]
    note = (
        f"Planned time until the held-out loss first is what '{FULL}' has in the end, as a share of the time that "
        f"'{FULL}' takes ({full_s / 3600:.1f} h); between two evaluations the loss is taken to fall evenly."
    )
    if published_s:
        headings.append(f"time / {FULL} as published")
        note += f" As published, the full pipeline is wired worse and takes {published_s / 3600:.1f} h."
    return Table("Time to the full model's loss", note, headings, rows)


def equal_time(runs: Runs, times: PlannedTimes) -> Table | None:
    """At the end of every variant that skips nothing: the full model, and smaller ones."""
    ends = {name: total_s(seeds, times) for name, seeds in runs.items() if not skipped(next(iter(seeds.values())))}
    ends_s = {name: end_s for name, end_s in ends.items() if end_s}
    rows = []
    for name, seeds in runs.items():
        spans = [(at, held_out(result)) for result in seeds.values() if (at := elapsed_s(result, times))]
        cells = []
        for end_s in ends_s.values():
            losses = [loss_at(at, losses, end_s) for at, losses in spans]
            mean = spread([loss for loss in losses if loss is not None], ".4f")
            over = max((at[-1] for at, _ in spans), default=end_s) / end_s
            cells.append(mean if over > 0.995 else f"{mean} (ends at {over:.0%})")
        if spans:
            rows.append((name, *cells))
    if len(rows) < 2 or not ends_s:
        return None
    note = (
        "Held-out loss at the planned time at which the variant of the column ends. A variant that is over before "
        "stays as it was; one that goes on has not brought its learning rate down yet, which counts against it."
    )
    return Table("At equal planned time", note, ("variant", *(f"at the end of '{name}'" for name in ends_s)), rows)


class RegimePoint(NamedTuple):
    """A run to its end."""

    variant: str
    tokens_per_parameter: float
    planned_s: float
    loss: float


def regime(runs: Runs, times: PlannedTimes) -> Table | None:
    """Models that were trained with stages skipped, beside the full and the smaller dense one at equal planned time."""
    rows, crossings = [], []
    families = _families(runs, times)
    for (*about, _), (variant, points) in families.items():
        if variant.recipe.phases == PLAIN.recipe.phases:
            continue
        rivals = [each for (*other, _), each in families.items() if other == about and _is_dense(each[0])]
        whole = [points for rival, points in rivals if rival.layers == variant.layers]
        dense = [points for rival, points in rivals if rival.layers != variant.layers]
        ahead = []
        for point in points:
            full = _best_in_time(whole, point.planned_s)
            smaller = _best_in_time(dense, point.planned_s)
            if smaller is not None:
                gap = point.loss - smaller
                ahead.append((point.tokens_per_parameter, gap))
                figures = f"{point.tokens_per_parameter:.3g}", f"{point.planned_s / 3600:.1f}", f"{point.loss:.4f}"
                others = f"{smaller:.4f}", NOTHING if full is None else f"{full:.4f}", spread([gap], "+.4f")
                rows.append((point.variant, str(about[1]), *figures, *others))
        if len(ahead) > 1:
            grown = f", grown at {variant.recipe.grow}" if variant.recipe.grow else ""
            crossings.append(f" {about[0]}, '{variant.recipe.skip}{grown}', seed {about[1]}: {_crossing(ahead)}")
    headings = ("variant", "seed", "tokens a parameter", "planned h", "loss", "smaller dense", FULL, "gap to smaller")
    note = (
        "Runs to their end, each with its own schedule of the learning rate, at equal planned time: losses of the best "
        "smaller dense model and of the full pipeline are on the straight line, over the logarithm of time, between "
        f"their runs with more and with less of it ({times.planned.cluster}, {times.planned.timing})."
    )
    title = "At equal planned time, by tokens a parameter"
    return Table(title, note + "".join(crossings), headings, rows) if rows else None


def _families(runs: Runs, times: PlannedTimes) -> dict[tuple[str, int, str, str], tuple[Variant, list[RegimePoint]]]:
    """Runs that differ in tokens only, those with fewer first: by model, seed, learning and variant."""
    found: dict[tuple[str, int, str, str], tuple[Variant, list[RegimePoint]]] = {}
    for name, seeds in runs.items():
        planned_s = total_s(seeds, times)
        for seed, result in seeds.items() if planned_s else ():
            settings = result["settings"]
            learning = {key: each for key, each in settings["learning"].items() if key not in ("iterations", "warmup")}
            variant = replace(variant_of(result), name=PLAIN.name, tokens=PLAIN.tokens)
            point = RegimePoint(name, result["tokens"] / result["parameters"], planned_s or 0.0, whole_loss(result))
            key = str(settings["model"]), seed, repr(sorted(learning.items())), repr(variant)
            found.setdefault(key, (variant, []))[1].append(point)
    for _, points in found.values():
        points.sort(key=lambda point: point.planned_s)
    return found


def _is_dense(variant: Variant) -> bool:
    """Whether it is a model of so many layers and no more: whole all along, without codecs or anything else."""
    return replace(variant, layers=PLAIN.layers, stages=PLAIN.stages) == PLAIN


def _best_in_time(families: Iterable[Sequence[RegimePoint]], planned_s: float) -> float | None:
    losses = (loss_in_time(points, planned_s) for points in families)
    return min((loss for loss in losses if loss is not None), default=None)


def loss_in_time(points: Sequence[RegimePoint], planned_s: float) -> float | None:
    """The loss of runs like these that take so long; None: all of them are longer, or all shorter."""
    times_s = [point.planned_s for point in points]
    if not points or not min(times_s) / SAME_TIME <= planned_s <= max(times_s) * SAME_TIME:
        return None
    return float(np.interp(math.log(planned_s), [math.log(each) for each in times_s], [each.loss for each in points]))


def _crossing(gaps: Sequence[tuple[float, float]]) -> str:
    """Where the sign of the gap changes, between two runs on the straight line over the logarithm of tokens."""
    span = f"from {gaps[0][0]:.3g} to {gaps[-1][0]:.3g} tokens a parameter"
    places = []
    for (before, one), (after, other) in pairwise(gaps):
        if (one > 0) != (other > 0):
            share = one / (one - other)
            places.append(math.exp(math.log(before) * (1 - share) + math.log(after) * share))
    first = "behind" if gaps[0][1] > 0 else "ahead"
    if not places:
        return f"{first} {span}, no crossing."
    if len(places) > 1:
        return f"{first} below {places[0]:.3g} tokens a parameter, and to and fro from there on."
    return f"{first} below {places[0]:.3g} tokens a parameter, and then not."


def curves(runs: Runs) -> Table | None:
    """At every sixth of the full run (without one: of the longest), or at the evaluation that is nearest to it."""
    candidates = [runs[FULL]] if FULL in runs else list(runs.values())
    evaluated_at = max(
        (_evaluated_at(result) for seeds in candidates for result in seeds.values()), key=max, default=[]
    )
    marks = [evaluated_at[-1] * nth / COLUMNS for nth in range(1, COLUMNS + 1)] if evaluated_at else []
    columns = sorted({min(evaluated_at, key=lambda each: abs(each - mark)) for mark in marks})
    rows = []
    for name, seeds in runs.items():
        cells = []
        for column in columns:
            going_on = [result for result in seeds.values() if _evaluated_at(result)[-1] >= column]
            losses = [loss_at(_evaluated_at(result), held_out(result), column) for result in going_on]
            cells.append(spread([loss for loss in losses if loss is not None], ".4f"))
        rows.append((name, *cells))
    headings = ("variant", *(f"iteration {column:,.0f}" for column in columns))
    return Table("While training", "Held-out loss of the whole model.", headings, rows) if columns else None


def routers(runs: Runs) -> Table | None:
    rows = []
    for name, seeds in runs.items():
        used = [result["routers"] for result in seeds.values() if result.get("routers")]
        for text in used[0] if used else ():
            shares = [np.array(each[text]) for each in used]
            apart = [
                fmean(_distance(np.array(each[text]), np.array(each[other])) for other in each if other != text)
                for each in used
                if len(each) > 1
            ]
            rows.append(
                (
                    name,
                    text,
                    spread([_evenness(each) for each in shares], ".3f"),
                    spread([float(each.max(-1).mean()) * each.shape[-1] for each in shares], ".2f"),
                    spread(apart, ".3f"),
                )
            )
    headings = ("variant", "text", "balance", "busiest expert", "specialisation")
    note = (
        "Means over layers. Balance: entropy of the shares of tokens that experts get, of the most there can be (1: "
        "even). Busiest expert: its share, in even shares. Specialisation: the share of tokens that would have to go "
        "to another expert for this text's shares to be another text's, mean over the other texts."
    )
    return Table("Routers", note, headings, rows) if rows else None


def iterations(runs: Runs, times: PlannedTimes) -> Table | None:
    rows = []
    for name, seeds in runs.items():
        one = next(iter(seeds.values()))
        variant = variant_of(one)
        phases = Counter(phases_of(variant.recipe, variant.stages, one["settings"]["iterations"]))
        wanted = [times.planned_iterations(variant, phases, moving=moving) for moving in (False, True)]
        for phase in sorted(phases, key=lambda phase: (parts_of(phase.visited), *phase[1:]), reverse=True):
            plans = [times.plans.get(each[phase]) for each in wanted]
            seconds = [f"{each.iteration_s:.2f}" if each and each.iteration_s else NOTHING for each in plans]
            share = f"{phases[phase] / phases.total():.0%}"
            stages = f"{path_length_text(phase.visited)} of {phase.visited if phase.young else variant.stages}"
            rows.append((name, stages, share, *seconds, path_length_text(wanted[0][phase].placed_for)))
    headings = ("variant", "stages on a path", "iterations", "seconds", "seconds, nodes placed for it", "placed for")
    note = f"Seconds of an iteration, planned for {times.planned.cluster} ({times.planned})."
    if times.published_s:
        note += f" The full pipeline as published: {times.published_s:.2f}."
    return Table("Iterations", note, headings, rows) if rows else None


def first_reach(at: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """When the loss first is as low as the target, between two evaluations on the straight line; None: never."""
    if losses[0] <= target:
        return at[0]
    for (before, after), (above, below) in zip(pairwise(at), pairwise(losses), strict=True):
        if below <= target:
            return before + (after - before) * (above - target) / (above - below)
    return None


def loss_at(at: Sequence[float], losses: Sequence[float], moment: float) -> float | None:
    """On the straight line between two evaluations; the last one holds from then on; None: before the first."""
    return None if moment < at[0] else float(np.interp(moment, at, losses))


def total_s(seeds: Seeds, times: PlannedTimes | None) -> float | None:
    """Planned seconds of a run, which are the same whatever the seed."""
    at = elapsed_s(next(iter(seeds.values())), times) if times and seeds else None
    return at[-1] if at else None


def _published_s(seeds: Seeds, times: PlannedTimes) -> float | None:
    iterations: int = next(iter(seeds.values()))["settings"]["iterations"]
    return times.published_s * iterations if times.published_s else None


def _evaluated_at(result: Result) -> list[float]:
    return [point[0] for point in result["curve"]]


def _evenness(shares: NDArray[np.float64]) -> float:
    """Of the shares of experts in every layer: their entropy, of the most there can be."""
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(-1)
    return float(entropy.mean() / math.log(shares.shape[-1]))


def _distance(shares: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Total variation, mean over layers."""
    return float(np.abs(shares - others).sum(-1).mean() / 2)
