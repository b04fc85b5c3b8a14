"""How long a wake is under way, and so how long before its deadline it has to leave."""

from __future__ import annotations

__all__ = ["Transit"]

#: Weights of the newest observation and of its deviation, and how many deviations the lead adds: those that TCP uses
#: for its time-outs (RFC 6298). They follow a change within some tens of wakes and cover the usual spread.
_MEAN_SHARE = 1 / 8
_DEVIATION_SHARE = 1 / 4
_DEVIATIONS = 4


class Transit:
    """A smoothed time of transit, and the lead that covers it. Before the first observation the lead is the longest:
    what arrives too early only waits a little longer where it has arrived."""

    def __init__(self, max_lead_ns: int) -> None:
        self._max_lead_ns = max_lead_ns
        self._mean_ns: float | None = None
        self._deviation_ns = 0.0

    def observe(self, transit_ns: int) -> None:
        """A wake was acknowledged so long after the instant at which it should have left."""
        if self._mean_ns is None:
            self._mean_ns, self._deviation_ns = float(transit_ns), transit_ns / 2
            return
        self._deviation_ns += _DEVIATION_SHARE * (abs(transit_ns - self._mean_ns) - self._deviation_ns)
        self._mean_ns += _MEAN_SHARE * (transit_ns - self._mean_ns)

    @property
    def lead_ns(self) -> int:
        """How long before its deadline the next wake should leave; never more than `max_lead_ns`."""
        if self._mean_ns is None:
            return self._max_lead_ns
        return min(self._max_lead_ns, round(self._mean_ns + _DEVIATIONS * self._deviation_ns))
