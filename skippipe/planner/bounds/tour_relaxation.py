"""How many microbatches lanes can bring home by a given time: a programme over tours, solved by column generation.

A lane on a tour that takes c brings home floor(T / c) microbatches by time T, and a node lies on no more lanes than it
has slots (TC1). On a data node with several lanes, their first forwards run one after another, and so do their last
backwards: the lane that is r-th to start and has q others behind it at the end has r forwards and q backwards less than
T; with w workers side by side, floor(r / w) forwards and floor(q / w) backwards. Stage sizes, allocation, order of
stages and collisions elsewhere are left open, so no plan does better.

The linear programme has few columns at first and adds those whose reduced profit is positive. Any dual prices prove an
upper limit, which is computed here from all tours, whatever the solver says; for the integer programme the solver's
word is taken that it is infeasible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from scipy.optimize import LinearConstraint, linprog, milp
from scipy.sparse import coo_array, csr_array

from skippipe.jit import Flags, Floats, Ints
from skippipe.planner.bounds.load_relaxation import INFEASIBLE, after_ns, before_ns, work_ns
from skippipe.planner.bounds.node_classes import NodeClasses, Tours

RANKS = 4  # lanes of a data node that are distinguished; all further ones count like the last of these
LEVELS = 4  # numbers of microbatches on one tour that are distinguished, likewise
MOST_WHOLE = 5_000  # columns of an integer programme: with many more the solver overruns its time limit
MOST_EXACT = 10_000  # tours, each with every number of microbatches
MARGIN = 1e-6  # of a microbatch: by how much a proof must hold
TOURS_PER_ROUND = 300  # that the linear programme knows at first, and gets to know at a time
MAX_PRICING_ROUNDS = 200  # of that
TINY = 1e-9  # of a microbatch: a tour that is worth less is not worth asking for
WHOLE_SHARE = 0.5  # of the time left, for one integer programme
SOLVED = 0  # what scipy calls it


@dataclass(frozen=True, eq=False)
class _Columns:
    """Columns of the programme: a tour, its microbatches, and how late a lane on it may be."""

    tour: Ints
    microbatches: Ints
    started: Ints
    """[column]: lanes of its data node that may start before it."""
    behind: Ints
    """[column]: lanes of its data node that may end after it."""

    def __len__(self) -> int:
        return len(self.tour)

    def __getitem__(self, chosen: Ints | Flags) -> _Columns:
        return _Columns(self.tour[chosen], self.microbatches[chosen], self.started[chosen], self.behind[chosen])


class TourProgramme:
    def __init__(
        self, classes: NodeClasses, tours: Tours, microbatches: int, share: int, most_data_nodes: int, with_load: bool
    ) -> None:
        """`share`: microbatches of a stage other than 0; `with_load`: nodes of these stages must be done by then
        too."""
        self.classes = classes
        self.tours = tours
        self.microbatches = microbatches
        self.share = share
        self.most_data_nodes = most_data_nodes
        self.with_load = with_load
        self.ranks = np.minimum(classes.slots[0], RANKS)
        self.lead_ns = classes.forward_ns[0]
        self.gap_ns = classes.backward_ns[0] + classes.weight_ns[0]
        slots = int(np.maximum(classes.slots[0], classes.other_slots) @ classes.count)
        self.most_lanes = min(microbatches, slots // (tours.others.shape[1] + 1))
        self.known = np.zeros(len(tours.start), np.bool_)
        self.known[np.argsort(tours.round_ns, kind="stable")[:TOURS_PER_ROUND]] = True

    def infeasible_by(self, deadline_ns: int, left_s: Callable[[], float]) -> bool:
        """Proven: at this time some microbatch is still on its way."""
        upper_limit, _ = self._upper_limit(self._columns(deadline_ns), self._node_limits(deadline_ns), left_s)
        return upper_limit < self.microbatches - MARGIN

    def whole_lanes_infeasible_by(self, deadline_ns: int, left_s: Callable[[], float]) -> bool:
        """Proven: at this time some microbatch is still on its way, as lanes and data nodes cannot be divided.

        If tours are many, a column stands for lanes with fewer microbatches too, and a node's work is dropped: a
        smaller programme with a weaker bound.
        """
        exact = int((deadline_ns // self.tours.round_ns).clip(max=self.microbatches).sum()) <= MOST_EXACT
        columns = self._columns(deadline_ns, exact)
        node_limits = self._node_limits(deadline_ns) if exact else None
        upper_limit, reduced_profit = self._upper_limit(columns, node_limits, left_s, to_the_end=True)
        if upper_limit < self.microbatches - MARGIN:
            return True
        useful = (
            upper_limit + np.minimum(reduced_profit, 0) >= self.microbatches - MARGIN
        )  # one lane of another makes too few
        if int(useful.sum()) > MOST_WHOLE or left_s() <= 0:
            return False
        columns = columns[useful]
        rows, most = self._rows(columns, node_limits)
        at_most = self.microbatches if exact else np.inf
        enough = np.concatenate([columns.microbatches, np.zeros(len(self.classes), np.int64)])
        outcome = milp(
            np.zeros(rows.shape[1]),
            integrality=np.ones(rows.shape[1], np.int64),
            constraints=[
                LinearConstraint(rows, -np.inf, most),
                LinearConstraint(csr_array(enough[None].astype(np.float64)), self.microbatches, at_most),
            ],
            options={"time_limit": max(left_s() * WHOLE_SHARE, 0.01)},
        )
        return bool(outcome.status == INFEASIBLE)

    def _columns(self, deadline_ns: int, exact: bool = False) -> _Columns:
        """Columns for every number of microbatches, each with the latest lane that it allows: a lane may as well be
        earlier.

        Unless `exact`, fewer microbatches are left out where more are as good for a lane that can be divided.
        """
        tours, start = self.tours, self.tours.start
        time_ns = deadline_ns - self.classes.weight_ns[0, start]
        most = time_ns // tours.round_ns
        last = self.ranks[start] - 1
        found = []
        live = np.flatnonzero(most > 0)
        most = np.minimum(most, self.microbatches)
        for level in range(int(most.max(initial=1)) if exact else LEVELS):
            count = most[live] - level
            slack_ns = time_ns[live] - count * tours.round_ns[live]
            lead_ns, gap_ns, final = self.lead_ns[start[live]], self.gap_ns[start[live]], last[live]
            workers = self.classes.workers[0, start[live]]
            if level == LEVELS - 1 and not exact:
                slack_ns = final * (lead_ns + gap_ns)  # as good as all that have fewer
            for started in range(RANKS):
                left_ns = slack_ns - started // workers * lead_ns
                next_left_ns = slack_ns - (started + 1) // workers * lead_ns
                behind = np.minimum(left_ns // gap_ns * workers + workers - 1, final)
                next_behind = np.minimum(next_left_ns // gap_ns * workers + workers - 1, final)
                good = (started <= final) & (behind >= 0) & ((started == final) | (next_behind < behind))
                found.append((live[good], count[good], np.full(int(good.sum()), started), behind[good]))
            at_ease = slack_ns >= final * (lead_ns + gap_ns)
            live = live[(exact | ~at_ease) & (count > 1)]
        return _Columns(*(np.concatenate([each[part] for each in found]) for part in range(4)))

    def _node_limits(self, deadline_ns: int) -> tuple[Ints, Ints]:
        """[class]: the microbatches that a data node and another node can do; a stage gets no more than its share."""
        classes = self.classes
        if not self.with_load:
            return np.full(len(classes), self.microbatches), np.full(len(classes), self.share)
        work, workers = work_ns(classes), classes.workers
        window_ns = np.maximum(0, deadline_ns - before_ns(classes) - after_ns(classes))
        return np.minimum(workers[0] * deadline_ns // work[0], self.microbatches), np.minimum(
            (workers[1:] * window_ns // work[1:]).max(axis=0), self.share
        )

    def _rows(self, columns: _Columns, node_limits: tuple[Ints, Ints] | None) -> tuple[csr_array, Floats]:
        """Constraint rows over (lanes of each column, data nodes of each class), and their upper limits.
        `_reduced_profit` follows the same order."""
        classes, tours = self.classes, self.tours
        n, number, length = len(columns), len(classes), tours.others.shape[1]
        every, start = np.arange(n), tours.start[columns.tour]
        lane, node_class = np.repeat(every, length), tours.others[columns.tour].ravel().astype(np.int64)
        data = np.arange(number)
        blocks: list[tuple[Ints, Ints, Ints]] = []
        most: list[Ints] = []
        height = 0

        def add(parts: list[tuple[Ints, Ints, Ints]], limits: Ints) -> None:
            nonlocal height
            blocks.extend((row + height, column, value) for row, column, value in parts)
            most.append(limits)
            height += len(limits)

        one, none = np.ones(max(n * length, number), np.int64), np.zeros(number, np.int64)
        add(
            [(node_class, lane, one[: n * length]), (data, n + data, classes.other_slots)],
            classes.other_slots * classes.count,
        )
        for rank, room in enumerate(self._room()):
            for place in (columns.started, columns.behind):
                early = np.flatnonzero(place <= rank)
                add([(start[early], early, one[: len(early)]), (data, n + data, -room)], none)
        add([(none, n + data, one[:number])], np.array([self.most_data_nodes]))
        add([(data, n + data, one[:number])], classes.count)
        if node_limits:
            data_most, other_most = node_limits
            count = columns.microbatches
            add([(start, every, count), (data, n + data, -data_most)], none)
            add([(node_class, lane, count[lane]), (data, n + data, other_most)], other_most * classes.count)
        row, column, value = (np.concatenate([block[part] for block in blocks]) for part in range(3))
        matrix = coo_array((value.astype(np.float64), (row, column)), shape=(height, n + number))
        return csr_array(matrix), np.concatenate(most).astype(np.float64)

    def _room(self) -> list[Ints]:
        """[rank][class]: lanes of a data node that are at most so late; the last rank takes all."""
        slots = self.classes.slots[0]
        return [np.where(rank < self.ranks - 1, rank + 1, slots) for rank in range(RANKS)]

    def _upper_limit(
        self,
        columns: _Columns,
        node_limits: tuple[Ints, Ints] | None,
        left_s: Callable[[], float],
        to_the_end: bool = False,
    ) -> tuple[float, Floats]:
        """An upper limit on the microbatches brought home, and the reduced profit of each column.

        Stops as soon as it is clear whether the limit is above the demand, unless it should go `to_the_end`.
        """
        number = len(self.classes)
        best, best_worth = np.inf, np.zeros(len(columns))
        for _ in range(MAX_PRICING_ROUNDS):
            few = columns[self.known[columns.tour]]
            rows, most = self._rows(few, node_limits)
            microbatches_of = np.concatenate([few.microbatches, np.zeros(number)])
            found = linprog(
                -microbatches_of, A_ub=cast(Any, rows), b_ub=most, options={"time_limit": max(left_s(), 0.01)}
            )
            if found.status != SOLVED or found.fun is None:
                break
            price = np.maximum(0, -found.ineqlin.marginals)
            reduced_profit = self._reduced_profit(columns, price)
            node_worth = np.maximum(0, -(rows[:, len(few) :].T @ price))  # of a data node
            upper_limit = float(
                most @ price + node_worth @ self.classes.count + self.most_lanes * max(0, reduced_profit.max(initial=0))
            )
            if upper_limit < best:
                best, best_worth = upper_limit, reduced_profit
            clear = best < self.microbatches - MARGIN or -found.fun >= self.microbatches
            if (clear and not to_the_end) or left_s() <= 0:
                break
            unknown = np.flatnonzero((reduced_profit > TINY) & ~self.known[columns.tour])
            if not len(unknown):
                break
            added = unknown[np.argsort(-reduced_profit[unknown], kind="stable")[:TOURS_PER_ROUND]]
            self.known[columns.tour[added]] = True
        return best, best_worth

    def _reduced_profit(self, columns: _Columns, price: Floats) -> Floats:
        """What one lane of each column brings beyond what its slots and work cost at these prices, for all tours."""
        number, tours = len(self.classes), self.tours
        by_class = price[:number], *price[number:][: 2 * RANKS * number].reshape(-1, number)
        rest = price[number * (1 + 2 * RANKS) + 1 + number :]
        data_work, other_work = rest.reshape(2, number) if len(rest) else np.zeros((2, number))
        slots = sum(by_class[0][tours.others[:, place]] for place in range(tours.others.shape[1]))
        work = data_work[tours.start] + sum(
            other_work[tours.others[:, place]] for place in range(tours.others.shape[1])
        )
        # a lane counts in the row of its own rank and in all later ones
        started = np.cumsum(by_class[1::2][::-1], axis=0)[::-1]
        behind = np.cumsum(by_class[2::2][::-1], axis=0)[::-1]
        start = tours.start[columns.tour]
        reduced_profit: Floats = columns.microbatches * (1 - work[columns.tour]) - slots[columns.tour]
        reduced_profit -= started[columns.started, start] + behind[columns.behind, start]
        return reduced_profit
