"""A recorded iteration as bars, for every node: as planned above, as measured below. Pure geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from skippipe.costs import ns
from skippipe.report import picture
from skippipe.report.picture import BRIEF, NEUTRAL, STAGE_GAP, Kind, pale, shade, span
from skippipe.runs.chart import KINDS, TASKS, Bar, Chart

PLANNED_PLACE, MEASURED_PLACE = (-0.23, 0.34), (0.18, 0.44)  # (below the middle of its row, height)
FAINT = "#888888"  # of lanes whose data node is not on record


@dataclass(frozen=True)
class Recorded:
    chart: Chart

    @cached_property
    def rows(self) -> list[tuple[str, float]]:
        """Label and middle of every node; y grows downwards."""
        return [
            (f"stage {stage} · {name}", index + STAGE_GAP * stage)
            for index, (stage, name) in enumerate(self.chart.rows)
        ]

    @cached_property
    def planned(self) -> list[picture.Bar]:
        return [bar._replace(colour=pale(bar.colour)) for bar in self._bars(self.chart.planned, "planned")]

    @cached_property
    def measured(self) -> list[picture.Bar]:
        return self._bars(self.chart.measured, "measured")

    def places(self, bars: Sequence[picture.Bar], place: tuple[float, float]) -> list[tuple[float, float]]:
        below, height = place
        return [(self.rows[bar.row][1] + below, height) for bar in bars]

    @property
    def shown_until_s(self) -> float:
        """Where planned averaging takes much longer than the passes, the picture ends with the passes."""
        bars = [*self.chart.planned, *self.chart.measured]
        whole_s = max(bar.end_s for bar in bars)
        last_s = max((bar.end_s for bar in bars if bar.kind in TASKS), default=whole_s)
        return whole_s if whole_s <= BRIEF * last_s else 1.05 * last_s

    def _bars(self, bars: Sequence[Bar], which: str) -> list[picture.Bar]:
        hues = self.chart.hues
        found = []
        for bar in bars:
            kind, of_task = KINDS[bar.kind], bar.lane >= 0
            colour = shade(hues.get(bar.lane, FAINT), kind) if of_task else NEUTRAL.get(kind, FAINT)
            times = (ns(bar.start_s), ns(bar.end_s))
            whose = f" of lane {bar.lane}, microbatch {bar.microbatch}" if of_task else ""
            stage, name = self.chart.rows[bar.row]
            hover = f"{which}: {kind}{whose}\non {name}, stage {stage}\n{span(*times)}"
            if bar.waited_s and kind is not Kind.WEIGHTS:
                hover += f"\nwaited {bar.waited_s:.3f} s"
            lane, microbatch, step = (bar.lane, bar.microbatch, bar.step) if of_task else (None, None, None)
            found.append(picture.Bar(bar.row, kind, *times, lane, microbatch, step, colour, hover))
        return found
