"""The examples of the toolkit do what they say."""

from __future__ import annotations

from examples.toolkit import outcomes


async def test_the_audit_was_told_once_of_each_order() -> None:
    assert await outcomes.main() == ["order-1 paid 10", "order-2 paid 20", "order-3 paid 30"]
