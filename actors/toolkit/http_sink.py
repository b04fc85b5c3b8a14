"""Posts outcomes to URLs."""

from __future__ import annotations

from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final

from actors.errors import SinkFailed
from actors.toolkit.outcomes import Outcome

if TYPE_CHECKING:
    import httpx

__all__ = ["HttpPoster", "retry_after_ms"]

#: Seconds for each step of a request. The whole of it has the sink's timeout, which is as long.
_STEP_TIMEOUT_S: Final = 5.0
#: Connections of one partition: deliveries come one after the other, so more would only be idle.
_MAX_CONNECTIONS: Final = 8
#: Of a number of seconds: thirty years are as good as for ever, and nothing that comes in is of any size.
_MAX_DIGITS: Final = 9


class HttpPoster:
    """Posts one outcome at a time. The body is JSON, the header `Idempotency-Key` its id: any 2xx takes it.

    Redirects are not followed, proxies of the environment not used, and the answer's body is never read.
    """

    def __init__(self, wall_ms: Callable[[], int]) -> None:
        self._wall_ms = wall_ms
        self._client: httpx.AsyncClient | None = None

    async def post(self, url: str, outcome: Outcome) -> None:
        """Raises `SinkFailed` for any other answer, with its `Retry-After`; else what the connection raises."""
        type_name, key = outcome.source
        body = {
            "id": outcome.id,
            "kind": outcome.kind,
            "payload": outcome.payload,
            "created_ms": outcome.created_ms,
            "source": {"class": type_name, "key": key},
            "subject": outcome.subject,
            "reason": outcome.reason,
            "detail": outcome.detail,
        }
        request = self._connected().stream("POST", url, json=body, headers={"Idempotency-Key": outcome.id})
        async with request as answer:
            if answer.is_success:
                return
            wish_ms = retry_after_ms(answer.headers.get("Retry-After"), self._wall_ms())
            raise SinkFailed(f"{url} answered {answer.status_code}", wish_ms)

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            import httpx  # takes a while, and most partitions never post

            limits = httpx.Limits(max_connections=_MAX_CONNECTIONS)
            self._client = httpx.AsyncClient(
                timeout=_STEP_TIMEOUT_S, limits=limits, follow_redirects=False, trust_env=False
            )
        return self._client

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


def retry_after_ms(value: str | None, now_ms: int) -> int | None:
    """What a `Retry-After` header asks for: seconds or a date. None for none, or for one that can't be read."""
    if value is None:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        return int(value[:_MAX_DIGITS]) * 1_000
    try:
        return max(0, int(parsedate_to_datetime(value).timestamp() * 1_000) - now_ms)
    except (ValueError, OverflowError):
        return None
