"""A way for datagrams between clients and an edge that can be cut, and that can change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any


class UdpWay(asyncio.DatagramProtocol):
    """Passes on between clients at `port` and a server, like a router that translates addresses."""

    def __init__(self, server_port: int, loss: float, random: Random) -> None:
        self.cut = False
        self.lost = 0
        self._loss = loss
        self._random = random
        self.port = 0
        self._server_port = server_port
        self._near: asyncio.DatagramTransport | None = None
        self._far: dict[Any, asyncio.DatagramTransport] = {}
        self._making: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, server_port: int, *, loss: float = 0.0, random: Random | None = None
    ) -> AsyncIterator[UdpWay]:
        """`loss`: the share of datagrams that get lost, either way."""
        way = cls(server_port, loss, random or Random(0))
        loop = asyncio.get_running_loop()
        near, _ = await loop.create_datagram_endpoint(lambda: way, ("127.0.0.1", 0))
        way._near = near
        way.port = near.get_extra_info("sockname")[1]
        try:
            yield way
        finally:
            near.close()
            way.change()
            await asyncio.gather(*way._making, return_exceptions=True)

    def change(self) -> None:
        """From now on every client comes from another address."""
        for far in self._far.values():
            far.close()
        self._far.clear()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """From a client."""
        if self._passes():
            if addr in self._far:
                self._far[addr].sendto(data)
            else:
                task = asyncio.get_running_loop().create_task(self._first(data, addr))
                self._making.add(task)
                task.add_done_callback(self._making.discard)

    async def _first(self, data: bytes, addr: Any) -> None:
        """Forward the first datagram of a client that has no address at the far side yet."""
        far, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: _Far(self, addr), remote_addr=("127.0.0.1", self._server_port)
        )
        if (other := self._far.pop(addr, None)) is not None:
            other.close()  # two came at once
        self._far[addr] = far
        far.sendto(data)

    def back(self, data: bytes, addr: Any) -> None:
        """From the server."""
        if self._passes() and self._near is not None:
            self._near.sendto(data, addr)

    def _passes(self) -> bool:
        lost = self.cut or self._random.random() < self._loss
        self.lost += lost
        return not lost


class _Far(asyncio.DatagramProtocol):
    def __init__(self, way: UdpWay, client: Any) -> None:
        self._way = way
        self._client = client

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._way.back(data, self._client)
