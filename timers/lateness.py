"""How late releases are: counted in logarithmic buckets, so that percentiles cost no memory."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Lateness", "LatenessRecorder"]

#: Buckets per octave, as a power of two: 4, so that no bucket is wider than a quarter of its lower bound.
_SUB_BITS = 2
_PER_OCTAVE = 1 << _SUB_BITS
#: 32 octaves: everything from 2^32 ns (4.3 s) on is in the last bucket.
_OCTAVES = 32
_BUCKETS = _OCTAVES * _PER_OCTAVE
_MAX_NS = (1 << _OCTAVES) - 1


@dataclass(frozen=True)
class Lateness:
    """A summary. Percentiles are upper bounds of their buckets; `max_ns` is exact."""

    count: int
    sum_ns: int
    p50_ns: int
    p95_ns: int
    p99_ns: int
    max_ns: int


class LatenessRecorder:
    """Records nanoseconds. One thread may record while another reads: a reader then misses what is under way."""

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._count = 0
        self._sum_ns = 0
        self._max_ns = 0

    def record(self, late_ns: int) -> None:
        """Count one release. Raises ValueError for one that was early."""
        if late_ns < 0:
            raise ValueError(f"a release was {-late_ns} ns early")
        self._counts[bucket_of(late_ns)] += 1
        self._count += 1
        self._sum_ns += late_ns
        self._max_ns = max(self._max_ns, late_ns)

    def summary(self) -> Lateness:
        """What has been recorded so far."""
        p50_ns, p95_ns, p99_ns = (self._percentile(percent) for percent in (50, 95, 99))
        return Lateness(self._count, self._sum_ns, p50_ns, p95_ns, p99_ns, self._max_ns)

    def _percentile(self, percent: int) -> int:
        wanted = -(-self._count * percent // 100)
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return min(upper_bound_ns(bucket), self._max_ns)
        return 0


def bucket_of(late_ns: int) -> int:
    """The bucket of a value: its octave, then which quarter of it."""
    value = min(late_ns, _MAX_NS)
    if value < _PER_OCTAVE:
        return value
    octave = value.bit_length() - 1
    return octave * _PER_OCTAVE + ((value >> (octave - _SUB_BITS)) & (_PER_OCTAVE - 1))


def upper_bound_ns(bucket: int) -> int:
    """The largest value in a bucket."""
    if bucket < _PER_OCTAVE:
        return bucket
    octave, quarter = divmod(bucket, _PER_OCTAVE)
    return (1 << octave) + ((quarter + 1) << (octave - _SUB_BITS)) - 1
