"""Datagrams of one port, and the process that gets each."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tailrace.edge.quic.reuseport_bpf import can_route_by_connection_id, route_by_connection_id

pytestmark = pytest.mark.skipif(
    not can_route_by_connection_id(), reason="the kernel steers on Linux only"
)

PROCESSES = 3
PATIENCE_S = 30.0


@pytest.fixture
def group() -> Iterator[list[socket.socket]]:
    """Sockets of one port that are steered, as processes have them."""
    with ExitStack() as stack:
        made: list[socket.socket] = []
        for _ in range(PROCESSES):
            each = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.settimeout(PATIENCE_S)
            each.bind(("127.0.0.1", made[0].getsockname()[1] if made else 0))
            made.append(each)
        route_by_connection_id(made)
        yield made


@pytest.mark.parametrize("long", [False, True], ids=["short header", "long header"])
def test_the_first_byte_of_the_connection_id_says_whose_it_is(
    group: list[socket.socket], long: bool
) -> None:
    for n in range(60):
        cid = bytes([n]) + b"1234567"
        data = b"\xc0\0\0\0\x01\x08" + cid if long else b"\x40" + cid
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:  # with a new address
            client.sendto(data + b"rest", group[0].getsockname())
            assert group[n % PROCESSES].recv(100) == data + b"rest"


def test_a_datagram_without_an_id_comes_to_one_of_them(group: list[socket.socket]) -> None:
    """Too short for the program: the kernel takes the first, or chooses by address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(b"\x40", group[0].getsockname())
        client.sendto(b"\x40\x01", group[0].getsockname())
    assert group[1].recv(100) == b"\x40\x01"
