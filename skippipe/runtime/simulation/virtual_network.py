"""The network between virtual nodes: links, uploads and downloads that messages wait for, as docs/formats.md has it."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np

from skippipe.collectives.transfers import transmit_ns
from skippipe.cost_model import CostModel, ns
from skippipe.dispatch import message_pass
from skippipe.runtime.node.state_machine import TrainingNode
from skippipe.runtime.simulation.symbolic_executor import PIECES
from skippipe.transport.message import BackupPiece, GradientPiece, Hop, Message, TeacherHop, ValidationHop

Link = tuple[int, int]


class VirtualNetwork:
    """When links, uploads and downloads have carried what was queued. A node that is lost leaves nothing queued."""

    def __init__(self, costs: CostModel, disturb: Callable[[int], int]) -> None:
        self._costs = costs
        self._disturb = disturb
        self._link_free_ns: dict[Link, int] = {}
        self._upload_free_ns: dict[int, int] = {}
        self._download_free_ns: dict[int, int] = {}

    def forget(self, node: int) -> None:
        self._link_free_ns = {link: at_ns for link, at_ns in self._link_free_ns.items() if node not in link}
        self._upload_free_ns.pop(node, None)
        self._download_free_ns.pop(node, None)

    def is_shared(self, receiver: int) -> bool:
        """Has the receiver a download that messages wait for?"""
        return bool(self._costs.download_bytes_per_s[receiver] < inf)

    def send(self, link: Link, size: int, planned_ns: int, factor: float, now_ns: int) -> tuple[int, int]:
        """When the first byte arrives, and how long the rest takes; links may take `factor` times what is planned."""
        sender, _ = link
        start_ns = now_ns
        if self._costs.upload_bytes_per_s[sender] < inf:
            start_ns = max(start_ns, self._upload_free_ns.get(sender, 0))
            self._upload_free_ns[sender] = start_ns + ns(size / self._costs.upload_bytes_per_s[sender])
        start_ns = max(start_ns, self._link_free_ns.get(link, 0))
        took_ns = int(self._disturb(planned_ns) * factor)
        self._link_free_ns[link] = start_ns + took_ns
        return start_ns + int(self._costs.flight_ns[link] * factor), took_ns

    def download(self, receiver: int, size: int, now_ns: int) -> int:
        """When a message whose first byte comes now gets through the receiver's download."""
        start_ns = max(now_ns, self._download_free_ns.get(receiver, 0))
        self._download_free_ns[receiver] = start_ns + ns(size / self._costs.download_bytes_per_s[receiver])
        return start_ns

    def planned(self, node: TrainingNode, link: Link, message: Message) -> tuple[int, int]:
        """Bytes of a message, and for how long it keeps its link busy, as planned."""
        costs, header = self._costs, message.header
        if isinstance(header, Hop):
            length = len(node.plan.lanes[header.lane].path)
            which = (message_pass(header.step, length), *link)
            return int(costs.hop_bytes[which]), int(costs.transmit_ns[which])
        if isinstance(header, TeacherHop):
            return int(costs.hop_bytes[0, *link]), int(costs.transmit_ns[0, *link])
        if isinstance(header, ValidationHop):
            size = node.plan.workload.activation_bytes
        elif isinstance(header, GradientPiece):
            averaging = node.averagings[header.stage]
            sizes = averaging.piece_bytes(*costs.gradient_rounds[header.stage])
            size = sizes[averaging.schedule.transfers[header.transfer].piece]
        else:
            is_backup = isinstance(header, BackupPiece)
            whole = node.plan.workload.backup_bytes if is_backup else costs.gradient_bytes[node.stage]
            size = int(getattr(message.body, "nbytes", whole // PIECES))
        return size, int(transmit_ns(np.array(size), costs.bandwidth_bytes_per_s[link]))
