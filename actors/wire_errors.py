"""Exceptions on their way to a caller in another process: by the codec, never by pickle.

What travels is the name of the type, the arguments, the attributes, the message and the traceback as text. The
receiver makes the same exception again if it has the type already; nothing is imported for it and no `__init__` of
the application is run, so an exception arrives as it left, whatever its constructor takes. Otherwise the caller gets
a `RemoteError` that says all of it in words.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

from actors.codec import decode, encode
from actors.errors import CorruptValue, RemoteError, UnstorableValue, ValueTypeUnavailable
from actors.typenames import resolve_type

__all__ = ["decode_error", "encode_error"]

# An error has to stay small beside the reply that it stands for. Text in characters, blobs in encoded bytes.
_MAX_TRACEBACK_CHARS = 16 * 1024
_MAX_TEXT_CHARS = 16 * 1024
_MAX_BLOBS_BYTES = 256 * 1024  # all arguments and attributes together
_MAX_SHORT_CHARS = 1024  # the text of an argument that can't be carried
_MAX_ARGS = 64
_MAX_ATTRIBUTES = 64
_MAX_NOTES = 4

#: First item of the encoded form: outcomes of turns are stored, so a later reader must know what it reads.
_VERSION = 1
#: How the note that carries the remote traceback begins; such notes do not travel again.
_NOTE_TITLE = "Traceback in the object's process:"
#: Can't be set on a future, or mean something to the interpreter, in whatever process they arrive.
_NEVER_REBUILT = (StopIteration, StopAsyncIteration)
_HEAP_TYPE_FLAG = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was made at run time


def encode_error(error: BaseException) -> bytes:
    """The exception as bytes, some 400 KiB at most. Never raises: what can't be carried is replaced by its text."""
    cls = type(error)
    # The file name of an OSError is not in its args, but what __reduce__ gives OSError's constructor has it.
    args = OSError.__reduce__(error)[1] if isinstance(error, OSError) else error.args
    room = _MAX_BLOBS_BYTES
    arg_blobs: list[bytes] = []
    for value in args[:_MAX_ARGS]:
        arg_blobs.append(_blob(value, room) or encode(_text(value)[:_MAX_SHORT_CHARS]))
        room -= len(arg_blobs[-1])
    attributes: dict[str, bytes] = {}
    for name, value in list(vars(error).items())[:_MAX_ATTRIBUTES]:
        blob = None if name in ("__notes__", "remote_traceback") else _blob(value, room)
        if blob is not None:
            attributes[_clean(name)] = blob
            room -= len(blob)
    return encode(
        [
            _VERSION,
            _clean(cls.__module__),
            _clean(cls.__qualname__),
            _text(error),
            arg_blobs,
            attributes,
            _notes(error),
            _traceback_text(error),
        ]
    )


def decode_error(data: bytes) -> Exception:
    """The exception again, or a `RemoteError` in its place; both have `remote_traceback` (text, "" if unknown).

    Raises `CorruptValue` if the bytes are not from `encode_error`.
    """
    try:
        version, module, qualname, message, args, attributes, notes, remote = decode(data)
        if version != _VERSION:
            raise CorruptValue(f"not an error: version {version!r}")
        type_name = qualname if module == "builtins" else f"{module}.{qualname}"
        rebuilt = _rebuild(module, qualname, args, attributes)
        result = rebuilt or RemoteError(f"{type_name}: {message}" if message else type_name, type_name)
        vars(result)["remote_traceback"] = str(remote)
        notes = [str(note) for note in notes]
    except CorruptValue:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise CorruptValue(f"not an error: {error}") from error
    if remote:
        notes.append(f"{_NOTE_TITLE}\n{remote}")
    if sys.version_info >= (3, 11):
        for note in notes:
            BaseException.add_note(result, note)
    return result


def _rebuild(module: str, qualname: str, arg_blobs: list[bytes], attributes: dict[str, bytes]) -> Exception | None:
    """The same exception, made the way that its built-in base makes one, then given its attributes; None if not."""
    try:
        cls = resolve_type(module, qualname)
        args = tuple(decode(blob) for blob in arg_blobs)
    except CorruptValue:  # also: a type that is not here
        return None
    if not issubclass(cls, Exception) or issubclass(cls, _NEVER_REBUILT):
        return None
    base = next(parent for parent in cls.__mro__ if not parent.__flags__ & _HEAP_TYPE_FLAG)
    try:
        error: Any = base.__new__(cls, *args)
        base.__init__(error, *args)  # type: ignore[misc]
        for name, blob in attributes.items():
            try:
                vars(error)[name] = decode(blob)
            except ValueTypeUnavailable:
                continue  # the exception itself is worth more than an attribute whose class is not here
        str(error)
    except Exception:  # a C extension's exception, or a __str__ that misses an attribute: say it in words
        return None
    assert isinstance(error, Exception)
    return error


def _blob(value: Any, room: int) -> bytes | None:
    try:
        blob = encode(value)
    except UnstorableValue:
        return None
    return blob if len(blob) <= room else None


def _text(value: Any) -> str:
    try:
        return _clean(str(value))
    except Exception as error:
        return f"<{type(value).__qualname__}: its str() raised {type(error).__qualname__}>"


def _clean(text: str) -> str:
    """Bounded, and free of lone surrogates, which have no UTF-8 form."""
    return text[:_MAX_TEXT_CHARS].encode("utf-8", "backslashreplace").decode()


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", None)
    texts = [_text(note) for note in notes] if isinstance(notes, list) else []
    return [text for text in texts if not text.startswith(_NOTE_TITLE)][:_MAX_NOTES]


def _traceback_text(error: BaseException) -> str:
    """The traceback, after that of the process where the exception came from; the middle is cut out of a long one."""
    text = ""
    if error.__traceback__ is not None:
        try:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        except Exception as problem:  # formatting runs the __str__ of every exception in the chain
            text = f"<the traceback could not be formatted: {type(problem).__qualname__}>\n"
    earlier = getattr(error, "remote_traceback", "")
    has_notes = sys.version_info >= (3, 11)  # the earlier one came as a note, which is part of the text then
    if isinstance(earlier, str) and earlier.strip() and not (has_notes and earlier.strip() in text):
        text = f"{earlier.rstrip()}\n\n{text}" if text else earlier
    if len(text) > _MAX_TRACEBACK_CHARS:
        half = (_MAX_TRACEBACK_CHARS - 64) // 2
        text = f"{text[:half]}\n  ... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()
