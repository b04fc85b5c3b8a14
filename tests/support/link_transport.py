"""The link as a transport under test."""

from __future__ import annotations

from typing import Any

from actors.channel import Channel, ChannelHandler, Endpoint, Hello
from actors.link import LinkChannel, connect_link
from actors.link_server import LinkServer
from actors.settings import Settings
from tests.support.transport_host import Host
from tests.support.transport_suite import EPOCH, PARTITION, SETTINGS

SECRET = b"the secret of this test cluster."


class LinkTransport:
    """A `LinkServer` in this process, reached over a Unix socket or over TCP."""

    trusted_pickle = False

    def __init__(self, socket_dir: str, *, tcp: bool) -> None:
        self._socket_dir = socket_dir
        self._tcp = tcp
        self._host: Host | None = None
        self.server: LinkServer | None = None
        self.endpoint: Endpoint | None = None

    async def serve(self, settings: Settings = SETTINGS, *, echo: bool = False, refuse: bool = False) -> None:
        self._host = Host(echo, refuse)
        self.server = LinkServer(SECRET, self._host.accept, settings, partition=PARTITION, epoch=EPOCH, node="n1")
        if self._tcp:
            self.endpoint = await self.server.start(unix_dir=None, tcp_host="127.0.0.1")
        else:
            self.endpoint = await self.server.start(unix_dir=self._socket_dir)

    async def connect(self, hello: Hello, handler: ChannelHandler, settings: Settings = SETTINGS) -> Channel:
        assert self.endpoint is not None
        known = Endpoint(
            hello.partition, hello.epoch, "n1", self.endpoint.unix_path, self.endpoint.host, self.endpoint.port, None
        )
        return await connect_link(known, hello, SECRET, handler, settings, node="n1")

    async def host(self, operation: str, *args: Any) -> Any:
        assert self._host is not None
        return await self._host.do(operation, *args)

    def stop_reading(self, channel: Channel) -> None:
        assert isinstance(channel, LinkChannel)
        assert channel._transport is not None
        channel._transport.pause_reading()

    def read_again(self, channel: Channel) -> None:
        assert isinstance(channel, LinkChannel)
        assert channel._transport is not None
        channel._transport.resume_reading()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop()
            self.server = None
