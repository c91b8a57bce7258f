"""How long the schedules of averaging take: all transfers of all stages, over links that they share.

Compiled, with numba where that is installed. docs/formats.md has the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from skippipe.collectives.schedule import Averaging
from skippipe.event_loop import drop_first, push
from skippipe.jit import Floats, Ints, kernel

NEVER_NS = 10**15  # about eleven days: what goes over no link takes that long, and no task, hop or transfer longer
NO_RECORD = np.empty((0, 4), np.int64)


class Columns(NamedTuple):
    """The transfers of one averaging as arrays, in the order of their numbers."""

    own: Ints
    """[transfer], as are the next seven: 0 if it is sent by a relay."""
    round: Ints
    total: Ints
    level: Ints
    piece: Ints
    sender: Ints
    """The node of the plan, as is the next."""
    receiver: Ints
    missing: Ints
    """How many transfers and joins it waits for."""
    joins: Ints
    """[join]: how many transfers it waits for. Where each of many transfers waits for the same ones, these lead to a
    join, and to nothing else, and the many wait for that; it takes no time. Joins are numbered after the transfers."""
    pairs: Ints
    """[pair, (number, number)]: a transfer or a join, and one that waits for it."""


def columns_of(averaging: Averaging) -> Columns:
    if averaging.rounds == 1 and not averaging.pieces and len(averaging.order) > 1:
        return columns_of_ring(averaging)
    is_star = averaging.pieces and averaging.rounds == 1 and not any(piece.via for piece in averaging.pieces)
    return columns_of_stars(averaging) if is_star else columns_of_schedule(averaging)


def columns_of_schedule(averaging: Averaging) -> Columns:
    schedule, nodes = averaging.schedule, np.array(averaging.nodes, np.int64)
    total, level, piece, sender, receiver, _ = np.array(schedule.transfers, np.int64).reshape(-1, 6).T
    missing = np.array([len(each) for each in schedule.needs], np.int64)
    own = np.array([number not in schedule.forwarding for number in range(len(total))], np.int64)
    pairs = [(before, number) for number, each in enumerate(schedule.needs) for before in each]
    rounds = piece // len(schedule.shares)
    columns = own, rounds, total, level, piece, nodes[sender], nodes[receiver], missing
    return Columns(*columns, np.empty(0, np.int64), np.array(pairs, np.int64).reshape(-1, 2))


def columns_of_ring(averaging: Averaging) -> Columns:
    """The same for a ring, in one round: each transfer waits for that of the same piece a level before."""
    size, nodes = len(averaging.order), np.array(averaging.order, np.int64)
    total, level, piece = (each.ravel() for each in np.indices((2, size - 1, size)))
    sender = (piece + level - total) % size
    ones, number = np.ones_like(piece), np.arange(len(piece))
    waits = (number >= size).astype(np.int64)
    columns = ones, np.zeros_like(ones), total, level, piece, nodes[sender], nodes[(sender + 1) % size], waits
    pairs = np.stack([number[:-size], number[size:]], 1)
    return Columns(*columns, np.empty(0, np.int64), pairs)


def columns_of_stars(averaging: Averaging) -> Columns:
    """The same where all nodes send straight to the root, or by way of a relay: the planner makes thousands of these,
    and a `Schedule` of each would take most of its time."""
    size, nodes = len(averaging.order), np.array(averaging.nodes, np.int64)
    place = {node: at for at, node in enumerate(averaging.nodes)}
    roots = np.array([place[piece.root] for piece in averaging.pieces], np.int64)
    relays = np.full((len(roots), size), -1, np.int64)
    for number, each in enumerate(averaging.pieces):
        for node, via in each.relays:
            relays[number, place[node]] = place[via]
    piece, leaf = np.nonzero(np.arange(size) != roots[:, None])
    root, relay = roots[piece], relays[piece, leaf]
    by = np.flatnonzero(relay >= 0)  # those that a relay forwards
    straight, zeros, ones = relay < 0, np.zeros(len(leaf), np.int64), np.ones(len(leaf), np.int64)
    # contributions, those that relays pass on, totals, those that relays pass on
    total = np.concatenate([zeros, zeros[by], ones, ones[by]])
    level = np.concatenate([zeros, ones[by], zeros, ones[by]])
    pieces = np.concatenate([piece, piece[by], piece, piece[by]])
    sender = np.concatenate([leaf, relay[by], root, relay[by]])
    receiver = np.concatenate([np.where(straight, root, relay), root[by], np.where(straight, leaf, relay), leaf[by]])
    order = _order(total, level, pieces, sender, receiver, np.concatenate([leaf, leaf[by], leaf, leaf[by]]))
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.arange(len(order))
    first, passed, back, passed_back = np.split(numbers, np.cumsum([len(leaf), len(by), len(leaf)]))
    arrives = first.copy()
    arrives[by] = passed
    join = len(order) + piece  # all contributions to a piece are there before its total leaves
    before = np.concatenate([first[by], back[by], arrives, join])
    pairs = np.stack([before, np.concatenate([passed, passed_back, join, back])], 1)
    waits = np.concatenate([zeros, ones[by], ones, ones[by]])
    own = np.concatenate([ones, zeros[by], ones, zeros[by]])
    columns = own, np.zeros_like(own), total, level, pieces, nodes[sender], nodes[receiver], waits
    return Columns._make([*(each[order] for each in columns), np.full(len(roots), size - 1), pairs])


def _order(*keys: Ints) -> Ints:
    """The order by these keys, the first one first, none of them negative; what is alike stays in order."""
    key = np.zeros(len(keys[0]), np.int64)
    for each in keys:  # the ranges of all together are far below 2**63
        key = key * (each.max(initial=0) + 1) + each
    return np.argsort(key, kind="stable")


class TransferTimes(NamedTuple):
    """[transfer]: times in nanoseconds."""

    transmit_ns: Ints
    """Time for which it keeps its link busy."""
    flight_ns: Ints
    """Time from leaving to arriving; other messages may follow at once."""
    notice_ns: Ints
    """After which the sender knows that the receiver is done, which counts where the receiver's download is shared."""
    upload_ns: Ints
    """Time for which it keeps the sender's upload busy; 0: that has no limit."""
    download_ns: Ints
    """Time for which it keeps the receiver's download busy; 0: that has no limit."""


class FreeLinks(NamedTuple):
    """When all that was sent before is over."""

    link_ns: Ints
    """[from, to]"""
    upload_ns: Ints
    """[node]"""
    download_ns: Ints


def free_links(nodes: int) -> FreeLinks:
    """All of them are free from the beginning."""
    return FreeLinks(np.zeros((nodes, nodes), np.int64), np.zeros(nodes, np.int64), np.zeros(nodes, np.int64))


@dataclass(frozen=True, eq=False)
class MergedSchedule:
    """The schedules of all stages as arrays for `run_schedule`: their transfers share links, and ranks are over all."""

    number: int
    """Number of stages."""
    stages: Ints
    """[transfer], as are the next five: its stage."""
    numbers: Ints
    """Its number in the stage's schedule."""
    pieces: Ints
    senders: Ints
    """The node that sends, as in the plan, like the next."""
    receivers: Ints
    missing: Ints
    """[transfer or join], as is the next: how many of them it waits for; see `Columns.joins`."""
    first_after: Ints
    """The place in `after` at which those begin that wait for it; one more entry than transfers and joins."""
    after: Ints
    """Transfers and joins that wait for one; only transfers wait for a join."""

    @classmethod
    def of(cls, averagings: Sequence[Averaging]) -> MergedSchedule:
        columns = [columns_of(each) for each in averagings]
        own, rounds, total, level, piece, sender, receiver, missing, joins, _ = map(
            np.concatenate, zip(*columns, strict=True)
        )
        sizes = np.array([(len(each.own), len(each.joins)) for each in columns], np.int64).reshape(-1, 2)
        first, first_join = (np.cumsum(sizes, axis=0) - sizes + [0, len(own)]).T
        of_stage = np.repeat(np.arange(len(averagings)), sizes[:, 0])
        order = _order(own, rounds, total, level)  # and then by stage and number, as they are now
        ranks = np.arange(len(own) + len(joins))
        ranks[order] = np.arange(len(own))
        pairs = []
        for stage, each in enumerate(columns):
            past = len(each.own)
            is_join = each.pairs >= past
            pairs.append(ranks[each.pairs + np.where(is_join, first_join[stage] - past, first[stage])])
        needed, needing = np.concatenate(pairs).T
        return cls(
            number=len(averagings),
            stages=of_stage[order],
            numbers=(np.arange(len(own)) - first[of_stage])[order],
            pieces=piece[order],
            senders=sender[order],
            receivers=receiver[order],
            missing=np.concatenate([missing[order], joins]),
            first_after=np.concatenate([[0], np.cumsum(np.bincount(needed, minlength=len(ranks)))]),
            after=needing[np.argsort(needed, kind="stable")],
        )

    def followers(self, number: int) -> Ints:
        """The transfers that wait for this one, also by way of a join."""
        found = self._after(number)
        joins = found[found >= len(self.senders)]
        return np.concatenate([found[found < len(self.senders)], *map(self._after, joins)])

    def _after(self, number: int) -> Ints:
        return self.after[self.first_after[number] : self.first_after[number + 1]]

    def run(self, done_ns: Ints, times: TransferTimes, free_ns: FreeLinks, record: Ints = NO_RECORD) -> Ints:
        """[stage]: when its last transfer has arrived; 0 if it has none. See `run_schedule`."""
        ends_ns = np.zeros(self.number, np.int64)
        run_schedule(
            done_ns,
            self.stages,
            self.senders,
            self.receivers,
            self.missing,
            self.first_after,
            self.after,
            *times,
            *free_ns,
            ends_ns,
            record,
        )
        return ends_ns


@kernel
def run_schedule(
    done_ns: Ints,  # [node]: end of its last task
    stages: Ints,  # as in `MergedSchedule`, like the next five
    senders: Ints,
    receivers: Ints,
    missing: Ints,
    first_after: Ints,
    after: Ints,
    transmit_ns: Ints,  # as in `TransferTimes`, like the next four
    flight_ns: Ints,
    notice_ns: Ints,
    upload_ns: Ints,
    download_ns: Ints,
    link_free_ns: Ints,  # in, out: as in `FreeLinks`, like the next two
    upload_free_ns: Ints,
    download_free_ns: Ints,
    ends_ns: Ints,  # in, out: [stage]: when its last transfer has arrived
    record: Ints,  # out: [transfer, (ready, start, sent, arrived)]; no rows: do not record
) -> None:
    """Let all transfers happen, in the order in which they are ready."""
    transfers = len(senders)
    recording = len(record) > 0
    waits = missing.copy()
    ready_ns = np.zeros(len(missing), np.int64)
    starts_ns = np.empty(transfers, np.int64)
    times, numbers = np.empty(transfers, np.int64), np.empty(transfers, np.int64)
    queued = 0
    for number in range(transfers):
        ready_ns[number] = done_ns[senders[number]]
        if download_ns[number] > 0:
            ready_ns[number] = max(ready_ns[number], done_ns[receivers[number]] + notice_ns[number])
        if waits[number] == 0:
            queued = push(times, numbers, queued, ready_ns[number], number)
    while queued > 0:
        now_ns, number = times[0], numbers[0]
        queued = drop_first(times, numbers, queued)
        if number < transfers:
            sender, receiver = senders[number], receivers[number]
            start_ns = now_ns
            if upload_ns[number] > 0:
                start_ns = max(now_ns, upload_free_ns[sender])
                upload_free_ns[sender] = start_ns + upload_ns[number]
            start_ns = max(start_ns, link_free_ns[sender, receiver])
            starts_ns[number] = start_ns
            link_free_ns[sender, receiver] = start_ns + transmit_ns[number]
            if recording:
                record[number, 0], record[number, 1] = now_ns, start_ns
            if download_ns[number] > 0:  # there messages of several senders meet
                queued = push(times, numbers, queued, start_ns + flight_ns[number], transfers + number)
                continue
            late_ns = 0
        else:
            number -= transfers
            receiver = receivers[number]
            start_ns = max(now_ns, download_free_ns[receiver])
            download_free_ns[receiver] = start_ns + download_ns[number]
            late_ns = start_ns - now_ns
        arrived_ns = starts_ns[number] + transmit_ns[number] + flight_ns[number] + late_ns
        ends_ns[stages[number]] = max(ends_ns[stages[number]], arrived_ns)
        if recording:
            record[number, 2], record[number, 3] = starts_ns[number] + transmit_ns[number], arrived_ns
        at, end = first_after[number], first_after[number + 1]
        while at < end:
            following = after[at]
            at += 1
            ready_ns[following] = max(ready_ns[following], arrived_ns)
            waits[following] -= 1
            if waits[following] > 0:
                continue
            if following < transfers:
                queued = push(times, numbers, queued, ready_ns[following], following)
            else:  # a join, and the transfer leads to nothing else
                arrived_ns, at, end = ready_ns[following], first_after[following], first_after[following + 1]


class LinkCosts(Protocol):
    """What a schedule asks the cost model for."""

    @property
    def gradient_bytes(self) -> tuple[int, ...]: ...
    @property
    def gradient_rounds(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def flight_ns(self) -> Ints: ...
    @property
    def bandwidth_bytes_per_s(self) -> Floats: ...
    @property
    def upload_bytes_per_s(self) -> Floats: ...
    @property
    def download_bytes_per_s(self) -> Floats: ...


def merged(costs: LinkCosts, averagings: Sequence[Averaging], stages: Sequence[int] | None = None) -> MergedSchedule:
    """The transfers of these averagings, in as many rounds as there are; `stages` are theirs, if they are not all."""
    rounds = [costs.gradient_rounds[stage] for stage in (range(len(averagings)) if stages is None else stages)]
    return _merged(tuple(each.in_rounds(len(sizes)) for each, sizes in zip(averagings, rounds, strict=True)))


@lru_cache(maxsize=64)
def _merged(averagings: tuple[Averaging, ...]) -> MergedSchedule:
    return MergedSchedule.of(averagings)


def transfer_times(costs: LinkCosts, averagings: Sequence[Averaging], stages: Sequence[int]) -> TransferTimes:
    """Times by the ranks of the merged schedule; `stages` are those of the averagings, which may be some only."""
    schedule = merged(costs, averagings, stages)
    sizes = [
        np.array(averaging.piece_bytes(*costs.gradient_rounds[stage]), np.int64)
        for stage, averaging in zip(stages, averagings, strict=True)
    ]
    first = np.cumsum([0, *map(len, sizes)])
    size_bytes = np.concatenate(sizes)[first[schedule.stages] + schedule.pieces]
    links = schedule.senders, schedule.receivers
    upload, download = costs.upload_bytes_per_s[schedule.senders], costs.download_bytes_per_s[schedule.receivers]
    return TransferTimes(
        transmit_ns=transmit_ns(size_bytes, costs.bandwidth_bytes_per_s[links]),
        flight_ns=costs.flight_ns[links],
        notice_ns=costs.flight_ns.T[links],
        upload_ns=transmit_ns(size_bytes, upload) * np.isfinite(upload),
        download_ns=transmit_ns(size_bytes, download) * np.isfinite(download),
    )


def transfer_loads(costs: LinkCosts, averagings: Sequence[tuple[int, Averaging]]) -> FreeLinks:
    """For how long these stages keep links, uploads and downloads busy."""
    loads = free_links(len(costs.flight_ns))
    if averagings:
        stages, each = zip(*averagings, strict=True)
        times, schedule = transfer_times(costs, each, stages), merged(costs, each, stages)
        np.add.at(loads.link_ns, (schedule.senders, schedule.receivers), times.transmit_ns)
        np.add.at(loads.upload_ns, schedule.senders, times.upload_ns)
        np.add.at(loads.download_ns, schedule.receivers, times.download_ns)
    return loads


def transmit_ns(size_bytes: Ints | int, bandwidth: Floats, least_ns: int = 1) -> Ints:
    """Time for which messages of so many bytes keep links busy; NEVER_NS where there is none."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        taken = np.asarray(size_bytes / bandwidth)
        taken *= 1e9
    np.rint(taken, out=taken)
    np.fmin(taken, NEVER_NS, out=taken)  # where there is no bandwidth, it is infinite or no number
    return np.maximum(taken, least_ns, out=taken).astype(np.int64)


def averaged_ns(costs: LinkCosts, stage: int, averaging: Averaging, done_ns: Ints) -> int:
    """When all nodes of one stage have the sum, were it alone; `done_ns`, by node, is when they end their last task."""
    if not averaging.order:
        return 0
    times, free_ns = transfer_times(costs, (averaging,), (stage,)), free_links(len(done_ns))
    ends_ns = merged(costs, (averaging,), (stage,)).run(done_ns, times, free_ns)
    return max(int(ends_ns[0]), int(done_ns[list(averaging.order)].max()))


def takes_ns(costs: LinkCosts, stage: int, averaging: Averaging) -> int:
    """The whole averaging of a stage whose nodes are done at the same time."""
    return averaged_ns(costs, stage, averaging, np.zeros(len(costs.flight_ns), np.int64))


def after_ns(costs: LinkCosts, stage: int, averaging: Averaging, last: int) -> int:
    """How long averaging goes on after this node is done, at least: the longest chain of transfers that begins there.
    (That all others were done long before need not be the least: what is ready early can go before what matters.)"""
    each, times = merged(costs, (averaging,), (stage,)), transfer_times(costs, (averaging,), (stage,))
    by_number = np.argsort(each.numbers)
    alone_ns = (times.transmit_ns + times.flight_ns)[by_number].tolist()
    begins = (each.senders == last)[by_number].tolist()
    ends_ns: list[int] = []
    schedule = averaging.in_rounds(len(costs.gradient_rounds[stage])).schedule
    for needs, begins_there, taken_ns in zip(schedule.needs, begins, alone_ns, strict=True):
        before_ns = max((ends_ns[at] for at in needs), default=0)  # a transfer comes after those it waits for
        ends_ns.append(before_ns + taken_ns if before_ns or begins_there else 0)
    return max(ends_ns, default=0)


@kernel
def link_ns(size_bytes: int, bandwidth: float) -> int:
    """`transmit_ns` for one message."""
    if bandwidth <= 0:
        return NEVER_NS
    return int(max(1.0, min(float(NEVER_NS), np.rint(size_bytes / bandwidth * 1e9))))
