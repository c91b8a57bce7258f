"""The plan as a map: stages are columns, nodes are stations, lanes are lines that call at them in their order.

Pure geometry, drawn alike by the page and by the image. Data nodes appear twice, at the left where their microbatches
set out and at the right where they come back for the head, so that every line reads from left to right. Only a swap
leads to the left. A line that skips a stage passes through a gap between its stations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from skippipe.report.gantt import Gantt
from skippipe.report.summary import equal_lanes, lanes_named

Point = tuple[float, float]

HALF_WIDTH = 0.31  # of a station, where columns are 1 apart
HEIGHT = 0.5  # of a station, where those of the fullest stage are 1 apart
LINE_SPACING = 0.13  # between lines side by side, where there is room
CURVE_POINTS = 14


class Station(NamedTuple):
    """A node in its column. x grows to the right by one a stage, y downwards."""

    node: int
    stage: int
    name: str
    x: float
    y: float
    hue: str | None
    """The hue of a data node; None: it is no data node."""


class LineHop(NamedTuple):
    """One hop of a line, from the edge of one station to the edge of the next."""

    points: tuple[Point, ...]
    swapped: bool
    """Leads to an earlier stage than the one before it."""


class PathLine(NamedTuple):
    """Lanes that take the same path."""

    lanes: tuple[int, ...]
    data_node: int
    hue: str
    hops: tuple[LineHop, ...]
    hover: str


@dataclass(frozen=True)
class PathMap:
    """All that is drawn of the paths of a plan."""

    columns: tuple[str, ...]
    height: float
    stations: tuple[Station, ...]
    lines: tuple[PathLine, ...]


class _Track(NamedTuple):
    """Where lines pass a column: at the station in this position, or in the gap before it."""

    column: int
    position: int
    gap: bool


def path_map(picture: Gantt) -> PathMap:
    plan = picture.plan
    head = tuple(dict.fromkeys([*plan.stages[0].nodes, *picture.data_nodes]))  # where the head runs
    columns = (*plan.placement, head)
    layout = _Layout(columns)
    groups = equal_lanes(plan)
    tracks = [layout.tracks(plan.lanes[group[0]].path, plan.stage_of) for group in groups]
    ys = layout.side_by_side(tracks)
    hues = {node: picture.hue_of(node) for node in picture.data_nodes}
    return PathMap(
        columns=(
            *(
                f"stage {index}, {stage.layers} layer{'s' * (stage.layers > 1)}"
                for index, stage in enumerate(plan.stages)
            ),
            "back for head and loss",
        ),
        height=layout.height,
        stations=tuple(
            Station(
                *(node, plan.stage_of[node], plan.cluster.nodes[node].name),
                *(column, layout.y(_Track(column, index, gap=False)), hues.get(node)),
            )
            for column, nodes in enumerate(columns)
            for index, node in enumerate(nodes)
        ),
        lines=tuple(
            PathLine(tuple(group), path[0], hues[path[0]], _hops(stops, y), _hover_text(picture, group))
            for group, stops, y in zip(groups, tracks, ys, strict=True)
            for path in [plan.lanes[group[0]].path]
        ),
    )


@dataclass(frozen=True)
class _Layout:
    columns: tuple[tuple[int, ...], ...]

    @property
    def height(self) -> float:
        return float(max(map(len, self.columns)))

    def pitch(self, column: int) -> float:
        """The distance from one station of a column to the next: short columns are spread over the whole height."""
        return self.height / max(1, len(self.columns[column]))

    def y(self, track: _Track) -> float:
        return self.pitch(track.column) * (track.position if track.gap else track.position + 0.5)

    def tracks(self, path: Sequence[int], stage_of: dict[int, int]) -> list[_Track]:
        """What a line passes: its stations, and between them the gaps that lie nearest to the straight way."""
        stops = [_Track(stage_of[node], self.columns[stage_of[node]].index(node), gap=False) for node in path]
        stops.append(_Track(len(self.columns) - 1, self.columns[-1].index(path[0]), gap=False))
        passed = stops[:1]
        for a, b in pairwise(stops):
            onward = 1 if b.column > a.column else -1
            for column in range(a.column + onward, b.column, onward):
                share = (column - a.column) / (b.column - a.column)
                straight = (1 - share) * self.y(a) + share * self.y(b)
                passed.append(_Track(column, round(straight / self.pitch(column)), gap=True))
            passed.append(b)
        return passed

    def side_by_side(self, lines: list[list[_Track]]) -> list[list[float]]:
        """The y of every line on every track, so that lines that share a track do not cover each other."""
        on_track: dict[_Track, list[tuple[float, int, int]]] = {}
        for number, line in enumerate(lines):
            for position, track in enumerate(line):
                came_from = self.y(line[position - 1 if position else 1])
                on_track.setdefault(track, []).append((came_from, number, position))
        ys = [[0.0] * len(line) for line in lines]
        for track, passing in on_track.items():
            room = (self.pitch(track.column) - HEIGHT) if track.gap else HEIGHT
            edge = track.gap and track.position in (0, len(self.columns[track.column]))
            apart = spacing(room / 2 if edge else room, len(passing))
            first = self.y(track) - apart * (len(passing) - 1) / 2
            if edge:  # half a gap, and all of it inside the map
                first = 0.0 if track.position == 0 else self.height - apart * (len(passing) - 1)
            for rank, (_, number, position) in enumerate(sorted(passing)):
                ys[number][position] = first + apart * rank
        return ys


def spacing(room: float, lines: int) -> float:
    """The distance between lines that share so much room."""
    return min(LINE_SPACING, 0.85 * room / lines)


def _hops(tracks: list[_Track], ys: list[float]) -> tuple[LineHop, ...]:
    hops: list[LineHop] = []
    points: list[Point] = []
    for (a, y_a), (b, y_b) in pairwise(zip(tracks, ys, strict=True)):
        onward = 1 if b.column >= a.column else -1
        start = (a.column + onward * HALF_WIDTH, y_a)
        end = (b.column - onward * HALF_WIDTH, y_b)
        points += [start, end] if onward < 0 else _curve(start, end)
        if not b.gap:
            hops.append(LineHop(tuple(points), swapped=onward < 0))
            points = []
    return tuple(hops)


def _curve(start: Point, end: Point) -> list[Point]:
    """A curve that leaves and arrives level, so that lines are easy to follow through a station."""
    shares = [index / (CURVE_POINTS - 1) for index in range(CURVE_POINTS)]
    (x_a, y_a), (x_b, y_b) = start, end
    return [(x_a + (x_b - x_a) * s, y_a + (y_b - y_a) * s * s * (3 - 2 * s)) for s in shares]


def _hover_text(picture: Gantt, group: list[int]) -> str:
    lane = picture.plan.lanes[group[0]]
    stops = [f"{picture.plan.cluster.nodes[node].name} [{picture.plan.stage_of[node]}]" for node in lane.path]
    each = "microbatch" if lane.microbatches == 1 else "microbatches"
    return f"{lanes_named(group)}, {lane.microbatches} {each}{' each' * (len(group) > 1)}\n{' → '.join(stops)}"
