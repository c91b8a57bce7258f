"""Commands and what they did: in this process, as processes, and heard line by line while they run; jobs for them."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from skippipe.checkpoint.format import Checkpoints

READY_S = 90.0  # for what is waited for to be said on a busy machine; a few seconds on an idle one
END_S = 30.0
RUN_END_S = 120.0  # for a run to end on a busy machine; each takes some 10 s on an idle one
NODES = 4
MODEL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
JOB = """
output = {output!r}
iterations = 2
cluster = "regions:{nodes}"
model.config = {folder!r}
data = {{ texts = [{text!r}], vocabulary = 300, folder = {tokens!r} }}
batch = {{ sequence = 16, samples = 1, microbatches = 4 }}
pipeline = {{ stages = {stages}, skip = "0", budget_s = 0.05 }}
"""


FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "transformers.models.llama.modeling_llama",
        "transformers.tokenization_utils_fast",
        "skippipe.cli.app",
        "skippipe.serving.launcher",
        "skippipe.serving.node",
        "skippipe.serving.http.routes",
        "skippipe.serving.executor",
        "skippipe.training.reference",
        "skippipe.training.run",
        "tests.helpers.faulty_node",
        "tests.helpers.models",
        "tests.helpers.profiling",
        "tests.helpers.preloaded",
    ]
)
"""What every process of a test is forked from, since importing torch takes longer than most of them. Python has one
such server for a process, and the list counts that it is started with: so there is one list."""


class ProcessOutput:
    """A thread that listens until the other side has nothing more to say."""

    def __init__(self, said: Iterable[str]) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, args=(said,), daemon=True)
        self._reader.start()

    def says(self, pattern: str, times: int = 1, within_s: float = READY_S) -> re.Match[str]:
        """The last of so many lines that match, once they are there."""
        deadline = time.monotonic() + within_s
        with self._news:
            while True:
                found = [match for line in self.lines if (match := re.search(pattern, line))]
                if len(found) >= times:
                    return found[times - 1]
                left_s = deadline - time.monotonic()
                assert left_s > 0 and self._reader.is_alive(), f"no {pattern!r} in:\n" + "\n".join(self.lines)
                self._news.wait(min(left_s, 1.0))

    def all_lines(self) -> list[str]:
        """All lines, once there will be no more."""
        self._reader.join(END_S)
        return self.lines

    def _read(self, said: Iterable[str]) -> None:
        for line in said:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()


class Place:
    """A folder with a small model, a text, keys, and room for jobs and runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "config.json").write_text(json.dumps(MODEL))
        (folder / "text.txt").write_text(
            "".join(f"The quick brown fox jumps over {each} dogs.\n" for each in range(300))
        )

    def job(self, name: str, nodes: int, stages: int, more: str = "") -> Path:
        path = self.folder / f"{name}.toml"
        said = {"output": str(self.folder / name), "folder": str(self.folder), "text": str(self.folder / "text.txt")}
        path.write_text(JOB.format(**said, tokens=str(self.folder / "tokens"), nodes=nodes, stages=stages) + more)
        return path

    def joining(self, name: str, port: int, peers: Path | None = None, key: Path | None = None) -> Path:
        keys = self.folder / "keys"
        said = {
            "listen": f"127.0.0.1:{port}",
            "peers": str(peers or keys / "peers.json"),
            "key": str(key or keys / "coordinator.key"),
        }
        transport = "".join(f"transport.{name} = {value!r}\n" for name, value in said.items())
        return self.job(name, NODES, 2, transport)

    def losses(self, name: str) -> list[float]:
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    def has_trained(self, name: str, iterations: int) -> bool:
        metrics = self.folder / name / "metrics.jsonl"
        return metrics.exists() and len(metrics.read_text().splitlines()) >= iterations

    def saved(self, name: str) -> int:
        """Iterations of the newest checkpoint."""
        found = Checkpoints.of_run(self.folder / name).newest_sound()
        return found.manifest.iterations if found else 0

    def is_trained(self, name: str) -> bool:
        model = self.folder / name / "model"
        return all(
            (model / file).exists() for file in ("config.json", "model.safetensors.index.json", "tokenizer.json")
        )


def start(*words: object, module: str = "skippipe") -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *map(str, words)]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def end(process: subprocess.Popen[str], within_s: float = RUN_END_S) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    try:
        out, err = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"still there after {within_s} s: {out}{err}")
    return process.returncode, out, err


def only_error(err: str) -> str:
    """The one line that says what is wrong; no traceback."""
    assert "Traceback" not in err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    return errors[0].removeprefix("error: ")


@dataclass(frozen=True)
class CommandResult:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., CommandResult]
"""Takes what stands behind `skippipe` on the command line."""


@contextmanager
def owner(task: Callable[[Path], None], folder: Path) -> Iterator[ForkServerProcess]:
    """A process that does something, forked from one that has imported much and done nothing."""
    process = FORKED.Process(target=task, args=(folder,))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(RUN_END_S)


def wait_for(what: Callable[[], bool], within_s: float = RUN_END_S) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, f"waited {within_s} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """A zombie whose new parent has not looked yet is as good as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or before it was read
        return False
