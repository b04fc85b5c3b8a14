"""How the two ends of a link prove to each other that they know the cluster's secret.

Four frames, none of them secret::

    client                                         server
      HELLO      nonce, session, connection, wanted   ->
      <-         CHALLENGE  nonce, partition, epoch, proof as server
      PROOF      proof as client                      ->
      <-         WELCOME

A proof is an HMAC-SHA256 over the role, the version, both nonces and everything that both sides have said. So a
proof is worth nothing on any other connection, as the other role, or with one number changed. Either side may answer
REFUSED and a code instead. The code alone crosses the wire: texts are made by the side that shows them.

No input or output happens here: frames go in, frames come out.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

from actors.channel import SESSION_BYTES, Endpoint, Hello
from actors.errors import AuthenticationFailed, ChannelClosed, MalformedFrame

__all__ = [
    "LINK_VERSION",
    "MAX_HANDSHAKE_FRAME_BYTES",
    "NONCE_BYTES",
    "ClientHandshake",
    "Handshake",
    "Refusal",
    "Refused",
    "ServerHandshake",
]

#: Raised with any change of the handshake, the framing or the messages inside the frames.
LINK_VERSION = 1
#: A stranger can't make this process hold more than this; the longest handshake frame has 95 bytes.
MAX_HANDSHAKE_FRAME_BYTES = 256
NONCE_BYTES = 32
#: A shorter secret could be guessed from one recorded proof.
MIN_SECRET_BYTES = 16

_MAGIC = b"MSPR"
_PREFIX = struct.Struct("!4sHB")  # magic, version, kind: the part that no version may change
_HELLO = struct.Struct(f"!{NONCE_BYTES}s{SESSION_BYTES}sQqQ")  # nonce, session, connection, partition, epoch
_CHALLENGE = struct.Struct(f"!{NONCE_BYTES}sqQ32s")  # nonce, partition, epoch, proof
_PROOF = struct.Struct("!32s")
_REFUSED = struct.Struct("!B")
_NOTHING = struct.Struct("!")


class _Kind(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5


class Refusal(IntEnum):
    """Why a handshake ended without a channel."""

    VERSION = 1
    SECRET = 2
    MALFORMED = 3
    OLD_CONNECTION = 4
    OTHER_PARTITION = 5
    OLD_EPOCH = 6
    FULL = 7
    NOT_ACCEPTED = 8


_TEXTS = {
    Refusal.VERSION: "the two sides run versions of Mainspring whose links do not understand each other",
    Refusal.SECRET: "the cluster secrets of the two sides differ",
    Refusal.MALFORMED: "a handshake frame is not valid",
    Refusal.OLD_CONNECTION: "the session has had this connection or a newer one",
    Refusal.OTHER_PARTITION: "another partition answers at this address",
    Refusal.OLD_EPOCH: "an earlier incarnation of the partition answers at this address",
    Refusal.FULL: "the partition has as many connections as `max_connections` allows",
    Refusal.NOT_ACCEPTED: "the partition takes no connections now",
}


class Refused(Exception):
    """This side refuses; the peer is told `code`. Never leaves the link: callers see `error()`."""

    def __init__(self, code: Refusal, detail: str = "", *, by_peer: bool = False) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail
        #: The refusal came from the peer, which need not be told.
        self.by_peer = by_peer

    def error(self) -> ChannelClosed:
        """The error that the application or the log sees."""
        text = _TEXTS[self.code] + (f" ({self.detail})" if self.detail else "")
        if self.by_peer:
            text = f"the peer refused the connection: {text}"
        if self.code is Refusal.SECRET:
            return AuthenticationFailed(text)
        if self.code is Refusal.MALFORMED:
            return MalformedFrame(text)
        return ChannelClosed(text)


def refusal_frame(code: Refusal) -> bytes:
    """The frame that tells the peer why."""
    return _frame(_Kind.REFUSED, _REFUSED, int(code))


@dataclass(frozen=True)
class _Transcript:
    """Everything both sides have said; what a proof is made over."""

    client_nonce: bytes
    server_nonce: bytes
    client: Hello
    partition: int
    epoch: int

    def proof(self, secret: bytes, role: bytes) -> bytes:
        said = _HELLO.pack(
            self.client_nonce,
            self.client.session,
            self.client.connection,
            self.client.partition,
            self.client.epoch,
        ) + struct.pack(f"!{NONCE_BYTES}sqQ", self.server_nonce, self.partition, self.epoch)
        head = b"mainspring link\0" + role + b"\0" + struct.pack("!H", LINK_VERSION)
        return hmac.digest(secret, head + said, "sha256")


class Handshake:
    """What both sides share: the peer, known and proved once it is not None."""

    peer: Hello | None = None

    def __init__(self, secret: bytes, nonce: bytes) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"a cluster secret has at least {MIN_SECRET_BYTES} bytes, this one has {len(secret)}")
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes, this one has {len(nonce)}")
        self._secret = secret
        self._nonce = nonce

    def first(self) -> bytes | None:
        """The frame to send when the connection is made."""
        return None

    def receive(self, frame: bytes) -> bytes | None:
        """Take the peer's next frame, give the answer to send. Raises `Refused`."""
        raise NotImplementedError

    def last(self) -> bytes | None:
        """The frame to send once `peer` is proved and accepted."""
        return None


class ClientHandshake(Handshake):
    """The side of the process that connects."""

    def __init__(self, secret: bytes, nonce: bytes, hello: Hello, endpoint: Endpoint) -> None:
        super().__init__(secret, nonce)
        self._hello = hello
        self._endpoint = endpoint
        self._server: Hello | None = None

    def first(self) -> bytes | None:
        hello = self._hello
        return _frame(_Kind.HELLO, _HELLO, self._nonce, hello.session, hello.connection, hello.partition, hello.epoch)

    def receive(self, frame: bytes) -> bytes | None:
        if self._server is None:
            server_nonce, partition, epoch, proof = _parse(frame, _Kind.CHALLENGE, _CHALLENGE)
            said = _Transcript(self._nonce, server_nonce, self._hello, partition, epoch)
            if not hmac.compare_digest(proof, said.proof(self._secret, b"server")):
                raise Refused(Refusal.SECRET)
            self._check(partition, epoch)
            self._server = Hello(self._hello.session, self._hello.connection, partition, epoch)
            return _frame(_Kind.PROOF, _PROOF, said.proof(self._secret, b"client"))
        _parse(frame, _Kind.WELCOME, _NOTHING)
        self.peer = self._server
        return None

    def _check(self, partition: int, epoch: int) -> None:
        wanted = self._endpoint.partition
        if partition != wanted or partition != self._hello.partition:
            raise Refused(Refusal.OTHER_PARTITION, f"{partition} instead of {wanted}")
        lowest = max(self._endpoint.epoch, self._hello.epoch)
        if epoch < lowest:
            raise Refused(Refusal.OLD_EPOCH, f"epoch {epoch}, known is {lowest}")


class ServerHandshake(Handshake):
    """The side of the partition."""

    def __init__(self, secret: bytes, nonce: bytes, partition: int, epoch: int) -> None:
        super().__init__(secret, nonce)
        self._partition = partition
        self._epoch = epoch
        self._said: _Transcript | None = None

    def receive(self, frame: bytes) -> bytes | None:
        if self._said is None:
            client_nonce, session, connection, partition, epoch = _parse(frame, _Kind.HELLO, _HELLO)
            client = Hello(session, connection, partition, epoch)
            self._said = _Transcript(client_nonce, self._nonce, client, self._partition, self._epoch)
            proof = self._said.proof(self._secret, b"server")
            return _frame(_Kind.CHALLENGE, _CHALLENGE, self._nonce, self._partition, self._epoch, proof)
        (proof,) = _parse(frame, _Kind.PROOF, _PROOF)
        if not hmac.compare_digest(proof, self._said.proof(self._secret, b"client")):
            raise Refused(Refusal.SECRET)
        client = self._said.client
        if client.partition != self._partition:
            raise Refused(Refusal.OTHER_PARTITION, f"{self._partition} instead of {client.partition}")
        if client.epoch > self._epoch:
            raise Refused(Refusal.OLD_EPOCH, f"epoch {self._epoch}, the peer knows {client.epoch}")
        self.peer = client
        return None

    def last(self) -> bytes | None:
        return _frame(_Kind.WELCOME, _NOTHING)


def _frame(kind: _Kind, body: struct.Struct, *fields: int | bytes) -> bytes:
    return _PREFIX.pack(_MAGIC, LINK_VERSION, kind) + body.pack(*fields)


# A tuple of whatever the struct names; the callers unpack it by name.
def _parse(frame: bytes, wanted: _Kind, body: struct.Struct) -> tuple:  # type: ignore[type-arg]
    """The fields of a frame of kind `wanted`. Raises `Refused`, also when the frame is the peer's refusal."""
    if len(frame) < _PREFIX.size:
        raise Refused(Refusal.MALFORMED, "too short")
    magic, version, kind = _PREFIX.unpack_from(frame)
    if magic != _MAGIC:
        raise Refused(Refusal.MALFORMED, "not a Mainspring link")
    if version != LINK_VERSION:
        raise Refused(Refusal.VERSION, f"link version {LINK_VERSION} here, {version} there")
    rest = frame[_PREFIX.size :]
    if kind == _Kind.REFUSED and len(rest) == _REFUSED.size:
        (code,) = _REFUSED.unpack(rest)
        if code in _TEXTS:
            raise Refused(Refusal(code), by_peer=True)
    if kind != wanted or len(rest) != body.size:
        raise Refused(Refusal.MALFORMED, f"kind {kind} with {len(rest)} bytes where {wanted.name} was due")
    return body.unpack(rest)
