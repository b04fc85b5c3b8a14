"""Uploads that are limited for each user and for the whole site: `python -m examples.toolkit.quotas`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from actors import DurableObject, QuotaLimit
from actors.errors import QuotaExceeded
from actors.testing import LocalRuntime

#: In each hour three uploads of a user, five of all users together.
LIMIT = QuotaLimit("1h", operations=5, local_operations=3)


class User(DurableObject):
    """Uploads files."""

    def upload(self, name: str) -> int:
        """Store a file; how many the user may still upload. Raises `QuotaExceeded`."""
        charge = self.quotas.charge("uploads", limit=LIMIT)  # before the work: nothing is done for what is refused
        self.storage[f"file/{name}"] = True
        assert charge.remaining_operations is not None
        return charge.remaining_operations


async def main() -> list[str]:
    """Ann runs into her own limit, then Bob into that of the site."""
    async with LocalRuntime() as runtime:
        users = runtime.namespace(User)
        lines = []
        for number in range(4):
            lines.append(await _try(users.get("ann").upload(f"{number}.txt"), "ann"))
        lines.append(await _try(users.get("bob").upload("0.txt"), "bob"))
        await runtime.advance(minutes=2)  # by now all know what the others have charged
        lines.append(await _try(users.get("bob").upload("1.txt"), "bob"))
        lines.append(await _try(users.get("bob").upload("2.txt"), "bob"))
        await runtime.advance(minutes=2)
        total = await runtime.quota_total("uploads", "1h")
        return [*lines, f"all together: {total.operations}"]


async def _try(upload: Awaitable[int], who: str) -> str:
    try:
        return f"{who}: {await upload} left"
    except QuotaExceeded:
        return f"{who}: refused"


if __name__ == "__main__":
    print("\n".join(asyncio.run(main())))
