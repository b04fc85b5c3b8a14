"""What the capabilities of an object have in common: its rows, its place, and turns that decide by both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.codec import decode, encode
from actors.errors import InvalidOption, SerialTurnsNeeded, ValueTooLarge
from timers.outcomes import ObjectPlace

if TYPE_CHECKING:
    from actors.durable_object import DurableObject
    from actors.object_rows import ObjectRows
    from actors.settings import Settings

__all__ = ["MAX_NAME_BYTES", "Capability"]

#: UTF-8 bytes of the names and ids that applications give: they are parts of keys.
MAX_NAME_BYTES = 512


class Capability:
    """Base of `self.outcomes` and its like. Made at each use; what it does is part of the running turn.

    Raises `SerialTurnsNeeded` for an interleaved class: its turns commit between awaits, so that what one decides by
    rows that another has just read would not be one change.
    """

    __slots__ = ("_host", "_object")

    def __init__(self, instance: DurableObject) -> None:
        self._object = instance
        self._host = instance._ms_host
        if self._host.interleaved:
            raise SerialTurnsNeeded(
                f"{self._host.id}: outcomes, tickets, reservations, leases, quotas and publications need turns = "
                "'serial'; keep them in an object of another class and call that"
            )

    @property
    def _rows(self) -> ObjectRows:
        return self._host.rows

    @property
    def _settings(self) -> Settings:
        return self._host.partition.settings

    @property
    def _place(self) -> ObjectPlace:
        object_id = self._host.id
        return ObjectPlace(self._rows.oid, object_id.slot, object_id.type_name, object_id.key)

    def _encoded(self, payload: Any, what: str) -> bytes:
        """Raises `UnstorableValue` and `ValueTooLarge`."""
        data = encode(payload)
        most = self._settings.max_outcome_bytes
        if len(data) > most:
            raise ValueTooLarge(
                f"{self._host.id}: the payload of {what} takes {len(data):,} bytes (`max_outcome_bytes` {most:,}): "
                "keep the data in storage and name it in the payload"
            )
        return data

    @staticmethod
    def _decoded(data: bytes) -> Any:
        return decode(data)

    def _check_name(self, name: object, what: str, *, least: int = 1) -> str:
        if not isinstance(name, str) or not least <= len(name.encode(errors="replace")) <= MAX_NAME_BYTES:
            raise InvalidOption(
                f"{self._host.id}: {what} = {name!r}: must be text of {least} to {MAX_NAME_BYTES} bytes"
            )
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise InvalidOption(f"{self._host.id}: {what} must be text that UTF-8 can write: {error}") from None
        return name
