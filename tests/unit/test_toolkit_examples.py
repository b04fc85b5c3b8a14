"""The examples of the toolkit do what they say."""

from __future__ import annotations

from examples.toolkit import durable_functions, leases, messages, outcomes, quotas, reservations, tickets


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


async def test_a_leader_that_lost_its_lease_is_refused() -> None:
    assert await leases.main() == [
        "ann leads: True, bob leads: False",
        "half a minute later bob leads: True",
        "ann is refused",
        "ledger: from ann, from bob",
    ]


async def test_uploads_are_limited_for_each_user_and_for_all() -> None:
    assert await quotas.main() == [
        "ann: 2 left",
        "ann: 1 left",
        "ann: 0 left",
        "ann: refused",
        "bob: 2 left",
        "bob: 0 left",
        "bob: refused",
        "all together: 5",
    ]


async def test_orders_were_packed_in_their_turn_and_what_never_could_be_was_given_up() -> None:
    found = await messages.main()
    assert found[:2] == ["alice: your lamp is on its way", "carol: your desk is on its way"]
    assert sorted(found[2:5]) == ["alice: how was it?", "bob: how was it?", "carol: how was it?"]
    assert found[5:] == ["bob -> Warehouse/main.pack: given up"]


async def test_an_order_was_fulfilled_over_days_and_crashes_and_one_was_paid_back() -> None:
    assert await durable_functions.main() == [
        "charged: 100; the lamp is running and waits for a sleep",
        "resolved: True",
        "resolved again: False",
        "lamp: 40, approved by ann",
        "chair: nobody approved it, 60 are paid back",
        "charged: 40",
    ]
