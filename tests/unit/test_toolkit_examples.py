"""The examples of the toolkit do what they say."""

from __future__ import annotations

from examples.toolkit import outcomes, reservations, tickets


async def test_the_audit_was_told_once_of_each_order() -> None:
    assert await outcomes.main() == ["order-1 paid 10", "order-2 paid 20", "order-3 paid 30"]


async def test_seats_that_nobody_bought_are_free_again() -> None:
    assert await tickets.main() == [
        "sold: 60",
        "sold out: 1 seats for eve",
        "expired: seats of bob",
        "eve keeps 1",
    ]


async def test_a_payment_that_nobody_captured_was_given_up() -> None:
    assert await reservations.main() == [
        "too late: p3 is aborted (abandoned)",
        "p1 reservation.committed (requested): 10",
        "p2 reservation.aborted (requested): 20",
        "p3 reservation.aborted (abandoned): 30",
        "balance: 90",
    ]
