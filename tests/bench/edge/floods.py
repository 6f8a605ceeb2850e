"""Floods: cheap input that makes an edge do as much work as possible, from a few connections.

    python tests/bench/edge/floods.py PORT NAME SECONDS [CONNECTIONS]

Sends the flood NAME to PORT of this machine, and connects again whenever the edge hangs up. It
prints how often the edge hung up and how many bytes were sent. No flood sends an API key.
"""

from __future__ import annotations

import selectors
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tailrace.ledger.frame import SCHEMA_HASH, Cancel, Credit, Detach, Hello, encode
from tests.bench.edge.readers import H2_PREFACE, WS_HANDSHAKE, message

PIECE_BYTES = 64 << 10
"""Bytes of one piece of a flood, about."""
SOCKETS = 4
READ_BYTES = 1 << 20
ENOUGH_STREAMS = 4_000_000
DATA_FRAMES_PER_STREAM = 20_000

# ---- HTTP/1.1 ----

POST = b"POST %b HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n%b"
NO_BODY = POST % (b"/v1/generate", b"Content-Length: 0\r\n\r\n")
CHAT = POST % (b"/v1/chat/completions", b'Content-Length: 15\r\n\r\n{"stream":true}')
EMPTY_LINES = b"\r\n"
CHUNKED = POST % (b"/v1/generate", b"Transfer-Encoding: chunked\r\n\r\n")
CHUNK = b"1\r\n \r\n"


# ---- WebSocket ----


def control(opcode: int, *, final: bool = True) -> bytes:
    """Return a client's empty frame (RFC 6455), masked."""
    return bytes((opcode | (0x80 if final else 0), 0x80)) + bytes(4)


def of_corrs(frame: Cancel | Credit | Detach) -> bytes:
    """Return a message full of this frame, on correlation ids that are not open."""
    frames = b"".join(encode(frame, corr) for corr in range(1, 2_000))
    return message(frames[: len(encode(frame, 1)) * (30_000 // len(encode(frame, 1)))])


# ---- HTTP/2 ----


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header field of HPACK; `name` is an index of the static table, encoded."""
    return name + bytes((len(value),)) + value


DATA, HEADERS = 0, 1
END_STREAM, END_HEADERS, PADDED = 1, 4, 8
ASKS_FOR_EVENTS = literal(b"\x01", b"localhost") + literal(b"\x0f\x04", b"text/event-stream")
POSTED = b"\x83\x86" + literal(b"\x04", b"/v1/generate") + ASKS_FOR_EVENTS
CONNECT = literal(b"\x02", b"CONNECT") + literal(b"\x01", b"localhost")
NO_PATH = b"\x82\x86" + literal(b"\x04", b"v1") + literal(b"\x01", b"localhost")
RESIZES = b"\x20" * 256 + POSTED
WHOLE = END_HEADERS | END_STREAM


def asked(block: bytes) -> Iterator[bytes]:
    """Yield requests without a body, each on a stream of its own."""
    for stream in range(1, ENOUGH_STREAMS, 2):
        yield frame(HEADERS, WHOLE, stream, block)


def trailers() -> Iterator[bytes]:
    for stream in range(1, ENOUGH_STREAMS, 2):
        yield frame(HEADERS, END_HEADERS, stream, POSTED)
        yield frame(HEADERS, WHOLE, stream, literal(b"\x00\x01t", b"t"))


def one_byte(flags: int, payload: bytes) -> Iterator[bytes]:
    """Yield DATA of one byte in each frame."""
    for stream in range(1, ENOUGH_STREAMS, 2):
        yield frame(HEADERS, END_HEADERS, stream, POSTED)
        for _ in range(DATA_FRAMES_PER_STREAM):
            yield frame(DATA, flags, stream, payload)


def repeated(piece: bytes) -> Iterator[bytes]:
    while True:
        yield piece


HELLO = WS_HANDSHAKE + message(encode(Hello(SCHEMA_HASH, "flood")))


def flood(name: str) -> tuple[bytes, Iterator[bytes]]:
    """Return the first bytes of a connection, and those that it sends from then on."""
    if name == "h1_chunks":
        return CHUNKED, repeated(CHUNK)
    if name.startswith("h1_"):
        pieces = {"h1_generate": NO_BODY, "h1_chat": CHAT, "h1_empty_lines": EMPTY_LINES}
        return b"", repeated(pieces[name])
    if name.startswith("ws_"):
        frames = {
            "ws_ping": control(0x9),
            "ws_pong": control(0xA),
            "ws_empty_message": control(0x2),
            "ws_empty_fragment": control(0x0, final=False),
            "ws_credit": of_corrs(Credit(1)),
            "ws_detach": of_corrs(Detach()),
            "ws_no_key": of_corrs(Cancel(bytes(16))),
        }
        begin = HELLO + (control(0x2, final=False) if name == "ws_empty_fragment" else b"")
        return begin, repeated(frames[name])
    sent: dict[str, Callable[[], Iterator[bytes]]] = {
        "h2_refused": lambda: asked(POSTED),
        "h2_connect": lambda: asked(CONNECT),
        "h2_path": lambda: asked(NO_PATH),
        "h2_resize": lambda: asked(RESIZES),
        "h2_trailers": trailers,
        "h2_data": lambda: one_byte(0, b"x"),
        "h2_padded": lambda: one_byte(PADDED, b"\x00x"),
    }
    return H2_PREFACE, sent[name]()


NAMES = (
    *("h1_generate", "h1_chat", "h1_empty_lines", "h1_chunks"),
    *("ws_ping", "ws_pong", "ws_empty_message", "ws_empty_fragment", "ws_credit", "ws_detach"),
    *("h2_refused", "h2_connect", "h2_path", "h2_resize", "h2_trailers", "h2_data", "h2_padded"),
)
NAMES_WITH_KEYS = ("ws_no_key",)
"""Names of the floods of an edge that requires API keys. Without keys, it would answer them."""


class Flooder:
    """Flood on one connection, and on a new one whenever the edge has closed it."""

    def __init__(self, port: int, name: str) -> None:
        self.hung_up = self.sent = 0
        self._port, self._name = port, name
        self.connect()

    def connect(self) -> None:
        self.socket = socket.create_connection(("127.0.0.1", self._port))
        self.socket.setblocking(False)
        begin, self._pieces = flood(self._name)
        self._unsent = bytearray(begin)

    def go_on(self) -> bool:
        """Read and write as much as goes at once; False where the edge has hung up."""
        try:
            while True:
                if not self.socket.recv(READ_BYTES):
                    return False
        except BlockingIOError:
            pass
        except OSError:
            return False
        while len(self._unsent) < PIECE_BYTES:
            self._unsent += next(self._pieces)
        try:
            done = self.socket.send(self._unsent)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.sent += done
        del self._unsent[:done]
        return True


def main(port: int, name: str, seconds: float, connections: int = SOCKETS) -> None:
    flooders = [Flooder(port, name) for _ in range(connections)]
    ready = selectors.DefaultSelector()
    both = selectors.EVENT_READ | selectors.EVENT_WRITE
    for each in flooders:
        ready.register(each.socket, both, each)
    until = monotonic() + seconds
    while monotonic() < until:
        for key, _ in ready.select(0.1):
            each = key.data
            if not each.go_on():
                each.hung_up += 1
                ready.unregister(each.socket)
                each.socket.close()
                each.connect()
                ready.register(each.socket, both, each)
    print(sum(each.hung_up for each in flooders), sum(each.sent for each in flooders))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), *map(int, sys.argv[4:]))
