"""The results of a study: which runs belong to it, and figures of a run or of its seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from skippipe.report.summary import NOTHING
from skippipe.study.config import Study

Result = Mapping[str, Any]
Seeds = dict[int, Result]
Runs = dict[str, Seeds]
"""Variant → seed → what came out, in the order of the study."""

FULL = "full"  # the variant with which others are compared


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


def whole_loss(result: Result) -> float:
    return float(next(iter(result["whole"].values())))
