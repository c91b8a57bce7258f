"""What stands on the pages: blocks, and commands in blocks and within sentences."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("studies/*.md")])
BLOCK = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
SENTENCE = re.compile(r"`(?P<text>(?:skippipe (?:\w+ |--)|pip |make )[^`]+)`")
"""A command within a sentence. `skippipe train` alone is a name."""

BEFORE_A_COMMAND = {"", "|", "&&", "do"}
AFTER_A_COMMAND = {"|", "&&", "&", ">"}


@dataclass(frozen=True)
class Piece:
    """A block, or a command within a sentence, whose kind is empty."""

    kind: str
    text: str


def sections(text: str) -> dict[str, str]:
    """Heading → what stands under it; what stands above all of them is under an empty one."""
    first, *others = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return {"": first, **dict(zip(others[::2], others[1::2], strict=True))}


def pieces(text: str) -> list[Piece]:
    """In the order of the text."""
    found = [(each.start(), Piece(each["kind"], each["text"])) for each in BLOCK.finditer(text)]
    between = BLOCK.sub(lambda block: " " * len(block[0]), text)
    found += [(each.start(), Piece("", " ".join(each["text"].split()))) for each in SENTENCE.finditer(between)]
    return [piece for _, piece in sorted(found, key=lambda place: place[0])]


def lines(block: str) -> list[str]:
    """What is typed, a command at a time; remarks at its end stay."""
    typed = re.sub(r"\\\n\s*", " ", block).splitlines()
    return [line.strip() for line in typed if line.strip() and not line.lstrip().startswith("#")]


def without_remark(line: str) -> str:
    return line.partition("  #")[0].strip()


def commands(text: str) -> Iterator[list[str]]:
    """What stands behind `skippipe` in blocks for a shell."""
    for block in BLOCK.finditer(text):
        if block["kind"] not in ("console", "bash"):
            continue
        for line in lines(block["text"]):
            try:
                words = shlex.split(line.removeprefix("$ "), comments=True)
            except ValueError:  # a quotation over several lines, or what a command prints
                assert "skippipe " not in line, line
                continue
            for at, word in enumerate(words):
                if word == "skippipe" and ["", *words][at] in BEFORE_A_COMMAND:
                    rest = words[at + 1 :]
                    end = next((place for place, word in enumerate(rest) if word in AFTER_A_COMMAND), len(rest))
                    yield rest[:end]


def without_blocks(text: str) -> str:
    return BLOCK.sub("", text)


def documented(page: str, heading: str) -> set[str]:
    """What stands in the first column of the tables under a heading: fields of a format."""
    text = re.split(rf"^#+ {re.escape(heading)}$", (ROOT / page).read_text(), flags=re.MULTILINE)[1]
    rows = re.findall(r"^\| (`[^|]+?) \|", re.split(r"^#", text, flags=re.MULTILINE)[0], flags=re.MULTILINE)
    return {field for row in rows for field in re.findall(r"`([^`]+)`", row)}
