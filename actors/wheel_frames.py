"""What a partition and the release wheel say to each other: three frames of fixed size on an ordinary link.

::

    partition                                   wheel
      ARM   generation, due_ms                    ->      takes the place of the one before
      <-    WAKE  generation                              a little before due_ms
      ACK   generation                            ->      at once: the wheel measures the way by it

Generations count up; whatever carries another one than the newest is stale and dropped.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from actors.errors import MalformedFrame

__all__ = ["WHEEL", "WheelFrame", "ack_frame", "arm_frame", "decode_wheel_frame", "wake_frame"]

#: The wheel's place in handshakes, where partitions have their number. No partition has a negative one.
WHEEL = -1

_FRAME = struct.Struct("!BQq")  # kind, generation, due_ms (0 where there is none)


class WheelFrame(IntEnum):
    """Kinds of frames."""

    ARM = 1
    WAKE = 2
    ACK = 3


def arm_frame(generation: int, due_ms: int) -> bytes:
    """Partition: wake me for this instant of wall time, instead of the one before."""
    return _FRAME.pack(WheelFrame.ARM, generation, due_ms)


def wake_frame(generation: int) -> bytes:
    """Wheel: the instant is near."""
    return _FRAME.pack(WheelFrame.WAKE, generation, 0)


def ack_frame(generation: int) -> bytes:
    """Partition: this wake has arrived."""
    return _FRAME.pack(WheelFrame.ACK, generation, 0)


def decode_wheel_frame(frame: bytes) -> tuple[WheelFrame, int, int]:
    """Kind, generation, due_ms. Raises `MalformedFrame`."""
    if len(frame) != _FRAME.size:
        raise MalformedFrame(f"a wheel frame has {_FRAME.size} bytes, this one has {len(frame)}")
    kind, generation, due_ms = _FRAME.unpack(frame)
    try:
        return WheelFrame(kind), generation, due_ms
    except ValueError:
        raise MalformedFrame(f"{kind} is no kind of wheel frame") from None
