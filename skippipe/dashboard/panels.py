"""The state of a run as the page shows it: JSON, a panel at a time, so that only what has changed is sent.

Names and texts go out as they are. The page puts them in as text, never as markup.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skippipe.dashboard.run_state import FileSource, RunFollower, RunState
from skippipe.plan import Plan
from skippipe.runs.records import KINDS, TraceBar, checkpoint_event, downsample
from skippipe.timeline import HUES

MOST_POINTS = 300  # of a curve; more cannot be told apart on a screen
MOST_LINKS = 5000  # of a map; those with the fewest bytes are left out
CURVES = ("loss", "tokens_per_s", "sent_bytes", "seconds", "promised_s")

Panel = dict[str, Any]


class Panels:
    """The panels as text, made anew where their sources have changed."""

    def __init__(self, follower: RunFollower) -> None:
        self.follower = follower
        self.texts: dict[str, str] = {}
        """Panel → its JSON, in one line."""
        self._made_of: dict[str, tuple[int, ...]] = {}

    def poll(self) -> bool:
        """Read what is new in the files; True if there is more to read right away."""
        more = self.follower.poll()
        state, texts = self.follower.state, dict(self.texts)
        for name, (made, sources) in PANELS.items():
            made_of = tuple(state.versions[source] for source in sources)
            if self._made_of.get(name) != made_of:
                text = json.dumps(made(state, self.follower.folder), allow_nan=False)
                if text != texts.get(name):
                    texts[name] = text
                self._made_of[name] = made_of
        self.texts = texts  # replaced as a whole: other threads may be reading
        return more


def run_panel(state: RunState, folder: Path) -> Panel:
    """What is trained, and the progress of the run."""
    last = state.rows[-1] if state.rows else None
    return {
        "folder": folder.name or str(folder),
        "done": last is not None and last.is_last if state.done is None else state.done,
        "iterations": last.iteration + 1 if last else 0,
        "total": last.total_iterations if last else None,
        **{name: getattr(last, name, None) for name in (*CURVES, "time", "tokens")},
        "unread": {file: count for file, count in sorted(state.unread.items()) if count},
        **(_plan_figures(state.plan) if state.plan else {}),
    }


def _plan_figures(plan: Plan) -> Panel:
    return {
        "model": plan.workload.model.name,
        "parameters": plan.workload.model.parameters,
        "cluster": plan.cluster.name,
        "nodes": len(plan.stage_of),
        "stages": len(plan.stages),
        "visited": plan.visited,
        "microbatches": plan.microbatches,
        "strategy": plan.strategy,
    }


def map_panel(state: RunState, _folder: Path) -> Panel:
    """The nodes on their stages, and the lanes. Places in `nodes` stand for nodes, here and in `load_panel`."""
    plan = state.plan
    if plan is None:
        return {"nodes": [], "stages": [], "lanes": []}
    lanes_of = [0] * len(plan.cluster.nodes)
    for lane in plan.lanes:
        for node in lane.path:
            lanes_of[node] += 1
    data_nodes = list(dict.fromkeys(lane.path[0] for lane in plan.lanes))
    return {
        "nodes": [
            {
                "name": node.name,
                "location": node.location,
                "stage": plan.stage_of.get(number),
                "lanes": lanes_of[number],
                "slots": plan.slots.get(number),
                "status": _status(state, node.name, number in plan.stage_of),
            }
            for number, node in enumerate(plan.cluster.nodes)
        ],
        "stages": [{"layers": stage.layers, "nodes": list(stage.nodes)} for stage in plan.stages],
        "lanes": [
            {
                "path": list(lane.path),
                "stages": list(plan.visits(lane)),
                "microbatches": lane.microbatches,
                "hue": HUES[data_nodes.index(lane.path[0]) % len(HUES)],
            }
            for lane in plan.lanes
        ],
    }


def _status(state: RunState, name: str, planned: bool) -> str:
    """lost, here (has joined and waits for a stage), learning, slow, works, or spare (it never joined)."""
    known = state.status.get(name)
    if known is not None:
        return known
    if not planned:
        return "spare"
    if name in state.learning:
        return "learning"
    return "slow" if name in state.slow else "works"


def load_panel(state: RunState, _folder: Path) -> Panel:
    """Bytes between nodes in the last iteration; both directions of a link stand together."""
    numbers = state.plan.cluster.number if state.plan else {}
    pairs: dict[tuple[int, int], list[int]] = {}
    for sender, receiver, sent in state.links:
        if sender in numbers and receiver in numbers and sent:
            a, b = numbers[sender], numbers[receiver]
            pairs.setdefault((min(a, b), max(a, b)), [0, 0])[int(a > b)] += sent
    links = sorted(([a, b, *sent] for (a, b), sent in pairs.items()), key=lambda link: -link[2] - link[3])
    return {
        "iteration": state.rows[-1].iteration if state.rows else None,
        "links": links[:MOST_LINKS],
        "left_out": max(0, len(links) - MOST_LINKS),
        "visits": state.visits,
    }


def curves_panel(state: RunState, _folder: Path) -> Panel:
    """Loss, speed and bytes of every iteration; of long runs, means of neighbours."""
    size, rows = downsample(state.rows, MOST_POINTS)
    columns = {name: [getattr(row, name) for row in rows] for name in CURVES}
    return {
        "mean_of": size,
        "iteration": [row.iteration for row in rows],
        **{name: [value and float(f"{value:.7g}") for value in column] for name, column in columns.items()},
    }


def gantt_panel(state: RunState, _folder: Path) -> Panel:
    gantt = state.gantt
    if gantt is None:
        return {"iteration": None}
    return {
        "iteration": gantt.iteration,
        "kinds": [str(kind) for kind in KINDS],
        "rows": [{"stage": stage, "name": name} for stage, name in gantt.rows],
        "hues": gantt.hues,
        "planned": list(map(_plain, gantt.planned)),
        "measured": list(map(_plain, gantt.measured)),
    }


def _plain(bar: TraceBar) -> list[float]:
    start_s, end_s = (round(time, 6) if math.isfinite(time) else 0.0 for time in (bar.start_s, bar.end_s))
    return [bar.row, bar.kind, start_s, end_s, bar.lane, bar.microbatch, bar.step]


def events_panel(state: RunState, _folder: Path) -> Panel:
    """Events, the newest first; checkpoints that are complete are among them."""
    made = [checkpoint_event(number, time) for number, time in state.checkpoints.items()]
    shown = [event._asdict() for event in (*state.events, *made)]
    shown.sort(key=lambda event: float(event["time"]), reverse=True)
    return {"events": shown, "in_all": state.events_total + len(made)}


PANELS: dict[str, tuple[Callable[[RunState, Path], Panel], tuple[FileSource, ...]]] = {
    "run": (run_panel, ("plan", "metrics", "events")),
    "map": (map_panel, ("plan", "events")),
    "load": (load_panel, ("plan", "metrics")),
    "chart": (gantt_panel, ("trace",)),
    "curves": (curves_panel, ("metrics",)),
    "events": (events_panel, ("events",)),
}
"""Panel → the function that makes it, and the sources that it is made of."""
