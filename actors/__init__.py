"""Durable objects for Python on Ray: one live instance per key, durable state, durable timers, calls that happen once.

`DurableObject` is what applications subclass, `Runtime` what they start. `actors.testing.LocalRuntime` is the whole
runtime in one process, on virtual time when asked.
"""

from __future__ import annotations

from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

import drivers as _drivers
import timers as _timers


def _check_siblings() -> None:
    """`drivers` and `timers` are plain names: another package of that name in front of ours must not go unnoticed."""
    home = _Path(__file__).resolve().parent.parent
    for package in (_drivers, _timers):
        found = getattr(package, "__file__", None)
        if getattr(package, "__mainspring__", False) is not True:
            raise ImportError(
                f"Mainspring needs its own package {package.__name__!r} (beside {home}), but Python found "
                f"{found or 'a namespace package'} first. Rename that one, or put Mainspring before it on sys.path."
            )


_check_siblings()

from actors.durable_object import DurableObject, shared  # noqa: E402  (only once the siblings are known to be ours)
from actors.errors import MainspringError, Rejected  # noqa: E402
from actors.execution_handle import ExecutionHandle, ExecutionStatus  # noqa: E402
from actors.migrations import migration  # noqa: E402
from actors.namespace import Namespace, Stub  # noqa: E402
from actors.object_timers import TimerInfo, TimerState  # noqa: E402
from actors.settings import Settings  # noqa: E402
from actors.toolkit.leases import Lease  # noqa: E402
from actors.toolkit.outcomes import Outcome, OutcomeBacklog, PendingOutcome, register_sink  # noqa: E402
from actors.toolkit.publications import Advance, Publications  # noqa: E402
from actors.toolkit.quotas import Charge, QuotaLimit, QuotaTotal  # noqa: E402
from actors.toolkit.reservations import Reservation  # noqa: E402
from actors.toolkit.tickets import Ticket, TicketUsage  # noqa: E402
from actors.workflow import DurableContext, Promise, durable  # noqa: E402
from timers.backoff import RetryPolicy  # noqa: E402

if TYPE_CHECKING:
    from actors.runtime import Runtime

__all__ = [
    "Advance",
    "Charge",
    "DurableContext",
    "DurableObject",
    "ExecutionHandle",
    "ExecutionStatus",
    "Lease",
    "MainspringError",
    "Namespace",
    "Outcome",
    "OutcomeBacklog",
    "PendingOutcome",
    "Promise",
    "Publications",
    "QuotaLimit",
    "QuotaTotal",
    "Rejected",
    "Reservation",
    "RetryPolicy",
    "Runtime",
    "Settings",
    "Stub",
    "Ticket",
    "TicketUsage",
    "TimerInfo",
    "TimerState",
    "durable",
    "migration",
    "register_sink",
    "shared",
]


def __getattr__(name: str) -> Any:
    # Importing Ray takes most of a second: who only uses a LocalRuntime need not wait for it.
    if name == "Runtime":
        from actors.runtime import Runtime

        return Runtime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
