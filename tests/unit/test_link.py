"""The link beyond the common contract: hostile peers, broken streams, sockets."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import stat
import struct
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from actors.channel import Endpoint
from actors.errors import AuthenticationFailed, ChannelClosed, FrameTooLarge, InvalidOption, MalformedFrame
from actors.handshake import (
    LINK_VERSION,
    MAX_HANDSHAKE_FRAME_BYTES,
    ClientHandshake,
    Refusal,
    ServerHandshake,
    refusal_frame,
)
from actors.link import connect_link
from actors.link_server import LinkServer
from actors.settings import Settings
from tests.support.link_transport import SECRET, LinkTransport
from tests.support.transport_host import Host, Side
from tests.support.transport_suite import EPOCH, OTHER_SESSION, PARTITION, SETTINGS, hello

WRONG_SECRET = b"the secret of some other cluster"
CLIENT_NONCE = b"c" * 32
SERVER_NONCE = b"s" * 32
ENDPOINT = Endpoint(PARTITION, EPOCH, "n1", None, None, None, None)


def framed(*frames: bytes) -> bytes:
    return b"".join(struct.pack("!I", len(frame)) + frame for frame in frames)


class Stranger:
    """A peer that writes what it likes to a server's Unix socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def reach(cls, endpoint: Endpoint) -> Stranger:
        assert endpoint.unix_path is not None
        return cls(*await asyncio.open_unix_connection(endpoint.unix_path))

    def write(self, *frames: bytes) -> None:
        self._writer.write(framed(*frames))

    def write_raw(self, data: bytes) -> None:
        self._writer.write(data)

    def end(self) -> None:
        self._writer.close()

    async def read(self) -> bytes:
        (length,) = struct.unpack("!I", await self._reader.readexactly(4))
        return await self._reader.readexactly(length)

    async def until_closed(self) -> None:
        """The server hangs up; whatever it said before is thrown away."""
        while True:
            try:
                if not await self._reader.read(4096):
                    break
            except ConnectionError:
                break
        self._writer.close()

    async def prove(self, connection: int = 1) -> bytes:
        """An honest handshake; gives the proof that was sent."""
        handshake = ClientHandshake(SECRET, CLIENT_NONCE, hello(connection), ENDPOINT)
        first = handshake.first()
        assert first is not None
        self.write(first)
        proof = handshake.receive(await self.read())
        assert proof is not None
        self.write(proof)
        handshake.receive(await self.read())
        return proof


@pytest.fixture
def socket_dir() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ms") as path:
        yield path


@pytest.fixture
async def link(socket_dir: str) -> AsyncIterator[LinkTransport]:
    transport = LinkTransport(socket_dir, tcp=False)
    yield transport
    await transport.stop()


def endpoint_of(link: LinkTransport) -> Endpoint:
    assert link.endpoint is not None
    return link.endpoint


def refusals(link: LinkTransport) -> dict[str, int]:
    assert link.server is not None
    return dict(link.server.refusals)


async def refused_as(link: LinkTransport, error: type[Exception]) -> None:
    """Wait until the server has counted a refusal: the last thing it does with a connection."""
    while error.__name__ not in refusals(link):  # noqa: ASYNC110 - a counter tells nobody
        await asyncio.sleep(0)


class TestAuthentication:
    async def test_a_wrong_secret_fails_on_both_sides(self, link: LinkTransport) -> None:
        await link.serve()
        side = Side()
        with pytest.raises(AuthenticationFailed):
            await connect_link(endpoint_of(link), hello(), WRONG_SECRET, side, SETTINGS)
        await refused_as(link, AuthenticationFailed)
        assert side.events == []
        assert await link.host("accepted") == 0

    async def test_a_client_that_ignores_the_servers_proof_is_found_by_its_own(self, link: LinkTransport) -> None:
        await link.serve()
        stranger = await Stranger.reach(endpoint_of(link))
        stranger.write(ClientHandshake(WRONG_SECRET, CLIENT_NONCE, hello(), ENDPOINT).first() or b"")
        await stranger.read()
        stranger.write(b"MSPR" + struct.pack("!HB", LINK_VERSION, 3) + bytes(32), b"a frame that nobody may see")
        assert await stranger.read() == refusal_frame(Refusal.SECRET)
        await stranger.until_closed()
        await refused_as(link, AuthenticationFailed)
        assert await link.host("accepted") == 0

    async def test_a_recorded_handshake_played_again_is_refused(self, link: LinkTransport) -> None:
        await link.serve()
        honest = await Stranger.reach(endpoint_of(link))
        proof = await honest.prove()
        thief = await Stranger.reach(endpoint_of(link))
        thief.write(ClientHandshake(SECRET, CLIENT_NONCE, hello(), ENDPOINT).first() or b"", proof)
        await thief.until_closed()
        await refused_as(link, AuthenticationFailed)
        assert await link.host("accepted") == 1
        honest.end()

    async def test_a_peer_that_says_nothing_is_cut_off(self, link: LinkTransport) -> None:
        await link.serve(Settings(handshake_timeout_ms=20))
        stranger = await Stranger.reach(endpoint_of(link))
        await stranger.until_closed()
        await refused_as(link, ChannelClosed)
        assert await link.host("accepted") == 0

    async def test_a_peer_that_stops_half_way_is_cut_off(self, link: LinkTransport) -> None:
        await link.serve(Settings(handshake_timeout_ms=20))
        stranger = await Stranger.reach(endpoint_of(link))
        stranger.write(ClientHandshake(SECRET, CLIENT_NONCE, hello(), ENDPOINT).first() or b"")
        await stranger.until_closed()
        assert await link.host("accepted") == 0

    async def test_frames_without_a_handshake_are_malformed(self, link: LinkTransport) -> None:
        await link.serve()
        stranger = await Stranger.reach(endpoint_of(link))
        stranger.write(b"\x93\x01\x90\x90")
        await stranger.until_closed()
        await refused_as(link, MalformedFrame)
        assert await link.host("accepted") == 0

    async def test_a_stranger_cannot_announce_a_large_frame(self, link: LinkTransport) -> None:
        await link.serve()
        stranger = await Stranger.reach(endpoint_of(link))
        stranger.write_raw(struct.pack("!I", MAX_HANDSHAKE_FRAME_BYTES + 1))
        await stranger.until_closed()
        await refused_as(link, FrameTooLarge)
        assert await link.host("accepted") == 0

    async def test_unproved_peers_over_the_bound_are_refused_and_do_not_count_as_sessions(
        self, link: LinkTransport
    ) -> None:
        await link.serve(Settings(max_connections=1))
        waiting = await Stranger.reach(endpoint_of(link))
        surplus = await Stranger.reach(endpoint_of(link))
        assert await surplus.read() == refusal_frame(Refusal.FULL)
        await surplus.until_closed()
        await waiting.prove()
        assert await link.host("accepted") == 1
        waiting.end()

    async def test_the_client_believes_no_welcome_before_a_proof(self, socket_dir: str) -> None:
        path = f"{socket_dir}/fake"
        heard: list[bytes] = []

        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(framed(ServerHandshake(SECRET, SERVER_NONCE, PARTITION, EPOCH).last() or b"", b"a frame"))
            heard.append(await reader.read())
            writer.close()

        server = await asyncio.start_unix_server(impostor, path)
        side = Side()
        fake = Endpoint(PARTITION, EPOCH, "n1", path, None, None, None)
        with pytest.raises(MalformedFrame):
            await connect_link(fake, hello(), SECRET, side, SETTINGS)
        server.close()
        assert side.events == []

    async def test_a_server_that_never_answers_ends_the_attempt(self, socket_dir: str) -> None:
        path = f"{socket_dir}/silent"
        sock = socket.socket(socket.AF_UNIX)
        with sock:
            sock.bind(path)
            sock.listen()
            silent = Endpoint(PARTITION, EPOCH, "n1", path, None, None, None)
            with pytest.raises(ChannelClosed, match="20 ms"):
                await connect_link(silent, hello(), SECRET, Side(), Settings(handshake_timeout_ms=20))

    async def test_a_cancelled_attempt_leaves_no_connection(self, socket_dir: str) -> None:
        path = f"{socket_dir}/slow"
        arrived = asyncio.Event()
        ended = asyncio.Event()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            arrived.set()
            await reader.read()
            ended.set()
            writer.close()

        server = await asyncio.start_unix_server(slow, path)
        endpoint = Endpoint(PARTITION, EPOCH, "n1", path, None, None, None)
        side = Side()
        attempt = asyncio.ensure_future(connect_link(endpoint, hello(), SECRET, side, SETTINGS))
        await arrived.wait()
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        await ended.wait()
        server.close()
        assert side.events == []


class TestBrokenStreams:
    async def test_a_stream_that_ends_inside_a_frame_is_malformed(self, link: LinkTransport) -> None:
        await link.serve()
        stranger = await Stranger.reach(endpoint_of(link))
        await stranger.prove()
        stranger.write(b"whole")
        stranger.write_raw(struct.pack("!I", 100) + b"only a part")
        stranger.end()
        assert (await link.host("error", 0)).startswith("MalformedFrame")
        assert await link.host("frames", 0, 1) == [b"whole"]

    async def test_a_length_over_the_bound_closes_before_the_frame_arrives(self, link: LinkTransport) -> None:
        await link.serve()
        stranger = await Stranger.reach(endpoint_of(link))
        await stranger.prove()
        stranger.write_raw(struct.pack("!I", SETTINGS.max_frame_bytes + 1))
        await stranger.until_closed()
        assert (await link.host("error", 0)).startswith("FrameTooLarge")

    async def test_frames_sent_with_the_proof_are_read_after_it(self, link: LinkTransport) -> None:
        await link.serve()
        stranger = await Stranger.reach(endpoint_of(link))
        handshake = ClientHandshake(SECRET, CLIENT_NONCE, hello(), ENDPOINT)
        stranger.write(handshake.first() or b"")
        proof = handshake.receive(await stranger.read()) or b""
        stranger.write(proof, b"at once")
        assert await stranger.read() == ServerHandshake(SECRET, SERVER_NONCE, PARTITION, EPOCH).last()
        assert await link.host("frames", 0, 1) == [b"at once"]
        stranger.end()

    async def test_a_peer_that_never_reads_does_not_hold_up_stopping(self, link: LinkTransport) -> None:
        await link.serve()
        side = Side()
        channel = await link.connect(hello(), side)
        link.stop_reading(channel)
        await link.host("send_copies", 0, b"x" * 100_000, 20)
        await link.stop()
        assert await link.host("error", 0) == "none"


class TestSockets:
    def server(self, partition: int = PARTITION) -> LinkServer:
        return LinkServer(SECRET, Host().accept, SETTINGS, partition=partition, epoch=EPOCH)

    async def test_the_socket_is_in_a_directory_that_only_this_user_can_enter(self, socket_dir: str) -> None:
        os.mkdir(f"{socket_dir}/mainspring-{os.geteuid()}", 0o755)
        server = self.server()
        endpoint = await server.start(unix_dir=socket_dir)
        assert endpoint.unix_path is not None
        directory = Path(endpoint.unix_path).parent
        assert directory.parent == Path(socket_dir)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert len(Path(endpoint.unix_path).name) < 24
        await server.stop()
        assert list(directory.iterdir()) == []

    async def test_a_directory_that_is_a_link_to_elsewhere_is_refused(self, socket_dir: str) -> None:
        os.mkdir(f"{socket_dir}/elsewhere")
        os.symlink(f"{socket_dir}/elsewhere", f"{socket_dir}/mainspring-{os.geteuid()}")
        with pytest.raises(PermissionError, match="not a directory of this user"):
            await self.server().start(unix_dir=socket_dir)

    async def test_a_path_too_long_for_a_socket_is_refused_with_the_reason(self, socket_dir: str) -> None:
        deep = f"{socket_dir}/{'d' * 100}"
        os.mkdir(deep)
        with pytest.raises(InvalidOption, match="107 bytes"):
            await self.server().start(unix_dir=deep)

    async def test_dead_sockets_of_the_partition_are_removed_and_living_ones_kept(self, socket_dir: str) -> None:
        living = self.server()
        kept = (await living.start(unix_dir=socket_dir)).unix_path
        assert kept is not None
        dead = kept[:-8] + "deadbeef"
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(dead)
        second = self.server()
        await second.start(unix_dir=socket_dir)
        assert os.listdir(os.path.dirname(kept)).count(os.path.basename(dead)) == 0
        assert os.listdir(os.path.dirname(kept)).count(os.path.basename(kept)) == 1
        await living.stop()
        await second.stop()

    async def test_nothing_listening_is_an_os_error(self, socket_dir: str) -> None:
        nowhere = Endpoint(PARTITION, EPOCH, "n1", f"{socket_dir}/nothing", None, None, None)
        with pytest.raises(OSError):
            await connect_link(nowhere, hello(), SECRET, Side(), SETTINGS)

    async def test_the_unix_socket_is_for_the_same_node_and_tcp_for_others(self, socket_dir: str) -> None:
        host = Host()
        server = LinkServer(SECRET, host.accept, SETTINGS, partition=PARTITION, epoch=EPOCH, node="n1")
        endpoint = await server.start(unix_dir=socket_dir, tcp_host="127.0.0.1")
        near = await connect_link(endpoint, hello(1), SECRET, Side(), SETTINGS, node="n1")
        far = await connect_link(endpoint, hello(1, OTHER_SESSION), SECRET, Side(), SETTINGS, node="n2")
        families = [channel._transport.get_extra_info("socket").family for channel in (near, far)]  # type: ignore[attr-defined]
        assert families == [socket.AF_UNIX, socket.AF_INET]
        assert server.connections == 2
        await server.stop()

    async def test_a_partition_without_a_reachable_address_says_so(self, socket_dir: str) -> None:
        endpoint = Endpoint(PARTITION, EPOCH, "n1", f"{socket_dir}/s", None, None, None)
        with pytest.raises(ChannelClosed, match="no address"):
            await connect_link(endpoint, hello(), SECRET, Side(), SETTINGS, node="n2")

    def certificate(self, directory: Path) -> tuple[Path, Path]:
        key, certificate = directory / "key.pem", directory / "cert.pem"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=partition"]
        files = ["-addext", "subjectAltName=DNS:partition", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run([*command, *files], check=True, capture_output=True)
        return key, certificate

    @pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
    async def test_tls_between_nodes(self, tmp_path: Path) -> None:
        key, certificate = self.certificate(tmp_path)
        inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        inside.load_cert_chain(certificate, key)
        outside = ssl.create_default_context(cafile=str(certificate))
        host = Host(echo=True)
        server = LinkServer(SECRET, host.accept, SETTINGS, partition=PARTITION, epoch=EPOCH, ssl_context=inside)
        endpoint = await server.start(unix_dir=None, tcp_host="127.0.0.1")
        side = Side()
        channel = await connect_link(
            endpoint, hello(), SECRET, side, SETTINGS, ssl_context=outside, server_hostname="partition"
        )
        frames = [b"small", b"x" * 1_000_000]
        for frame in frames:
            channel.send(frame)
        assert await side.until_frames(2) == frames
        with pytest.raises(ChannelClosed):
            await connect_link(
                endpoint, hello(2), SECRET, Side(), SETTINGS.model_copy(update={"handshake_timeout_ms": 500})
            )  # no TLS on this side
        channel.close()
        await side.until_event("closed")
        await server.stop()
