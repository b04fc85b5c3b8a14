"""Tokens of promises: the address of a promise and the secret that lets somebody resolve it, as one text."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import uuid
from dataclasses import dataclass
from typing import Final

import msgpack

from actors.errors import InvalidPromiseToken
from actors.execution_rows import STEP_BITS
from timers.durable_sleep import promise_id

__all__ = ["SECRET_BYTES", "PromiseAddress", "id_of_promise", "is_secret", "promise_secret"]

SECRET_BYTES: Final = 32
#: Begins every token, with the version of its form.
_PREFIX: Final = "msp1"
#: A token addresses one object and names one execution: far below this.
_MAX_TOKEN_CHARACTERS: Final = 4_096


def id_of_promise(execution: bytes, step: int) -> uuid.UUID:
    """The promise that is this step of the execution. The upper bits of a step name its branch."""
    branch, own = divmod(step, 1 << STEP_BITS)
    name = execution if branch == 0 else b"%b\0%d" % (execution, branch)
    return promise_id(name, own)


def promise_secret(seed: bytes, promise: uuid.UUID) -> bytes:
    """The secret of one promise. It follows from the execution's random seed, so that a step that is run again after a
    crash sends the same token; one promise's secret says nothing about another's."""
    return hashlib.blake2b(promise.bytes, key=seed, digest_size=SECRET_BYTES, person=b"ms-promise").digest()


def is_secret(given: object, seed: bytes, promise: uuid.UUID) -> bool:
    """Whether this is the promise's secret; takes the same time for every wrong one."""
    return isinstance(given, bytes) and hmac.compare_digest(given, promise_secret(seed, promise))


@dataclass(frozen=True)
class PromiseAddress:
    """Where a promise is: the object, the execution, the step."""

    type_name: str
    key: str
    execution_id: str
    step: int

    def token(self, secret: bytes) -> str:
        """Address and secret as text that may stand in a URL."""
        address: bytes = msgpack.packb([self.type_name, self.key, self.execution_id, self.step])
        return f"{_PREFIX}.{_text(address)}.{_text(secret)}"

    @classmethod
    def parse(cls, token: object) -> tuple[PromiseAddress, bytes]:
        """Address and secret. Raises `InvalidPromiseToken` for what is no token."""
        try:
            if not isinstance(token, str) or len(token) > _MAX_TOKEN_CHARACTERS:
                raise ValueError("a token is a text")
            prefix, address, secret = token.split(".")
            if prefix != _PREFIX:
                raise ValueError("unknown form")
            type_name, key, execution_id, step = msgpack.unpackb(_bytes(address))
            texts = all(isinstance(each, str) for each in (type_name, key, execution_id))
            if not texts or not isinstance(step, int) or not 0 <= step < 2**63:
                raise ValueError("not an address")
            found = cls(type_name, key, execution_id, step)
            if found.token(_bytes(secret)) != token:  # the last character has bits that say nothing
                raise ValueError("another text for the same promise")
            return found, _bytes(secret)
        except (ValueError, TypeError, binascii.Error, msgpack.UnpackException) as error:
            raise InvalidPromiseToken(f"this is not the token of a promise ({error}); nothing was resolved") from None


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if _text(data) != text:  # decoding leaves out what is no base64, and bits that count for nothing
        raise ValueError("not written as a token is")
    return data
