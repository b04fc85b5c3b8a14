"""Structured log records: every one has an `event`, a stable word to search for, and its facts as `fields`."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

__all__ = ["LEVEL_VARIABLE", "EventFormatter", "log_event", "log_to_stderr", "logger", "tell"]

logger = logging.getLogger("mainspring")

#: Environment variable with the level that actor processes log at. Ray copies their stderr to the driver, so the
#: default shows only what somebody should act on.
LEVEL_VARIABLE = "MAINSPRING_LOG_LEVEL"


def log_event(level: int, event: str, message: str, *, error: BaseException | None = None, **fields: Any) -> None:
    """Log one record: `record.event` is the event, `record.fields` its facts, `error` comes with its traceback."""
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    logger.log(level, message, extra={"event": event, "fields": fields}, exc_info=exc_info)


class EventFormatter(logging.Formatter):
    """One line a record: time, level, event, text, then the fields as JSON. Tracebacks follow on their own lines."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text; plain records of other code have no event and are shown without one."""
        event = getattr(record, "event", None)
        fields = dict(getattr(record, "fields", None) or {})
        stack = fields.pop("stack", None)  # many lines: readable below the record, not inside its JSON
        parts = [self.formatTime(record), record.levelname, record.name]
        if event is not None:
            parts.append(f"event={event}")
        parts.append(record.getMessage())
        if fields:
            parts.append(json.dumps(fields, default=str, sort_keys=True))
        line = " ".join(parts)
        if stack:
            line += f"\n{stack}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def log_to_stderr() -> None:
    """Send this process's records to stderr. For the runtime's own processes; applications configure theirs."""
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EventFormatter())
    logger.addHandler(handler)
    logger.setLevel(os.environ.get(LEVEL_VARIABLE, "WARNING").upper())
    logger.propagate = False


def tell(event: str, message: str, **fields: Any) -> None:
    """Log something that the person at the terminal should know once: printed when nobody configured logging."""
    if logger.hasHandlers():
        log_event(logging.INFO, event, message, **fields)
    else:
        print(f"mainspring: {message}", file=sys.stderr)
