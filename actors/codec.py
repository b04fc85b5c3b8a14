"""The codec of stored values and of calls: msgpack, and extension types for what msgpack lacks. Never pickle.

Carried: None, bool, int of any size, float, str, bytes, list, tuple, dict, set, frozenset, datetime, date, time
(naive and aware kept apart; fixed offsets and `zoneinfo` zones kept), timedelta, Decimal, UUID, enums, dataclasses
and pydantic models. Equal values give equal bytes as long as their dicts have one order: sets are sorted.

Two things come back changed, because looking for them would cost every plain value: bytearray and memoryview come
back as bytes. (msgpack's own `ExtType` is not a value for applications: it would be taken for one of the types
below.) Dataclasses and models are rebuilt from their fields without running `__init__` or validators: fields that
the class has gained since take their defaults, fields that it has lost are dropped.
"""

from __future__ import annotations

from actors.decoder import decode
from actors.encoder import encode
from actors.extensions import MAX_EXTENSION_DEPTH
from actors.typenames import register_type

__all__ = ["MAX_EXTENSION_DEPTH", "decode", "encode", "register_type"]
