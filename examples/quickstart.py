"""A shopping cart, first in this process on virtual time, then on Ray: `python -m examples.quickstart [--local]`."""

from __future__ import annotations

import asyncio
import sys
import tempfile

from actors import Runtime
from actors.testing import LocalRuntime
from examples.cart import Cart, OutOfStock, Shelf


async def in_process() -> None:
    """Everything in this process. Half an hour passes at once."""
    async with LocalRuntime() as runtime:
        cart = runtime.namespace(Cart).get("alice")
        await cart.add("apple", 2)
        await cart.add("pear")
        print("in the cart:", await cart.items())
        await runtime.advance(minutes=30)
        await runtime.crash()
        print("reminders after half an hour and a crash:", await cart.reminders())


def on_ray() -> None:
    """The same objects in Ray actors, from plain code: `.sync` waits for the reply."""
    with tempfile.TemporaryDirectory() as data, Runtime.start(data, partitions=2) as runtime:
        carts, shelves = runtime.namespace(Cart), runtime.namespace(Shelf)
        shelves.get("apple").fill.sync(10)
        carts.get("alice").add.sync("apple", 2)
        print("bought:", carts.get("alice").check_out.sync())
        carts.get("bob").add.sync("apple", 9)
        try:
            carts.get("bob").check_out.sync()
        except OutOfStock as refusal:
            print("refused:", refusal)


if __name__ == "__main__":
    asyncio.run(in_process())
    if "--local" not in sys.argv:
        on_ray()
