"""The devices of one node as one executor: each holds the whole stage, and they compute tasks side by side.

To the rest of the run it is one node. Every device adds up the gradients of the microbatches that it computed; these
sums are added on the machine, in the order of the devices, before the stage averages, so that the network carries them
once. Every device then takes the same optimizer step: all of them hold the whole state, bit by bit the same, and
none is needed more than the others. What others see of the state is that of the first.

A device that fails is left out: what was on it is done again by the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from skippipe.collectives.schedule import Schedule
from skippipe.errors import first_line
from skippipe.model.stage_step import StageStep
from skippipe.runtime.node import ops
from skippipe.runtime.stage_executor import CHUNK_VALUES, StageExecutor
from skippipe.transport.message import Message

log = logging.getLogger(__name__)


class DevicePool:
    """An executor made of one for each device; `devices` are those that work, by their numbers."""

    def __init__(self, executors: Sequence[StageExecutor]) -> None:
        self.devices = dict(enumerate(executors))
        self._lost: set[int] = set()
        """Devices that have failed."""
        self._unreported: list[ops.DeviceLost] = []
        """Lost devices that no operation has reported."""
        self._lock = threading.Lock()
        """Guards `devices` when one fails: several may at the same time."""
        self._threads = ThreadPoolExecutor(len(executors), thread_name_prefix="device")

    @property
    def first(self) -> StageExecutor:
        return next(iter(self.devices.values()))

    @property
    def tasks(self) -> StageStep:
        """The stage on the first device, whose state others see."""
        return self.first.tasks

    def run(self, op: ops.Op) -> Any:
        """The result of an operation; `DeviceLost` if it is of an iteration, and what a device has added up is gone."""
        if isinstance(op, (ops.StageTask, *ops.OPS_OF_AVERAGING)):
            with suppress(IndexError):  # several devices compute, and one of them takes it
                return self._unreported.pop()
        match op:
            case ops.StageTask():
                return self._run_on(op.device, op)
            case ops.DropMicrobatch() | ops.ClearGradients() | ops.PlanTransfer() | ops.WriteState():
                return self._run_on_all(op)
            case ops.BeginAveraging() | ops.CheckFinite() | ops.GradNorm(alone=True):
                return self._sum_gradients() or self._run_on(next(iter(self.devices)), op)
            case ops.ContributePiece() | ops.AdoptPiece() | ops.GradNorm():
                return self._run_on(next(iter(self.devices)), op)
            case ops.OptimizerStep():
                if op.scale:
                    self._hand_over_gradient()
                return self._run_on_all(op)
            case _:
                return self._run_on_first(op)

    def fits(self, message: Message, expected: Schedule) -> bool:
        return self.first.fits(message, expected)

    def prefetch(self, given: Any, device: int) -> Any:
        """Copies to that device, unless it has failed."""
        there = self.devices.get(device)
        return given if there is None else there.prefetch(given)

    def lose(self, device: int, reason: str) -> None:
        """A device has failed, and is not the last: its stage, and what it has added up, are gone."""
        self._unreported.append(self._leave_out(device, RuntimeError(reason)))

    def _leave_out(self, device: int, error: Exception) -> ops.DeviceLost:
        """What is to be reported of a device that has failed; raises the error if there is no other one."""
        reason = first_line(error)
        with self._lock:
            if len(self.devices) == 1:
                raise error
            former_first, failed = self.first, self.devices.pop(device)
            self._lost.add(device)
            if failed is former_first:
                self.first.take_over(failed)
            left = len(self.devices)
        log.warning("device %d of this node has failed, %d are left: %s", device, left, reason)
        return ops.DeviceLost(device, reason)

    @property
    def _others(self) -> list[tuple[int, StageExecutor]]:
        return list(self.devices.items())[1:]

    def _run_on(self, device: int, op: ops.Op) -> Any:
        """The result; `DeviceLost` if the device has failed, or fails now."""
        if device in self._lost:  # the operation has waited for it
            return ops.DeviceLost(device, "it has failed before")
        try:
            return self.devices[device].run(op)
        except torch.AcceleratorError as error:
            return self._leave_out(device, error)

    def _run_on_all(self, op: ops.Op) -> Any:
        """Run on every device at the same time; gives the result of one that works; others are reported later."""
        results = list(self._threads.map(lambda device: self._run_on(device, op), list(self.devices)))
        self._unreported += [each for each in results if isinstance(each, ops.DeviceLost)]
        return next(each for each in results if not isinstance(each, ops.DeviceLost))

    def _run_on_first(self, op: ops.Op) -> Any:
        """What any device can do, because all have the same state."""
        while isinstance(result := self._run_on(next(iter(self.devices)), op), ops.DeviceLost):
            self._unreported.append(result)
        return result

    def _sum_gradients(self) -> ops.DeviceLost | None:
        """Add up what the devices have, at the first; the others then have none, so that it can be done again."""
        first, total = next(iter(self.devices)), self.first.tasks.weights.gradient
        for device, each in self._others:
            gradient = each.tasks.weights.gradient
            try:
                for start in range(0, len(total), CHUNK_VALUES):  # no copy of all of it on the first device
                    part = slice(start, start + CHUNK_VALUES)
                    total[part].add_(gradient[part].to(total.device))
                gradient.zero_()
            except torch.AcceleratorError as error:
                return self._leave_out(first if _responds(each) else device, error)
        return None

    def _hand_over_gradient(self) -> None:
        """Give the averaged gradient to every device."""
        first = self.first
        for device, each in self._others:
            try:
                each.follow(first)
            except torch.AcceleratorError as error:
                if _responds(each):
                    raise  # the first has failed, and the gradient is gone with it
                self._unreported.append(self._leave_out(device, error))


def _responds(executor: StageExecutor) -> bool:
    """A copy between two devices does not say which of them has failed."""
    try:
        executor.tasks.weights.gradient[:1].cpu()
    except torch.AcceleratorError:
        return False
    return True
