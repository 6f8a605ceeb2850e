"""An HTTP/3 client on aioquic that returns whole answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import ConnectionTerminated, ProtocolNegotiated, QuicEvent, StreamReset

from tests.edge.server.serving import Answer

TIMEOUT_S = 20.0


@dataclass(slots=True)
class Exchange:
    """One request and its answer so far."""

    done: asyncio.Future[Answer]
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)

    def end(self, *, ended: bool) -> None:
        """Complete the answer, whose body is whole if `ended`."""
        if not self.done.done():
            status = int(self.headers.pop(":status", "0"))
            self.done.set_result(Answer(status, self.headers, bytes(self.body), ended))


class Http3Client(QuicConnectionProtocol):
    """One connection."""

    _http3: H3Connection | None = None

    @classmethod
    @asynccontextmanager
    async def connected(cls, port: int, authorities: Path) -> AsyncIterator[Http3Client]:
        """Connect to a port of this machine, whose certificate is signed by `authorities`."""
        configuration = QuicConfiguration(
            is_client=True, alpn_protocols=H3_ALPN, server_name="localhost"
        )
        configuration.load_verify_locations(str(authorities))
        async with connect(
            "127.0.0.1", port, configuration=configuration, create_protocol=cls
        ) as client:
            yield cast(Http3Client, client)

    async def request(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: Sequence[bytes]
    ) -> Answer:
        """Send a request, its body in these pieces, and return the whole answer.

        Header names are sent in lower case, and `Host` as `:authority`.
        """
        assert self._http3 is not None
        authority = dict(headers)["Host"]
        pseudo = {":method": method, ":scheme": "https", ":authority": authority, ":path": target}
        fields = [*pseudo.items(), *((n.lower(), v) for n, v in headers if n != "Host")]
        stream = self._quic.get_next_available_stream_id()
        exchange = Exchange(asyncio.get_running_loop().create_future())
        self._exchanges[stream] = exchange
        encoded = [(name.encode(), value.encode()) for name, value in fields]
        self._http3.send_headers(stream, encoded, end_stream=not body)
        for nth, piece in enumerate(body, 1):
            self._http3.send_data(stream, piece, end_stream=nth == len(body))
        self.transmit()
        async with asyncio.timeout(TIMEOUT_S):
            return await exchange.done

    def quic_event_received(self, event: QuicEvent) -> None:
        """Add an event to the answer that it belongs to."""
        if isinstance(event, ProtocolNegotiated):
            self._http3 = H3Connection(self._quic)
            self._exchanges: dict[int, Exchange] = {}
        elif isinstance(event, StreamReset) and event.stream_id in self._exchanges:
            self._exchanges[event.stream_id].end(ended=False)
        elif isinstance(event, ConnectionTerminated):
            for exchange in self._exchanges.values():
                exchange.end(ended=False)
        if self._http3 is None:
            return
        for each in self._http3.handle_event(event):
            if isinstance(each, HeadersReceived):
                exchange = self._exchanges[each.stream_id]
                exchange.headers |= {n.decode(): v.decode() for n, v in each.headers}
                ended = each.stream_ended
            elif isinstance(each, DataReceived):
                exchange = self._exchanges[each.stream_id]
                exchange.body += each.data
                ended = each.stream_ended
            else:
                continue
            if ended:
                exchange.end(ended=True)
