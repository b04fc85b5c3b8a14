"""What is sent of one pair of objects, and when: pure, against a receiver that follows the rules of receivers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timers.message_pair import AGAIN_BASE_MS, AGAIN_CAP_MS, PairQueue, again_delay_ms

NOW = 1_000


def queue_of(*numbers: int, most: int = 4) -> PairQueue:
    queue = PairQueue(most)
    for number in numbers:
        queue.append(number)
    return queue


def send_all(queue: PairQueue, now_ms: int = NOW) -> list[tuple[int, int]]:
    """(number, predecessor) of everything that may be sent now."""
    found = []
    while (number := queue.peek(now_ms)) is not None:
        found.append((number, queue.sent()))
    return found


def test_messages_go_in_order_several_at_a_time_each_with_its_predecessor() -> None:
    queue = queue_of(3, 5, 9, 10, 11)
    assert send_all(queue) == [(3, 0), (5, 3), (9, 5), (10, 9)]
    queue.applied(3)
    assert send_all(queue) == [(11, 10)]


def test_a_run_stops_at_its_first_failure_and_the_next_begins_there_once_all_have_been_answered() -> None:
    queue = queue_of(1, 2, 3)
    send_all(queue)
    queue.applied(1)
    queue.raised()
    queue.retried(NOW)
    assert send_all(queue) == []  # 3 has not been answered
    queue.out_of_order()
    assert send_all(queue) == [(2, 0)]  # and fewer at a time at first
    queue.applied(2)
    assert send_all(queue) == [(3, 0)]


def test_nothing_is_sent_while_a_failed_try_is_on_its_way_to_disk() -> None:
    queue = queue_of(1, 2)
    assert queue.sent() == 0
    queue.raised()
    assert send_all(queue) == []
    assert not queue.idle
    queue.retried(NOW + 10)
    assert send_all(queue, NOW + 9) == []
    assert send_all(queue, NOW + 10) == [(1, 0), (2, 1)]


def test_what_comes_after_a_dead_letter_goes_on() -> None:
    queue = queue_of(1, 2, 3)
    send_all(queue)
    queue.raised()
    queue.out_of_order()
    queue.out_of_order()
    queue.buried(1)
    assert send_all(queue) == [(2, 0)]


def test_what_was_not_run_is_sent_again_after_a_pause_that_grows_and_is_forgotten_with_success() -> None:
    queue = queue_of(1, 2, most=1)
    pauses = []
    now_ms = NOW
    for _ in range(3):
        assert send_all(queue, now_ms) == [(1, 0)]
        again_ms = queue.not_run(now_ms)
        assert queue.peek(again_ms - 1) is None
        pauses.append(again_ms - now_ms)
        now_ms = again_ms
    assert pauses == [AGAIN_BASE_MS, 2 * AGAIN_BASE_MS, 4 * AGAIN_BASE_MS]
    send_all(queue, now_ms)
    queue.applied(1)
    send_all(queue, now_ms)
    assert queue.not_run(now_ms) == now_ms + AGAIN_BASE_MS


@pytest.mark.parametrize("failures", [9, 10, 1_000_000])
def test_pauses_have_a_cap(failures: int) -> None:
    assert again_delay_ms(failures) == AGAIN_CAP_MS


def test_answers_may_come_in_another_order() -> None:
    queue = queue_of(1, 2, 3)
    send_all(queue)
    queue.applied(2)
    queue.applied(1)
    assert len(queue) == 1
    queue.applied(3)
    assert (len(queue), queue.idle, queue.head) == (0, True, 0)


def test_a_receiver_that_starts_the_next_before_the_last_has_ended_gets_fewer_at_a_time() -> None:
    queue = queue_of(*range(1, 9))
    assert len(send_all(queue)) == 4
    for _ in range(3):
        queue.out_of_order()
    queue.applied(1)
    assert send_all(queue) == [(2, 0), (3, 2)]
    queue.out_of_order()
    queue.applied(2)
    assert [number for number, _ in send_all(queue)] == [3, 4]
    queue.applied(3)
    assert [number for number, _ in send_all(queue)] == [5, 6, 7]


@dataclass
class Receiver:
    """Applies by the rules: each number once, and only after its predecessor."""

    applied: list[int] = field(default_factory=list)

    @property
    def highest(self) -> int:
        return self.applied[-1] if self.applied else 0

    def receive(self, number: int, predecessor: int, fails: bool) -> str:
        if number <= self.highest:
            return "applied"
        if predecessor > self.highest:
            return "out of order"
        if fails:
            return "raised"
        self.applied.append(number)
        return "applied"


@given(st.data())
def test_whatever_fails_gets_lost_or_is_repeated_each_message_is_applied_once_in_order_or_buried(
    data: st.DataObject,
) -> None:
    numbers = data.draw(st.lists(st.integers(1, 50), unique=True, min_size=1, max_size=12).map(sorted))
    queue = queue_of(*numbers, most=data.draw(st.integers(1, 5)))
    receiver = Receiver()
    answers: list[tuple[int, str]] = []
    held: list[int] = []
    buried: set[int] = set()
    failures = 0
    now_ms = NOW
    for _ in range(400):
        if not len(queue):
            break
        number = queue.peek(now_ms)
        choices = [
            *(["send"] if number is not None else []),
            *(["answer"] if answers else []),
            *(["saved"] if held else []),
        ]
        if not choices:
            now_ms = queue.not_before_ms
            continue
        choice = data.draw(st.sampled_from(choices))
        if choice == "send":
            assert number is not None
            fate = data.draw(st.sampled_from(["arrives", "arrives", "raises", "is lost", "its answer is lost"]))
            failures += fate not in ("arrives",)
            predecessor = queue.sent()
            if failures > 20:
                fate = "arrives"
            if fate == "is lost":
                answers.append((number, "not run"))
            else:
                answer = receiver.receive(number, predecessor, fate == "raises")
                answers.append((number, "not run" if fate == "its answer is lost" else answer))
        elif choice == "answer":
            number, answer = answers.pop(data.draw(st.integers(0, len(answers) - 1)))
            if answer == "applied":
                queue.applied(number)
            elif answer == "out of order":
                queue.out_of_order()
            elif answer == "raised":
                queue.raised()
                held.append(number)
            else:
                queue.not_run(now_ms)
        else:
            number = held.pop()
            if data.draw(st.booleans()):
                queue.buried(number)
                buried.add(number)
            else:
                queue.retried(now_ms + 1)
    assert not len(queue)
    assert receiver.applied == [number for number in numbers if number not in buried]
