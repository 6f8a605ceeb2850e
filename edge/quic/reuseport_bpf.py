"""Routing of datagrams to several processes that share a UDP port (SO_ATTACH_REUSEPORT_CBPF).

The kernel distributes datagrams over the sockets of a port by address, so a client whose address
changes would reach another process. A BPF program in the kernel uses the first byte of the
connection id instead: the ids that process n issues begin with n. The id in a client's first
packets is random, but it does not change until the client uses an id from the server. Linux only.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from collections.abc import Sequence

MAX_PROCESSES = 64
"""Maximum number of processes of an edge."""

SO_ATTACH_REUSEPORT_CBPF = 51
LOAD_BYTE, JUMP_IF_SET, JUMP, MODULO, RETURN = 0x30, 0x45, 0x05, 0x94, 0x16
"""Opcodes of classic BPF instructions, for example BPF_LD | BPF_B | BPF_ABS to load a byte."""
LONG_HEADER = 0x80
CID_OF_SHORT, CID_OF_LONG = 1, 6
"""Offsets of the connection id in a short and in a long header (RFC 8999, 5.1 and 5.2)."""


def can_route_by_connection_id() -> bool:
    """Return True if the kernel supports `route_by_connection_id`."""
    return sys.platform == "linux"


def route_by_connection_id(sockets: Sequence[socket.socket]) -> None:
    """Route each datagram to socket number `first byte of its connection id % len(sockets)`.

    All sockets must have been bound to the same port with SO_REUSEPORT, in this order, and no
    other socket may be bound to it.
    """
    program = _program(len(sockets))
    code = ctypes.create_string_buffer(program, len(program))
    instructions = len(program) // struct.calcsize("=HBBI")
    argument = struct.pack("@HP", instructions, ctypes.addressof(code))
    sockets[0].setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, argument)


def _program(count: int) -> bytes:
    """Return the encoded instructions, each with opcode, jump if true, jump if false, operand."""
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
