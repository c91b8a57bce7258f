"""What a node computes when it is measured: one layer of the model, forward and backward, as in training."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skippipe.model.model_spec import ModelSpec, config_from
from skippipe.model.stage_step import StageStep
from skippipe.optim.config import OptimConfig
from skippipe.runtime.messages import Computed
from skippipe.transport.message import Message
from skippipe.workload import Workload

WARM_UP = 2  # passes that are not measured
FEWEST, MOST = 5, 200  # passes that are, unless one alone takes longer than there is time
CGROUP = Path("/sys/fs/cgroup")
WHICH = (0, 0)


@dataclass
class ComputeBench:
    """An executor that measures itself. Everything is made in `run`, so that the node can send heartbeats meanwhile."""

    config: dict[str, Any]
    """The model's configuration, as Hugging Face writes it."""
    workload: Workload
    device: str
    compute_s: float
    """Seconds for the passes that are measured; the one that runs then is the last."""
    compiled: bool = False
    devices: int = 1
    """Alike devices of the node, of which the first is measured."""

    def __post_init__(self) -> None:
        self._device = torch.device(self.device)

    def run(self, _work: Any) -> Computed:
        room = free_bytes(self._device)
        passes = self._passes()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if self._device.type == "cpu":
            room //= self.devices  # workers of one CPU share its memory
        return Computed(passes, room, str(self._device), machine(), self.devices)

    def fits(self, _message: Message, _expected: Any) -> bool:
        return False

    def prefetch(self, given: Any, _device: int) -> Any:
        return given

    def _passes(self) -> list[list[float]]:
        work = self.workload
        tasks = StageStep(
            ModelSpec(config_from(self.config)),
            range(1),
            OptimConfig(),
            ends=False,
            device=str(self._device),
            compute_dtype=work.compute_dtype,
            recompute=work.activation_checkpointing,
            compiled=self.compiled,
        )
        shape = work.samples_per_microbatch, work.sequence_tokens, work.model.hidden
        hidden = torch.randn(shape, device=self._device)
        passes: list[list[float]] = []
        began = time.monotonic()
        for done in range(WARM_UP + MOST):
            spent_s = time.monotonic() - began
            if passes and spent_s > self.compute_s * (1 if len(passes) >= FEWEST else FEWEST):
                break
            forward_s, made = self._timed(lambda: tasks.forward(WHICH, hidden))
            gradient = torch.randn_like(made)
            backward_s, _ = self._timed(lambda gradient=gradient: tasks.backward(WHICH, gradient))  # type: ignore[misc]
            too_long = forward_s + backward_s > self.compute_s  # such a pass has no need to warm up
            if done >= WARM_UP or too_long:
                passes.append([forward_s, backward_s])
        return passes

    def _timed(self, what: Callable[[], torch.Tensor | None]) -> tuple[float, torch.Tensor]:
        self._wait()
        began = time.perf_counter()
        made = what()
        self._wait()
        assert made is not None
        return time.perf_counter() - began, made

    def _wait(self) -> None:
        """Wait until a GPU has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def free_bytes(device: torch.device) -> int:
    """Memory that a node may fill: of the GPU, or of the machine within the limit of its control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
    limit, used = _text(CGROUP / "memory.max").strip(), _text(CGROUP / "memory.current").strip()
    return max(1, min(free, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else free)


def machine() -> str:
    """An id of this machine or container: its name, and what tells it from others of that name."""
    boot = _text(Path("/proc/sys/kernel/random/boot_id")).strip()
    return f"{socket.gethostname()}/{boot}"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
