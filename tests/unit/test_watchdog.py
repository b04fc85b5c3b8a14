"""A loop that stops turning is reported once, with its stack, and ends its process in the end."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable

import pytest

from actors.logs import logger
from actors.watchdog import HANG_EXIT_CODE, Watchdog

BLOCKED_MS = 1_000
HANG_MS = 60_000
PERIOD_S = 0.25


class FakeLoop:
    """A loop that turns only when told to."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], object]] = []
        self.closed = False

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.callbacks.append(callback)

    def turn(self) -> None:
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()


class Bench:
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 0.0
        self.loop = FakeLoop()
        self.exits: list[int] = []
        self.caplog = caplog
        self.watchdog = Watchdog(
            self.loop,  # type: ignore[arg-type]
            threading.get_ident(),
            name="p0",
            blocked_ms=BLOCKED_MS,
            hang_ms=HANG_MS,
            clock=lambda: self.now,
            exit_process=self.exits.append,
        )

    def look_for(self, seconds: float) -> None:
        for _ in range(round(seconds / PERIOD_S)):
            self.now += PERIOD_S
            if not self.watchdog.look():
                return

    def events(self) -> list[str]:
        return [record.event for record in self.caplog.records]  # type: ignore[attr-defined]


@pytest.fixture
def bench(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger="mainspring")
    return Bench(caplog)


def test_a_loop_that_turns_is_never_reported(bench: Bench) -> None:
    for _ in range(1_000):
        bench.look_for(PERIOD_S)
        bench.loop.turn()
    assert bench.events() == []
    assert bench.exits == []


def test_a_loop_is_asked_again_only_after_it_has_answered(bench: Bench) -> None:
    bench.look_for(10)
    assert len(bench.loop.callbacks) == 1


def test_a_blocked_loop_is_reported_once_with_the_stack_of_its_thread(bench: Bench) -> None:
    bench.look_for(5)
    assert bench.events() == ["loop_blocked"]
    fields = bench.caplog.records[0].fields  # type: ignore[attr-defined]
    assert fields["loop"] == "p0"
    assert BLOCKED_MS <= fields["blocked_ms"] <= BLOCKED_MS + 2 * PERIOD_S * 1_000
    assert "look_for" in fields["stack"]


def test_a_loop_that_turns_again_is_reported_and_a_second_block_as_well(bench: Bench) -> None:
    for _ in range(2):
        bench.look_for(5)
        bench.loop.turn()
        bench.look_for(PERIOD_S)
    assert bench.events() == ["loop_blocked", "loop_unblocked"] * 2
    assert bench.exits == []


def test_a_hung_loop_ends_the_process(bench: Bench) -> None:
    bench.look_for(HANG_MS / 1_000 + 1)
    assert bench.events() == ["loop_blocked", "loop_hung"]
    assert bench.exits == [HANG_EXIT_CODE]


def test_time_in_which_the_watchdog_itself_did_not_run_is_not_held_against_the_loop(bench: Bench) -> None:
    bench.look_for(PERIOD_S)
    bench.now += 3_600  # the process was stopped, or the machine suspended
    bench.look_for(PERIOD_S)
    assert bench.events() == []
    bench.loop.turn()
    bench.look_for(PERIOD_S)
    assert bench.exits == []


def test_a_closed_loop_ends_the_watch(bench: Bench) -> None:
    bench.loop.closed = True
    assert bench.watchdog.look() is False
    assert bench.exits == []


def test_a_real_blocked_loop_is_found_and_its_stack_names_the_culprit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    reported = threading.Event()
    stacks: list[str] = []

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.event == "loop_blocked":  # type: ignore[attr-defined]
                stacks.append(record.fields["stack"])  # type: ignore[attr-defined]
                reported.set()

    handler = Seen()
    logger.addHandler(handler)

    def culprit() -> None:
        assert reported.wait(30)

    async def scenario() -> None:
        watchdog = Watchdog(
            asyncio.get_running_loop(),
            threading.get_ident(),
            name="real",
            blocked_ms=40,
            hang_ms=60_000,
            exit_process=lambda code: pytest.fail(f"the process would have ended with {code}"),
            frames=sys._current_frames,
        )
        watchdog.start()
        try:
            culprit()
        finally:
            watchdog.stop()

    try:
        asyncio.run(scenario())
    finally:
        logger.removeHandler(handler)
    assert "culprit" in stacks[0]
