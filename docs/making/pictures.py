"""The pictures of docs/concepts.md: `python docs/making/pictures.py` writes docs/concept-*.svg.

Each has a panel of its own, light or dark as the reader's machine is, so that it can be read on any page.
"""

from __future__ import annotations

import math
from pathlib import Path

STYLE = """<style>
text{font:14px system-ui,sans-serif}.small{font-size:12px}.mid{text-anchor:middle}
.panel{fill:#fff;stroke:#d0d7de}.ink{fill:#1f2328}.dim{fill:#59636e}.on{fill:#fff}
.line{stroke:#8c959f;fill:none;stroke-width:1.5}.way{fill:none;stroke-width:3}.back{stroke-dasharray:3 5}
.wait{fill:none;stroke:#d1242f;stroke-width:1.5;stroke-dasharray:3 3}.good{fill:#1a7f37}.bad{fill:#d1242f}
@media(prefers-color-scheme:dark){.panel{fill:#161b22;stroke:#3d444d}.ink{fill:#f0f6fc}.dim{fill:#9198a1}
.good{fill:#3fb950}.bad{fill:#ff7b72}.wait{stroke:#ff7b72}}
</style>"""
STAGES = ["#0e7c86", "#3565c9", "#b45f06", "#8250df"]
"""A colour for each stage; white text can be read on all of them."""
NODES = [["ann", "bob", "carol"], ["dan", "eve"], ["fay", "gus"], ["hal", "ida"]]
"""Nine nodes on four stages, of which a microbatch visits three: 3 : 2 : 2 : 2 matches the demand."""
A, B = "#0e7c86", "#b45f06"
"""Two microbatches."""


def text(x: float, y: float, words: str, kind: str = "ink") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, words: str = "") -> str:
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{colour}"/>'
    return shape + (text(x + width / 2, y + height / 2 + 5, words, "on mid") if words else "")


def waiting(x: float, y: float, width: float, height: float) -> str:
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="wait"/>'
    return shape + text(x + width / 2, y + height / 2 + 4, "waits", "bad small mid")


def line(points: list[tuple[float, float]], kind: str, colour: str = "") -> str:
    where = " ".join(f"{x:g},{y:g}" for x, y in points)
    stroke = f' stroke="{colour}" marker-end="url(#{colour[1:]})"' if colour else ""
    return f'<polyline points="{where}" class="{kind}"{stroke}/>'


def drawing(name: str, width: int, height: int, title: str, parts: list[str]) -> None:
    heads = "".join(
        f'<marker id="{colour[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="4" markerHeight="4" '
        f'orient="auto"><path d="M0 0 8 4 0 8z" fill="{colour}"/></marker>'
        for colour in dict.fromkeys([*STAGES, A, B])
    )
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    panel = f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" class="panel"/>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">'
    whole = [svg, f"<title>{title}</title>", STYLE, f"<defs>{heads}</defs>", panel, *parts, "</svg>"]
    (Path(__file__).parent.parent / f"concept-{name}.svg").write_text("\n".join(whole) + "\n")


def stages() -> None:
    parts = [text(20, 30, "the model"), text(20, 160, "nodes"), text(20, 178, "that hold it", "dim small")]
    for stage, colour in enumerate(STAGES):
        x = 130 + stage * 150
        parts += [box(x + layer * 34, 48, 30, 50, colour, str(stage * 3 + layer)) for layer in range(3)]
        parts.append(text(x + 49, 36, f"stage {stage}", "ink mid"))
        parts += [box(x, 145 + row * 30, 98, 24, colour, name) for row, name in enumerate(NODES[stage])]
        parts.append(line([(x + 49, 102 if stage else 124), (x + 49, 140)], "line"))
    parts += [text(130, 118, "+ embedding, head, loss", "dim small"), text(20, 78, "12 layers", "dim small")]
    parts.append(text(130, 252, "data nodes", "dim small"))
    drawing("stages", 720, 268, "Twelve layers in four stages, and the nodes that hold each", parts)


def _place(left: float, stage: int, row: float) -> tuple[float, float]:
    return left + 34 + stage * 56, 92 + row * 44 + (22 if stage else 0)


def paths() -> None:
    over = (1, -0.8)  # around stage 1, where nobody is
    shown: list[tuple[str, list[tuple[int, float]]]] = [
        ("all stages, in order", [(0, 0), (1, 0), (2, 0), (3, 1)]),
        ("stage 1 is skipped", [(0, 0), over, (2, 0), (3, 1)]),
        ("2 and 1 are swapped", [(0, 0), over, (2, 0), (1, 1)]),
    ]
    parts = []
    for number, (title, path) in enumerate(shown):
        left = 15 + number * 238
        parts.append(text(left + 118, 30, title, "ink mid"))
        way = [_place(left, stage, row) for stage, row in path]
        x, y = way[-1]
        home = way[0][1]
        parts.append(line([*way[:-1], _short_of(way[-2], way[-1])], "way", A))
        parts.append(line([(x, y), (x, 225), (left + 4, 225), (left + 4, home), (left + 20, home)], "way back", A))
        for stage, names in enumerate(NODES):
            parts.append(text(_place(left, stage, 0)[0], 56, str(stage), "dim mid small"))
            for row in range(len(names)):
                x, y = _place(left, stage, row)
                parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="12" fill="{STAGES[stage]}"/>')
    parts.append(
        text(20, 252, "Dashed: back to the data node for head and loss. Then backward, the same way.", "dim small")
    )
    drawing("paths", 735, 266, "A full path, one that skips a stage, one that swaps two", parts)


def _short_of(start: tuple[float, float], end: tuple[float, float], gap: float = 13) -> tuple[float, float]:
    """Where an arrow to a circle ends."""
    share = gap / math.dist(start, end)
    return end[0] - (end[0] - start[0]) * share, end[1] - (end[1] - start[1]) * share


def lane() -> None:
    unit, left, hop = 29.0, 70.0, 0.4
    rows = {"ann": 46, "fay": 86, "hal": 126}
    parts = [text(20, y + 19, name) for name, y in rows.items()]
    time = 0.0
    for number, colour in enumerate((A, B)):
        steps = [("ann", 1.0, "F"), ("fay", 1.0, "F"), ("hal", 1.0, "F"), ("ann", 0.6, "H")]
        steps += [("hal", 1.5, "B"), ("fay", 1.5, "B"), ("ann", 1.5, "B")]
        begun = time
        for at, (name, seconds, what) in enumerate(steps):
            parts.append(box(left + time * unit, rows[name], seconds * unit - 1, 28, colour, what))
            time += seconds
            if at + 1 < len(steps):
                start = (left + time * unit, rows[name] + 14.0)
                end = (left + (time + hop) * unit, rows[steps[at + 1][0]] + 14.0)
                parts.append(line([start, end], "line"))
                time += hop
        parts.append(text(left + (begun + time) / 2 * unit, 30, f"microbatch {number + 1}", "dim small mid"))
    parts.append(text(70, 178, "F: forward. H: head and loss. B: backward. Time runs to the right.", "dim small"))
    drawing("lane", 720, 192, "A lane: one microbatch after another on the same path", parts)


def collision() -> None:
    unit, parts = 62, []
    shown = [
        ("A collision: both want fay at the same time.", "fay", 0.7),
        ("A longer way, to gus, and yet sooner there.", "gus", 1.0),
    ]
    rows = {"ann": 50, "fay": 86, "gus": 122, "bob": 158}
    for number, (title, node, link_s) in enumerate(shown):
        left = 20 + number * 355
        zero = left + 44
        parts += [text(left, 30, title, "ink small"), *(text(left, y + 18, name) for name, y in rows.items())]
        parts += [box(zero, rows["ann"], unit, 26, A, "F"), box(zero, rows["bob"], unit, 26, B, "F")]
        parts.append(line([(zero + unit, rows["ann"] + 13), (zero + 1.4 * unit, rows["fay"] + 13)], "line"))
        parts.append(box(zero + 1.4 * unit, rows["fay"], unit, 26, A, "F"))
        arrives = 1 + link_s
        starts = 2.4 if node == "fay" else arrives
        lands = rows[node] + (30 if starts > arrives else 0)
        parts.append(line([(zero + unit, rows["bob"] + 13), (zero + arrives * unit, lands + 13)], "line"))
        if starts > arrives:
            parts.append(waiting(zero + arrives * unit, lands, (starts - arrives) * unit - 2, 26))
        parts.append(box(zero + starts * unit, rows[node], unit, 26, B, "F"))
    drawing("collision", 720, 200, "Two microbatches meet on a node; one of them waits, or goes elsewhere", parts)


def rules() -> None:
    def path(x: float, y: float, visits: str) -> list[str]:
        return [box(x + at * 30, y, 26, 24, STAGES[int(stage)], stage) for at, stage in enumerate(visits)]

    def verdict(x: float, y: float, holds: bool, why: str) -> list[str]:
        return [
            text(x, y + 17, "✓" if holds else "✗", "good" if holds else "bad"),
            text(x + 20, y + 17, why, "dim small"),
        ]

    parts = []
    single = [
        ("CC1", "023", "begins on stage 0", "123", "leaves stage 0 out"),
        ("CC2", "021", "neighbours swap", "031", "not neighbours"),
    ]
    for row, (rule, good, why, bad, why_not) in enumerate(single):
        y = 22 + row * 44
        parts += [text(20, y + 17, rule), *path(80, y, good), *verdict(180, y, True, why)]
        parts += [*path(400, y, bad), *verdict(500, y, False, why_not)]
    parts.append(text(20, 148, "CC3"))
    for x, paths_, why in (
        (80, ("012", "013", "023"), "1, 2, 3: twice each"),
        (400, ("012", "012", "023"), "2, 3 and 1 times"),
    ):
        for number, visits in enumerate(paths_):
            parts += path(x, 112 + number * 28, visits)
        parts += verdict(x + 100, 138, x < 200, why)
    parts.append(text(20, 249, "TC1"))
    for x, lanes, why in ((80, 3, "3 lanes, 3 slots"), (400, 4, "4 lanes, 3 slots")):
        parts += [
            f'<rect x="{x + slot * 30}" y="232" width="26" height="24" rx="4" class="line"/>' for slot in range(3)
        ]
        parts += [box(x + at * 30 + 4, 236, 18, 16, A) for at in range(lanes)]
        parts += verdict(x + 128, 232, lanes <= 3, why)
    drawing("rules", 720, 274, "What CC1, CC2, CC3 and TC1 allow, and what they do not", parts)


def averaging() -> None:
    ring = {"dan": (120.0, 30.0, 2), "eve": (230.0, 150.0, 1), "kim": (20.0, 150.0, 3)}
    parts = []
    for name, (x, y, came) in ring.items():
        parts += [box(x, y, 90, 48, STAGES[1]), text(x + 45, y + 20, name, "on mid")]
        parts.append(text(x + 45, y + 38, f"sum of {came}", "on small mid"))
    ends = [((212, 62), (262, 146)), ((226, 174), (114, 174)), ((70, 146), (118, 62))]
    parts += [line(list(pair), "way", B) for pair in ends]
    parts += [
        text(360, 44, "Sums travel around the ring of a stage."),
        text(360, 84, "gradient = (dan + eve + kim) / 6"),
        text(360, 114, "6: the microbatches that visited this stage;", "dim small"),
        text(360, 132, "not 3, the nodes, nor 9, all microbatches", "dim small"),
        text(360, 172, "One norm over all stages clips the gradient;", "dim small"),
        text(360, 190, "then every node takes the same step.", "dim small"),
    ]
    drawing("averaging", 720, 222, "Nodes of a stage average their gradients in a ring", parts)


if __name__ == "__main__":
    for draw in (stages, paths, lane, collision, rules, averaging):
        draw()
