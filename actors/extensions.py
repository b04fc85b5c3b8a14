"""Numbers of the codec's msgpack extension types, and what their bytes hold."""

from __future__ import annotations

# Extension numbers are permanent: bytes on disk carry them. Add new ones at the end; never reuse one.
BIG_INT = 1  # two's complement, big-endian: ints outside -2**63 .. 2**64-1
TUPLE = 2  # msgpack array
SET = 3  # msgpack array, sorted by the encoded bytes of the items
FROZENSET = 4  # the same
# zone: nil (naive) | microseconds from UTC | [microseconds, name] | zoneinfo key
DATETIME = 5  # [ISO text without zone, fold, zone]
DATE = 6  # ISO text
TIME = 7  # [ISO text without zone, fold, zone]
TIMEDELTA = 8  # [days, seconds, microseconds]
DECIMAL = 9  # text as str() gives it
UUID = 10  # 16 bytes
ENUM = 11  # [module, qualname, member name]; flags: [module, qualname, int]
DATACLASS = 12  # [module, qualname, {field: value}]
MODEL = 13  # [module, qualname, {field: value}, extra | nil, [fields set], private | nil]

#: Tuples, sets, dataclasses and models inside each other. Each level is a nested call of the C decoder, which takes
#: about 40 KiB of C stack. (Lists and dicts alone may nest 511 deep: msgpack's own limit.)
MAX_EXTENSION_DEPTH = 64
