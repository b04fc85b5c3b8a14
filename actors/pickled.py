"""What only pickle can carry, between processes that trust each other. Never stored by objects, never off a link.

Loading a pickle can run anything. Only bytes that came through Ray, which itself runs on pickle, may be given to
`load`, or bytes that a partition wrote down after they had come that way.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, Final

import cloudpickle

from actors.errors import UnstorableValue, ValueTooLarge, ValueTypeUnavailable

__all__ = ["dump", "load"]

#: The first protocol that carries large buffers well; every Python that runs this has it.
PROTOCOL: Final = 5


class _BoundedFile(io.BytesIO):
    """Refuses to grow past a limit, so that a value of some gigabytes is not pickled whole to find it too large."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._max_bytes:
            raise ValueTooLarge(f"take more than {self._max_bytes:,} bytes as a pickle (`max_args_bytes`)")
        return super().write(data)


def dump(value: Any, what: str, max_bytes: int, refusal: UnstorableValue) -> bytes:
    """A value that the codec refused with `refusal`, as a pickle. `what` ("the arguments of ...") is for messages.

    Classes that other processes can't import go by value. Raises `ValueTooLarge`, and `UnstorableValue` for what
    pickle can't carry either.
    """
    file = _BoundedFile(max_bytes)
    try:
        cloudpickle.Pickler(file, protocol=PROTOCOL).dump(value)
    except ValueTooLarge as error:
        raise ValueTooLarge(f"{what} {error}") from None
    except Exception as error:  # pickling runs code of the value, which may raise anything
        raise UnstorableValue(
            f"{refusal}; pickle can't carry {what} either: {type(error).__name__}: {error}"
        ) from error
    return file.getvalue()


def load(data: bytes, what: str) -> Any:
    """The value of a pickle that can be trusted. Raises `ValueTypeUnavailable` when it can't be made here."""
    try:
        return pickle.loads(data)
    except Exception as error:  # unpickling imports modules and runs code of the value
        raise ValueTypeUnavailable(
            f"{what} came as a pickle that can't be loaded in this process: {type(error).__name__}: {error}"
        ) from error
