"""Names of classes in stored bytes: module and qualified name, and back, without ever importing what bytes ask for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Mapping
from typing import TypeVar

from actors.errors import ValueTypeUnavailable

__all__ = ["NamelessType", "name_of", "register_type", "resolve_type"]

T = TypeVar("T", bound=type)

_by_name: dict[tuple[str, str], type] = {}
_by_type: dict[type, tuple[str, str]] = {}


class NamelessType(Exception):
    """The class can't be found again by a name; the message is the reason. Internal: callers wrap it."""


def register_type(cls: T, *, module: str | None = None, qualname: str | None = None) -> T:
    """Make `cls` known under its own name, or under an older one, and return it (so it serves as a decorator).

    Needed for classes that a module lookup can't find: those that were renamed or moved (give the old `module`
    or `qualname`; new values are still written under the class's own name), those of `__main__` in another
    process, and those made inside a function. The last registration of a name wins.
    """
    own = (cls.__module__, cls.__qualname__)
    name = (module or own[0], qualname or own[1])
    _by_name[name] = cls
    if name == own:
        _by_type[cls] = own
    return cls


def name_of(cls: type) -> tuple[str, str]:
    """Module and qualified name under which `cls` is found again. Raises `NamelessType` with the reason if it isn't."""
    registered = _by_type.get(cls)
    if registered is not None:
        return registered
    module, qualname = cls.__module__, cls.__qualname__
    if "<locals>" in qualname:
        raise NamelessType(
            f"{module}.{qualname} is made inside a function, where no other process can find it;"
            " move it to the top level of a module"
        )
    if "[" in qualname:
        raise NamelessType(
            f"{module}.{qualname} is a parametrised generic; give it a name: class MyModel({qualname}): ..."
        )
    found = _look_up(module, qualname)
    if found is None:
        raise NamelessType(f"module {module!r} has no class {qualname!r}, so it could not be read back")
    if found is not cls:
        raise NamelessType(f"module {module!r} has another class under the name {qualname!r} by now")
    return module, qualname


def resolve_type(module: str, qualname: str, modules: Collection[str] = ()) -> type:
    """The class of that name. Raises `ValueTypeUnavailable` if it isn't there.

    Looks in the registered types, then in modules that are imported already. A module that is not is imported
    only if it is named in `modules`.
    """
    found = _by_name.get((module, qualname))
    if found is not None:
        return found
    if module not in sys.modules:
        if module not in modules:
            raise ValueTypeUnavailable(
                f"{module}.{qualname}: module {module!r} is not imported in this process; import it, or name the"
                " class with register_type"
            )
        try:
            importlib.import_module(module)
        except Exception as error:
            raise ValueTypeUnavailable(f"{module}.{qualname}: the module can't be imported: {error}") from error
    found = _look_up(module, qualname)
    if found is None:
        hint = ""
        if module == "__main__":
            hint = "; it belongs to the main program of another process: move it to a module of its own"
        raise ValueTypeUnavailable(f"module {module!r} has no class {qualname!r}{hint}")
    return found


def _look_up(module: str, qualname: str) -> type | None:
    """Follow the dots through plain namespaces only: no `__getattr__` of a module or class is ever run."""
    names: Mapping[str, object] = vars(sys.modules[module]) if module in sys.modules else {}
    found: type | None = None
    for part in qualname.split("."):
        member = names.get(part)
        if not isinstance(member, type):
            return None
        found, names = member, vars(member)
    return found
