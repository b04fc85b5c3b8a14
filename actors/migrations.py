"""State of objects that was written by older code: brought to the class's version when the object comes into memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from actors.errors import InvalidClassOption, InvalidOption, ObjectTooNew
from drivers.tables import VERSIONS

if TYPE_CHECKING:
    from actors.durable_object import DurableObject
    from actors.object_host import ObjectHost

__all__ = ["FIRST_VERSION", "is_migration", "migration", "migrations_of", "pending_start"]

#: The version of classes that do not say one, and of objects that have none on record.
FIRST_VERSION: Final = 1
_MARK: Final = "_ms_migration"

F = TypeVar("F", bound=Callable[..., Any])


def migration(version: int) -> Callable[[F], F]:
    """Mark a method (`def` or `async def`, no arguments) that brings an object's state from the version before to
    `version`.

    The class says `schema_version = n`, and has one for each version from 2 to n. An object that was last written by
    code of an older version runs those it lacks, in order, when it comes into memory: before `on_start` and before any
    turn, in one commit with what `on_start` writes. One that raises fails that call as `on_start` does, and nothing of
    it is kept. Objects that are new have the class's version. Raises `InvalidOption`.
    """
    if not isinstance(version, int) or isinstance(version, bool) or version <= FIRST_VERSION:
        raise InvalidOption(f"migration({version!r}): a version is a whole number of at least {FIRST_VERSION + 1}")

    def mark(method: F) -> F:
        setattr(method, _MARK, version)
        return method

    return mark


def is_migration(member: Any) -> bool:
    """Whether the function was marked with `@migration`."""
    return hasattr(member, _MARK)


def migrations_of(cls: type[DurableObject]) -> dict[int, Callable[..., Any]]:
    """The class's migrations by the version that they lead to. Raises `InvalidClassOption` unless there is exactly one
    for each version up to the class's."""
    found: dict[int, Callable[..., Any]] = {}
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        if not is_migration(member):
            continue
        version = getattr(member, _MARK)
        if version in found:
            raise InvalidClassOption(
                f"{cls.__qualname__}.{name}: {found[version].__name__} is the migration to {version}"
            )
        found[version] = member
    wanted = set(range(FIRST_VERSION + 1, cls.schema_version + 1))
    if lacking := wanted - found.keys():
        raise InvalidClassOption(
            f"{cls.__qualname__}: schema_version is {cls.schema_version}, and there is no migration to {min(lacking)}"
        )
    if beyond := found.keys() - wanted:
        raise InvalidClassOption(
            f"{cls.__qualname__}.{found[max(beyond)].__name__} leads to version {max(beyond)}, and schema_version is "
            f"{cls.schema_version}"
        )
    return found


def pending_start(host: ObjectHost, instance: DurableObject, migrations: Mapping[int, Callable[..., Any]]) -> Any:
    """Run what an object's state lacks, then `on_start`; a coroutine when there is anything to wait for, or None.

    Raises `ObjectTooNew` when newer code has written the object.
    """
    on_start = instance.on_start if host.info.has_on_start else None  # type: ignore[attr-defined]
    oid, version = host.state.oid, host.info.cls.schema_version
    if oid is None:
        return None if on_start is None else on_start()
    row = host.state.read_row((VERSIONS, (oid,)))
    known = FIRST_VERSION if row is None else row[0]
    if known > version:
        raise ObjectTooNew(
            f"{host.id} was written by version {known} of {host.info.type_name}, and this process has version "
            f"{version}: run the newer code"
        )
    if known == version:
        return None if on_start is None else on_start()
    steps = [migrations[number] for number in range(known + 1, version + 1)]
    return _migrate(host, instance, oid, steps, on_start)


async def _migrate(
    host: ObjectHost, instance: DurableObject, oid: int, steps: list[Callable[..., Any]], on_start: Any
) -> None:
    for step in steps:
        result = step(instance)
        if inspect.isawaitable(result):
            await result
    turn = host.activation
    assert turn is not None
    turn.buffer.top.put_row((VERSIONS, (oid,)), (host.info.cls.schema_version,))
    started = None if on_start is None else on_start()
    if inspect.isawaitable(started):
        await started
