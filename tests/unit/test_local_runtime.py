"""What `LocalRuntime` promises to those who test with it: time that moves when told to, and nothing left out."""

from __future__ import annotations

from actors import DurableObject, TimerInfo
from actors.testing import LocalRuntime

MINUTE_MS = 60_000


class Meter(DurableObject):
    """Counts the minutes, and every fire that is not at its own instant."""

    def start(self) -> None:
        self.timers.set("minute", every="1m", method="on_minute")

    def on_minute(self, timer: TimerInfo) -> None:
        last_ms = self.storage.get("last_ms")
        on_time = timer.fired_ms == timer.due_ms and last_ms in (None, timer.due_ms - MINUTE_MS)
        self.storage.put_many(
            {
                "fires": self.storage.get("fires", 0) + 1,
                "astray": self.storage.get("astray", 0) + (not on_time or timer.missed > 0),
                "last_ms": timer.due_ms,
            }
        )

    def counts(self) -> tuple[int, int]:
        return self.storage.get("fires", 0), self.storage.get("astray", 0)


async def test_thirty_days_of_a_one_minute_interval_are_43200_fires_each_at_its_instant() -> None:
    async with LocalRuntime() as runtime:
        meter = runtime.namespace(Meter).get("a")
        await meter.start()
        await runtime.advance(days=30)
        assert await meter.counts() == (43_200, 0)
