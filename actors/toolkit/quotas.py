"""Quotas: how much an object, and all objects together, may charge to a name in a window of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from actors.coordinator_services import QuotaTotal
from actors.errors import InvalidOption, QuotaExceeded
from actors.toolkit.capability import Capability
from actors.toolkit.coordinator_asks import ask_coordinator
from timers.quota_admission import Admission, Caps, admit
from timers.quotas import NO_USAGE, CounterRow, QuotaWindow, Usage, ViewRow, charge
from timers.schedule import parse_duration_ms

__all__ = ["Charge", "QuotaLimit", "QuotaTotal", "Quotas", "window_length_ms"]

#: The shortest window. Totals of all objects are known after `quota_rollup_ms`: windows that are not much longer than
#: that have only the limits of each object.
MIN_WINDOW_MS: Final = 1_000
#: The longest one: a year and a day.
MAX_WINDOW_MS: Final = 367 * 86_400_000
#: The largest amount and the largest limit: sums of them still fit a column.
MAX_AMOUNT: Final = 2**53


def window_length_ms(window: Any) -> int:
    """A window's length ("1h", a timedelta). Raises `InvalidSchedule` and `InvalidOption`."""
    length_ms = parse_duration_ms(window)
    if not MIN_WINDOW_MS <= length_ms <= MAX_WINDOW_MS:
        raise InvalidOption(f"window = {window!r}: must be {MIN_WINDOW_MS:,} ms to {MAX_WINDOW_MS // 86_400_000} days")
    return length_ms


def _check_amount(name: str, value: object, *, optional: bool) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_AMOUNT:
        raise InvalidOption(f"{name} = {value!r}: must be a whole number of 0 to 2**53{' or None' * optional}")


@dataclass(frozen=True)
class QuotaLimit:
    """What may be charged to a quota in each window.

    `window` ("1h", a timedelta): windows lie end to end from the epoch on, so one of "1d" is a day in UTC. `operations`
    and `bytes` are for all objects together, `local_operations` and `local_bytes` for each of them; None: no limit.
    Exactly at the limit is allowed.

    An object alone never gets past any of the four. Together they can get past the first two: what the others have
    charged is known a minute late (`quota_rollup_ms`), and not at all while the coordinator is away. Where that
    matters, give each object a share with the local ones. Raises `InvalidOption`, `InvalidSchedule`.
    """

    window: Any
    operations: int | None = None
    bytes: int | None = None
    local_operations: int | None = None
    local_bytes: int | None = None

    def __post_init__(self) -> None:
        window_length_ms(self.window)
        for name in ("operations", "bytes", "local_operations", "local_bytes"):
            _check_amount(name, getattr(self, name), optional=True)

    @property
    def window_ms(self) -> int:
        return window_length_ms(self.window)


@dataclass(frozen=True)
class Charge:
    """How a charge went, or would go. `remaining_*` is what is left after it if it was made (None: without limit).

    `resets_ms` (epoch ms): the next window begins. `metered`: what all objects together have charged is not known well
    enough, so only this object's own counts were looked at.
    """

    allowed: bool
    remaining_operations: int | None
    remaining_bytes: int | None
    resets_ms: int
    metered: bool


class Quotas(Capability):
    """`self.quotas`: `charge`, `check`, `total`.

    A quota is a name of your own; all classes share the names. Windows of different length are counted apart. A charge
    is part of the turn: if that raises, nothing was charged. Time is the turn's (`self.turn.now_ms`).
    """

    __slots__ = ()

    def charge(self, name: str, operations: int = 1, bytes: int = 0, *, limit: QuotaLimit) -> Charge:
        """Charge both amounts, or neither. Raises `QuotaExceeded`, which says what is left and when the window ends."""
        old, admission, amount, window = self._look(name, operations, bytes, limit)
        if admission.denied_by is not None:
            raise QuotaExceeded(
                f"{self._host.id}: {operations} operations and {bytes} bytes are over the limit of quota {name!r} "
                f"({admission.denied_by}): left are {_shown(admission.left_operations)} operations and "
                f"{_shown(admission.left_bytes)} bytes until {window.end_ms} (epoch ms)",
                admission.left_operations,
                admission.left_bytes,
                window.end_ms,
                admission.metered,
            )
        if amount != NO_USAGE:
            oid = self._rows.oid
            source = self._source() if old is None else old.source
            usage = amount if old is None else old.usage + amount
            row = CounterRow(oid, window, source, usage)
            self._rows.apply(charge(old, row, self._rows.now_ms, self._settings.quota_rollup_ms))
        return _charge(admission, amount, window)

    def check(self, name: str, operations: int = 1, bytes: int = 0, *, limit: QuotaLimit) -> Charge:
        """Whether such a charge would be allowed now, and what is left without it. Charges nothing, raises nothing of
        the kind; works in `@shared` methods."""
        _old, admission, _amount, window = self._look(name, operations, bytes, limit)
        return _charge(admission, NO_USAGE, window)

    async def total(self, name: str, window: Any = "1h") -> QuotaTotal:
        """What all objects together have charged in the window that lies now, as far as the coordinator has been told.

        Raises `CoordinatorUnavailable`, `InvalidOption`.
        """
        name, window_ms = self._check_name(name, "name"), window_length_ms(window)
        total: QuotaTotal = await ask_coordinator(
            self._host.reading_turn(),
            f"total of quota {name}",
            lambda coordinator, _: coordinator.quota_total(name, window_ms),
            reads=True,
        )
        return total

    # --- inside -----------------------------------------------------------------------------------

    def _look(
        self, name: str, operations: int, size: int, limit: QuotaLimit
    ) -> tuple[CounterRow | None, Admission, Usage, QuotaWindow]:
        name = self._check_name(name, "name")
        _check_amount("operations", operations, optional=False)
        _check_amount("bytes", size, optional=False)
        now_ms = self._rows.now_ms
        window = QuotaWindow.at(name, limit.window_ms, now_ms)
        counter = self._rows.get(CounterRow, *window.key())
        view = self._rows.get(ViewRow, *window.key())
        amount = Usage(operations, size)
        caps = Caps(limit.operations, limit.bytes, limit.local_operations, limit.local_bytes)
        used = NO_USAGE if counter is None else counter.usage
        return counter, admit(used, view, caps, amount, now_ms), amount, window

    def _source(self) -> str:
        object_id = self._host.id
        return f"{object_id.type_name}/{object_id.key}#{self._host.writing_turn().unique_id('quota source')}"


def _charge(admission: Admission, charged: Usage, window: QuotaWindow) -> Charge:
    return Charge(
        admission.denied_by is None,
        None if admission.left_operations is None else admission.left_operations - charged.operations,
        None if admission.left_bytes is None else admission.left_bytes - charged.bytes,
        window.end_ms,
        admission.metered,
    )


def _shown(left: int | None) -> str:
    return "any number of" if left is None else str(left)
