"""Whether a charge is within the limits: what the object itself has charged, exactly; all objects together, as far as
is known."""

from __future__ import annotations

from dataclasses import dataclass

from timers.quotas import CLOCK_GRACE_MS, VIEW_MAX_AGE_MS, Usage, ViewRow

__all__ = ["Admission", "Caps", "admit", "is_fresh"]


@dataclass(frozen=True)
class Caps:
    """Limits of one window; None: none. `operations` and `bytes` are for all objects together, the others for each."""

    operations: int | None = None
    bytes: int | None = None
    local_operations: int | None = None
    local_bytes: int | None = None


@dataclass(frozen=True)
class Admission:
    """`denied_by` names the limit that stands in the way, or is None. What is left of each kind, by all limits that
    apply, without the charge; None: without limit. `metered`: only the object's own counts were looked at."""

    denied_by: str | None
    left_operations: int | None
    left_bytes: int | None
    metered: bool


def is_fresh(view: ViewRow | None, now_ms: int) -> bool:
    """Whether the view is new enough. One from the future is of before a clock was set back: a little is drift."""
    return view is not None and -CLOCK_GRACE_MS <= now_ms - view.observed_ms <= VIEW_MAX_AGE_MS


def admit(local: Usage, view: ViewRow | None, caps: Caps, amount: Usage, now_ms: int) -> Admission:
    """The object's own limits first, then those of all objects if the view is fresh; operations before bytes. Exactly
    at the limit is within it."""
    looks: list[tuple[str, Usage, int | None, int | None]] = [
        ("local", local, _least(caps.local_operations, caps.operations), _least(caps.local_bytes, caps.bytes))
    ]
    has_cluster_caps = caps.operations is not None or caps.bytes is not None
    metered = has_cluster_caps and not is_fresh(view, now_ms)
    if view is not None and not metered:
        # never less than the object knows for certain
        estimate = view.total - view.pushed + local
        looks.append(("cluster", estimate, caps.operations, caps.bytes))
    denied_by: str | None = None
    left_operations = left_bytes = None
    for scope, used, operations, size in looks:
        for kind, cap, charged, wanted in (
            ("operations", operations, used.operations, amount.operations),
            ("bytes", size, used.bytes, amount.bytes),
        ):
            if denied_by is None and cap is not None and charged + wanted > cap:
                denied_by = f"{scope} {kind}"
        left_operations = _least(left_operations, _left(operations, used.operations))
        left_bytes = _least(left_bytes, _left(size, used.bytes))
    return Admission(denied_by, left_operations, left_bytes, metered)


def _least(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)


def _left(cap: int | None, used: int) -> int | None:
    return None if cap is None else max(0, cap - used)
