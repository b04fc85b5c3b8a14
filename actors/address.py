"""How an object is addressed: class, key and slot."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from actors.errors import InvalidKey

__all__ = ["MAX_KEY_BYTES", "SLOTS", "ClassRef", "ObjectId", "check_key", "slot_of"]

#: Keys hash to this many slots, the unit of ownership and of moving. Permanent: stored data depends on it.
SLOTS = 4_096

#: UTF-8 bytes that a key may have.
MAX_KEY_BYTES = 1_024


@dataclass(frozen=True)
class ObjectId:
    """One object: the stable name of its class, its key, and the slot that they hash to."""

    type_name: str
    key: str
    slot: int


@dataclass(frozen=True)
class ClassRef:
    """What a process says of a class so that a partition can find it.

    `shipped` is the class itself by value, only for classes that no other process could import; `digest` tells one
    definition of such a class from the next. `shared_methods` names the methods that only read.
    """

    type_name: str
    module: str
    qualname: str
    shipped: bytes | None = None
    shared_methods: frozenset[str] = frozenset()
    digest: bytes | None = None


def slot_of(type_name: str, key: str) -> int:
    """The slot of an object, 0 to 4095. Never changes: data on disk is placed by it.

    Raises `InvalidKey` when the key is no text that UTF-8 can write.
    """
    try:
        return crc32(f"{type_name}\0{key}".encode()) % SLOTS
    except UnicodeEncodeError:
        check_key(key)
        raise


def check_key(key: str) -> str:
    """Return the key when it can address an object, else raise `InvalidKey`.

    A key is text of 1 to 1024 UTF-8 bytes without a NUL character.
    """
    if not isinstance(key, str):
        raise InvalidKey(f"a key must be text (str), not {type(key).__name__}: {_shown(key)}; pass str(...) of it")
    if not key:
        raise InvalidKey("a key must not be empty: ''; give 1 to 1024 bytes of text, or use namespace.unique()")
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidKey(
            f"a key must be text that UTF-8 can write; {_shown(key)} has a lone surrogate at position"
            f" {error.start}; decode the text properly before you use it as a key"
        ) from None
    if size > MAX_KEY_BYTES:
        raise InvalidKey(
            f"a key has at most {MAX_KEY_BYTES} bytes as UTF-8; {_shown(key)} has {size}; shorten it, or hash it"
        )
    if "\0" in key:
        raise InvalidKey(f"a key must not hold a NUL character; {_shown(key)} does; remove or escape it")
    return key


def _shown(key: object) -> str:
    text = repr(key)
    return text if len(text) <= 80 else f"{text[:80]}..."
