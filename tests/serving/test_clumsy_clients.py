"""`skippipe serve` and clients that ask for what cannot be: real processes over a small model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.helpers.echo_engine import COMPLETIONS, api_error
from tests.helpers.model_folders import export_to
from tests.helpers.serve_process import Server

PATIENCE_S = 60.0
MODEL = "small"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clumsy") / MODEL
    export_to(folder, max_position_embeddings=512)
    running = Server(folder, "--port", 0, "--nodes", 3, "--context", 600)
    try:
        yield running
    finally:
        running.end()


def ask(server: Server, **fields: Any) -> httpx2.Response:
    body = {"model": MODEL, "prompt": "some words", "max_tokens": 20, **fields}
    return httpx2.post(f"{server.address}{COMPLETIONS}", json=body, timeout=PATIENCE_S)


def test_a_context_beyond_the_models_own_is_warned_of_and_served(server: Server) -> None:
    assert ask(server, prompt=[5] * 550).status_code == 200
    api_error(ask(server, prompt=[5] * 590), 400, "context_length_exceeded", "prompt")
    server.says(r"--context 600: by its config the model is made for 512 tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_becomes_too_complex_is_the_clients_affair(server: Server, stream: bool) -> None:
    """It would be asked for again and again, if the error were the server's."""
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(800)}}
    wanted = {"type": "json_schema", "json_schema": {"name": "large", "schema": schema}}
    response = ask(server, response_format=wanted, stream=stream)
    assert "too complex" in api_error(response, 400, "unsupported_value", "response_format")
    assert ask(server).status_code == 200
