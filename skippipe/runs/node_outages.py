"""Nodes that were lost, what was done about it, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from skippipe.runs.records import EventRecord

if TYPE_CHECKING:
    from skippipe.runs.history import RunHistory

ANSWERS = ("rerouted", "restarted", "paused")


class NodeOutage(NamedTuple):
    node: str
    iteration: int
    """From 0."""
    time: float
    why: str
    answer: str
    """What was done within the iteration; empty: nothing is on record."""
    end: str


def node_outages(history: RunHistory) -> list[NodeOutage]:
    """In the order in which they happened."""
    found = []
    for place, event in enumerate(history.events):
        if event.kind == "gone":
            later = _until_lost_again(history.events[place + 1 :], event.node)
            told = (event.node, event.iteration, event.time, event.text, _answer(later, event))
            found.append(NodeOutage(*told, _end(later, event, history)))
    return found


def _until_lost_again(events: Sequence[EventRecord], node: str) -> list[EventRecord]:
    found = []
    for event in events:
        found.append(event)
        if event.kind == "gone" and event.node == node:
            break
    return found


def _answer(later: Sequence[EventRecord], lost: EventRecord) -> str:
    for event in later:
        if event.kind in ANSWERS and event.node in (lost.node, "") and event.iteration == lost.iteration:
            return f"{event.kind}: {event.text}"
    return ""


def _end(later: Sequence[EventRecord], lost: EventRecord, history: RunHistory) -> str:
    mine = {event.kind: event for event in reversed(later) if event.node == lost.node}  # the first of each kind
    if "able" in mine:
        return f"back at work from iteration {mine['able'].iteration + 2} on"
    if any(event.kind == "recovered" for event in later):
        return "asked anew when the coordinator was started again"
    if "gone" in mine:
        return f"came back, and was lost again in iteration {mine['gone'].iteration + 1}"
    came = mine.get("joined") or mine.get("learning")
    if came is not None:
        return f"came back in iteration {came.iteration + 1}; no event says that it got microbatches"
    if history.last_sent.get(lost.node, -1) > lost.iteration:
        return f"at work again, as late as iteration {history.last_sent[lost.node] + 1}; no event says since when"
    return "did not come back"
