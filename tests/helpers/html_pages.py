"""What is packed into a page of a report."""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any

PACKED = re.compile(r'<script type="text/plain"(?: id="plotly")?>([^<]*)</script>')


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
