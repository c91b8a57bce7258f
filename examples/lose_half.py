"""Serve the built-in model over nodes, and kill half of them in the middle of an answer:

python examples/lose_half.py

Every stage of the model is on a process of its own, which joins with a key as it would from another machine. The same
question is asked twice, with the same seed: once with all nodes, and once while every other node is killed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import socket
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

MODEL = "austen"
PROMPT = "It is a truth universally acknowledged, that"
ASKED = {"model": MODEL, "prompt": PROMPT, "max_tokens": 70, "temperature": 0.7, "seed": 1, "stream": True}
KILL_AFTER = 20  # tokens
START_S = 120.0  # for all nodes to join and load their stages
ANSWER_S = 120.0
END_S = 10.0
WIDTH, MARK = 100, "✂"
DIM, PLAIN = ("\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "")
PRELOADED = ("inference.checkpoint_loader", "serving.launcher", "serving.node", "serving.executor", "serving.http")
FORKED = multiprocessing.get_context("forkserver")  # from a process that has imported torch once for all


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    FORKED.set_forkserver_preload(["skippipe.cli.app", *(f"skippipe.{name}" for name in PRELOADED)])
    started: list[BaseProcess] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            show(Path(folder), started)
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.join(END_S)
                process.kill()


def show(folder: Path, started: list[BaseProcess]) -> None:
    from skippipe.inference.checkpoint_loader import read_outline
    from skippipe.transport.keys import PeerList

    stages = len(read_outline(Path(MODEL)).layers)
    keys, join = folder / "keys", f"127.0.0.1:{free_port()}"
    start(os.devnull, "keys", f"regions:{stages}", keys).join(START_S)
    names = list(PeerList.load(keys / "peers.json").peers)
    print(f"The built-in model '{MODEL}' in {stages} stages, each on a node of its own: {', '.join(names)}", flush=True)
    said = folder / "said"
    os.mkfifo(said)
    started.append(
        start(said, "serve", MODEL, "--keys", keys, "--listen", join, "--port", 0, "--wait-timeout", int(START_S))
    )
    started += [start(os.devnull, "node", "--join", join, "--key", keys / f"{name}.key") for name in names]
    address = address_of(started[0], said)
    print(f"\nWith all {stages} nodes:\n", flush=True)
    print_answer(address)
    lost = dict(list(zip(names, started[1:], strict=True))[1::2])
    print(f"\nThe same again. At the {MARK}, {len(lost)} of {stages} nodes are killed: {', '.join(lost)}\n", flush=True)
    print_answer(address, list(lost.values()))


def start(said: Path | str, *words: object) -> BaseProcess:
    """A command of skippipe as a process; what it says goes to a file."""
    process = FORKED.Process(target=run, args=(str(said), *map(str, words)))
    process.start()
    return process


def run(said: str, *words: str) -> None:
    from skippipe.cli import main as skippipe

    with Path(said).open("w", buffering=1) as output:
        sys.stdout = sys.stderr = output
        sys.argv = ["skippipe", *words]
        skippipe()


def address_of(gateway: BaseProcess, said: Path) -> str:
    """Where the model is served."""
    too_late = threading.Timer(START_S, gateway.kill)
    too_late.start()
    output, lines = said.open(), []
    for line in output:
        lines.append(line)
        if found := re.search(r" is served at (http://\S+)/v1", line):
            too_late.cancel()
            threading.Thread(target=output.read, daemon=True).start()  # or the gateway would wait for us
            return found[1]
    raise SystemExit(f"it was not served within {START_S:.0f} s:\n{''.join(lines)}")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answer(address: str) -> Iterator[dict[str, Any]]:
    """The answer, piece by piece as it comes."""
    told = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(ASKED).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(told, timeout=ANSWER_S) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def print_answer(address: str, lost: Sequence[BaseProcess] = ()) -> None:
    """Print an answer as it comes, and how much of the model gave it; on its way, kill these nodes."""
    print(f"  {DIM}{PROMPT}{PLAIN}", end="", flush=True)
    column, pieces, given = len(PROMPT) + 2, 0, {}
    for piece in answer(address):
        if "error" in piece:
            raise SystemExit(f"\n{piece['error']['message']}")
        given = piece.get("skippipe") or given
        text = "".join(choice["text"] for choice in piece["choices"])
        for word in re.findall(r"\s*\S+|\s+", text):
            shown = f"\n  {word.lstrip()}" if column + len(word) > WIDTH and word[0].isspace() else word
            print(shown, end="", flush=True)
            column = len(shown) - 1 if "\n" in shown else column + len(shown)
        pieces += bool(text)
        if pieces == KILL_AFTER and lost:
            for process in lost:
                process.kill()
            lost = ()
            print(f" {MARK}", end="", flush=True)
    if lost:
        raise SystemExit("\nthe answer was over before anything was killed")
    print(f"\n\n  {DIM}its last tokens were computed by {given['stages']} of {given['of']} stages{PLAIN}")


if __name__ == "__main__":
    main()
