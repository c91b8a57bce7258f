"""Pages of reports: what a browser would fetch, what a person reads, and what is packed into them."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from typing import Any

PACKED = re.compile(r'<script type="text/plain"(?: id="plotly")?>([^<]*)</script>')


class Page(HTMLParser):
    """What a browser would fetch, and what a person would read; script text is neither."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.images = 0
        self.read = ""
        self.headings: list[str] = []
        self.cells: list[str] = []
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.images += tag == "img"
        self.fetched += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "data", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        if tag == self._tag:
            self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag not in ("script", "style"):
            self.read += data
        if self._tag == "h2":
            self.headings.append(data)
        if self._tag == "td":
            self.cells.append(data)


def figures_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(figure) for figure in _unpacked(text)[:-1]]


def library_of(text: str) -> str:
    return _unpacked(text)[-1]


def _unpacked(text: str) -> list[str]:
    found = []
    for packed in PACKED.findall(text):
        content = base64.b85decode(packed.replace(",", "<"))
        found.append(gzip.decompress(content[4 : 4 + int.from_bytes(content[:4], "big")]).decode())
    return found
