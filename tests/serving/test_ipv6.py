"""Serving over IPv6 from end to end: invitations, doctor, nodes that join, and the HTTP server."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from skippipe.transport.addresses import free_port, join_address, tcp_server
from tests.helpers.model_folders import export_to
from tests.helpers.processes import Command as Run
from tests.helpers.serve_process import Command, Server

pytestmark = pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
PATIENCE_S = 60.0


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_host_may_have_brackets(host: str) -> None:
    with tcp_server(host, 0) as server:
        where = join_address(host, server.getsockname()[1])
        assert where == f"[::1]:{server.getsockname()[1]}"


@pytest.mark.slow
def test_nodes_are_invited_examined_and_serve_over_ipv6(tmp_path: Path, skippipe: Run) -> None:
    folder, keys = tmp_path / "model", tmp_path / "keys"
    export_to(folder, max_position_embeddings=128)
    at = f"[::1]:{free_port('::1')}"
    invited = {}
    for name in ("ann", "bob", "cem"):
        result = skippipe("invite", keys, "--name", name, "--address", at, "--json")
        assert result.code == 0, result.err
        assert result.json["addresses"] == [at]
        invited[name] = result.json["invitation"]
    with ExitStack() as stack:
        server = Server(folder, "--port", 0, "--host", "[::1]", "--keys", keys, "--listen", at)
        stack.callback(server.end, signal.SIGKILL)
        server.says("ann, bob, cem")
        examined = skippipe("doctor", invited["bob"])
        assert examined.code == 0, examined.out + examined.err
        assert "[::1]:" in examined.out
        for name, invitation in invited.items():
            node = Command("node", invitation, "--key", tmp_path / f"{name}.key")
            stack.callback(node.end, signal.SIGKILL)
        assert server.address.startswith("http://[::1]:")
        ask = {"model": "model", "prompt": "some words", "max_tokens": 5, "temperature": 0}
        reply = httpx2.post(f"{server.address}/v1/completions", json=ask, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 5
