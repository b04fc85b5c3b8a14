"""What a recheck timer remembers between its fires: for which state of things, and how far it is."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from typing import Final

from timers.errors import CorruptRow

__all__ = ["MAX_POSITION", "PAYLOAD_BYTES", "RecheckPayload"]

#: Permanent: rows carry it. Version, digest, position; little-endian.
_FORMAT: Final = struct.Struct("<B32sI")
_VERSION: Final = 1
PAYLOAD_BYTES: Final = _FORMAT.size
#: Twice the items that an advance may have: as many dependencies and as many external bases.
MAX_POSITION: Final = 8_192


@dataclass(frozen=True)
class RecheckPayload:
    """`position` counts the remote witnesses that were seen, in their order. It is only good for the `binding` that it
    was counted for."""

    binding: bytes
    position: int = 0

    @classmethod
    def new(cls, generation: int, boundary: int, contents: bytes) -> RecheckPayload:
        """Nothing seen yet. `boundary` is up to where the line is published, `contents` the bytes of the advance."""
        digest = hashlib.sha256(generation.to_bytes(8, "little") + boundary.to_bytes(8, "little") + contents)
        return cls(digest.digest())

    def resume(self, earlier: RecheckPayload) -> RecheckPayload:
        """This with the progress of an earlier one, if that was made for the same state of things."""
        return replace(self, position=earlier.position) if earlier.binding == self.binding else self

    def at(self, position: int) -> RecheckPayload:
        return replace(self, position=position)

    def to_bytes(self) -> bytes:
        return _FORMAT.pack(_VERSION, self.binding, self.position)

    @classmethod
    def from_bytes(cls, data: bytes) -> RecheckPayload:
        """Raises `CorruptRow`."""
        if len(data) != PAYLOAD_BYTES:
            raise CorruptRow(f"the payload of a recheck timer has {len(data)} bytes, not {PAYLOAD_BYTES}")
        version, binding, position = _FORMAT.unpack(data)
        if version != _VERSION or position > MAX_POSITION:
            raise CorruptRow(f"the payload of a recheck timer has version {version}, position {position}")
        return cls(binding, position)
