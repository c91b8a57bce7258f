"""What every node does when another is lost in the middle of an iteration, message by message."""

from __future__ import annotations

import math
from typing import Any

from skippipe.runtime.messages import Average, Averaged, Commit, Drain, DrainAck, MicrobatchDone, Reroute
from skippipe.runtime.node.interfaces import NodePhase
from tests.helpers.single_node import A_HOP, Bench, average_alone, gradient_piece, hop, long_plan, plan_of

# Repair inside an iteration, node by node, on `long_plan`: lane 0 goes 0 → 2 → 3 → 5 → (head at 0) → 5 → 3 → 2 → 0

THREE_BY_FOUR = Reroute(0, 1, [3], [[0, 0, 0, 2, 4, 5]], [])
WITHOUT_PLACE_1 = Reroute(0, 1, [2], [[0, 0, 0, 2, 3, 5], [1, 0, 1, 2, 4, 6]], [[0, 1], [1, 1]])


def on_lane_0(number: int, *steps: int, microbatch: int = 0, **others: Any) -> Bench:
    """A node that has taken these steps of a microbatch."""
    bench = Bench(number, long_plan(**others)).begin()
    comes_from = {1: 0, 2: 2, 3: 3, 4: 5, 5: 0, 6: 5, 7: 3, 8: 2}
    for step in steps:
        bench.take(comes_from[step], hop(0, step, microbatch))
        bench.work()
    bench.work()
    bench.sent()
    bench.heard()
    return bench


def test_the_node_before_a_lost_one_sends_again_to_the_replica() -> None:
    assert on_lane_0(2, 1).hear(THREE_BY_FOUR).sent() == ["0/0 step 2 → 4, epoch 1"]


def test_but_not_when_the_gradient_has_come_back() -> None:
    assert on_lane_0(2, 1, 7).hear(THREE_BY_FOUR).sent() == []


def test_nor_when_it_has_nothing_yet() -> None:
    assert on_lane_0(2).hear(THREE_BY_FOUR).sent() == []


def test_nor_of_a_microbatch_that_is_long_back() -> None:
    bench = on_lane_0(2, 1, 7).take(0, hop(0, 1, 1))  # the next is here, but has not been sent on
    assert bench.hear(Reroute(0, 1, [3], [[0, 1, 0, 2, 4, 5]], [])).sent() == []
    assert bench.work() == ["0/1 step 1"]
    assert bench.sent() == ["0/1 step 2 → 4, epoch 1"], "it goes to the replica from the first"


def test_the_node_after_a_lost_one_sends_the_gradient_again() -> None:
    assert on_lane_0(5, 3).hear(THREE_BY_FOUR).sent() == []
    assert on_lane_0(5, 3, 5).hear(THREE_BY_FOUR).sent() == ["0/0 step 6 → 4, epoch 1"]


def test_but_not_of_a_microbatch_that_is_long_back() -> None:
    bench = on_lane_0(5, 3, 5).take(3, hop(0, 3, 1))
    assert bench.hear(Reroute(0, 1, [3], [[0, 1, 0, 2, 4, 5]], [])).sent() == []


def test_those_far_from_a_lost_one_send_nothing_again() -> None:
    assert on_lane_0(0).hear(THREE_BY_FOUR).sent() == []
    assert on_lane_0(0, 4, 8).hear(THREE_BY_FOUR).sent() == []


def test_a_replica_that_gets_the_gradient_first_waits_for_the_activation() -> None:
    bench = on_lane_0(4).hear(THREE_BY_FOUR)
    bench.take(5, hop(0, 6, epoch=1))
    assert bench.work() == []
    bench.take(2, hop(0, 2, epoch=1))
    assert bench.work() == ["0/0 step 2", "0/0 step 6"]
    assert bench.sent() == ["0/0 step 3 → 5, epoch 1", "0/0 step 7 → 2, epoch 1"]


def test_a_replica_lets_go_of_a_microbatch_that_did_not_need_it_when_the_next_comes() -> None:
    """The gradient had passed the lost node already."""
    bench = on_lane_0(4).hear(THREE_BY_FOUR).take(2, hop(0, 2, epoch=1))
    assert bench.work() == ["0/0 step 2"]
    bench.take(2, hop(0, 2, 1, epoch=1))
    assert bench.work() == ["drop 0/0", "0/1 step 2"]
    bench.take(5, hop(0, 6, 0, epoch=1))
    assert bench.work() == []
    assert bench.node.dropped == {(5, "a hop that has been taken before"): 1}, "or too late, which is the same"


def test_what_the_replica_sends_that_the_lost_node_had_sent_is_dropped() -> None:
    bench = on_lane_0(5, 3, 5).hear(THREE_BY_FOUR)
    bench.sent()
    bench.take(4, hop(0, 3, epoch=1))
    assert bench.work() == []
    assert bench.node.dropped == {(4, "a hop that has been taken before"): 1}


def test_messages_of_a_node_that_was_declared_lost_are_dropped() -> None:
    bench = on_lane_0(2, 1).hear(THREE_BY_FOUR)
    bench.take(3, hop(0, 7), hop(0, 7, epoch=1))
    assert bench.work() == []
    assert bench.node.dropped == {(3, "from a node that was declared lost"): 2}
    bench.begin(1, 2)  # in the next iteration it may be back
    bench.take(0, hop(0, 1, iteration=1, epoch=2)).work()
    bench.take(3, hop(0, 7, iteration=1, epoch=2))
    assert bench.work() == ["0/0 step 7"]


def test_a_new_data_node_sets_out_what_is_on_its_way() -> None:
    bench = Bench(1, long_plan()).begin()
    assert bench.work() == ["1/0 step 0"]
    bench.sent()
    bench.hear(Reroute(0, 1, [0], [[0, 1, 1, 2, 3, 5]], []))
    assert bench.work() == ["0/1 step 0"], "the first was back"
    assert bench.sent() == ["0/1 step 1 → 2, epoch 1"]
    bench.take(5, hop(0, 4, 1, epoch=1))
    assert bench.work() == ["0/1 step 4"]
    bench.take(2, hop(0, 8, 1, epoch=1))
    assert bench.work() == ["0/1 step 8"]
    assert bench.heard() == [MicrobatchDone(0, bench.node.epoch, 0, 1, 0.0)]


def test_a_new_data_node_that_gets_the_gradient_before_the_head_does_not_know_the_loss() -> None:
    bench = Bench(1, long_plan()).begin()
    bench.work()
    bench.hear(Reroute(0, 1, [0], [[0, 1, 1, 2, 3, 5]], [])).take(2, hop(0, 8, 1, epoch=1))
    assert bench.work() == ["0/1 step 0", "0/1 step 8"]
    (returned,) = bench.heard()
    assert isinstance(returned, MicrobatchDone)
    assert math.isnan(returned.loss)


def test_a_new_data_node_has_nothing_to_do_when_all_are_back() -> None:
    bench = Bench(1, long_plan()).begin()
    bench.work()
    bench.hear(Reroute(0, 1, [0], [[0, 2, 1, 2, 3, 5]], []))
    assert bench.work() == []


def test_the_last_node_sends_the_heads_input_to_a_new_data_node_in_any_case() -> None:
    new_data_node = Reroute(0, 1, [0], [[0, 0, 1, 2, 3, 5]], [])
    assert on_lane_0(5, 3).hear(new_data_node).sent() == ["0/0 step 4 → 1, epoch 1"]
    assert on_lane_0(5, 3, 5).hear(new_data_node).sent() == ["0/0 step 4 → 1, epoch 1"]


def test_the_second_node_sends_the_last_gradient_to_a_new_data_node() -> None:
    new_data_node = Reroute(0, 1, [0], [[0, 0, 1, 2, 3, 5]], [])
    assert on_lane_0(2, 1).hear(new_data_node).sent() == []
    assert on_lane_0(2, 1, 7).hear(new_data_node).sent() == ["0/0 step 8 → 1, epoch 1"]


def test_the_node_before_a_skipped_place_sends_to_the_next() -> None:
    bench = on_lane_0(0).hear(WITHOUT_PLACE_1)
    assert bench.sent() == ["0/0 step 2 → 3, epoch 1"]
    assert bench.work() == []
    bench.take(5, hop(0, 4, epoch=1))
    assert bench.work() == ["0/0 step 4"]
    bench.take(3, hop(0, 8, epoch=1))
    assert bench.work() == ["0/0 step 8", "0/1 step 0"]
    assert bench.sent() == ["0/0 step 5 → 5, epoch 1", "0/1 step 2 → 3, epoch 1"]
    assert bench.heard() == [MicrobatchDone(0, bench.node.epoch, 0, 0, 0.0)]


def test_the_head_runs_again_beyond_a_skipped_place_but_counts_once() -> None:
    bench = on_lane_0(0, 4).hear(WITHOUT_PLACE_1)
    assert bench.sent() == ["0/0 step 2 → 3, epoch 1"]
    bench.take(5, hop(0, 4, epoch=1))
    assert bench.work() == ["0/0 step 4, counts not"]


def test_a_microbatch_that_is_past_a_skipped_place_again_goes_on() -> None:
    bench = Bench(0, long_plan()).begin()
    bench.work()
    bench.take(5, hop(0, 4)).work()
    bench.sent()
    bench.take(2, hop(0, 8)).hear(WITHOUT_PLACE_1)
    assert bench.sent() == [], "its gradient has come back"
    assert bench.work() == ["0/0 step 8", "0/1 step 0"]
    assert bench.sent() == ["0/1 step 2 → 3, epoch 1"]


def test_nodes_beyond_a_skipped_place_forget_the_microbatch() -> None:
    bench = on_lane_0(3, 2).hear(WITHOUT_PLACE_1)
    assert bench.sent() == []
    assert bench.work() == ["drop 0/0"]
    bench.take(0, hop(0, 2, epoch=1))
    assert bench.work() == ["0/0 step 2"], "the same again, of another activation"
    bench.take(5, hop(0, 6, epoch=1))
    assert bench.work() == ["0/0 step 6"]
    assert bench.sent() == ["0/0 step 3 → 5, epoch 1", "0/0 step 8 → 0, epoch 1"]


def test_nodes_beyond_a_skipped_place_forget_what_they_wait_to_run() -> None:
    bench = on_lane_0(3).take(2, hop(0, 2)).hear(WITHOUT_PLACE_1)
    assert bench.work() == []
    bench = on_lane_0(3, 2).take(5, hop(0, 6)).hear(WITHOUT_PLACE_1)
    assert bench.work() == ["drop 0/0"]


def test_what_has_been_added_up_beyond_a_skipped_place_is_run_again_and_counts_once() -> None:
    bench = on_lane_0(5, 3, 5).hear(WITHOUT_PLACE_1)
    assert bench.work() == [], "it is not held any more"
    bench.take(3, hop(0, 3, epoch=1))
    assert bench.work() == ["0/0 step 3, counts not"]
    bench.take(0, hop(0, 5, epoch=1))
    assert bench.work() == ["0/0 step 5, counts not"]
    assert bench.sent() == ["0/0 step 4 → 0, epoch 1", "0/0 step 6 → 3, epoch 1"]
    bench.hear(Drain(0, 1, False)).work()
    assert bench.heard() == [DrainAck(0, 1, [[0, 0]])]


def test_what_was_sent_beyond_a_skipped_place_before_is_stale() -> None:
    bench = on_lane_0(5).hear(WITHOUT_PLACE_1)
    bench.take(3, hop(0, 3, epoch=0))
    assert bench.work() == []
    assert bench.node.dropped == {(3, A_HOP): 1}
    bench.take(3, hop(0, 3, epoch=1))
    assert bench.work() == ["0/0 step 3"]


def test_what_a_node_made_beyond_a_skipped_place_is_not_sent_again() -> None:
    to_a_new_data_node = Reroute(0, 2, [0], [[0, 0, 1, 2, 3, 5]], [])
    assert on_lane_0(5, 3).hear(WITHOUT_PLACE_1, to_a_new_data_node).sent() == []
    assert on_lane_0(3, 2, 6).hear(WITHOUT_PLACE_1, to_a_new_data_node).sent() == []


def test_what_was_sent_on_this_side_of_a_skipped_place_is_not() -> None:
    """Place 2 of lane 0 is skipped; what node 0 has sent to node 2 before it knew is as good as ever."""
    bench = on_lane_0(2).hear(Reroute(0, 1, [3, 4], [[0, 0, 0, 2, 3, 5]], [[0, 2]]))
    bench.take(0, hop(0, 1, epoch=0))
    assert bench.work() == ["0/0 step 1"]
    assert bench.sent() == ["0/0 step 3 → 5, epoch 1"]


def test_a_forward_that_runs_beyond_a_skipped_place_comes_to_nothing() -> None:
    bench = on_lane_0(3).take(2, hop(0, 2))
    assert bench.decide() == "0/0 step 2"
    bench.hear(WITHOUT_PLACE_1)
    bench.end()
    assert bench.sent() == []
    assert bench.work() == ["drop 0/0"]
    bench.take(0, hop(0, 2, epoch=1))
    assert bench.work() == ["0/0 step 2"]


def test_a_backward_that_runs_beyond_a_skipped_place_is_added_up_and_sent_to_nobody() -> None:
    bench = on_lane_0(3, 2).take(5, hop(0, 6))
    assert bench.decide() == "0/0 step 6"
    bench.hear(WITHOUT_PLACE_1)
    bench.end()
    assert bench.sent() == []
    assert bench.work() == []
    bench.take(0, hop(0, 2, epoch=1)).work()
    bench.take(5, hop(0, 6, epoch=1))
    assert bench.work() == ["0/0 step 6, counts not"]
    assert bench.sent() == ["0/0 step 3 → 5, epoch 1", "0/0 step 8 → 0, epoch 1"]


def test_two_places_of_a_lane_can_be_skipped_one_after_the_other() -> None:
    without_2_too = Reroute(0, 2, [3], [[0, 0, 0, 2, 3, 5]], [[0, 2]])
    bench = on_lane_0(5, 3).hear(WITHOUT_PLACE_1)
    assert bench.work() == ["drop 0/0"]
    bench.hear(without_2_too)
    bench.take(0, hop(0, 3, epoch=1))
    assert bench.work() == [], "it was sent before the second place was left out"
    bench.take(0, hop(0, 3, epoch=2))
    assert bench.work() == ["0/0 step 3"]
    before = on_lane_0(0).hear(WITHOUT_PLACE_1, without_2_too)
    assert before.sent() == ["0/0 step 2 → 3, epoch 1", "0/0 step 3 → 5, epoch 2"]


def test_two_places_in_quick_succession_leave_no_trace() -> None:
    """The forward that the first change made void must not take the next one with it when the second comes."""
    bench = on_lane_0(5).take(3, hop(0, 3))
    assert bench.decide() == "0/0 step 3"
    bench.hear(WITHOUT_PLACE_1)
    bench.end()
    assert bench.work() == ["drop 0/0"]
    bench.hear(Reroute(0, 2, [3], [[0, 0, 0, 2, 3, 5]], [[0, 2]]))
    bench.take(0, hop(0, 3, epoch=2))
    assert bench.work() == ["0/0 step 3"]
    assert bench.sent() == ["0/0 step 4 → 0, epoch 2"]


def test_a_change_and_then_a_new_beginning_leave_no_trace() -> None:
    """The backward that was to be sent to nobody must not silence the first task of the new beginning."""
    bench = on_lane_0(3, 2).take(5, hop(0, 6))
    bench.decide()
    bench.hear(WITHOUT_PLACE_1)
    bench.begin(0, 2)
    bench.end()
    assert bench.work() == ["clear gradients"]
    bench.take(2, hop(0, 2, epoch=2))
    assert bench.work() == ["0/0 step 2"]
    assert bench.sent() == ["0/0 step 3 → 5, epoch 2"]


def test_what_was_sent_before_a_new_beginning_is_stale() -> None:
    """Lanes may be others by then; and a later microbatch must not make this node deaf to the first."""
    bench = on_lane_0(2, 1, 7).begin(0, 1)
    bench.work()
    bench.take(0, hop(0, 1, 1, epoch=0))  # was under way when the iteration began again
    assert bench.work() == []
    bench.take(0, hop(0, 1, 0, epoch=1))
    assert bench.work() == ["0/0 step 1"]


def test_a_broken_connection_has_what_was_sent_last_sent_again() -> None:
    bench = on_lane_0(2, 1)
    bench.node.reconnected(3)
    assert bench.sent() == ["0/0 step 2 → 3, epoch 0"]
    bench.node.reconnected(4)
    bench.node.reconnected(0)
    assert bench.sent() == []
    bench.take(3, hop(0, 7)).work()
    bench.sent()
    bench.node.reconnected(0)
    assert bench.sent() == ["0/0 step 8 → 0, epoch 0"]


def test_a_broken_connection_has_all_pieces_sent_again_that_may_be_lost() -> None:
    bench = Bench(5).begin()
    bench.work()
    for number, piece in ((1, 1), (3, 0), (8, 2)):
        bench.take(4, gradient_piece(number, piece=piece)).work()
    sent = bench.sent()
    assert sent == [f"transfer {number} → 3, epoch 0" for number in (2, 4, 6, 11)]
    bench.node.reconnected(4)
    assert bench.sent() == []
    bench.node.reconnected(3)
    assert bench.sent() == sent[1:], "the total of piece 2 has come: so this node's contribution is in it"


def test_averaging_that_is_under_way_is_given_up_and_begun_again_with_those_who_are_left() -> None:
    bench = Bench(5).begin()
    assert bench.work() == ["begin averaging", "contribute to piece 2, 0 given"]
    bench.take(4, gradient_piece(1, piece=1))
    assert bench.decide() == "contribute to piece 1, 1 given"
    assert bench.sent() == ["transfer 2 → 3, epoch 0"]
    bench.hear(Reroute(0, 1, [4], [[1, 0, 1, 2, 3]], []))
    bench.end()
    assert bench.sent() == [], "what was under way comes to nothing"
    assert bench.work() == []
    bench.take(3, gradient_piece(0, epoch=0))
    assert bench.node.dropped == {(3, "a gradient piece of an attempt that was given up"): 1}
    bench.hear(Drain(0, 1, False))
    assert bench.work() == []
    assert bench.heard() == [DrainAck(0, 1, [])]
    bench.hear(Drain(0, 1, False), Average(0, 0, [4, 4, 3]))
    assert bench.work() == []
    assert bench.heard() == [DrainAck(0, 1, [])], "averaging of another epoch does not begin"
    bench.hear(Average(0, 1, [4, 4, 0]))
    assert bench.work() == ["begin averaging", "contribute to piece 1, 0 given"]
    bench.take(3, gradient_piece(0, epoch=1, piece=0))
    assert bench.work() == ["contribute to piece 0, 1 given, total"]
    bench.take(3, gradient_piece(3, epoch=1, piece=1))
    assert bench.work() == ["adopt piece 1", "measure 0"]
    assert bench.sent() == ["transfer 1 → 3, epoch 1", "transfer 2 → 3, epoch 1"]
    (averaged,) = bench.heard()
    assert isinstance(averaged, Averaged)
    assert (averaged.iteration, averaged.epoch, averaged.squared_norm) == (0, 1, 0.0)


def test_one_that_is_left_alone_averages_alone() -> None:
    bench = on_lane_0(5, 3, 5).hear(Reroute(0, 1, [6], [[1, 0, 1, 2, 4, 5]], []))
    bench.hear(Drain(0, 1, False)).work()
    bench.hear(Average(0, 1, [4, 4, 4, 1]))
    assert bench.work() == ["measure 1 alone"]


def test_after_a_change_nobody_averages_by_counting() -> None:
    bench = Bench(5, long_plan()).begin().hear(THREE_BY_FOUR)
    for microbatch in range(2):
        bench.take(4, hop(0, 3, microbatch, epoch=1)).work()
        bench.take(0, hop(0, 5, microbatch, epoch=1)).work()
    assert bench.node.phase is NodePhase.RUNNING
    undisturbed = Bench(5, long_plan()).begin()
    for microbatch in range(2):
        undisturbed.take(3, hop(0, 3, microbatch)).work()
        undisturbed.take(0, hop(0, 5, microbatch)).work()
    assert undisturbed.node.phase is NodePhase.AVERAGING


def test_a_node_that_has_averaged_averages_again() -> None:
    bench = Bench(2).begin()
    average_alone(bench)
    bench.hear(Reroute(0, 1, [3], [], []), Drain(0, 1, False))
    assert bench.work() == []
    every = [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert bench.heard() == [DrainAck(0, 1, every)]
    bench.hear(Average(0, 1, [4, 4, 2]))
    assert bench.work() == ["measure 4 alone"], "what it has added up is still there"
    assert bench.node.phase is NodePhase.AVERAGED


def test_what_is_half_done_when_all_is_settled_is_let_go() -> None:
    """A replica that ran a microbatch again for nothing: the gradient had passed already."""
    bench = on_lane_0(4).hear(THREE_BY_FOUR).take(2, hop(0, 2, epoch=1))
    assert bench.work() == ["0/0 step 2"]
    bench.hear(Drain(0, 1, False))
    assert bench.work() == ["drop 0/0"]
    assert bench.heard() == [DrainAck(0, 1, [])]


def test_weight_gradients_that_were_put_off_are_added_before_the_account() -> None:
    bench = on_lane_0(3, 2, split_backward=True).take(5, hop(0, 6))
    assert bench.decide() == "0/0 step 6"
    bench.hear(Reroute(0, 1, [6], [[1, 0, 1, 2, 4, 5]], []))
    bench.end()
    bench.hear(Drain(0, 1, False))
    assert bench.heard() == []
    assert bench.work() == ["0/0 step 11"]
    assert bench.heard() == [DrainAck(0, 1, [[0, 0]])]


def test_weight_gradients_that_were_put_off_beyond_a_skipped_place_are_added_once() -> None:
    bench = on_lane_0(3, 2, split_backward=True).take(5, hop(0, 6))
    bench.decide()
    bench.end()
    bench.hear(WITHOUT_PLACE_1)
    assert bench.work() == ["0/0 step 11"]
    bench.take(0, hop(0, 2, epoch=1)).work()
    bench.take(5, hop(0, 6, epoch=1))
    assert bench.work() == ["0/0 step 6, counts not", "0/0 step 11, counts not"]
    bench.hear(Drain(0, 1, False))
    assert bench.work() == []
    assert bench.heard() == [DrainAck(0, 1, [[0, 0]])]


def test_a_microbatch_that_comes_again_before_its_weight_gradients_were_added_goes_on() -> None:
    bench = on_lane_0(3, 2, split_backward=True).take(5, hop(0, 6))
    bench.decide()
    bench.end()
    bench.hear(WITHOUT_PLACE_1).take(0, hop(0, 2, epoch=1))
    assert sorted(bench.work()) == ["0/0 step 11", "0/0 step 2, counts not"]
    bench.take(5, hop(0, 6, epoch=1))
    assert "0/0 step 6, counts not" in bench.work()
    assert bench.sent()[-1] == "0/0 step 8 → 0, epoch 1"


def test_a_gradient_that_is_not_finite_is_left_out_by_the_one_who_has_made_it() -> None:
    for poison, contribution in ((False, [[0, 0]]), (True, [])):
        bench = on_lane_0(5, 3)
        bench.executor.poison = poison
        bench.take(0, hop(0, 5)).work()
        bench.hear(Drain(0, 1, True))
        assert bench.work() == ["check finite"]
        assert bench.heard() == [DrainAck(0, 1, contribution)]


def test_a_change_while_a_gradient_is_inspected_forgets_nothing() -> None:
    """What the computer has cleared is in no account."""
    bench = on_lane_0(5, 3)
    bench.executor.poison = True
    bench.take(0, hop(0, 5)).work()
    bench.hear(Drain(0, 1, True))
    assert bench.decide() == "check finite"
    bench.hear(Reroute(0, 2, [6], [[1, 2, 1, 2, 4, 6]], []))
    bench.end()
    bench.hear(Drain(0, 2, False))
    bench.work()
    bench.hear(Average(0, 2, [4, 4, 4, 0]))
    assert bench.heard() == [DrainAck(0, 2, [])]
    assert bench.work() == ["measure 0 alone"]


def test_a_change_of_the_next_iteration_waits_for_it() -> None:
    bench = Bench(5, plan_of(6, ((0, 1), (2,), (3, 4), (5,)), ((0, 2, 3, 5), (1, 2, 4)))).begin()
    for microbatch in range(2):
        bench.take(3, hop(0, 3, microbatch)).work()
        bench.take(0, hop(0, 5, microbatch)).work()
    bench.hear(Commit(0, 1.0, 1.0), Reroute(1, 1, [3], [[0, 0, 0, 2, 4, 5]], []))
    bench.take(4, hop(0, 3, iteration=1, epoch=1))
    assert bench.work() == ["optimizer step", "0/0 step 3"]
    assert not bench.node.dropped
