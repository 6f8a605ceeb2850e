"""Whether QUIC answers, seen from outside: a version that nobody speaks is answered with ours.

A process can live, and its TCP ports answer, while nothing comes back from UDP: a full socket, a
handler that is stuck, a rule of a firewall. Version Negotiation (RFC 8999, 6) passes the socket
and the server, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress

PROBE_EVERY_S = 5.0
PROBE_TIMEOUT_S = 2.0
PROBES_UNANSWERED = 2
"""So many in a row mean that nothing answers: one can be lost."""
UNKNOWN_VERSION = bytes.fromhex("1a2a3a4a")
"""Reserved to exercise Version Negotiation (RFC 9000, 15)."""
PROBE_BYTES = 1200


class Probe:
    """Asks one address."""

    def __init__(self, address: tuple[str, int], timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._unanswered = 0

    @property
    def answered(self) -> bool:
        return self._unanswered < PROBES_UNANSWERED

    async def ask(self) -> None:
        self._unanswered = (
            0 if await answers(self._address, self._timeout_s) else self._unanswered + 1
        )


async def answers(address: tuple[str, int], timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Whether a QUIC server answers at `address`."""
    loop = asyncio.get_running_loop()
    cid, ours = os.urandom(8), os.urandom(8)
    question = b"\xc0" + UNKNOWN_VERSION + b"\x08" + cid + b"\x08" + ours
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    expected = b"\0\0\0\0\x08" + ours + b"\x08" + cid
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError, TimeoutError):
        probe.setblocking(False)
        probe.connect(address)
        async with asyncio.timeout(timeout_s):
            await loop.sock_sendall(probe, question.ljust(PROBE_BYTES, b"\0"))
            while True:
                answer = await loop.sock_recv(probe, PROBE_BYTES)
                if answer[1 : 1 + len(expected)] == expected:
                    return True
    return False
