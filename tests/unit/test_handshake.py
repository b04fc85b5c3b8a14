"""The parts a link is made of, without a connection: framing, the proof of the secret, the session table."""

from __future__ import annotations

import struct

import pytest

from actors.channel import Endpoint, Hello
from actors.errors import AuthenticationFailed, FrameTooLarge, MalformedFrame
from actors.framing import FrameReader
from actors.handshake import (
    LINK_VERSION,
    MAX_HANDSHAKE_FRAME_BYTES,
    ClientHandshake,
    Refusal,
    Refused,
    ServerHandshake,
    refusal_frame,
)
from actors.sessions import SessionTable
from tests.support.link_transport import SECRET
from tests.support.transport_suite import EPOCH, OTHER_SESSION, PARTITION, SESSION, hello

WRONG_SECRET = b"the secret of some other cluster"
CLIENT_NONCE = b"c" * 32
SERVER_NONCE = b"s" * 32
ENDPOINT = Endpoint(PARTITION, EPOCH, "n1", None, None, None, None)


def framed(*frames: bytes) -> bytes:
    return b"".join(struct.pack("!I", len(frame)) + frame for frame in frames)


class TestFraming:
    FRAMES = [b"", b"a", b"bc" * 300, b"", b"last"]

    @pytest.mark.parametrize("piece", [1, 2, 3, 4, 5, 7, 64, 1_000])
    def test_frames_are_the_same_however_the_stream_is_cut(self, piece: int) -> None:
        stream = framed(*self.FRAMES)
        reader = FrameReader(1_000)
        found = [
            frame for start in range(0, len(stream), piece) for frame in reader.feed(stream[start : start + piece])
        ]
        assert found == self.FRAMES
        assert not reader.partial

    def test_a_stream_that_ends_inside_a_frame_is_partial(self) -> None:
        for end in (1, 3, 4, 6):
            reader = FrameReader(1_000)
            assert list(reader.feed(framed(b"four")[:end])) == []
            assert reader.partial

    def test_a_frame_over_the_limit_fails_at_its_length_after_the_frames_before_it(self) -> None:
        reader = FrameReader(10)
        frames = reader.feed(framed(b"x" * 10) + struct.pack("!I", 11))
        assert next(frames) == b"x" * 10
        with pytest.raises(FrameTooLarge):
            next(frames)


class TestHandshake:
    def pair(
        self, client_secret: bytes = SECRET, server_nonce: bytes = SERVER_NONCE, said: Hello | None = None
    ) -> tuple[ClientHandshake, ServerHandshake]:
        client = ClientHandshake(client_secret, CLIENT_NONCE, said or hello(), ENDPOINT)
        return client, ServerHandshake(SECRET, server_nonce, PARTITION, EPOCH)

    def test_both_sides_end_up_with_the_other_proved(self) -> None:
        client, server = self.pair()
        challenge = server.receive(client.first() or b"")
        proof = client.receive(challenge or b"")
        assert client.peer is None
        assert server.peer is None
        server.receive(proof or b"")
        assert server.peer == hello()
        client.receive(server.last() or b"")
        assert client.peer == Hello(SESSION, 1, PARTITION, EPOCH)

    def test_every_handshake_frame_fits_the_bound_for_strangers(self) -> None:
        client, server = self.pair()
        challenge = server.receive(client.first() or b"") or b""
        frames = [client.first(), challenge, client.receive(challenge), server.last()]
        assert all(frame and len(frame) <= MAX_HANDSHAKE_FRAME_BYTES for frame in frames)

    def test_a_client_proves_nothing_to_a_server_that_does_not_know_the_secret(self) -> None:
        client, server = self.pair(client_secret=WRONG_SECRET)
        challenge = server.receive(client.first() or b"") or b""
        with pytest.raises(Refused) as refused:
            client.receive(challenge)
        assert isinstance(refused.value.error(), AuthenticationFailed)

    def test_a_proof_is_worth_nothing_in_another_handshake(self) -> None:
        client, server = self.pair()
        proof = client.receive(server.receive(client.first() or b"") or b"") or b""
        _, later = self.pair(server_nonce=b"t" * 32)
        later.receive(client.first() or b"")
        with pytest.raises(Refused) as refused:
            later.receive(proof)
        assert refused.value.code is Refusal.SECRET

    @pytest.mark.parametrize(
        "other",
        [
            hello(session=OTHER_SESSION),
            hello(connection=2),
            hello(epoch=EPOCH - 1),
        ],
        ids=["session", "connection", "epoch"],
    )
    def test_a_proof_holds_only_for_what_was_said(self, other: Hello) -> None:
        client, server = self.pair()
        proof = client.receive(server.receive(client.first() or b"") or b"") or b""
        liar, victim = self.pair(said=other)
        victim.receive(liar.first() or b"")
        with pytest.raises(Refused) as refused:
            victim.receive(proof)
        assert refused.value.code is Refusal.SECRET

    def test_a_servers_proof_sent_back_is_no_clients_proof(self) -> None:
        client, server = self.pair()
        challenge = server.receive(client.first() or b"") or b""
        reflected = challenge[:6] + bytes([3]) + challenge[-32:]
        with pytest.raises(Refused) as refused:
            server.receive(reflected)
        assert refused.value.code is Refusal.SECRET

    def test_one_changed_bit_of_a_challenge_is_noticed(self) -> None:
        _, server = self.pair()
        first = self.pair()[0].first() or b""
        challenge = server.receive(first) or b""
        for position in range(7, len(challenge)):
            client, _ = self.pair()
            changed = challenge[:position] + bytes([challenge[position] ^ 1]) + challenge[position + 1 :]
            with pytest.raises(Refused) as refused:
                client.receive(changed)
            assert refused.value.code is Refusal.SECRET

    @pytest.mark.parametrize("frame", [b"", b"MSPR", b"HTTP/1.1 200 OK", b"MSPR\0\1\7", b"MSPR\0\1\1short"])
    def test_frames_that_are_no_handshake_are_malformed(self, frame: bytes) -> None:
        for side in self.pair():
            with pytest.raises(Refused) as refused:
                side.receive(frame)
            assert isinstance(refused.value.error(), MalformedFrame)

    def test_another_version_is_named_on_both_sides(self) -> None:
        for side in self.pair():
            with pytest.raises(Refused) as refused:
                side.receive(b"MSPR" + struct.pack("!HB", LINK_VERSION + 1, 1) + b"anything")
            assert f"link version {LINK_VERSION} here, {LINK_VERSION + 1} there" in str(refused.value.error())

    def test_an_unknown_refusal_code_is_malformed(self) -> None:
        client, _ = self.pair()
        with pytest.raises(Refused) as refused:
            client.receive(refusal_frame(Refusal.FULL)[:-1] + b"\xff")
        assert refused.value.code is Refusal.MALFORMED

    def test_a_short_secret_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 16 bytes"):
            ServerHandshake(b"short", SERVER_NONCE, PARTITION, EPOCH)


class TestSessions:
    def test_an_ended_session_is_remembered_until_enough_others_have_ended(self) -> None:
        table: SessionTable[object] = SessionTable(max_live=10, remembered=2)
        first = object()
        table.claim(b"a", 5, first)
        table.release(b"a", 5, first)
        with pytest.raises(Refused):
            table.claim(b"a", 5, object())
        for session in (b"b", b"c"):
            other = object()
            table.claim(session, 1, other)
            table.release(session, 1, other)
        assert table.claim(b"a", 5, object()) is None

    def test_what_was_replaced_or_refused_does_not_release_the_live_connection(self) -> None:
        table: SessionTable[object] = SessionTable(max_live=10)
        older, newer = object(), object()
        table.claim(b"a", 1, older)
        assert table.claim(b"a", 2, newer) is older
        table.release(b"a", 1, older)
        table.release(b"a", 2, object())
        assert table.find(b"a", 2) is newer
        assert table.find(b"a", 1) is None
