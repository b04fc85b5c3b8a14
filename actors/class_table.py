"""The application's classes in a partition: told by clients, imported by name, remembered across restarts."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Awaitable, Callable

from actors.address import ClassRef
from actors.durable_object import ClassInfo, DurableObject, class_info, find_class
from actors.errors import ClassNotImportable, DuplicateTypeName, MainspringError, UnknownClass
from drivers.store import Store
from drivers.tables import CLASSES, Op

__all__ = ["ClassTable", "FetchClass", "revive_class"]

#: Asks for the definition of a class that was shipped by value: its bytes, or None when nobody shipped it.
FetchClass = Callable[[str], Awaitable[bytes | None]]
_MAIN = "__main__"


def revive_class(data: bytes, qualname: str) -> type[DurableObject]:
    """A class that was shipped by value. Only bytes that came through Ray may be given here: this runs code."""
    import cloudpickle

    cls: type[DurableObject] = cloudpickle.loads(data)
    cls.__qualname__ = qualname  # the pickle does not carry it, and other partitions know the class by it
    return cls


class ClassTable:
    """Finds classes by `type_name`. `get` gives the class, the error why there is none, or None while it is loaded.

    Modules that this process has not imported yet are imported on a thread: an import can take seconds, and the
    partition's loop must go on meanwhile.
    """

    def __init__(self, store: Store, persist: Callable[[list[Op]], None], fetch: FetchClass | None) -> None:
        self._persist = persist
        self._fetch = fetch
        self._refs: dict[str, ClassRef] = {
            name: ClassRef(name, module, qualname) for name, module, qualname in store.scan(CLASSES)
        }
        self._stored = set(self._refs)
        self._loaded: dict[str, ClassInfo | MainspringError] = {}
        self._older: dict[str, ClassInfo] = {}
        self._loading: dict[str, list[Callable[[], None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: told the type name of a class whose loaded definition is not the newest: its idle objects must be rebuilt
        self.on_outdated: Callable[[str], None] = _ignore

    def add(self, cls: type[DurableObject]) -> ClassInfo:
        """Make a class of this process known. Raises `DuplicateTypeName`."""
        info = class_info(cls)
        known = self._loaded.get(info.type_name)
        if isinstance(known, ClassInfo) and known.cls is not cls and not _same_place(known.ref, info.ref):
            raise _duplicate(known.ref, info.ref)
        if self._is_shipped(info.type_name):
            # Another shipped class that refers to this one may have brought an older definition along.
            return known if isinstance(known, ClassInfo) else info
        self._loaded[info.type_name] = info
        self._refs[info.type_name] = info.ref
        self._remember(info.ref)
        return info

    def tell(self, ref: ClassRef) -> None:
        """A client names a class; calls of it may follow. A conflict is kept and answered to those calls."""
        known = self._refs.get(ref.type_name)
        if known is not None and not _same_place(known, ref):
            if isinstance(self._loaded.get(ref.type_name), ClassInfo):
                raise _duplicate(known, ref)
            # what was known could not be loaded: a corrected name takes its place
            self._loaded.pop(ref.type_name, None)
        elif isinstance(self._loaded.get(ref.type_name), MainspringError):
            del self._loaded[ref.type_name]  # asked for again: the module may be there by now
        if known is not None and known.digest is not None and ref.digest is None and _same_place(known, ref):
            return  # told by an object, which does not know that the class was shipped
        self._refs[ref.type_name] = ref
        if known is not None and ref.digest not in (None, known.digest) and ref.type_name in self._loaded:
            # Defined again, or told by a process that does not know the newest definition: the coordinator does.
            outdated = self._loaded.pop(ref.type_name)
            if isinstance(outdated, ClassInfo):
                self._older[ref.type_name] = outdated
            self.on_outdated(ref.type_name)

    def learn(self, ref: ClassRef) -> None:
        """Another partition knew this class; what is known here already stands."""
        if ref.type_name not in self._refs:
            self._refs[ref.type_name] = ref
            self._remember(ref)

    def _is_shipped(self, type_name: str) -> bool:
        ref = self._refs.get(type_name)
        return ref is not None and ref.digest is not None

    def get(self, type_name: str) -> ClassInfo | MainspringError | None:
        """The class, the error that says why it can't be had, or None while it is being loaded."""
        found = self._loaded.get(type_name)
        if found is not None:
            return found
        ref = self._refs.get(type_name)
        if ref is None:
            return UnknownClass(
                f"no class {type_name!r} is known here: address it through runtime.namespace(Class), "
                "which tells the partitions where to find it"
            )
        if type_name not in self._loading:
            self._load(ref)
        return self._loaded.get(type_name)

    def ref(self, type_name: str) -> ClassRef | None:
        """Where the class is said to be, or None when nobody has said it here."""
        return self._refs.get(type_name)

    def when_loaded(self, type_name: str, callback: Callable[[], None]) -> None:
        """Call back when `get` has an answer. Only after `get` gave None."""
        self._loading[type_name].append(callback)

    def forget_failure(self, type_name: str) -> None:
        """Try to load the class again at the next `get`."""
        if isinstance(self._loaded.get(type_name), MainspringError):
            del self._loaded[type_name]

    def _load(self, ref: ClassRef) -> None:
        if not _comes_by_value(ref) and _is_imported(ref.module):
            self._finish(ref, self._find(ref))
            return
        self._loading[ref.type_name] = []
        task = asyncio.get_running_loop().create_task(self._load_slowly(ref))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load_slowly(self, ref: ClassRef) -> None:
        result: ClassInfo | MainspringError
        try:
            result = await self._import(ref)
            while self._refs[ref.type_name].digest != ref.digest:  # defined again meanwhile
                ref = self._refs[ref.type_name]
                result = await self._import(ref)
        except Exception as error:  # an import runs the application's code, which may raise anything
            result = ClassNotImportable(
                f"{ref.type_name} ({ref.module}.{ref.qualname}) can't be imported in the partition's process: "
                f"{type(error).__name__}: {error}. Make the module importable there (install it, or start the "
                "runtime from its directory)."
            )
            result.__cause__ = error
        self._finish(ref, result)
        for callback in self._loading.pop(ref.type_name, ()):
            callback()

    async def _import(self, ref: ClassRef) -> ClassInfo | MainspringError:
        if _comes_by_value(ref):
            shipped = ref.shipped
            if shipped is None and self._fetch is not None:
                try:
                    shipped = await self._fetch(ref.type_name)
                except MainspringError:
                    older = self._older.get(ref.type_name)
                    if older is None:
                        raise
                    return older  # without a coordinator objects go on with what they have
            if shipped is None:
                return ClassNotImportable(
                    f"{ref.type_name} is defined in {ref.module} ({ref.qualname}), which only its own process has. "
                    "Move it to a module that the workers can import."
                )
            return class_info(revive_class(shipped, ref.qualname))
        await asyncio.to_thread(importlib.import_module, ref.module)
        return self._find(ref)

    @staticmethod
    def _find(ref: ClassRef) -> ClassInfo | MainspringError:
        try:
            info = class_info(find_class(ref.module, ref.qualname))
        except (AttributeError, KeyError) as error:
            return ClassNotImportable(f"{ref.type_name}: module {ref.module} has no {ref.qualname} ({error})")
        except MainspringError as error:
            return error
        if info.type_name != ref.type_name:
            return ClassNotImportable(
                f"{ref.module}.{ref.qualname} calls itself {info.type_name!r} here, the caller {ref.type_name!r}: "
                "both sides must run the same version of the class"
            )
        return info

    def _finish(self, ref: ClassRef, result: ClassInfo | MainspringError) -> None:
        self._loaded[ref.type_name] = result
        self._older.pop(ref.type_name, None)
        if isinstance(result, ClassInfo):
            self._remember(ref)

    def _remember(self, ref: ClassRef) -> None:
        if ref.type_name not in self._stored:
            self._stored.add(ref.type_name)
            self._persist([(CLASSES, (ref.type_name,), (ref.module, ref.qualname))])


def _ignore(type_name: str) -> None:
    return None


def _comes_by_value(ref: ClassRef) -> bool:
    """Whether only the process that defined the class could find it by its name."""
    is_shipped = ref.shipped is not None or ref.digest is not None
    return is_shipped or ref.module == _MAIN or "<locals>" in ref.qualname


def _is_imported(module: str) -> bool:
    """Whether the module is here whole: while a thread imports it, it is in `sys.modules` without its later names."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return module in sys.modules and not getattr(spec, "_initializing", False)


def _same_place(one: ClassRef, other: ClassRef) -> bool:
    return (one.module, one.qualname) == (other.module, other.qualname)


def _duplicate(known: ClassRef, new: ClassRef) -> DuplicateTypeName:
    return DuplicateTypeName(
        f"two classes are called {new.type_name!r}: {known.module}.{known.qualname} and {new.module}.{new.qualname}. "
        "Give one of them another type_name."
    )
