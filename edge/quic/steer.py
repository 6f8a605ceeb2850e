"""Several processes on one port: each datagram to the process that has its connection.

The kernel spreads datagrams over the sockets of a port by address, so a client whose address
changes would come to another process. A small program in the kernel goes by the first byte of
the connection id instead: the ids of process n begin with n, and a client's own first one is
at random, but the same until it has learnt ours. Linux only (SO_ATTACH_REUSEPORT_CBPF).
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from collections.abc import Sequence

MAX_PROCESSES = 64

SO_ATTACH_REUSEPORT_CBPF = 51
LOAD_BYTE, JUMP_IF_SET, JUMP, MODULO, RETURN = 0x30, 0x45, 0x05, 0x94, 0x16
"""Instructions of classic BPF on the accumulator: BPF_LD | BPF_B | BPF_ABS, and so on."""
LONG_HEADER = 0x80
CID_OF_SHORT, CID_OF_LONG = 1, 6
"""Where a connection id begins (RFC 8999, 5.1 and 5.2)."""


def can_steer() -> bool:
    return sys.platform == "linux"


def steer(sockets: Sequence[socket.socket]) -> None:
    """Datagrams to the port of these, bound in this order, go to number `first byte of id % n`.

    All of them were bound with SO_REUSEPORT, and nothing else is bound there.
    """
    program = _program(len(sockets))
    code = ctypes.create_string_buffer(program, len(program))
    instructions = len(program) // struct.calcsize("=HBBI")
    argument = struct.pack("@HP", instructions, ctypes.addressof(code))
    sockets[0].setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, argument)


def _program(count: int) -> bytes:
    """The instructions: code, jump if true, jump if false, operand."""
    return b"".join(
        struct.pack("=HBBI", *instruction)
        for instruction in (
            (LOAD_BYTE, 0, 0, 0),
            (JUMP_IF_SET, 2, 0, LONG_HEADER),
            (LOAD_BYTE, 0, 0, CID_OF_SHORT),
            (JUMP, 0, 0, 1),
            (LOAD_BYTE, 0, 0, CID_OF_LONG),
            (MODULO, 0, 0, count),
            (RETURN, 0, 0, 0),
        )
    )
