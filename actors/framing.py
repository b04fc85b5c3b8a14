"""Length-prefixed frames: four bytes, big-endian, then that many bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from actors.errors import FrameTooLarge

__all__ = ["LENGTH", "FrameReader"]

#: The prefix of every frame.
LENGTH = struct.Struct("!I")


class FrameReader:
    """Cuts a byte stream into frames.

    Bytes of an unfinished frame are kept as the chunks they came in and joined once, so a large frame that arrives
    in many pieces is copied twice, not once per piece.
    """

    def __init__(self, limit: int) -> None:
        #: Largest frame that is accepted, in bytes. May be changed between frames.
        self.limit = limit
        self._chunks: list[bytes] = []
        self._have = 0
        self._need = LENGTH.size

    @property
    def partial(self) -> bool:
        """True when the stream has so far ended inside a frame."""
        return self._have > 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that `data` completes.

        Whoever stops in the middle of this iteration must not feed more. Raises `FrameTooLarge` as soon as the
        length of a frame that is too large has been read.
        """
        if self._have:
            self._chunks.append(data)
            self._have += len(data)
            if self._have < self._need:
                return
            data = b"".join(self._chunks)
            self._chunks.clear()
        size = len(data)
        position = 0
        need = LENGTH.size
        while size - position >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data, position)
            if length > self.limit:
                raise FrameTooLarge(f"the peer sent a frame of {length} bytes; the limit here is {self.limit}")
            start = position + LENGTH.size
            end = start + length
            if end > size:
                need = LENGTH.size + length
                break
            position = end
            yield data[start:end]
        self._have = size - position
        self._need = need
        if self._have:
            self._chunks.append(data[position:] if position else data)
