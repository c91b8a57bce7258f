"""Commands that spread a model's layers over several devices, as processes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.helpers.model_folders import export_to
from tests.helpers.serve_process import Command, Server

PATIENCE_S = 60.0
ENVIRONMENT = {"TQDM_DISABLE": "1"}


def said_by(*words: object) -> str:
    """What a command prints, once it has ended well."""
    command = Command(*words, environment=ENVIRONMENT)
    command.process.join(PATIENCE_S)
    said = command.all_lines()
    assert command.process.exitcode == 0, said
    return "\n".join(line for line in said if "Loading weights" not in line)  # how long that took


@pytest.mark.slow
def test_serve_generate_and_eval_over_two_devices(tmp_path: Path) -> None:
    folder, words = tmp_path / "model", "some words"
    export_to(folder, max_position_embeddings=512)
    (tmp_path / "words.txt").write_text("some words, and some more words.\n" * 20)
    ask = {"model": "model", "prompt": words, "max_tokens": 20, "temperature": 0}
    found = []
    for device in ("cpu:2", "cpu"):
        server = Server(folder, "--port", 0, "--nodes", 3, "--device", device, environment=ENVIRONMENT)
        try:
            reply = httpx2.post(f"{server.address}/v1/completions", json=ask, timeout=PATIENCE_S)
        finally:
            code = server.end()
        assert (reply.status_code, code) == (200, 130), (reply.text, server.lines)  # Ctrl-C
        served: str = reply.json()["choices"][0]["text"]
        generate = ("generate", folder, words, "--max-tokens", 20, "--temperature", 0, "--device", device)
        results = tmp_path / f"{device}.json"
        said_by("eval", folder, "--text", tmp_path / "words.txt", "--device", device, "-o", results)
        parts: list[dict[str, Any]] = json.loads(results.read_text())["parts"]
        found.append((served, said_by(*generate), [each["texts"] for each in parts]))
    assert found[0] == found[1]
    assert found[0][0] and found[0][0] in found[0][1]
