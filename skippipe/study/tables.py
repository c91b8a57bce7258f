"""The results of a study as tables, and the figures that its pictures show too.

    headline      every variant in a line
    texts         loss of the whole model on every text
    codecs        what codecs in training cost
    parts         what is lost when stages are left out, after training
    parts_by_wire what codecs on hops cost then
    time_to_loss  when a variant is as good as the full model
    equal_time    how good it is when another one ends
    curves        loss while training
    routers       are experts used evenly, and do they specialise?
    iterations    seconds by the planner

A table for which there is nothing is None. Differences are taken seed by seed; ± is the standard deviation over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skippipe.codecs import gradient_codec
from skippipe.report.summary import NOTHING, Table
from skippipe.study.config import Study, Traffic
from skippipe.study.planned_time import PlannedTimes, counted, elapsed_s, phases_of, variant_of

Result = Mapping[str, Any]
Seeds = dict[int, Result]
Runs = dict[str, Seeds]
"""Variant → seed → what came out, in the order of the study."""

FULL = "full"  # the variant with which others are compared
COLUMNS = 6  # of a curve


def runs_of(results: Iterable[Result], study: Study) -> Runs:
    """Results with the study's settings; of a variant that has none of these, all there are."""
    keys = {run.key for run in study.runs}
    found: Runs = {variant.name: {} for variant in study.variant}
    for result in sorted(results, key=lambda result: result["key"] not in keys):  # those of the study come first
        seeds = found.setdefault(result["variant"], {})
        of_study = any(each["key"] in keys for each in seeds.values())
        if result["key"] in keys or not of_study:
            seeds[result["seed"]] = result
    return {name: dict(sorted(seeds.items())) for name, seeds in found.items() if seeds}


def outdated_variants(runs: Runs, study: Study) -> list[str]:
    """Variants whose runs had other settings than the study has now."""
    keys = {run.key for run in study.runs}
    return [name for name, seeds in runs.items() if any(result["key"] not in keys for result in seeds.values())]


def all_tables(runs: Runs, times: PlannedTimes | None) -> list[Table]:
    found = [headline(runs, times), texts(runs), codecs(runs), parts(runs), parts_by_wire(runs)]
    if times:
        found += [time_to_loss(runs, times), equal_time(runs, times)]
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
            spread([_whole(result) for result in seeds.values()], ".4f"),
            spread(gaps(runs, name, _whole), "+.4f"),
        ]
        if times:
            row.append(f"{took_s / full_s:.2f}" if took_s and full_s else NOTHING)
        rows.append(row)
    headings = ["variant", "parameters", "seeds", "tokens", "skipped", "loss", f"gap to {FULL}"]
    note = f"Loss of the whole model on '{first_text(runs)}', held out."
    if times:
        headings.append(f"time / {FULL}")
        note += (
            f" Time as planned for {times.planned.cluster} ({times.planned.timing}), nodes staying where they are best "
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
            apart = spread(gaps(runs, name, _whole, control), "+.4f")
            back = traffic["wire_back"] or (gradient_codec(traffic["wire"]) if traffic["wire"] else "")
            hops: tuple[str, ...] = (traffic["wire"], back)
            if traffic["subspace"]:
                rank = f"rank {traffic['subspace']}{', fixed' * (traffic['basis'] == 'fixed')}"
                hops = tuple(f"{rank}, {each}" if each else rank for each in hops)
            names = (each or NOTHING for each in (*hops, traffic["gradients"]))
            rows.append((name, *names, spread([_whole(result) for result in seeds.values()], ".4f"), apart))
    headings = ("variant", "activations", "their gradients", "weight gradients", "loss", "gap")
    note = (
        "Loss of the whole model, evaluated without codecs, but in the subspace that it was trained with; gap to the "
        "same recipe trained without."
    )
    return Table("Codecs in training", note, headings, rows) if rows else None


@dataclass(frozen=True)
class Increase:
    """Increase of the perplexity when only so many stages are kept: 0.1 is 10% more than the same model has whole."""

    text: str
    kept: int
    stages: int
    drive: float
    """The exponent that was best on the first text."""
    means: list[float]
    """Over the parts of this size, for each seed; likewise of the best and of the worst part."""
    bests: list[float]
    worsts: list[float]
    undriven: list[float]
    """The means if stages are not driven."""


def increases(seeds: Seeds) -> list[Increase]:
    """For every text and number of stages, by the parts of those runs that measured the whole among them."""
    models = [parts for result in seeds.values() if (parts := _Parts(result)).whole]
    found = []
    for kept in sorted({kept for parts in models for kept in parts.sizes}, reverse=True):
        measured = [parts for parts in models if kept in parts.sizes]
        first = measured[0]
        drive = min(first.drives(kept), key=lambda drive: fmean(each.mean(kept, drive) for each in measured))
        for text in first.whole:
            driven = [parts.increases(text, kept, drive) for parts in measured]
            undriven = [fmean(parts.increases(text, kept, 0.0)) for parts in measured]
            means, bests, worsts = ([kind(each) for each in driven] for kind in (fmean, min, max))
            found.append(Increase(text, kept, first.stages, drive, means, bests, worsts, undriven))
    return found


class _Parts:
    """The losses of all parts of one model, and of the whole on the same windows."""

    def __init__(self, result: Result, parts: Sequence[Mapping[str, Any]] | None = None) -> None:
        self.stages: int = result["settings"]["variant"]["stages"]
        self._losses: dict[tuple[str, int, float], list[float]] = {}
        for part in result["parts"] if parts is None else parts:
            self._losses.setdefault((part["text"], len(part["stages"]), part["drive"]), []).append(part["loss"])
        self.whole = {text: losses[0] for (text, kept, _), losses in self._losses.items() if kept == self.stages}
        self.sizes = {kept for _, kept, _ in self._losses} - {self.stages}

    def drives(self, kept: int) -> list[float]:
        return sorted({drive for _, size, drive in self._losses if size == kept})

    def mean(self, kept: int, drive: float) -> float:
        """On the first text, which is the one to choose by."""
        return fmean(self._losses[next(iter(self.whole)), kept, drive])

    def increases(self, text: str, kept: int, drive: float) -> list[float]:
        return [math.expm1(loss - self.whole[text]) for loss in self._losses[text, kept, drive]]

    def increase_to(self, other: _Parts, text: str, kept: int) -> float:
        """From these losses to others of the same parts, at the drive that is best for these."""
        drive = min(self.drives(kept), key=lambda drive: self.mean(kept, drive))
        pairs = zip(self._losses[text, kept, drive], other._losses[text, kept, drive], strict=True)
        return fmean(math.expm1(after - before) for before, after in pairs)


def parts(runs: Runs) -> Table | None:
    rows = [
        (
            name,
            each.text,
            f"{each.kept} of {each.stages}",
            f"{each.drive:g}",
            *(spread(values, "+.1%") for values in (each.means, each.bests, each.worsts, each.undriven)),
        )
        for name, seeds in runs.items()
        for each in increases(seeds)
    ]
    note = (
        "Increase of the perplexity against the same model whole, when stages are left out after training: mean over "
        "the parts that were drawn, best and worst of them. Stages that are kept are driven by ((S−1)/(L−1)) to the "
        "power of the exponent, the one with the lowest mean loss on the first text; undriven: exponent 0."
    )
    headings = ("variant", "text", "kept stages", "exponent", "mean", "best part", "worst part", "mean, undriven")
    return Table("Parts of the model", note, headings, rows) if rows else None


def parts_by_wire(runs: Runs) -> Table | None:
    rows = []
    for name, seeds in runs.items():
        measured: dict[tuple[str, str, int, int], list[float]] = {}
        for result in seeds.values():
            plain = _Parts(result)
            for wire, losses in result.get("parts_by_wire", {}).items():
                rounded = _Parts(result, losses)
                for text in plain.whole:
                    for kept in sorted({plain.stages, *plain.sizes}, reverse=True):
                        more = plain.increase_to(rounded, text, kept)
                        measured.setdefault((wire, text, kept, plain.stages), []).append(more)
        for (wire, text, kept, stages), increase in measured.items():
            rows.append((name, wire, text, f"{kept} of {stages}", spread(increase, "+.2%")))
    note = "Increase of the perplexity against the same stages without a codec, mean over the parts that were drawn."
    headings = ("variant", "codec of hops", "text", "stages", "increase")
    return Table("Codecs on hops after training", note, headings, rows) if rows else None


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
        phases = counted(phases_of(variant, one["settings"]["iterations"]))
        wanted = [times.planned_iterations(variant, phases, moving=moving) for moving in (False, True)]
        for phase in sorted(phases, reverse=True):
            plans = [times.plans.get(each[phase]) for each in wanted]
            seconds = [f"{each.iteration_s:.2f}" if each and each.iteration_s else NOTHING for each in plans]
            share = f"{float(phases[phase] / sum(phases.values())):.0%}"
            stages = f"{phase.visited} of {phase.visited if phase.young else variant.stages}"
            rows.append((name, stages, share, *seconds, str(wanted[0][phase].placed_for)))
    headings = ("variant", "stages on a path", "iterations", "seconds", "seconds, nodes placed for it", "placed for")
    note = f"Seconds of an iteration, planned for {times.planned.cluster} ({times.planned.timing})."
    if times.published_s:
        note += f" The full pipeline as published: {times.published_s:.2f}."
    return Table("Iterations", note, headings, rows) if rows else None


def spread(values: Sequence[float], form: str) -> str:
    """The mean, and with several values their standard deviation."""
    if not values:
        return NOTHING
    size = form.lstrip("+")
    mean = f"{fmean(values):{'' if size == form else '+'}z{size}}".replace("-", "−")
    return mean if len(values) < 2 else f"{mean} ± {stdev(values):{size}}"


def gaps(runs: Runs, name: str, figure: Callable[[Result], float | None], control: str = FULL) -> list[float]:
    """How much more of something a variant has than the full or another one, for every seed that both have."""
    full = runs.get(control, {}) if name != control else {}
    pairs = ((figure(result), figure(full[seed])) for seed, result in runs[name].items() if seed in full)
    return [own - full for own, full in pairs if own is not None and full is not None]


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


def held_out(result: Result) -> list[float]:
    """The held-out loss at every evaluation."""
    return [point[3] for point in result["curve"]]


def first_text(runs: Runs) -> str:
    return str(next(text for seeds in runs.values() for result in seeds.values() for text in result["whole"]))


def skipped(result: Result) -> float:
    """Share of the stages, over all iterations."""
    stages = result["settings"]["variant"]["stages"]
    left_out = sum(count * (stages - int(visited)) for visited, count in result["lengths"].items())
    return float(left_out / (stages * sum(result["lengths"].values())))


def total_s(seeds: Seeds, times: PlannedTimes | None) -> float | None:
    """Planned seconds of a run, which are the same whatever the seed."""
    at = elapsed_s(next(iter(seeds.values())), times) if times and seeds else None
    return at[-1] if at else None


def _published_s(seeds: Seeds, times: PlannedTimes) -> float | None:
    iterations: int = next(iter(seeds.values()))["settings"]["iterations"]
    return times.published_s * iterations if times.published_s else None


def _whole(result: Result) -> float:
    return float(next(iter(result["whole"].values())))


def _evaluated_at(result: Result) -> list[float]:
    return [point[0] for point in result["curve"]]


def _evenness(shares: NDArray[np.float64]) -> float:
    """Of the shares of experts in every layer: their entropy, of the most there can be."""
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(-1)
    return float(entropy.mean() / math.log(shares.shape[-1]))


def _distance(shares: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Total variation, mean over layers."""
    return float(np.abs(shares - others).sum(-1).mean() / 2)
