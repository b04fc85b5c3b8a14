"""Releases become visible once everything that they are built on is: `python -m examples.toolkit.publications`."""

from __future__ import annotations

import asyncio

from actors import Advance, DurableObject, shared
from actors.testing import LocalRuntime

__all__ = ["Release", "main"]


class Release(DurableObject):
    """One release of a package. Its files and its metadata appear together, after those of what it requires."""

    def announce(self, files: list[str], requires: list[str]) -> Advance:
        """Publish now, or as soon as every required release has published its metadata."""
        return self.publications.advance(
            items=["metadata", *files], depends_on=[(Release, each, "metadata") for each in requires]
        )

    def yank(self) -> None:
        """Keep it back for now; `self.publications.release(1)` would let it go on."""
        self.publications.hold(1)

    @shared
    def status(self) -> Advance:
        """What it is, and what it waits for."""
        return self.publications.get(1)

    def on_published(self, advance: Advance) -> None:
        """Runs once for each advance that was published."""
        self.storage["note"] = f"{len(advance.items)} items"


async def run() -> list[str]:
    """Three releases arrive in the wrong order; gives what is to be seen of them."""
    lines: list[str] = []
    async with LocalRuntime(partitions=2, memory=True) as runtime:
        releases = runtime.namespace(Release)

        async def look(when: str) -> None:
            for key in ("app-3", "lib-2"):
                status = await releases.get(key).status()
                needs = ", ".join(str(need) for need in status.waiting_for) or "nothing"
                lines.append(f"{when}: {key} is {status.state}, waits for {needs}")

        await releases.get("app-3").announce(["app.whl"], ["lib-2"])
        await releases.get("lib-2").announce(["lib.whl"], ["base-1"])
        await runtime.run_until_idle()
        await look("before base-1")
        await runtime.crash()  # what waits, waits on disk
        await releases.get("base-1").announce(["base.whl"], [])
        await runtime.advance(seconds=10)  # two rechecks at most; usually they are woken at once
        await look("after base-1")
    return lines


def main() -> None:
    for line in asyncio.run(run()):
        print(line)


if __name__ == "__main__":
    main()
